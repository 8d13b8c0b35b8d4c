//! `pause-sandboxer check`: looks at the node and says what is wrong and what to do.
//!
//! Each look is a function that reads a little of the node and hands it to a pure one, which makes
//! the [`Finding`]s. Nothing is changed, except that one pause is started and ended again, for what
//! the kernel allows shows only then.

use std::fmt;
use std::path::PathBuf;

use crate::config::Config;

mod cgroup;
mod containerd;
mod daemon;
mod kernel;
mod kubelet;
mod mounts;
mod privilege;
mod sandboxes;
mod trial;
mod units;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// As it should be.
    Ok,
    /// Pods may run, but somebody should look at it.
    Warn,
    /// Pods will not run.
    Fail,
}

/// What one look found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub level: Level,
    /// What was looked at.
    pub subject: &'static str,
    /// What is so.
    pub fact: String,
    /// What to do about it; empty if nothing.
    pub advice: String,
}

impl Finding {
    fn ok(subject: &'static str, fact: impl Into<String>) -> Self {
        Self { level: Level::Ok, subject, fact: fact.into(), advice: String::new() }
    }

    fn warn(subject: &'static str, fact: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { level: Level::Warn, subject, fact: fact.into(), advice: advice.into() }
    }

    fn fail(subject: &'static str, fact: impl Into<String>, advice: impl Into<String>) -> Self {
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
        serde_json::json!({ "level": self.level.name(), "subject": self.subject, "fact": self.fact, "advice": self.advice })
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

/// What to look at.
#[derive(Clone, Debug)]
pub struct Subject {
    /// The daemon's settings.
    pub config: Config,
    /// containerd's config file.
    pub containerd_config: PathBuf,
    /// containerd's program; a bare name is looked for in `PATH`.
    pub containerd_program: PathBuf,
}

/// Looks at everything, in the order in which things must be fixed.
pub fn run(subject: &Subject) -> Vec<Finding> {
    let mut findings = kernel::look();
    findings.extend(privilege::look(&subject.config));
    findings.extend(cgroup::look());
    findings.extend(trial::look(&subject.config));
    findings.extend(daemon::look(&subject.config));
    findings.extend(mounts::look(&subject.config));
    findings.extend(units::look());
    findings.extend(sandboxes::look(&subject.config));
    findings.extend(containerd::look(subject));
    findings
}

/// The worst level of `findings`.
pub fn worst(findings: &[Finding]) -> Level {
    findings.iter().map(|finding| finding.level).max().unwrap_or(Level::Ok)
}

/// A file's text for a look, or the finding that it cannot be read.
fn read(subject: &'static str, path: &str) -> Result<String, Finding> {
    std::fs::read_to_string(path).map_err(|e| {
        Finding::fail(subject, format!("read {path}: {e}"), "mount /proc and /sys as usual")
    })
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
