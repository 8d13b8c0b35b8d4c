//! `pause-sandboxer check`: diagnoses the node and prints a remedy for each problem.
//!
//! Each module reads a part of the node and passes it to a pure function, which makes the
//! [`Finding`]s. No file and no service is changed. The daemon's own code examines whether it can
//! work on the node: [`DaemonFindings`].

use std::fmt;
use std::path::PathBuf;
use std::pin::Pin;

use base::config::Config;

pub(crate) mod containerd;
mod daemon;
mod directories;
pub(crate) mod kubelet;
pub mod program;
mod sandboxes;
pub(crate) mod systemd;

/// The command that corrects most problems. [`containerd::examine`] adds the options that the last
/// `enable` has set.
const ENABLE: &str = "pause-sandboxer enable --restart";

/// The same for the handler of the shim without the daemon. It does not contain [`ENABLE`], so each
/// gets the options of its own last `enable`.
const ENABLE_SHIM_ONLY: &str = "pause-sandboxer enable --shim-only --restart";

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// No problem.
    Ok,
    /// Pods can run, but an operator should act.
    Warn,
    /// Pods cannot run.
    Fail,
}

/// The result of examining one part of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The severity.
    pub level: Level,
    /// The part of the node that was examined.
    pub subject: &'static str,
    /// The fact.
    pub fact: String,
    /// The remedy; empty if none is needed.
    pub advice: String,
}

impl Finding {
    /// A part without a problem.
    pub fn ok(subject: &'static str, fact: impl Into<String>) -> Self {
        Self { level: Level::Ok, subject, fact: fact.into(), advice: String::new() }
    }

    /// A part that an operator should correct.
    pub fn warn(subject: &'static str, fact: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { level: Level::Warn, subject, fact: fact.into(), advice: advice.into() }
    }

    /// A part that prevents pods.
    pub fn fail(subject: &'static str, fact: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { level: Level::Fail, subject, fact: fact.into(), advice: advice.into() }
    }
}

impl Level {
    /// Its word in JSON.
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

impl Finding {
    /// As an object, for scripts.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::json!({
            "level": self.level.name(), "subject": self.subject,
            "fact": self.fact, "advice": self.advice,
        })
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let level = match self.level {
            Level::Ok => "ok",
            Level::Warn => "warn",
            Level::Fail => "FAIL",
        };
        write!(f, "{level:4}  {}: {}", self.subject, self.fact)?;
        if !self.advice.is_empty() {
            write!(f, "\n      -> {}", self.advice)?;
        }
        Ok(())
    }
}

/// The node to examine.
#[derive(Clone, Debug)]
pub struct Subject {
    /// The daemon's settings.
    pub config: Config,
    /// containerd's config file; `None`: the one that the running containerd was started with.
    pub containerd_config: Option<PathBuf>,
    /// containerd's program, where a bare name is searched in `PATH`; `None`: the one that runs.
    pub containerd_program: Option<PathBuf>,
}

/// The findings of the daemon's code, which this crate does not have.
pub struct DaemonFindings<'a> {
    /// Examines whether the daemon can work here: kernel, privileges, cgroups, mounts.
    pub first: Pin<Box<dyn Future<Output = Vec<Finding>> + 'a>>,
    /// Examines the shims and OCI runtimes of handlers.
    pub shims: &'a ShimFindings<'a>,
}

/// Examines the shims and OCI runtimes of handlers of the containerd that the settings name.
pub type ShimFindings<'a> =
    dyn Fn(Vec<HandlerRuntime>, Config) -> Pin<Box<dyn Future<Output = Vec<Finding>> + 'a>> + 'a;

/// The runtime of a handler.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HandlerRuntime {
    /// The runtime's name, such as `io.containerd.runc.v2`.
    pub kind: String,
    /// The OCI runtime of its options, `BinaryName`; empty: runc.
    pub binary: String,
    /// Whether containerd starts the shim, by its path.
    pub shim_only: bool,
}

/// Examines everything, in the order in which problems must be solved.
pub async fn run(subject: &Subject, own: DaemonFindings<'_>) -> Vec<Finding> {
    if let Some(subject) = containerd::shim_only::find_node(subject).await {
        let node = containerd::NodeContainerd::find(&subject);
        return containerd::examine(&subject, &node, None, own.shims).await;
    }
    let mut findings = own.first.await;
    findings.extend(directories::examine(&subject.config));
    let (answers, known) = daemon::examine(&subject.config).await;
    findings.push(answers);
    let node = containerd::NodeContainerd::find(subject);
    findings.extend(systemd::examine(node.pid.map(|_| &node)).await);
    findings.extend(known.as_deref().map(sandboxes::examine).unwrap_or_default());
    findings.extend(containerd::examine(subject, &node, Some(known.is_some()), own.shims).await);
    findings
}

/// The worst level of `findings`.
pub fn worst(findings: &[Finding]) -> Level {
    findings.iter().map(|finding| finding.level).max().unwrap_or(Level::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_shows_level_subject_fact_and_advice() {
        assert_eq!(Finding::ok("kernel", "6.18").to_string(), "ok    kernel: 6.18");
        assert_eq!(Finding::warn("a", "b", "c").to_string(), "warn  a: b\n      -> c");
        assert_eq!(Finding::fail("a", "b", "c").to_string(), "FAIL  a: b\n      -> c");
    }

    #[test]
    fn the_worst_level_counts() {
        let (ok, warn, fail) =
            (Finding::ok("a", ""), Finding::warn("a", "", ""), Finding::fail("a", "", ""));
        assert_eq!(worst(&[]), Level::Ok);
        assert_eq!(worst(&[warn.clone(), ok.clone()]), Level::Warn);
        assert_eq!(worst(&[ok, fail, warn]), Level::Fail);
    }
}
