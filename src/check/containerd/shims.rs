//! Whether the shims of the handlers that name this sandboxer are there.

use toml::{Table, Value};

use super::super::Finding;
use crate::config::{Config, ShimOwner};
use crate::error::StepError;
use crate::shim;
use crate::shim::own::{self, OwnShim};

const SUBJECT: &str = "shim";

/// Examines the shims of these runtime handlers.
pub(super) fn examine(handlers: &[(String, Table)], config: &Config) -> Vec<Finding> {
    let mut kinds: Vec<&str> = handlers
        .iter()
        .filter_map(|(_, handler)| handler.get("runtime_type").and_then(Value::as_str))
        .filter(|kind| !kind.is_empty())
        .collect();
    kinds.sort_unstable();
    kinds.dedup();
    let mut findings = Vec::new();
    let is_own = |kind: &&str| own::replaces(kind) && !config.shims.0.contains_key(*kind);
    if config.shim == ShimOwner::Own && kinds.iter().any(is_own) {
        findings.push(own_shim(OwnShim::open_beside()));
    }
    let path = shim::path();
    findings.extend(kinds.into_iter().map(|kind| {
        let found = match config.shims.0.get(kind) {
            Some(set) => shim::resolve::check(set),
            None => shim::resolve::find_binary(kind, &path, &config.containerd_address),
        };
        match found {
            Ok(found) => Finding::ok(SUBJECT, format!("of {kind}: {}", found.display())),
            Err(step) => Finding::fail(
                SUBJECT,
                format!("{step}, so no container of {kind} will start"),
                "install containerd whole, or name the shim by `shims` in this sandboxer's config",
            ),
        }
    }));
    findings
}

/// The finding about this project's own shim, as a daemon with this program would open it.
fn own_shim(opened: Result<OwnShim, StepError>) -> Finding {
    match opened {
        Ok(own) => Finding::ok(SUBJECT, format!("own: {}", own.path().display())),
        Err(step) => Finding::warn(
            SUBJECT,
            format!("{step}, so pods get the runtime's shim"),
            "install it again beside the daemon's program, owned and writable by root alone, and \
             restart the daemon; or set shim = \"runtime\"",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::Level;
    use super::*;

    #[test]
    fn a_missing_own_shim_is_a_warning_where_pods_would_have_it() {
        let finding = own_shim(OwnShim::open("/no/such/shim".into()));
        assert_eq!(finding.level, Level::Warn);
        assert_eq!(
            finding.fact,
            "open shim /no/such/shim: No such file or directory (os error 2), so pods get the \
             runtime's shim"
        );
        let handlers = |kind: &str| {
            let handler: Table = toml::from_str(&format!("runtime_type = {kind:?}")).unwrap();
            [("handler".to_owned(), handler)]
        };
        let about_own = |shim, kind: &str| {
            let config = Config { shim, ..Config::default() };
            // No shim is beside the program of this test.
            let findings = examine(&handlers(kind), &config);
            findings.iter().filter(|finding| finding.fact.contains(own::NAME)).count()
        };
        assert_eq!(about_own(ShimOwner::Own, "io.containerd.runc.v2"), 1);
        assert_eq!(about_own(ShimOwner::Own, "io.containerd.runsc.v1"), 0);
        assert_eq!(about_own(ShimOwner::Runtime, "io.containerd.runc.v2"), 0);
    }
}
