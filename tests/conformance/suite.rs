//! One run of critest, and what became of its cases.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kit::{Node, Process};
use serde_json::Value;

use crate::known;

/// Time limit of a run; a hang is a failure that names its place.
const LIMIT: Duration = Duration::from_secs(1200);

/// How much of a case's message is kept, characters.
const LONGEST_MESSAGE: usize = 2000;

/// The result of a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Passed,
    /// It says itself why this node cannot run it.
    Skipped(String),
    Failed(String),
}

impl Outcome {
    /// As a word.
    pub(crate) fn word(&self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Skipped(_) => "skipped",
            Self::Failed(_) => "failed",
        }
    }

    /// The reason of one that has not passed.
    pub(crate) fn why(&self) -> &str {
        match self {
            Self::Passed => "",
            Self::Skipped(why) | Self::Failed(why) => why,
        }
    }
}

/// Cases at a time: most of their time is waiting.
const AT_ONCE: usize = 4;

/// The outcomes by the cases' full names.
pub(crate) type Outcomes = BTreeMap<String, Outcome>;

/// The programs and how they are run.
pub(crate) struct Critest {
    directory: PathBuf,
}

impl Critest {
    /// Those of a directory that `tests/kit/fetch-conformance` has filled.
    pub(crate) fn new(directory: PathBuf) -> Self {
        Self { directory }
    }

    /// Runs all cases, or those whose names match one of these regular expressions, with the pods
    /// of the handler with this name.
    pub(crate) async fn run(
        &self,
        node: &Node,
        handler: &str,
        focus: &[String],
    ) -> Result<Outcomes> {
        let begun = Instant::now();
        let top = &node.layout().top;
        let scratch = top.join("critest");
        fs::create_dir_all(&scratch)?;
        let (report, log) = (scratch.join("report.json"), scratch.join("log"));
        let _ = fs::remove_file(&report);
        let mut command = self.command(&scratch);
        for case in focus {
            command.arg(format!("--focus={case}"));
        }
        for case in known::NOT_RUN {
            command.arg(format!("--skip={}", only(case)));
        }
        let socket = format!("unix://{}", node.layout().containerd_socket().display());
        command
            .arg(self.directory.join("critest.test"))
            .arg("--")
            .arg(format!("-runtime-endpoint={socket}"))
            .arg(format!("-image-endpoint={socket}"))
            .arg(format!("-runtime-handler={handler}"))
            .arg(format!("-nri-socket={}", node.layout().nri_socket().display()))
            .arg("-config=/dev/null");
        let mut process = Process::spawn(command, &log)?;
        let limit = kit::patient(LIMIT);
        while process.ended()?.is_none() {
            ensure!(begun.elapsed() < limit, "critest is not done after {limit:?}: {}", tail(&log));
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        // Its exit code only says that a case has failed.
        let outcomes = parse(&report).with_context(|| tail(&log))?;
        ensure!(!outcomes.is_empty(), "critest ran no case: {}", tail(&log));
        let seconds = begun.elapsed().as_secs();
        println!("{handler}: {} cases in {seconds} s", outcomes.len());
        Ok(outcomes)
    }

    fn command(&self, scratch: &Path) -> Command {
        let mut command = Command::new(self.directory.join("ginkgo"));
        command
            // The logs of its pods are removed with the node.
            .env("TMPDIR", scratch)
            .arg("run")
            .arg(format!("--procs={AT_ONCE}"))
            .args(["--no-color", "--skip=benchmark", "--keep-going", "--timeout=30m"])
            .arg("--json-report=report.json")
            .arg(format!("--output-dir={}", scratch.display()));
        command
    }
}

/// A regular expression that matches this case alone. What is matched begins with the suite's name.
fn only(case: &str) -> String {
    let mut quoted = String::new();
    for c in case.chars() {
        if !c.is_alphanumeric() && c != ' ' {
            quoted.push('\\');
        }
        quoted.push(c);
    }
    format!(" {quoted}$")
}

fn parse(report: &Path) -> Result<Outcomes> {
    let text = fs::read_to_string(report).context("critest wrote no report")?;
    let suites: Value = serde_json::from_str(&text).context("read critest's report")?;
    let specs = suites[0]["SpecReports"].as_array().context("no SpecReports")?;
    let mut outcomes = Outcomes::new();
    for spec in specs {
        let message = || spec["Failure"]["Message"].as_str().map(one_line).unwrap_or_default();
        let is_case = spec["LeafNodeType"] == "It";
        let outcome = match spec["State"].as_str() {
            // Cases that the filter leaves out are skipped without a message.
            Some("skipped") if message().is_empty() => continue,
            Some("pending") => continue,
            Some("passed") => Outcome::Passed,
            Some("skipped") => Outcome::Skipped(message()),
            Some(state) => {
                Outcome::Failed(format!("{state}: {} at {}", message(), place(&spec["Failure"])))
            }
            None => bail!("a spec without a state: {spec}"),
        };
        if is_case {
            outcomes.insert(name(spec), outcome);
        } else if let Outcome::Failed(why) = outcome {
            bail!("{}: {why}", spec["LeafNodeType"]);
        }
    }
    Ok(outcomes)
}

/// A message as one line. Its first words are often no more than that there was an error, which
/// follows.
fn one_line(message: &str) -> String {
    let words: Vec<&str> = message.split_whitespace().collect();
    words.join(" ").chars().take(LONGEST_MESSAGE).collect()
}

/// Which call of a case has failed: several have the same message.
fn place(failure: &Value) -> String {
    let path = failure["Location"]["FileName"].as_str().unwrap_or_default();
    let file = path.rsplit('/').next().unwrap_or(path);
    format!("{file}:{}", failure["Location"]["LineNumber"])
}

fn name(spec: &Value) -> String {
    let above = spec["ContainerHierarchyTexts"].as_array().map_or(&[][..], Vec::as_slice);
    let texts = above.iter().chain([&spec["LeafNodeText"]]);
    texts.filter_map(Value::as_str).collect::<Vec<_>>().join(" ")
}

fn tail(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(40)..].join("\n")
}
