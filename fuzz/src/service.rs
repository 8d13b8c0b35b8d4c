//! A controller without sandboxes: it keeps the last request, and its answer depends on the id.

use std::collections::BTreeMap;
use std::io;
use std::sync::Mutex;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pause_sandboxer::controller::SandboxService;
use pause_sandboxer::error::StepError;
use pause_sandboxer::podsandbox::{
    CreateRequest, Error, Exit, Metric, Platform, SandboxInfo, StartResponse, StatusReport,
    quarantined,
};
use pause_sandboxer::protos::inspect;
use protobuf::well_known_types::any::Any;

/// How long the Wait of an id that begins with `w` is pending.
const WAIT: Duration = Duration::from_secs(60);

/// The last request.
#[derive(Debug, Default)]
pub struct Asked {
    pub calls: usize,
    pub id: String,
    pub create: Option<CreateRequest>,
    pub update: Option<(SandboxInfo, Vec<String>)>,
}

#[derive(Debug, Default)]
pub struct Fake(Mutex<Asked>);

impl Fake {
    /// The last request since this was last taken.
    pub fn take(&self) -> Asked {
        std::mem::take(&mut *self.0.lock().expect("no panic"))
    }

    fn asked(&self, id: &str) -> Result<(), Error> {
        let mut asked = self.0.lock().expect("no panic");
        asked.calls += 1;
        id.clone_into(&mut asked.id);
        drop(asked);
        let step =
            |errno| StepError::at("mount", "/run/x/shm", io::Error::from_raw_os_error(errno));
        let (rpc, id) = ("start", id.to_owned());
        match id.as_bytes().first() {
            Some(b'1') => {
                Err(Error::Invalid { id, field: "options".into(), reason: "missing".into() })
            }
            Some(b'2') => Err(Error::NotFound { id }),
            Some(b'3') => Err(Error::AlreadyExists { id }),
            Some(b'4') => Err(Error::State { id, rpc, state: "ready" }),
            Some(b'5') => Err(Error::Failed { id, rpc, steps: step(28).into() }),
            Some(b'6') => {
                Err(Error::Failed { id, rpc, steps: [step(16), step(5)].into_iter().collect() })
            }
            Some(b'7') => Err(Error::Timeout { id, rpc, seconds: 10 }),
            Some(b'8') => Err(Error::Stopping { id }),
            Some(b'0') => Err(Error::Quarantined { id, reason: "not a record".into() }),
            Some(b'9') => Err(Error::Fault { id, rpc, reason: "a task panicked".into() }),
            _ => Ok(()),
        }
    }
}

fn time() -> SystemTime {
    UNIX_EPOCH + Duration::new(1_700_000_000, 5)
}

/// A typed payload.
pub fn any(type_url: &str, value: &[u8]) -> Any {
    Any { type_url: type_url.into(), value: value.into(), ..Default::default() }
}

impl SandboxService for Fake {
    async fn create(&self, request: CreateRequest) -> Result<(), Error> {
        let result = self.asked(&request.id);
        self.0.lock().expect("no panic").create = Some(request);
        result
    }

    async fn start(&self, id: &str) -> Result<StartResponse, Error> {
        self.asked(id)?;
        Ok(StartResponse {
            pid: 4711,
            created_at: time(),
            labels: BTreeMap::from([("id".into(), id.into())]),
            address: "ttrpc+unix:///run/x.sock".into(),
            version: 3,
            spec: Some(any("spec", b"{}")),
        })
    }

    async fn platform(&self, id: &str) -> Result<Platform, Error> {
        self.asked(id)?;
        Ok(Platform::node())
    }

    async fn stop(&self, id: &str) -> Result<(), Error> {
        self.asked(id)
    }

    fn wait(&self, id: &str) -> impl Future<Output = Result<Exit, Error>> + Send + use<> {
        let (asked, is_pending) = (self.asked(id), id.starts_with('w'));
        async move {
            asked?;
            if is_pending {
                tokio::time::sleep(WAIT).await;
            }
            Ok(Exit { status: 137, at: time() })
        }
    }

    async fn status(&self, id: &str, verbose: bool) -> Result<StatusReport, Error> {
        self.asked(id)?;
        Ok(StatusReport {
            pid: 4711,
            state: "SANDBOX_READY",
            info: if verbose {
                BTreeMap::from([("id".into(), id.into())])
            } else {
                BTreeMap::new()
            },
            created_at: time(),
            exited_at: id.starts_with('e').then(time),
            address: "ttrpc+unix:///run/x.sock".into(),
            version: 3,
        })
    }

    async fn shutdown(&self, id: &str) -> Result<(), Error> {
        self.asked(id)
    }

    async fn metrics(&self, id: &str) -> Result<Metric, Error> {
        self.asked(id)?;
        let data = any("io.containerd.cgroups.v2.Metrics", &[1, 2]);
        Ok(Metric { timestamp: time(), data })
    }

    async fn update(&self, id: &str, info: SandboxInfo, fields: Vec<String>) -> Result<(), Error> {
        let result = self.asked(id);
        self.0.lock().expect("no panic").update = Some((info, fields));
        result
    }

    async fn list(&self, after: &str, most: usize) -> Result<(Vec<inspect::Sandbox>, bool), Error> {
        self.asked(after)?;
        assert!(most > 0);
        Ok((vec![quarantined(after, "never was")], true))
    }
}
