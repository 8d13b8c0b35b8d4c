//! A sandboxer's process: this project's daemon with some settings, or the floor.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kit::controller::Controller;
use kit::{Node, Process, grpc, until};

/// The daemon under measurement.
pub(crate) const BINARY: &str = env!("CARGO_BIN_EXE_pause-sandboxer");

/// How long it may take to answer.
const UP: Duration = Duration::from_secs(60);

/// How long a start took.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StartUp {
    /// Until it listened. It holds calls until it has recovered its pods.
    pub(crate) listening: Duration,
    /// Until it answered its first call.
    pub(crate) answering: Duration,
}

/// One sandboxer.
#[derive(Debug)]
pub(crate) struct Daemon {
    words: Vec<String>,
    program: PathBuf,
    socket: PathBuf,
    log: PathBuf,
    process: Option<Process>,
}

impl Daemon {
    /// This project's, with the node's settings and these lines of its config.
    pub(crate) fn ours(node: &Node, name: &str, settings: &str) -> Result<Self> {
        let layout = node.layout();
        let state = layout.state().join(format!("bench-{name}"));
        let config = layout.top.join(format!("{name}.toml"));
        let socket = socket(node, name);
        let text = format!(
            "socket = {socket:?}\nstate_dir = {state:?}\ncontainerd_root = {root:?}\n\
             containerd_state = {run:?}\n\
             containerd_address = {address:?}\nrestrict_oom_score_adj = true\n{settings}",
            root = layout.root(),
            run = layout.state(),
            address = layout.containerd_socket(),
        );
        std::fs::write(&config, text).context("write the daemon's config")?;
        let words = ["serve".into(), "--config".into(), config.to_string_lossy().into_owned()];
        Ok(Self::new(node, name, Path::new(BINARY), words.into()))
    }

    /// A daemon that only answers.
    pub(crate) fn floor(node: &Node) -> Result<Self> {
        let words = ["floor".into(), socket(node, "floor").to_string_lossy().into_owned()];
        Ok(Self::new(node, "floor", &std::env::current_exe()?, words.into()))
    }

    fn new(node: &Node, name: &str, program: &Path, words: Vec<String>) -> Self {
        let log = node.layout().top.join("logs").join(format!("{name}.log"));
        Self { words, program: program.into(), socket: socket(node, name), log, process: None }
    }

    /// Starts it and waits until it answers.
    pub(crate) async fn start(&mut self) -> Result<StartUp> {
        /// Between two looks at the socket.
        const LOOK: Duration = Duration::from_micros(200);
        let mut command = Command::new(&self.program);
        command.args(&self.words);
        let begun = Instant::now();
        self.process = Some(Process::spawn(command, &self.log)?);
        // The file of a killed predecessor's socket refuses; the socket listens when it takes the
        // path.
        while std::os::unix::net::UnixStream::connect(&self.socket).is_err() {
            self.process.as_mut().context("started above")?.check()?;
            anyhow::ensure!(begun.elapsed() < UP, "{} does not listen", self.log.display());
            tokio::time::sleep(LOOK).await;
        }
        let listening = begun.elapsed();
        let direct = self.client();
        until("the sandboxer answers", UP, async || match direct.status("unknown", false).await {
            Err(status) if status.code == grpc::NOT_FOUND => Ok(()),
            other => anyhow::bail!("status of an unknown id: {other:?}"),
        })
        .await?;
        Ok(StartUp { listening, answering: begun.elapsed() })
    }

    /// Ends it with SIGKILL. Pods keep running.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.process.take().map_or(Ok(()), |mut process| process.kill().map(drop))
    }

    pub(crate) fn pid(&self) -> Result<u32> {
        Ok(self.process.as_ref().context("it is not running")?.pid())
    }

    /// Asks it directly.
    pub(crate) fn client(&self) -> Controller {
        Controller::new(&self.socket, "")
    }
}

/// The socket of the sandboxer of this name.
pub(crate) fn socket(node: &Node, name: &str) -> PathBuf {
    node.layout().top.join(format!("{name}.sock"))
}
