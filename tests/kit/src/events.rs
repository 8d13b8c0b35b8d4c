//! containerd's events of the pods' and containers' lives.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use tokio::task::JoinHandle;

use crate::cri::{Cri, api, decode};
use crate::until;

/// Everything that `GetContainerEvents` has sent since the call.
#[derive(Debug)]
pub struct Events {
    seen: Arc<Mutex<Seen>>,
    reader: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Seen {
    events: Vec<api::ContainerEventResponse>,
    ended: Option<String>,
}

impl Events {
    pub(crate) async fn open(cri: &Cri) -> Result<Self> {
        let mut answers = cri.container_events().await?;
        let seen = Arc::new(Mutex::new(Seen::default()));
        let writer = Arc::clone(&seen);
        let reader = tokio::spawn(async move {
            let reason = loop {
                let event = match answers.next().await {
                    Ok(Some(bytes)) => decode::<api::ContainerEventResponse>(&bytes),
                    Ok(None) => break "the server has ended the stream".to_owned(),
                    Err(e) => Err(e),
                };
                match event {
                    Ok(event) => lock(&writer).events.push(event),
                    Err(status) => break status.to_string(),
                }
            };
            lock(&writer).ended = Some(reason);
        });
        Ok(Self { seen, reader })
    }

    /// The kinds of event received so far for a container or a sandbox, in order.
    ///
    /// # Errors
    /// The stream has ended.
    pub fn of(&self, id: &str) -> Result<Vec<api::ContainerEventType>> {
        let seen = lock(&self.seen);
        if let Some(reason) = &seen.ended {
            bail!("the stream of events has ended: {reason}");
        }
        Ok(seen
            .events
            .iter()
            .filter(|event| event.container_id == id)
            .filter_map(|event| event.container_event_type.enum_value().ok())
            .collect())
    }

    /// Waits until `kind` was received for `id`.
    ///
    /// # Errors
    /// It was not within `limit`, or the stream has ended.
    pub async fn until(
        &self,
        id: &str,
        kind: api::ContainerEventType,
        limit: Duration,
    ) -> Result<()> {
        until(&format!("event {kind:?} of {id}"), limit, async || {
            let received = self.of(id)?;
            ensure!(received.contains(&kind), "received so far: {received:?}");
            Ok(())
        })
        .await
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

fn lock(seen: &Mutex<Seen>) -> std::sync::MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
