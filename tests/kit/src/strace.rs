//! Faults that `strace` injects into a running process.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Result, ensure};
use nix::sys::signal::Signal;

use crate::{Process, until};

/// A fault, for as long as this lives.
#[derive(Debug)]
pub struct Fault {
    process: Process,
    output: PathBuf,
}

/// `strace` with injections such as `umount2:error=EBUSY`, for a command to be run or `-p PID`.
pub fn strace(injections: &[&str]) -> Command {
    let mut command = Command::new("strace");
    // Interruptible, which it is not by itself with a command and a file.
    command.args(["-f", "-I", "2", "-o", "/dev/null"]);
    let calls: Vec<&str> =
        injections.iter().filter_map(|injection| injection.split(':').next()).collect();
    command.arg("-e").arg(format!("trace={}", calls.join(",")));
    for injection in injections {
        command.arg("-e").arg(format!("inject={injection}"));
    }
    command
}

impl Fault {
    /// Attaches to a process with all its threads.
    ///
    /// # Errors
    /// strace does not attach.
    pub async fn begin(pid: u32, injections: &[&str]) -> Result<Self> {
        Self::begin_at(pid, injections, &[]).await
    }

    /// The same, for calls that name one of these paths only.
    ///
    /// # Errors
    /// strace does not attach.
    pub async fn begin_at(pid: u32, injections: &[&str], paths: &[PathBuf]) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name =
            format!("strace-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let output = std::env::temp_dir().join(name);
        let mut command = strace(injections);
        for path in paths {
            command.arg("-P").arg(path);
        }
        command.arg("-p").arg(pid.to_string());
        let process = Process::spawn(command, &output)?;
        let mut fault = Self { process, output };
        let (output, process) = (fault.output.clone(), std::sync::Mutex::new(&mut fault.process));
        until("strace has attached", Duration::from_secs(10), async || {
            lock(&process).check()?;
            let output_text = fs::read_to_string(&output)?;
            ensure!(output_text.contains(&format!("Process {pid} attached")), "{output_text}");
            Ok(())
        })
        .await?;
        Ok(fault)
    }

    /// Lets the process go, without faults.
    ///
    /// # Errors
    /// strace does not end.
    pub async fn end(mut self) -> Result<()> {
        self.process.signal(Signal::SIGINT)?;
        let process = std::sync::Mutex::new(&mut self.process);
        until("strace has ended", Duration::from_secs(20), async || {
            ensure!(lock(&process).ended()?.is_some(), "it runs");
            Ok(())
        })
        .await
    }
}

impl Drop for Fault {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.output);
    }
}

fn lock<T>(mutex: &std::sync::Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
