//! Whether the shims of the handlers that name this sandboxer are there.

use std::path::{Path, PathBuf};

use node::check::Finding;

use crate::config::{Config, ShimOwner};
use crate::error::StepError;
use crate::shim;
use crate::shim::own::{self, OwnShim};

const SUBJECT: &str = "shim";

/// Name of the daemon's program.
const NAME: &str = "pause-sandboxer";

/// Examines the shims of these runtimes.
pub fn examine(kinds: &[&str], config: &Config) -> Vec<Finding> {
    let serves = |kind: &&str| own::serves(kind);
    let own = (config.shim == ShimOwner::Own && kinds.iter().any(serves)).then(|| open_own(config));
    let has_own = matches!(own, Some(Ok(_)));
    let mut findings: Vec<Finding> = own.into_iter().map(own_shim).collect();
    let path = shim::path();
    findings.extend(kinds.iter().map(|kind| {
        match shim::resolve::find_binary(kind, &path, &config.containerd_address) {
            Ok(found) => Finding::ok(SUBJECT, format!("of {kind}: {}", found.display())),
            Err(step) => missing(kind, &step, has_own && serves(kind)),
        }
    }));
    findings
}

/// The finding about the shim of a runtime that is not there. `is_served`: pods of it have the own
/// shim.
fn missing(kind: &str, step: &StepError, is_served: bool) -> Finding {
    let advice = "install the complete containerd package, or link the shim into /usr/local/bin";
    if is_served {
        let fact = format!(
            "{step}; pods of {kind} use the sandboxer's own shim, and have no fallback if it \
             becomes unavailable"
        );
        return Finding::warn(SUBJECT, fact, advice);
    }
    Finding::fail(SUBJECT, format!("{step}, so no container of {kind} will start"), advice)
}

/// Opens the own shim as the daemon does: beside the program that runs, or else beside this one.
fn open_own(config: &Config) -> Result<OwnShim, StepError> {
    match running_daemon(config) {
        Some(program) => OwnShim::open(program.with_file_name(own::NAME)),
        None => OwnShim::open_beside(),
    }
}

/// The program of the daemon that holds the lock of the state directory.
fn running_daemon(config: &Config) -> Option<PathBuf> {
    let holder = std::fs::read_to_string(config.state_dir.join("lock")).ok()?;
    let holder: u32 = holder.trim().parse().ok()?;
    let program = std::fs::read_link(format!("/proc/{holder}/exe")).ok()?;
    // Replaced since it was started.
    let path = program.to_str()?;
    let path = Path::new(path.strip_suffix(" (deleted)").unwrap_or(path));
    // The pid of a killed daemon may have been reused.
    let own = std::env::current_exe().ok()?;
    let is_daemon = path.file_name() == own.file_name() || path.file_name() == Some(NAME.as_ref());
    is_daemon.then(|| path.to_owned())
}

/// The finding about this project's own shim, as a daemon with this program would open it.
fn own_shim(opened: Result<OwnShim, StepError>) -> Finding {
    match opened {
        Ok(own) => Finding::ok(SUBJECT, format!("own: {}", own.path().display())),
        Err(step) => Finding::warn(
            SUBJECT,
            format!("{step}, so pods get the runtime's shim"),
            "install it again next to the daemon's program, owned and writable by root only, and \
             restart the daemon; or set shim = \"runtime\"",
        ),
    }
}

#[cfg(test)]
mod tests {
    use node::check::Level;

    use super::*;

    #[test]
    fn the_program_of_the_daemon_is_found_by_its_lock() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { state_dir: dir.path().to_owned(), ..Config::default() };
        assert_eq!(running_daemon(&config), None);
        let lock = |pid: u32| std::fs::write(dir.path().join("lock"), format!("{pid}\n")).unwrap();
        lock(std::process::id());
        assert_eq!(running_daemon(&config), std::env::current_exe().ok());
        // Another program has the number of a daemon that has ended.
        let mut other = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        lock(other.id());
        let found = running_daemon(&config);
        other.kill().unwrap();
        other.wait().unwrap();
        assert_eq!(found, None);
    }

    #[test]
    fn a_missing_own_shim_is_a_warning_where_pods_would_have_it() {
        let finding = own_shim(OwnShim::open("/no/such/shim".into()));
        assert_eq!(finding.level, Level::Warn);
        assert_eq!(
            finding.fact,
            "open shim /no/such/shim: No such file or directory (os error 2), so pods get the \
             runtime's shim"
        );
        let step = || StepError::new("find", std::io::ErrorKind::NotFound.into());
        let (served, lost) = (missing("a.b.v1", &step(), true), missing("a.b.v1", &step(), false));
        assert_eq!((served.level, lost.level), (Level::Warn, Level::Fail));
        assert!(lost.fact.ends_with("so no container of a.b.v1 will start"), "{lost}");
        let about_own = |shim, kind: &str| {
            let config = Config { shim, ..Config::default() };
            // No shim is beside the program of this test.
            let findings = examine(&[kind], &config);
            findings.iter().filter(|finding| finding.fact.contains(own::NAME)).count()
        };
        assert_eq!(about_own(ShimOwner::Own, "io.containerd.runc.v2"), 1);
        assert_eq!(about_own(ShimOwner::Own, "io.containerd.runsc.v1"), 0);
        assert_eq!(about_own(ShimOwner::Runtime, "io.containerd.runc.v2"), 0);
    }
}
