//! The shims and OCI runtimes of the handlers that name this sandboxer: whether they are there, and
//! what they inherit.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::process::Command;

use node::check::{Finding, HandlerRuntime, program};
use node::daemon_process::DaemonProcess;

use crate::config::{Config, ShimOwner};
use crate::error::StepError;
use crate::process::inheritance::Inheritance;
use crate::shim::containerd;
use crate::shim::own::{self, OwnShim};
use crate::shim::resolve::find_binary;

const SUBJECT: &str = "shim";
const RUNTIME: &str = "OCI runtime";
const INHERITED: &str = "inherited";

/// Examines the shims and the OCI runtimes of these handlers, and what both inherit.
pub async fn examine(runtimes: Vec<HandlerRuntime>, config: &Config) -> Vec<Finding> {
    // containerd starts the others itself.
    let by_daemon = runtimes.iter().filter(|runtime| !runtime.shim_only);
    let kinds: BTreeSet<&str> = by_daemon.map(|runtime| runtime.kind.as_str()).collect();
    let is_by_daemon = !kinds.is_empty() || runtimes.is_empty();
    let (mut findings, inheritance) = match inherited(config, is_by_daemon).await {
        Ok(found) => found,
        Err(finding) => return vec![finding],
    };
    let serves = |kind: &str| own::serves(kind);
    let own = (config.shim == ShimOwner::Own && kinds.iter().any(|kind| serves(kind)))
        .then(|| open_own(config));
    let has_own = matches!(own, Some(Ok(_)));
    if let Some(opened) = own {
        findings.push(own_shim(opened).await);
    }
    findings.extend(kinds.iter().map(|kind| match find_binary(kind, &inheritance) {
        Ok(found) => Finding::ok(SUBJECT, format!("of {kind}: {}", found.display())),
        Err(step) => missing(kind, &step, has_own && serves(kind)),
    }));
    for runtime in runtimes.iter().filter(|runtime| serves(&runtime.kind)) {
        findings.push(oci_runtime(&runtime.binary, &inheritance).await);
    }
    findings
}

/// Executes an OCI runtime as a shim does: by the `PATH` of containerd's children.
async fn oci_runtime(binary: &str, inheritance: &Inheritance) -> Finding {
    let binary = if binary.is_empty() { "runc" } else { binary };
    let reason = match version_of(binary.as_ref(), inheritance.variables()).await {
        Ok(version) => return Finding::ok(RUNTIME, format!("{binary}: {version}")),
        Err(reason) => reason,
    };
    let path = inheritance.path();
    Finding::fail(
        RUNTIME,
        format!("{binary} --version: {reason}, with PATH={}", path.display()),
        "install it in a directory of that PATH, or set BinaryName of the runtime handler to its \
         path",
    )
}

/// The first line of the version that a program prints.
///
/// # Errors
/// It cannot be executed, fails, or does not end in time.
async fn version_of(
    binary: &Path,
    variables: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<String, String> {
    let mut command = Command::new(binary);
    command.arg("--version");
    let output = program::run_with(command, variables).await?;
    if !output.status.success() {
        return Err(output.status.to_string());
    }
    Ok(output.stdout.lines().next().unwrap_or_default().to_owned())
}

/// The findings about what shims, and so containers, inherit, if the daemon starts them, and what
/// that is.
///
/// # Errors
/// The finding that `/proc` cannot be read.
async fn inherited(
    config: &Config,
    is_by_daemon: bool,
) -> Result<(Vec<Finding>, Inheritance), Finding> {
    let read = |process: &str| {
        let failed =
            |step: StepError| Finding::fail(INHERITED, step.to_string(), "mount /proc as usual");
        Inheritance::read(process).map_err(failed)
    };
    let asked =
        containerd::ask(&config.containerd_address).await.map(|(_, inheritance)| inheritance);
    let asked = asked.map(|inheritance| inheritance.with(&config.container_limits));
    // A pod can choose the maximum.
    let asked = asked.map(|inheritance| inheritance.with(&config.container_limits_max));
    let mut findings = Vec::new();
    if is_by_daemon {
        let daemon = DaemonProcess::find(&config.state_dir).map(|daemon| daemon.pid.to_string());
        findings = compare(&asked, &read(daemon.as_deref().unwrap_or("self"))?);
    }
    Ok((findings, asked.or_else(|_| read("self").map(containerd::substitute))?))
}

/// The findings about what shims, and so containers, inherit.
pub async fn inheritance(config: &Config) -> Vec<Finding> {
    inherited(config, true).await.map_or_else(|finding| vec![finding], |(findings, _)| findings)
}

/// Compares what children of containerd inherit with the daemon's own attributes.
fn compare(asked: &Result<Inheritance, StepError>, own: &Inheritance) -> Vec<Finding> {
    let theirs = match asked {
        Ok(theirs) => theirs,
        // The finding of containerd's socket says that it does not run.
        Err(step) if gone(step.io().kind()) => return Vec::new(),
        Err(step) => {
            return vec![Finding::warn(
                INHERITED,
                format!("{step}, so shims get limits and PATH of the daemon"),
                "if containerd runs, read its log",
            )];
        }
    };
    let beyond = theirs.limits_beyond(own).join(" ");
    let mut findings = vec![if beyond.is_empty() {
        Finding::ok(INHERITED, "shims get the limits and the environment of containerd")
    } else {
        Finding::warn(
            INHERITED,
            format!(
                "containers get lower limits than with containerd: {beyond}; the daemon has no \
                 CAP_SYS_RESOURCE, which raises them"
            ),
            "grant CAP_SYS_RESOURCE to the daemon, or set these limits in its unit as in that of \
             containerd",
        )
    }];
    findings.extend(theirs.differences(own).into_iter().map(|(name, theirs, own)| {
        Finding::warn(
            INHERITED,
            format!("{name} is {theirs} for children of containerd, {own} for those of the daemon"),
            "set the same in the units of both; docs/security.md lists the options",
        )
    }));
    findings
}

/// Whether nothing listens at a socket.
fn gone(kind: io::ErrorKind) -> bool {
    matches!(kind, io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
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
    match DaemonProcess::find(&config.state_dir) {
        Some(daemon) => OwnShim::open(daemon.program.with_file_name(own::NAME)),
        None => OwnShim::open_beside(),
    }
}

/// The finding about this project's own shim, as a daemon with this program would open it.
async fn own_shim(opened: Result<OwnShim, StepError>) -> Finding {
    const INSTALL: &str = "install it again next to the daemon's program, owned and writable by \
                           root only, and restart the daemon; or set shim = \"runtime\"";
    let shim = match opened {
        Ok(shim) => shim,
        Err(step) => {
            let fact = format!("{step}, so pods get the runtime's shim");
            return Finding::warn(SUBJECT, fact, INSTALL);
        }
    };
    let shown = shim.path().display();
    // It can be executed with the rights of root: no other user can write the open file. Another
    // one may be at its path by now.
    match version_of(&shim.opened_path(), []).await {
        Ok(version) if version == own_version() => Finding::ok(SUBJECT, format!("own: {shown}")),
        Ok(version) => Finding::warn(
            SUBJECT,
            format!("{shown} is {version:?}, but this program needs {:?}", own_version()),
            "install both programs of one version, and restart the daemon",
        ),
        Err(reason) => {
            let fact = format!("{shown} --version: {reason}, so no container can start");
            Finding::fail(SUBJECT, fact, INSTALL)
        }
    }
}

/// The version that the own shim of this program prints.
fn own_version() -> String {
    format!("{} {}", own::NAME, env!("CARGO_PKG_VERSION"))
}

#[cfg(test)]
mod tests {
    use node::check::Level;

    use super::*;

    /// Promise: only_files_of_root_count.
    #[tokio::test]
    async fn the_executed_shim_is_the_one_that_was_examined() {
        if kit::skip_without_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(own::NAME);
        let script = format!("#!/bin/sh\necho {}\n", own_version());
        kit::write_program(&path, script.as_bytes()).unwrap();
        let opened = OwnShim::open(path.clone());
        std::fs::remove_file(&path).unwrap();
        let ran = dir.path().join("ran");
        let script = format!("#!/bin/sh\ntouch {}\necho {}\n", ran.display(), own_version());
        kit::write_program(&path, script.as_bytes()).unwrap();
        let finding = own_shim(opened).await;
        assert!(!ran.exists() && finding.level == Level::Ok, "{finding}");
    }

    #[tokio::test]
    async fn a_missing_own_shim_is_a_warning_where_pods_would_have_it() {
        let finding = own_shim(OwnShim::open("/no/such/shim".into())).await;
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
        for (shim, kind, expected) in [
            (ShimOwner::Own, "io.containerd.runc.v2", 1),
            (ShimOwner::Own, "io.containerd.runsc.v1", 0),
            (ShimOwner::Runtime, "io.containerd.runc.v2", 0),
        ] {
            let config = Config { shim, ..Config::default() };
            let runtime = HandlerRuntime {
                kind: kind.to_owned(),
                binary: "true".to_owned(),
                shim_only: false,
            };
            // No shim is beside the program of this test.
            let findings = examine(vec![runtime], &config).await;
            let about_own = |finding: &&Finding| finding.fact.contains(own::NAME);
            assert_eq!(findings.iter().filter(about_own).count(), expected, "{shim:?} {kind}");
        }
    }

    #[tokio::test]
    async fn a_runtime_is_executed_by_the_path_of_containerd() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("runc-of-this-test");
        kit::write_program(&program, b"#!/bin/sh\necho version 7\necho more\n").unwrap();
        let mut inheritance = Inheritance::read("self").unwrap();
        let name = "runc-of-this-test";
        let missing = oci_runtime(name, &inheritance).await;
        assert_eq!(missing.level, Level::Fail, "{missing}");
        inheritance.environment = vec![format!("PATH={}", dir.path().display()).into()];
        let found = oci_runtime(name, &inheritance).await;
        assert_eq!(found, Finding::ok(RUNTIME, "runc-of-this-test: version 7"));
    }

    #[test]
    fn limits_that_the_daemon_cannot_give_are_named() {
        let read = || serde_json::to_value(Inheritance::read("self").unwrap()).unwrap();
        let with = |open_files: serde_json::Value, raises: bool, nice: u32| -> Inheritance {
            let mut value = read();
            value["limits"][7] = open_files;
            value["raises_limits"] = raises.into();
            value["unset"]["nice"] = nice.to_string().into();
            serde_json::from_value(value).unwrap()
        };
        let low = || serde_json::json!([1024, 4096]);
        let theirs = || Ok(with(serde_json::json!([1024, null]), false, 0));
        let levels = |own: &Inheritance| {
            compare(&theirs(), own).iter().map(|finding| finding.level).collect::<Vec<_>>()
        };
        assert_eq!(levels(&with(low(), true, 0)), [Level::Ok]);
        assert_eq!(levels(&with(low(), true, 5)), [Level::Ok, Level::Warn]);
        let found = compare(&theirs(), &with(low(), false, 0));
        assert_eq!(found.len(), 1);
        assert!(found[0].level == Level::Warn && found[0].fact.contains("LimitNOFILE="));
        let failed = |kind: io::ErrorKind| Err(StepError::new("ask", kind.into()));
        let findings = |kind| compare(&failed(kind), &with(low(), true, 0));
        assert_eq!(findings(io::ErrorKind::TimedOut)[0].level, Level::Warn);
        assert!(findings(io::ErrorKind::NotFound).is_empty());
    }
}
