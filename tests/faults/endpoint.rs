//! The Task endpoint of a standalone daemon's sandbox, as containerd calls it, and the shim that
//! serves there.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use containerd_shim_protos::api::ConnectRequest;
use kit::machine::processes::{self, Proc};
use kit::until;
use protobuf::Message as _;
use ttrpc::asynchronous::Client;
use ttrpc::proto::Request;

use crate::standalone::Standalone;

/// Name of the runtime's shim.
pub(crate) const RUNTIME_SHIM: &str = "containerd-shim-runc-v2";

/// How long a caller waits for a shim.
const CALL_TIMEOUT: Duration = Duration::from_secs(15);

/// A standalone daemon that has a shim to launch.
pub(crate) fn with_shim() -> Result<Standalone> {
    if kit::shim::setting() == "own" {
        kit::shim::prepare(Path::new(crate::harness::binary()))?;
        return Standalone::new("shim = \"own\"\n");
    }
    let standalone = Standalone::new("shim = \"runtime\"\n")?;
    let shim = kit::Parts::get()?.program(RUNTIME_SHIM);
    symlink(shim, standalone.path("programs").join(RUNTIME_SHIM))?;
    Ok(standalone)
}

/// The shims of the daemon's sandboxes.
pub(crate) fn shims(standalone: &Standalone) -> Result<Vec<Proc>> {
    let named = format!(" -address {}", standalone.path("c.sock").display());
    let all = processes::all()?.into_iter();
    Ok(all.filter(|process| process.state != 'Z' && process.command.contains(&named)).collect())
}

/// The socket of the only sandbox.
fn socket(standalone: &Standalone) -> Result<PathBuf> {
    let dir = standalone.path("state/shims");
    let sockets = fs::read_dir(&dir)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let [socket] = sockets.as_slice() else { anyhow::bail!("{}: {sockets:?}", dir.display()) };
    Ok(socket.clone())
}

/// A connection to the endpoint.
pub(crate) struct Caller(Client);

impl Caller {
    pub(crate) async fn connect(standalone: &Standalone) -> Result<Self> {
        Ok(Self(Client::connect(&format!("unix://{}", socket(standalone)?.display())).await?))
    }

    /// Asks for a task that the shim does not have; done when it says so.
    pub(crate) async fn ask(&self, id: &str) -> Result<()> {
        let request = Request {
            service: "containerd.task.v3.Task".to_owned(),
            method: "Connect".to_owned(),
            payload: ConnectRequest { id: id.to_owned(), ..Default::default() }.write_to_bytes()?,
            timeout_nano: i64::try_from(CALL_TIMEOUT.as_nanos())?,
            ..Default::default()
        };
        match tokio::time::timeout(CALL_TIMEOUT, self.0.request(request))
            .await
            .context("no answer")?
        {
            Ok(_) | Err(ttrpc::Error::RpcStatus(_)) => Ok(()),
            Err(e) => Err(e).context("ask the shim"),
        }
    }
}

/// Waits until the daemon has done all for its only shim, or is gone.
pub(crate) async fn settled_in(standalone: &Standalone, id: &str) -> Result<()> {
    let score = |pid| -> Result<i32> {
        Ok(fs::read_to_string(format!("/proc/{pid}/oom_score_adj"))?.trim().parse()?)
    };
    let daemon = standalone.pid()?;
    let record = standalone.record(id).join("shim/shim.json");
    until("the shim is on record", CALL_TIMEOUT, async || {
        if !processes::exists(daemon)
            || processes::all()?.iter().any(|p| p.pid == daemon && p.state == 'Z')
        {
            return Ok(());
        }
        ensure!(fs::read_to_string(&record)?.contains("running"), "it is not");
        Ok(())
    })
    .await?;
    // Where the daemon was killed the next one is asked.
    let Ok(daemon) = score(daemon) else { return Ok(()) };
    let shim = score(one(standalone)?.pid)?;
    ensure!(shim == daemon + 1, "the shim's oom_score_adj is {shim}, the daemon's {daemon}");
    Ok(())
}

/// The only shim.
pub(crate) fn one(standalone: &Standalone) -> Result<Proc> {
    match shims(standalone)?.as_slice() {
        [shim] => Ok(shim.clone()),
        other => anyhow::bail!("shims: {other:?}"),
    }
}
