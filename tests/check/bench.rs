//! A node with a daemon in a directory of its own, which a test breaks.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use kit::machine::processes;
use kit::{ContainerSpec, Handler, Node, Options, Pod, PodSpec, Process};
use nix::mount::MsFlags;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::PodTry;

/// The step that breaks a node.
pub(crate) type Work<'a> = Pin<Box<dyn Future<Output = Result<()>> + 'a>>;

/// How long a pod may take to start on a node that is not broken.
const STARTED: Duration = Duration::from_secs(10);

/// How long `check` may take: two questions that are not answered, and some programs.
const CHECKED: Duration = Duration::from_secs(10);

/// The programs of the sandboxer.
pub(crate) const PROGRAM: &str = "pause-sandboxer";

/// A problem that `check` prints.
#[derive(Debug)]
pub(crate) struct Problem {
    pub(crate) line: String,
    pub(crate) remedy: String,
}

/// The output of `check --strict`.
pub(crate) struct Checked {
    pub(crate) status: i32,
    pub(crate) text: String,
    pub(crate) problems: Vec<Problem>,
}

/// The node. Its fields are dropped in their order: the node last.
pub(crate) struct Bench {
    /// A process that the test has stopped.
    pub(crate) stopped: Option<u32>,
    /// A containerd that is not the node's own.
    pub(crate) process: Option<Process>,
    /// Sockets and a pod that stay until the end of the test.
    pub(crate) listeners: Vec<UnixListener>,
    pub(crate) pod: Option<Pod>,
    /// More arguments of `check`.
    pub(crate) arguments: Vec<String>,
    /// A command that runs `check`, such as `unshare`.
    pub(crate) wrapper: Vec<String>,
    /// Directories that go before those of `PATH`.
    pub(crate) path: Vec<PathBuf>,
    /// This containerd cannot be broken so.
    pub(crate) skips: bool,
    pub(crate) node: Arc<Node>,
    /// The directory with the programs of the sandboxer, which are links to those that cargo has
    /// built.
    pub(crate) programs: tempfile::TempDir,
}

impl Bench {
    /// A node that is not broken.
    pub(crate) async fn start() -> Result<Self> {
        let built = Path::new(env!("CARGO_BIN_EXE_pause-sandboxer"));
        kit::shim::prepare(built)?;
        let programs = tempfile::Builder::new()
            .prefix("check-")
            .tempdir_in(built.parent().context("no directory")?)?;
        for name in [PROGRAM, kit::shim::NAME] {
            fs::hard_link(built.with_file_name(name), programs.path().join(name))?;
        }
        let sandboxer = Some(programs.path().join(PROGRAM));
        let node = Node::start(Options { sandboxer, ..Options::default() }).await?;
        let state = node.layout().sandboxer_state();
        fs::create_dir(&state)?;
        let options = Some("size=2m,mode=700");
        nix::mount::mount(Some("state"), &state, Some("tmpfs"), MsFlags::empty(), options)?;
        node.start_sandboxer().await?;
        let path = vec![node.parts().bin().to_owned()];
        Ok(Self {
            node,
            programs,
            arguments: Vec::new(),
            wrapper: Vec::new(),
            path,
            stopped: None,
            process: None,
            pod: None,
            listeners: Vec::new(),
            skips: false,
        })
    }

    /// A command of the sandboxer's program.
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let program = env!("CARGO_BIN_EXE_pause-sandboxer").to_owned();
        let mut line = self.wrapper.iter().cloned().chain([program]);
        let mut command = Command::new(line.next().unwrap());
        command.args(line).args(words).arg("--config").arg(self.node.layout().sandboxer_config());
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path = self.path.iter().cloned().chain(std::env::split_paths(&path));
        command.env("PATH", std::env::join_paths(path).unwrap());
        command
    }

    /// The output of a command, its exit status, and its time.
    pub(crate) async fn run(&self, words: &[&str]) -> Result<(String, i32, Duration)> {
        let mut command = self.command(words);
        command.stdin(Stdio::null());
        let begun = Instant::now();
        #[allow(clippy::disallowed_methods, reason = "a test's own thread")]
        let output = tokio::task::spawn_blocking(move || command.output()).await??;
        let text = String::from_utf8([output.stdout, output.stderr].concat())?;
        Ok((text, output.status.code().context("a signal")?, begun.elapsed()))
    }

    /// Runs `check --strict`.
    pub(crate) async fn check(&self) -> Result<Checked> {
        let arguments = self.arguments.iter().map(String::as_str);
        let words: Vec<&str> = ["check", "--strict"].into_iter().chain(arguments).collect();
        let (text, status, took) = self.run(&words).await?;
        ensure!(took < kit::patient(CHECKED), "check took {took:?}: {text}");
        let lines: Vec<&str> = text.lines().collect();
        let remedy = |at: usize| lines.get(at + 1).and_then(|line| line.strip_prefix("      -> "));
        let problems = lines.iter().enumerate().filter(|(_, line)| !line.starts_with("ok "));
        let problems = problems.filter(|(_, line)| !line.starts_with("      ->"));
        let problems = problems
            .map(|(at, line)| Problem {
                line: (*line).to_owned(),
                remedy: remedy(at).unwrap_or_default().to_owned(),
            })
            .collect();
        Ok(Checked { status, text, problems })
    }

    /// Replaces a text in containerd's config file.
    pub(crate) fn edit(&self, from: &str, to: &str) -> Result<()> {
        replace(&self.node.layout().containerd_config(), from, to)
    }

    /// Replaces a text in containerd's config file, and restarts containerd.
    pub(crate) async fn reconfigure(&self, from: &str, to: &str) -> Result<()> {
        self.edit(from, to)?;
        self.restart_containerd().await
    }

    pub(crate) async fn restart_containerd(&self) -> Result<()> {
        self.node.stop_containerd().await?;
        self.node.start_containerd().await
    }

    /// Appends lines to the settings of the sandboxer, which the daemon does not read again.
    pub(crate) fn set(&self, from: &str, to: &str) -> Result<()> {
        replace(&self.node.layout().sandboxer_config(), from, to)
    }

    /// Replaces a program of the sandboxer by a script, and restarts the daemon.
    pub(crate) fn script(&self, path: &Path, text: &str) -> Result<()> {
        // Another file: the one that is there is linked to what cargo has built.
        if path.exists() {
            fs::remove_file(path)?;
        }
        kit::write_program(path, format!("#!/bin/sh\n{text}\n").as_bytes())?;
        Ok(fs::set_permissions(path, fs::Permissions::from_mode(0o755))?)
    }

    /// Starts a containerd that is not the kit's, which waits for CRI.
    pub(crate) async fn start_other_containerd(&mut self, mut command: Command) -> Result<()> {
        let layout = self.node.layout();
        command.arg("--config").arg(layout.containerd_config());
        self.process = Some(Process::spawn(command, &layout.containerd_log())?);
        kit::until("containerd listens", Duration::from_secs(30), async || {
            std::os::unix::net::UnixStream::connect(layout.containerd_socket())?;
            Ok(())
        })
        .await
    }

    pub(crate) async fn restart_daemon(&self) -> Result<()> {
        self.node.stop_sandboxer().await?;
        self.node.start_sandboxer().await
    }

    /// Stops a process with SIGSTOP until the end of the test.
    pub(crate) async fn stop(&mut self, pid: u32) -> Result<()> {
        processes::stop(pid).await?;
        self.stopped = Some(pid);
        Ok(())
    }

    /// Runs a pod of the node's network, and fails unless it does what is expected.
    pub(crate) async fn tries(&self, expected: PodTry) -> Result<()> {
        if matches!(expected, PodTry::NotTried) {
            return Ok(());
        }
        let home = self.node.prepare(PodSpec::new("tried").host_network())?;
        let (cri, name) = (self.node.cri(), Handler::Ours.name());
        let run = cri.run_pod_sandbox_within(home.config(), name, STARTED).await;
        let id = match (run, expected) {
            (Err(_), PodTry::NoSandbox) => {
                // A call that was given up may have made it; the node's end removes that.
                let _ = home.clear();
                return Ok(());
            }
            (Ok(_), PodTry::NoSandbox) => bail!("a pod starts"),
            (Err(e), _) => return Err(e).context("no pod starts"),
            (Ok(id), _) => id,
        };
        let pod = Pod::new(&self.node, Handler::Ours, home, id);
        match (pod.run(ContainerSpec::sleeping("main")).await, expected) {
            (Ok(_), PodTry::NoContainer) => bail!("a container starts"),
            (Err(e), PodTry::Runs) => Err(e).context("no container starts"),
            _ => pod.remove().await,
        }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if let Some(pid) = self.stopped.take() {
            let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGCONT);
        }
    }
}

fn replace(path: &Path, from: &str, to: &str) -> Result<()> {
    let text = fs::read_to_string(path)?;
    ensure!(text.contains(from), "{} lacks {from:?}", path.display());
    Ok(fs::write(path, text.replace(from, to))?)
}
