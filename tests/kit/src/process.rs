//! A daemon of the node: started, watched, ended.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::until;

/// One process of ours, with its output in a file.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `command` with its output appended to `log`, in a process group of its own, so that
    /// Ctrl-C at a terminal reaches it only through us.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn spawn(mut command: Command, log: &Path) -> Result<Self> {
        let name = Path::new(command.get_program())
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let output: File = OpenOptions::new()
            .create(true)
            .append(true)
            .open(log)
            .with_context(|| format!("open {}", log.display()))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .process_group(0)
            .spawn()
            .with_context(|| format!("start {}", command.get_program().to_string_lossy()))?;
        Ok(Self { name, child, log: log.to_owned() })
    }

    /// Process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The file of its output.
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// How it ended, if it has.
    ///
    /// # Errors
    /// The system does not tell.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.child.try_wait()?)
    }

    /// Fails if it has ended.
    ///
    /// # Errors
    /// It has ended; the message ends with its last lines.
    pub fn check(&mut self) -> Result<()> {
        match self.ended()? {
            None => Ok(()),
            Some(status) => bail!("{} has ended: {status}\n{}", self.name, tail(&self.log, 20)),
        }
    }

    /// Sends a signal. A process that has ended is success.
    ///
    /// # Errors
    /// The signal cannot be sent.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        if self.ended()?.is_some() {
            return Ok(());
        }
        let pid = Pid::from_raw(i32::try_from(self.child.id())?);
        kill(pid, signal).with_context(|| format!("send {signal} to {}", self.name))
    }

    /// Sends SIGTERM and waits for the end.
    ///
    /// # Errors
    /// It has not ended after `limit`.
    pub async fn stop(&mut self, limit: Duration) -> Result<ExitStatus> {
        self.signal(Signal::SIGTERM)?;
        let child = std::sync::Mutex::new(&mut self.child);
        let what = format!("end of {} after SIGTERM", self.name);
        until(&what, limit, async || {
            let mut child = child.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            child.try_wait()?.context("it is running")
        })
        .await
    }

    /// Sends SIGKILL and waits for the end.
    ///
    /// # Errors
    /// The system does not let us.
    pub fn kill(&mut self) -> Result<ExitStatus> {
        if let Some(status) = self.ended()? {
            return Ok(status);
        }
        self.child.kill().with_context(|| format!("kill {}", self.name))?;
        Ok(self.child.wait()?)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Err(e) = self.kill() {
            eprintln!("kit: {e:#}");
        }
    }
}

/// The last `lines` lines of a file; the error instead, if it cannot be read.
pub(crate) fn tail(path: &Path, lines: usize) -> String {
    /// More than the lines that anybody wants to see.
    const READ: u64 = 256 << 10;
    let read = || -> std::io::Result<String> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(READ)))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    match read() {
        Ok(text) => {
            let all: Vec<&str> = text.lines().collect();
            all[all.len().saturating_sub(lines)..].join("\n")
        }
        Err(e) => format!("{}: {e}", path.display()),
    }
}
