//! A daemon in a directory of a test's own.

use std::fs;
use std::io::{BufRead as _, BufReader, ErrorKind};
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

/// How long a daemon may take for anything here; only a broken one takes it.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

pub(crate) fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_pause-sandboxer"))
}

pub(crate) fn run(args: &[&str]) -> Output {
    program().args(args).output().unwrap()
}

pub(crate) fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).unwrap()
}

pub(crate) fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

/// A directory of a test's own with settings that keep a daemon inside it.
pub(crate) struct Scratch {
    pub(crate) dir: TempDir,
}

impl Scratch {
    pub(crate) fn new() -> Self {
        Self { dir: TempDir::new().unwrap() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) -> String {
        let path = self.path(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// The option of every command that names a config file with [`Scratch::settings`].
    pub(crate) fn flags(&self) -> Vec<String> {
        let lines = self.settings().map(|(name, path)| format!("{name} = {path:?}\n"));
        let text = lines.concat() + "restrict_oom_score_adj = true\n";
        vec![format!("--config={}", self.write("config.toml", &text))]
    }

    /// The same settings as options of `serve`.
    pub(crate) fn options(&self) -> Vec<String> {
        let flags = self
            .settings()
            .map(|(name, path)| format!("--{}={}", name.replace('_', "-"), path.display()));
        flags.into_iter().chain(["--restrict-oom-score-adj".to_owned()]).collect()
    }

    fn settings(&self) -> [(&'static str, PathBuf); 5] {
        [
            ("socket", "run/s.sock"),
            ("state_dir", "state"),
            ("containerd_root", "root"),
            ("containerd_state", "containerd"),
            ("containerd_address", "containerd/c.sock"),
        ]
        .map(|(name, path)| (name, self.path(path)))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A daemon that was killed leaves its records' directory mounted, for its successor.
        let _ = umount2(&self.path("state/sandboxes"), MntFlags::MNT_DETACH);
    }
}

/// A daemon that is killed when its test ends.
pub(crate) struct Daemon {
    pub(crate) child: Child,
    pub(crate) log: BufReader<ChildStderr>,
    notices: UnixDatagram,
}

impl Daemon {
    /// Starts a daemon that tells us, as it would systemd, when it is ready.
    pub(crate) fn start(scratch: &Scratch, flags: &[String]) -> Self {
        let mut command = program();
        command.arg("serve").args(flags);
        Self::spawn(scratch, command)
    }

    pub(crate) fn spawn(scratch: &Scratch, mut command: Command) -> Self {
        let socket = scratch.path("notify");
        let _ = fs::remove_file(&socket);
        let notices = UnixDatagram::bind(&socket).unwrap();
        notices.set_read_timeout(Some(TIMEOUT)).unwrap();
        command.env("NOTIFY_SOCKET", &socket).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let log = BufReader::new(child.stderr.take().unwrap());
        Self { child, log, notices }
    }

    /// Reads notices until one has `line`.
    pub(crate) fn noticed(&self, line: &str) {
        let mut buffer = [0; 4096];
        loop {
            let length = match self.notices.recv(&mut buffer) {
                // The kernel does not restart a call with a timeout (signal(7)).
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                received => received.unwrap_or_else(|e| panic!("no notice {line:?}: {e}")),
            };
            if std::str::from_utf8(&buffer[..length]).unwrap().lines().any(|l| l == line) {
                return;
            }
        }
    }

    /// Reads the log until a line has `part`; the line.
    pub(crate) fn logged(&mut self, part: &str) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.log.read_line(&mut line).unwrap(), 0, "the log ended without {part:?}");
            if line.contains(part) {
                return line;
            }
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().try_into().unwrap()), signal).unwrap();
    }

    /// The exit status, within [`TIMEOUT`].
    pub(crate) fn ended(&mut self) -> std::process::ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(begun.elapsed() < TIMEOUT, "the daemon does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Fails if it has ended, which is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
