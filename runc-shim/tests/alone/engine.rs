//! What Docker and nerdctl have in common: the words of their commands. ENGINES_DIR names what
//! `tests/kit/fetch-engines` has fetched.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use anyhow::{Context as _, Result, ensure};
use kit::machine::processes;
use kit::{Node, until};

use crate::{SOON, kill, no_shims, shim};

/// A file of what was fetched.
pub(crate) fn fetched(file: &str) -> Result<PathBuf> {
    let directory = std::env::var_os("ENGINES_DIR");
    let directory = directory.context("ENGINES_DIR is not set; `make test-shim-alone` sets it")?;
    Ok(PathBuf::from(directory).join(file))
}

/// Removes the directories of the engine's containerd namespace, which are empty: those of runc's
/// states, and of bundles.
pub(crate) fn forget(node: &Node) -> Result<()> {
    let layout = node.layout();
    let bundles =
        [layout.root(), layout.state()].map(|it| it.join("io.containerd.runtime.v2.task"));
    for directory in [bundles.as_slice(), &["/run/containerd/runc".into()]].concat() {
        let directory = directory.join(&layout.name);
        fs::remove_dir(&directory).with_context(|| directory.display().to_string())?;
    }
    Ok(())
}

/// The command line of an engine.
pub(crate) struct Engine {
    /// The program with the options of all its commands.
    pub(crate) program: Vec<String>,
    /// The options of all its containers.
    pub(crate) options: Vec<String>,
    /// The image.
    pub(crate) image: &'static str,
    /// Whether it shows the exit code of a container whose shim has died, as Docker does. nerdctl
    /// shows that of a task, and containerd has no task then.
    pub(crate) shows_dead: bool,
}

impl Engine {
    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.program[0]);
        command.args(&self.program[1..]).args(words).stdin(Stdio::null());
        command
    }

    pub(crate) fn call(&self, words: &[&str]) -> Result<Output> {
        self.command(words).output().with_context(|| self.program[0].clone())
    }

    pub(crate) fn succeeds(&self, words: &[&str]) -> Result<String> {
        let output = self.call(words)?;
        ensure!(output.status.success(), "{words:?}: {output:?}");
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs a container with a script.
    pub(crate) fn run(&self, options: &[&str], script: &str) -> Result<Output> {
        let mut words = vec!["run"];
        words.extend(self.options.iter().map(String::as_str));
        words.extend(options);
        words.extend(["--entrypoint", "sh", self.image, "-c", script]);
        self.call(&words)
    }

    /// The same in the background.
    pub(crate) fn run_detached(&self, name: &str, options: &[&str], script: &str) -> Result<()> {
        let output = self.run(&[&["-d", "--name", name], options].concat(), script)?;
        ensure!(output.status.success(), "{name}: {output:?}");
        Ok(())
    }

    /// A field of what `inspect` says about a container.
    pub(crate) fn state(&self, name: &str, field: &str) -> Result<String> {
        let format = format!("{{{{.State.{field}}}}}");
        let said = self.succeeds(&["inspect", "--type", "container", "--format", &format, name])?;
        Ok(said.trim().to_owned())
    }

    /// Waits until a container has ended with this exit code.
    pub(crate) async fn ends(&self, name: &str, code: i32) -> Result<()> {
        until("it has exited", SOON, async || {
            let (status, exit) = (self.state(name, "Status")?, self.state(name, "ExitCode")?);
            ensure!(status == "exited" && exit == code.to_string(), "{name}: {status} {exit}");
            Ok(())
        })
        .await
    }

    /// The lines in the log of a container.
    pub(crate) fn lines(&self, name: &str) -> Result<Vec<String>> {
        Ok(self.succeeds(&["logs", name])?.lines().map(str::to_owned).collect())
    }

    /// Waits until its log has a line at least so often.
    pub(crate) async fn says(&self, name: &str, line: &str, count: usize) -> Result<()> {
        until("the line in the log", SOON, async || {
            let lines = self.lines(name)?;
            ensure!(lines.iter().filter(|one| *one == line).count() >= count, "{lines:?}");
            Ok(())
        })
        .await
    }

    /// An exec that reads its standard input and has an exit code.
    pub(crate) fn exec_answers(&self, name: &str) -> Result<()> {
        let mut command = self.command(&["exec", "-i", name, "sh", "-c", "cat; exit 4"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        child.stdin.take().context("its standard input")?.write_all(b"in\n")?;
        let output = child.wait_with_output()?;
        // nerdctl only says it.
        let said = String::from_utf8_lossy(&output.stderr).contains("exit code 4");
        let is_same = output.status.code() == Some(4) || said;
        ensure!(is_same && output.stdout == b"in\n", "{output:?}");
        Ok(())
    }

    /// Attaches to a container that answers each line with `got LINE`.
    pub(crate) fn attach_answers(&self, name: &str) -> Result<()> {
        let mut command = self.command(&["attach", name]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut input = child.stdin.take().context("its standard input")?;
        let mut output = BufReader::new(child.stdout.take().context("its standard output")?);
        input.write_all(b"hello\n")?;
        let mut line = String::new();
        let read = output.read_line(&mut line);
        child.kill()?;
        child.wait()?;
        read?;
        ensure!(line == "got hello\n", "{line:?}");
        Ok(())
    }

    pub(crate) fn remove(&self, name: &str) -> Result<()> {
        self.succeeds(&["rm", "-f", name]).map(drop)
    }

    /// Removes the last containers, with which their shims end.
    pub(crate) async fn remove_last(&self, node: &Node, names: &[&str]) -> Result<()> {
        names.iter().try_for_each(|name| self.remove(name))?;
        no_shims(node).await
    }
}

/// A container from its start to its end, by the commands of a person.
pub(crate) async fn commands(engine: &Engine, node: &Node) -> Result<()> {
    let output = engine.run(&["--rm"], "echo out; echo err >&2; exit 3")?;
    ensure!(output.status.code() == Some(3) && output.stdout == b"out\n", "{output:?}");
    ensure!(String::from_utf8_lossy(&output.stderr).contains("err\n"), "{output:?}");

    let script = "trap 'echo ends; exit 7' TERM; echo begun; while :; do sleep 0.1; done";
    engine.run_detached("main", &[], script)?;
    engine.says("main", "begun", 1).await?;
    shim(node)?;
    engine.exec_answers("main")?;
    engine.succeeds(&["pause", "main"])?;
    ensure!(engine.state("main", "Status")? == "paused", "not paused");
    engine.succeeds(&["unpause", "main"])?;
    engine.succeeds(&["stop", "main"])?;
    engine.ends("main", 7).await?;
    engine.says("main", "ends", 1).await?;
    engine.succeeds(&["start", "main"])?;
    engine.says("main", "begun", 2).await?;
    let first = engine.state("main", "Pid")?;
    engine.succeeds(&["restart", "main"])?;
    engine.says("main", "begun", 3).await?;
    engine.says("main", "ends", 2).await?;
    ensure!(engine.state("main", "Pid")? != first, "the same process");
    engine.succeeds(&["kill", "main"])?;
    engine.ends("main", 137).await?;
    engine.remove_last(node, &["main"]).await
}

/// The death of a shim ends its container alone.
pub(crate) async fn shim_dies(engine: &Engine, node: &Node) -> Result<()> {
    engine.run_detached("killed", &[], "exec sleep 1000")?;
    let first = shim(node)?;
    engine.run_detached("other", &[], "exec sleep 1000")?;
    let pid = engine.state("killed", "Pid")?.parse()?;
    kill(&first)?;
    until("its process has ended", SOON, async || {
        ensure!(processes::one(pid).is_err(), "it runs");
        Ok(())
    })
    .await?;
    if engine.shows_dead {
        engine.ends("killed", 137).await?;
    }
    ensure!(engine.state("other", "Status")? == "running", "it has ended");
    engine.exec_answers("other")?;
    engine.remove_last(node, &["killed", "other"]).await
}

/// A script that writes the numbers from 1 on.
pub(crate) const COUNTS: &str = "n=1; while :; do echo $n; n=$((n + 1)); sleep 0.02; done";

/// Waits until a container with [`COUNTS`] has written further, and none of its lines is lost.
pub(crate) async fn counts_on(engine: &Engine, name: &str) -> Result<()> {
    let before = engine.lines(name)?.len();
    until("more lines", SOON, async || {
        let lines = engine.lines(name)?;
        let expected: Vec<String> = (1..=lines.len()).map(|number| number.to_string()).collect();
        ensure!(lines == expected, "{lines:?}");
        ensure!(lines.len() > before, "no line after {before}");
        Ok(())
    })
    .await
}
