//! A `SandboxService` whose outcome depends on the sandbox id.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kit::controller::any;
use pause_sandboxer::controller::SandboxService;
use pause_sandboxer::error::{StepError, StepErrors};
use pause_sandboxer::log_context;
use pause_sandboxer::podsandbox::{
    CreateRequest, Error, Exit, Metric, Platform, SandboxInfo, StartResponse, StatusReport,
    quarantined,
};
use pause_sandboxer::protos::inspect;
use tokio::sync::Notify;

/// Every id that fails, with the gRPC code number of its error.
pub(crate) const FAILURES: [(&str, i32); 11] = [
    ("invalid", 3),
    ("unknown", 5),
    ("exists", 6),
    ("state", 9),
    ("step", 13),
    ("scarce", 8),
    ("steps", 13),
    ("timeout", 4),
    ("stopping", 14),
    ("quarantined", 13),
    ("fault", 13),
];

/// When things happened, in the answers: 1.5 s after the epoch and later.
pub(crate) fn time(seconds: u64) -> SystemTime {
    UNIX_EPOCH + Duration::new(seconds, 500_000_000)
}

/// A controller without sandboxes.
#[derive(Debug, Default)]
pub(crate) struct Fake {
    pub(crate) created: Mutex<Vec<CreateRequest>>,
    pub(crate) updated: Mutex<Vec<(String, SandboxInfo, Vec<String>)>>,
    /// Waits, and slow calls of Status, that are pending now.
    pub(crate) waiting: Arc<AtomicUsize>,
    /// Ends every pending Wait.
    pub(crate) end: Arc<Notify>,
}

/// Counts a Wait for as long as its future lives.
struct Pending(Arc<AtomicUsize>);

impl Drop for Pending {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

fn outcome(id: &str) -> Result<(), Error> {
    let step = |errno| StepError::at("mount", "/run/x/shm", io::Error::from_raw_os_error(errno));
    let rpc = "start";
    let (name, id) = (id, id.to_owned());
    match name {
        "invalid" => Err(Error::Invalid { id, field: "options".into(), reason: "missing".into() }),
        "unknown" => Err(Error::NotFound { id }),
        "exists" => Err(Error::AlreadyExists { id }),
        "state" => Err(Error::State { id, rpc, state: "ready" }),
        "step" => Err(Error::Failed { id, rpc, steps: step(libc::EPERM).into() }),
        "scarce" => Err(Error::Failed { id, rpc, steps: step(libc::ENOSPC).into() }),
        "steps" => Err(Error::Failed {
            id,
            rpc,
            steps: StepErrors::from_iter([step(libc::EBUSY), step(libc::EIO)]),
        }),
        "timeout" => Err(Error::Timeout { id, rpc, seconds: 10 }),
        "stopping" => Err(Error::Stopping { id }),
        "quarantined" => Err(Error::Quarantined { id, reason: "not a record".into() }),
        "fault" => Err(Error::Fault { id, rpc, reason: "a task panicked".into() }),
        "panic" => panic!("deliberate, for the test"),
        _ => Ok(()),
    }
}

impl SandboxService for Fake {
    async fn create(&self, request: CreateRequest) -> Result<(), Error> {
        outcome(&request.id)?;
        self.created.lock().unwrap().push(request);
        Ok(())
    }

    async fn start(&self, id: &str) -> Result<StartResponse, Error> {
        outcome(id)?;
        Ok(StartResponse {
            pid: 4711,
            created_at: time(1),
            labels: BTreeMap::from([("selinux_label".into(), "s0".into())]),
            address: "ttrpc+unix:///run/x.sock".into(),
            version: 2,
            spec: Some(any("spec", b"{}".to_vec())),
        })
    }

    async fn platform(&self, id: &str) -> Result<Platform, Error> {
        outcome(id)?;
        Ok(Platform { os: "linux", architecture: "arm64", variant: "v8" })
    }

    async fn stop(&self, id: &str) -> Result<(), Error> {
        outcome(id)
    }

    fn wait(&self, id: &str) -> impl Future<Output = Result<Exit, Error>> + Send + use<> {
        let (id, waiting, end) = (id.to_owned(), self.waiting.clone(), self.end.clone());
        async move {
            outcome(&id)?;
            if id == "ended" {
                return Ok(Exit { status: 137, at: time(3) });
            }
            let ended = end.notified_owned();
            tokio::pin!(ended);
            ended.as_mut().enable();
            waiting.fetch_add(1, Ordering::SeqCst);
            let _pending = Pending(waiting);
            ended.await;
            // The id names the failure of the Wait.
            outcome(id.strip_prefix("then-").unwrap_or_default())?;
            Ok(Exit { status: 137, at: time(3) })
        }
    }

    async fn status(&self, id: &str, verbose: bool) -> Result<StatusReport, Error> {
        outcome(id)?;
        let took = match id {
            "slow" => Some(Duration::from_millis(300)),
            "hanging" => Some(Duration::MAX),
            _ => None,
        };
        if let Some(took) = took {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            let _pending = Pending(Arc::clone(&self.waiting));
            tokio::time::sleep(took).await;
        }
        // Answers that no client of ttrpc would read, and no client at all.
        let text = match id {
            "huge" => "x".repeat(4 << 20),
            "vast" => "x".repeat(16 << 20),
            _ => "{}".to_owned(),
        };
        let ended = id == "ended";
        Ok(StatusReport {
            pid: if ended { 0 } else { 4711 },
            state: if ended { "SANDBOX_NOTREADY" } else { "SANDBOX_READY" },
            info: if verbose {
                let trace =
                    log_context::current().map(|trace| ("trace".to_owned(), trace.to_string()));
                [("info".to_owned(), text)].into_iter().chain(trace).collect()
            } else {
                BTreeMap::new()
            },
            created_at: time(1),
            exited_at: ended.then(|| time(3)),
            address: "ttrpc+unix:///run/x.sock".into(),
            version: 2,
        })
    }

    async fn shutdown(&self, id: &str) -> Result<(), Error> {
        outcome(id)
    }

    async fn metrics(&self, id: &str) -> Result<Metric, Error> {
        outcome(id)?;
        let data = any("io.containerd.cgroups.v2.Metrics", vec![1, 2]);
        Ok(Metric { timestamp: time(2), data })
    }

    async fn update(&self, id: &str, info: SandboxInfo, fields: Vec<String>) -> Result<(), Error> {
        outcome(id)?;
        self.updated.lock().unwrap().push((id.to_owned(), info, fields));
        Ok(())
    }

    async fn list(&self, after: &str, most: usize) -> Result<(Vec<inspect::Sandbox>, bool), Error> {
        outcome(after)?;
        let ids = (0..2500).map(|number| format!("{number:04}")).filter(|id| id.as_str() > after);
        let lines = ids.take(most).map(|id| quarantined(&id, "never was")).collect();
        Ok((lines, !after.starts_with("1999")))
    }
}
