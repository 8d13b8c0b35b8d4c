//! Programs that a check executes: each ends in time, with a limited output.

use std::ffi::OsString;
use std::io;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _};

/// A program ends in a tenth of a second; one that must be read from a busy disk takes longer.
const DEADLINE: Duration = Duration::from_secs(10);

/// A dump of containerd's defaults has 8 kB.
const OUTPUT_MAX: u64 = 4 << 20;

/// The exit status and the output of a program.
#[derive(Debug)]
pub struct Output {
    /// How it has ended.
    pub status: ExitStatus,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

/// Runs a command to its end, with no environment but `PATH`.
///
/// # Errors
/// It cannot be started, does not end in time, or prints too much.
pub(crate) async fn run(command: Command) -> Result<Output, String> {
    run_with(command, std::env::var_os("PATH").map(|path| ("PATH".into(), path))).await
}

/// Runs a command to its end, with no environment but these variables.
///
/// # Errors
/// As of `run`.
pub async fn run_with(
    mut command: Command,
    variables: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<Output, String> {
    command.env_clear().envs(variables);
    run_within(command, DEADLINE, OUTPUT_MAX).await
}

async fn run_within(mut command: Command, deadline: Duration, most: u64) -> Result<Output, String> {
    // A relative path, or one in PATH, must not lead to a program in the caller's directory.
    command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut command = tokio::process::Command::from(command);
    let mut child = command.kill_on_drop(true).spawn().map_err(|e| e.to_string())?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let all = async {
        let (stdout, stderr) = tokio::try_join!(read(stdout, most), read(stderr, most))?;
        Ok(Output { status: child.wait().await?, stdout, stderr })
    };
    match tokio::time::timeout(deadline, all).await {
        Ok(output) => output.map_err(|e: io::Error| e.to_string()),
        Err(_) => Err(format!("does not end within {} s", deadline.as_secs_f32())),
    }
}

async fn read(from: Option<impl AsyncRead + Unpin>, most: u64) -> io::Result<String> {
    let mut bytes = Vec::new();
    if let Some(from) = from {
        from.take(most + 1).read_to_end(&mut bytes).await?;
    }
    if bytes.len() as u64 > most {
        return Err(io::Error::other(format!("prints more than {most} bytes")));
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        command
    }

    #[tokio::test]
    async fn a_program_runs_with_a_deadline_and_bounded_output() {
        let within =
            async |limit, script: &str| run_within(sh(script), limit, 100).await.map(|o| o.stdout);
        let limited = async |script: &str| within(Duration::from_secs(30), script).await;
        assert_eq!(limited("echo here; pwd").await.unwrap(), "here\n/\n");
        let late = within(Duration::from_millis(300), "exec sleep 60").await.unwrap_err();
        assert_eq!(late, "does not end within 0.3 s");
        assert_eq!(limited("yes").await.unwrap_err(), "prints more than 100 bytes");
        assert_eq!(limited("yes >&2").await.unwrap_err(), "prints more than 100 bytes");
        let none = run(Command::new("/nowhere/containerd")).await.unwrap_err();
        assert!(none.contains("No such file"), "{none}");
    }

    #[tokio::test]
    async fn a_program_gets_no_environment_but_path() {
        let output = run(Command::new("env")).await.unwrap();
        let names = output.stdout.lines().map(|line| line.split('=').next().unwrap());
        assert_eq!(names.collect::<Vec<_>>(), ["PATH"]);
    }
}
