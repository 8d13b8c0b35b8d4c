//! The base of the cases: a node whose shims misbehave on order, and the list of them.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use kit::machine::processes::{self, Proc};
use kit::{ContainerSpec, Handler, Node, Options, Pod, PodSpec, until};

/// Time limit for steps that take no time on an idle machine.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// How long a case may take.
pub(crate) const LIMIT: Duration = Duration::from_secs(120);

/// Variables that shims get beside the daemon's own.
pub(crate) const SHIM_ENV: &str = r#"shim_env = ["KIT_VARIABLE=set"]"#;

/// The program of the pods' shims, by the setting `shim`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// The runtime's shim.
    Runtime,
    /// The sandboxer's own shim.
    Own,
}

/// A node whose sandboxer uses the wrapped shim.
pub(crate) struct Harness {
    pub(crate) node: Arc<Node>,
    kind: Kind,
    order: PathBuf,
    dir: tempfile::TempDir,
}

impl Harness {
    pub(crate) async fn start(kind: Kind) -> Result<Self> {
        let dir = tempfile::tempdir()?;
        let (order, shim) = (dir.path().join("order"), dir.path().join("shim"));
        let sandboxer = PathBuf::from(env!("CARGO_BIN_EXE_pause-sandboxer"));
        let real = match kind {
            Kind::Own => {
                kit::shim::prepare(&sandboxer)?;
                sandboxer.with_file_name(kit::shim::NAME)
            }
            _ => kit::Parts::get()?.program("containerd-shim-runc-v2"),
        };
        let script = include_str!("wrapper.sh")
            .replace("REAL_SHIM", &real.display().to_string())
            .replace("ORDER_FILE", &order.display().to_string())
            .replace("THIS_TEST", &std::env::current_exe()?.display().to_string());
        fs::write(&shim, script)?;
        fs::set_permissions(&shim, fs::Permissions::from_mode(0o755))?;
        fs::write(&order, "good")?;
        let (sandboxer, environment) = match kind {
            // A script cannot be executed by a descriptor: this program is, and becomes the script.
            Kind::Own => {
                let copy = dir.path().join("pause-sandboxer");
                fs::copy(&sandboxer, &copy)?;
                symlink(std::env::current_exe()?, copy.with_file_name(kit::shim::NAME))?;
                let script = format!(r#", "{}={}"]"#, crate::proxy::SCRIPT, shim.display());
                (copy, SHIM_ENV.replace(']', &script))
            }
            _ => (sandboxer, SHIM_ENV.to_owned()),
        };
        let node = Node::start(Options {
            sandboxer: Some(sandboxer),
            sandboxer_config: format!(
                "{environment}\nmetrics = \"unix://{}\"\n{}",
                dir.path().join("metrics").display(),
                kind.setting()
            ),
            containerd_config: crate::refused::HANDLERS.to_owned(),
            ..Options::default()
        })
        .await?;
        if kind != Kind::Own {
            symlink(&shim, node.layout().programs().join("containerd-shim-runc-v2"))?;
        }
        node.start_sandboxer().await?;
        let harness = Self { node, kind, order, dir };
        // containerd makes directories of its own with the first container, and the pod network
        // with the first pod.
        let pod = harness.node.run(Handler::Ours, PodSpec::new("first")).await?;
        pod.run(ContainerSpec::sleeping("a")).await?;
        pod.remove().await?;
        Ok(harness)
    }

    /// The socket of the daemon's metrics.
    pub(crate) fn metrics(&self) -> PathBuf {
        self.dir.path().join("metrics")
    }

    /// How the next shim is to come.
    pub(crate) fn order(&self, word: &str) -> Result<()> {
        Ok(fs::write(&self.order, word)?)
    }

    /// The next shim freezes in this cgroup of version 1 before it answers.
    pub(crate) fn order_freeze(&self, cgroup: &Path) -> Result<()> {
        symlink(cgroup, self.order.with_extension("freezer"))?;
        self.order("freeze")
    }

    /// The order for the next calls of a method, of shims that came by the order `proxy`:
    /// `fail N`, `lose N`, `cut N`, `die N`, `hang N`, `late SECONDS`.
    pub(crate) fn misbehave(&self, method: &str, how: &str) -> Result<()> {
        Ok(fs::write(crate::proxy::calls(&self.order), format!("{method} {how}"))?)
    }

    /// The shim variable's value in the last call that cleaned up after a shim.
    pub(crate) fn deleted(&self) -> Result<String> {
        Ok(fs::read_to_string(self.order.with_extension("deleted"))?)
    }

    /// Calls are passed on as they are.
    pub(crate) fn behave(&self) -> Result<()> {
        Ok(fs::write(crate::proxy::calls(&self.order), "")?)
    }

    /// Waits until the order for calls has been used up.
    pub(crate) async fn used_up(&self) -> Result<()> {
        until("the order for calls is used up", SOON, async || {
            let order = fs::read_to_string(crate::proxy::calls(&self.order))?;
            ensure!(order.ends_with(" 0"), "{order:?}");
            Ok(())
        })
        .await
    }

    pub(crate) async fn pod(&self, name: &str) -> Result<Pod> {
        self.node.run(Handler::Ours, PodSpec::new(name).host_network()).await
    }

    /// Waits until a pod has its shim, if the sandbox is a task of it, and the task: a shim that
    /// ends before may be followed by another, for the task.
    pub(crate) async fn bring_shim(&self, pod: &Pod) -> Result<()> {
        if self.kind != Kind::Own {
            return Ok(());
        }
        self.node.sandboxer().platform(pod.id()).await?;
        crate::container_record::has_task(pod).await
    }

    /// The program beside the sandboxer's, of [`Kind::Own`].
    pub(crate) fn own_shim(&self) -> PathBuf {
        self.dir.path().join(kit::shim::NAME)
    }

    /// Where a pod's shim is on record.
    pub(crate) fn record(&self, pod: &Pod) -> PathBuf {
        let dir = self.node.layout().sandboxer_state().join("sandboxes").join(pod.id());
        dir.join("shim/shim.json")
    }

    pub(crate) async fn restart(&self) -> Result<()> {
        self.node.kill_sandboxer()?;
        self.node.start_sandboxer().await
    }
}

/// The shims of a pod, whatever their program. One that is called to start or to clean up is none:
/// it has no socket.
pub(crate) fn shims(pod: &Pod) -> Result<Vec<Proc>> {
    let called = |process: &Proc| {
        ["start", "delete"].contains(&process.command.split_whitespace().last().unwrap_or(""))
    };
    Ok(shims_and_calls(pod)?.into_iter().filter(|process| !called(process)).collect())
}

fn shims_and_calls(pod: &Pod) -> Result<Vec<Proc>> {
    let named = format!("-id {} ", pod.id());
    let all = processes::all()?.into_iter();
    Ok(all.filter(|process| process.state != 'Z' && process.command.contains(&named)).collect())
}

pub(crate) async fn one_shim(pod: &Pod) -> Result<Proc> {
    until("one shim", SOON, async || match shims(pod)?.as_slice() {
        [one] => Ok(one.clone()),
        other => bail!("shims: {other:?}"),
    })
    .await
}

pub(crate) async fn no_shim(pod: &Pod) -> Result<()> {
    until("no shim", SOON, async || none(&shims_and_calls(pod)?)).await
}

/// Ends a shim that has no containers any more. From 2.4 on containerd has done so with the last
/// container; before, it is a signal, with the same effect.
pub(crate) async fn end_empty(pod: &Pod, shim: &Proc) -> Result<()> {
    end_empty_by(pod, shim, nix::sys::signal::Signal::SIGTERM).await
}

/// The same by this signal.
pub(crate) async fn end_empty_by(
    pod: &Pod,
    shim: &Proc,
    by: nix::sys::signal::Signal,
) -> Result<()> {
    until("the end of the empty shim", SOON, async || {
        let now = shims(pod)?;
        if now.iter().any(|now| now.pid == shim.pid) {
            // Again and again: one that has just been executed passes it over.
            match signal(shim.pid, by) {
                Err(e) if e.downcast_ref() == Some(&nix::Error::ESRCH) => {}
                other => other?,
            }
            bail!("{now:?}");
        }
        Ok(())
    })
    .await
}

pub(crate) fn none(processes: &[Proc]) -> Result<()> {
    ensure!(processes.is_empty(), "{processes:?}");
    Ok(())
}

pub(crate) async fn not_ready(pod: &Pod) -> Result<()> {
    ensure!(!pod.is_ready().await?, "it is ready");
    Ok(())
}

pub(crate) fn signal(pid: u32, signal: nix::sys::signal::Signal) -> Result<()> {
    let pid = nix::unistd::Pid::from_raw(i32::try_from(pid)?);
    nix::sys::signal::kill(pid, signal).context("kill")
}

/// Removes a pod as kubelet does, again and again: CRI takes a container whose shim is gone for
/// running until it has handled its exit.
pub(crate) async fn removed(pod: &Pod) -> Result<()> {
    until("removed", SOON, async || {
        pod.stop().await?;
        pod.node().cri().remove_pod_sandbox(pod.id()).await.context("RemovePodSandbox")
    })
    .await?;
    pod.clear().await
}

/// The processes in the cgroup of a container.
pub(crate) fn inside(id: &str) -> Result<Vec<Proc>> {
    Ok(processes::all()?
        .into_iter()
        .filter(|process| process.cgroups.contains(id) && process.state != 'Z')
        .collect())
}

impl Kind {
    /// The word before the names of its cases.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Runtime => "runtime",
            Self::Own => "own",
        }
    }

    fn setting(self) -> &'static str {
        match self {
            Self::Runtime => "shim = \"runtime\"\n",
            Self::Own => "shim = \"own\"\n",
        }
    }
}

type Run = fn(Arc<Harness>) -> Pin<Box<dyn Future<Output = Result<()>>>>;

/// One case.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) kind: Kind,
    pub(crate) limit: Duration,
    pub(crate) run: Run,
}

macro_rules! cases {
    ($kind:expr => $($case:ident),* $(,)?) => {
        vec![$(crate::harness::Case {
            name: stringify!($case),
            kind: $kind,
            limit: crate::harness::LIMIT,
            run: |harness| Box::pin($case(harness)),
        }),*]
    };
}
pub(crate) use cases;

/// Cases of the shims that are handed their socket: the runtime's and the sandboxer's own.
macro_rules! cases_of_both {
    ($($case:ident),* $(,)?) => {{
        let mut all = crate::harness::cases![crate::harness::Kind::Runtime => $($case),*];
        all.extend(crate::harness::cases![crate::harness::Kind::Own => $($case),*]);
        all
    }};
}
pub(crate) use cases_of_both;
