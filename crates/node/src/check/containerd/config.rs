//! containerd's config as containerd itself reads it: `containerd config dump` merges the file with
//! its imports, converts it to the newest version and adds the defaults.

use std::io;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _};
use toml::{Table, Value};

use super::running::{ContainerdProgram, Flags};

/// A dump takes a tenth of a second.
const DEADLINE: Duration = Duration::from_secs(10);

/// A dump of the defaults has 8 kB.
const OUTPUT_MAX: u64 = 4 << 20;

/// Characters of containerd's own words in a finding.
const REASON_MAX: usize = 500;

/// The merged config of `file`.
///
/// # Errors
/// Why there is none, in containerd's words if it has some.
pub(super) async fn dump(program: &ContainerdProgram, file: &Path) -> Result<Table, String> {
    let mut command = program.command();
    command.arg("--config").arg(file).args(["config", "dump"]);
    let output = run(command).await?;
    if !output.status.success() {
        return Err(format!("{}: {}", output.status, last_line(&output.stderr)));
    }
    toml::from_str(&output.stdout).map_err(|e| format!("its output: {}", e.message()))
}

/// Lets the options of the containerd that runs override its config, as they do there.
pub(super) fn apply(flags: &Flags, table: &mut Table) {
    let text = |path: &Path| Value::from(path.to_string_lossy().into_owned());
    for (key, path) in [("root", &flags.root), ("state", &flags.state)] {
        if let Some(path) = path {
            table.insert(key.to_owned(), text(path));
        }
    }
    if let Some(path) = &flags.address {
        let server = table.get_mut("plugins").and_then(Value::as_table_mut);
        server.and_then(|plugins| plugins.remove(super::SERVER));
        let grpc = Table::from_iter([("address".to_owned(), text(path))]);
        table.insert("grpc".to_owned(), Value::Table(grpc));
    }
}

/// The exit status and the output of a program.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) status: ExitStatus,
    pub(super) stdout: String,
    stderr: String,
}

/// Runs a command to its end, with no environment but `PATH`.
///
/// # Errors
/// It cannot be started, does not end in time, or prints too much.
pub(super) async fn run(command: Command) -> Result<Output, String> {
    run_within(command, DEADLINE, OUTPUT_MAX).await
}

async fn run_within(mut command: Command, deadline: Duration, most: u64) -> Result<Output, String> {
    command.env_clear().envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
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

/// The last line with words, which has the error; of one line and of a limited length.
fn last_line(text: &str) -> String {
    let line = text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
    line.trim().chars().filter(|c| !c.is_control()).take(REASON_MAX).collect()
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

    #[tokio::test]
    async fn a_dump_that_fails_has_containerds_reason() {
        let dir = tempfile::tempdir().unwrap();
        let script = async |text: &str| {
            let path = dir.path().join("script");
            std::fs::write(&path, text).unwrap();
            let mut command = Command::new("/bin/sh");
            command.arg(path);
            let output = run(command).await.unwrap();
            (output.status.success(), last_line(&output.stderr))
        };
        let (success, reason) =
            script("echo level=warning >&2; echo 'containerd: bad' >&2; exit 1").await;
        assert_eq!((success, reason.as_str()), (false, "containerd: bad"));
        assert_eq!(last_line(&"x".repeat(1000)).len(), REASON_MAX);
        assert_eq!(last_line("a\u{1b}[31mb\n\n"), "a[31mb");
    }

    #[test]
    fn options_override_the_config() {
        let mut table: Table = toml::from_str(
            "root = '/a'\nstate = '/b'\n[plugins.'io.containerd.server.v1.grpc']\naddress = '/c'",
        )
        .unwrap();
        apply(&Flags::default(), &mut table);
        assert_eq!((table["root"].as_str(), table.contains_key("grpc")), (Some("/a"), false));
        let flags = Flags {
            config: None,
            root: Some("/r".into()),
            state: None,
            address: Some("/s.sock".into()),
        };
        apply(&flags, &mut table);
        assert_eq!(table["root"].as_str(), Some("/r"));
        assert_eq!(table["state"].as_str(), Some("/b"));
        assert_eq!(table["grpc"]["address"].as_str(), Some("/s.sock"));
        assert!(table["plugins"].get("io.containerd.server.v1.grpc").is_none());
    }
}
