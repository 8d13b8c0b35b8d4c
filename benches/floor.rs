//! A sandboxer that does nothing but answer, over this project's own wire: what containerd and the
//! wire cost around any external one.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use anyhow::Result;
use kit::controller::any;
use pause_sandboxer::controller::SandboxService;
use pause_sandboxer::podsandbox::{
    CreateRequest, Error, Exit, Metric, Platform, SandboxInfo, StartResponse, StatusReport,
};
use pause_sandboxer::protos::inspect;
use pause_sandboxer::wire::{Server, bind};
use tokio::sync::watch;

/// Type of an OCI runtime spec in containerd.
const SPEC: &str = "types.containerd.io/opencontainers/runtime-spec/1/Spec";

/// Ids, and what their waiters wait for.
#[derive(Debug, Default)]
struct Floor(Mutex<HashMap<String, Known>>);

#[derive(Clone, Debug)]
struct Known {
    created_at: SystemTime,
    exit: watch::Sender<Option<Exit>>,
}

/// Serves until it is killed.
pub(crate) async fn serve(socket: PathBuf) -> Result<()> {
    let twin = PathBuf::from(format!("{}.ttrpc", socket.display()));
    let (_stop, stopped) = watch::channel(false);
    Ok(Server::new(Arc::new(Floor::default()), bind(&socket)?, bind(&twin)?).run(stopped).await?)
}

impl Floor {
    fn find(&self, id: &str) -> Result<Known, Error> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(id).cloned().ok_or_else(|| Error::NotFound { id: id.to_owned() })
    }
}

impl SandboxService for Floor {
    async fn create(&self, request: CreateRequest) -> Result<(), Error> {
        let known = Known { created_at: SystemTime::now(), exit: watch::channel(None).0 };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(request.id.to_string(), known);
        Ok(())
    }

    async fn start(&self, id: &str) -> Result<StartResponse, Error> {
        Ok(StartResponse {
            // Some process that lives; no container is started in these pods.
            pid: std::process::id(),
            created_at: self.find(id)?.created_at,
            labels: Default::default(),
            address: "ttrpc+unix:///unused".into(),
            version: 2,
            spec: Some(any(SPEC, b"{}".to_vec())),
        })
    }

    async fn platform(&self, _: &str) -> Result<Platform, Error> {
        Ok(Platform::node())
    }

    async fn stop(&self, id: &str) -> Result<(), Error> {
        self.find(id)?.exit.send_replace(Some(Exit { status: 137, at: SystemTime::now() }));
        Ok(())
    }

    fn wait(&self, id: &str) -> impl Future<Output = Result<Exit, Error>> + Send + use<> {
        let (known, id) = (self.find(id), id.to_owned());
        async move {
            let mut exit = known?.exit.subscribe();
            let exit = exit.wait_for(Option::is_some).await.ok().and_then(|exit| *exit);
            exit.ok_or(Error::NotFound { id })
        }
    }

    async fn status(&self, id: &str, _: bool) -> Result<StatusReport, Error> {
        let known = self.find(id)?;
        let exit = *known.exit.borrow();
        Ok(StatusReport {
            pid: if exit.is_some() { 0 } else { std::process::id() },
            state: if exit.is_some() { "SANDBOX_NOTREADY" } else { "SANDBOX_READY" },
            info: Default::default(),
            created_at: known.created_at,
            exited_at: exit.map(|exit| exit.at),
            address: "ttrpc+unix:///unused".into(),
            version: 2,
        })
    }

    async fn shutdown(&self, id: &str) -> Result<(), Error> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
        Ok(())
    }

    async fn metrics(&self, id: &str) -> Result<Metric, Error> {
        self.find(id)?;
        Ok(Metric { timestamp: SystemTime::now(), data: Default::default() })
    }

    async fn update(&self, id: &str, _: SandboxInfo, _: Vec<String>) -> Result<(), Error> {
        self.find(id).map(drop)
    }

    async fn list(&self, _: &str, _: usize) -> Result<(Vec<inspect::Sandbox>, bool), Error> {
        Ok((Vec::new(), false))
    }
}
