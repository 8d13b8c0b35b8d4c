//! kubelet and the handlers of this sandboxer must use the same cgroup driver.
//!
//! kubelet queries containerd's driver (CRI `RuntimeConfig`; by default since Kubernetes 1.31) and
//! prefers it to its own `cgroupDriver`. containerd reports that of its default handler, so the
//! sandboxer's handlers are compared with the default one.

use std::collections::BTreeMap;

use toml::{Table, Value};

use super::containerd::Mode;
use super::{ENABLE, ENABLE_SHIM_ONLY, Finding};
use base::platform::systemd_runs;

const SUBJECT: &str = "kubelet";

/// The runtime whose options say how it makes cgroups.
const RUNC: &str = "io.containerd.runc.v2";

/// The default handler, and what its options say, where a config does not name them (containerd
/// `internal/cri/config`).
const DEFAULT: &str = "runc";

/// The handlers of containerd's merged config.
#[derive(Debug, Default)]
pub(crate) struct Handlers {
    /// `default_runtime_name`; empty where the config does not name one.
    pub(crate) default: String,
    /// All, by name.
    pub(crate) all: BTreeMap<String, Table>,
    /// The names of those that name this sandboxer.
    pub(crate) ours: Vec<String>,
    /// The names of those that have its shim without it.
    pub(crate) shim_only: Vec<String>,
}

impl Handlers {
    /// The names of those that `enable` adds in this mode.
    pub(crate) fn of(&self, mode: Mode) -> &[String] {
        match mode {
            Mode::Sandboxer => &self.ours,
            Mode::ShimOnly => &self.shim_only,
        }
    }

    /// The same with their settings.
    pub(crate) fn tables(&self, mode: Mode) -> impl Iterator<Item = (&String, &Table)> {
        self.of(mode).iter().filter_map(|name| Some((name, self.all.get(name)?)))
    }

    /// Whether a handler needs this program's files.
    pub(crate) fn has(&self, name: &String) -> bool {
        Mode::ALL.iter().any(|mode| self.of(*mode).contains(name))
    }
}

/// Compares the handlers of this sandboxer with the cgroup driver that containerd reports to
/// kubelet. `restart` restarts containerd.
pub(super) fn examine(handlers: &Handlers, restart: &str) -> Vec<Finding> {
    cgroup_driver_findings(handlers, systemd_runs(), restart)
}

fn cgroup_driver_findings(handlers: &Handlers, systemd_runs: bool, restart: &str) -> Vec<Finding> {
    let (by, default) = default_driver(handlers, systemd_runs);
    let driver = name(default);
    handlers
        .tables(Mode::Sandboxer)
        .chain(handlers.tables(Mode::ShimOnly))
        .filter(|(_, handler)| is_of_runc(handler))
        .map(|(name, handler)| {
            // A handler without options does not ask runc for systemd's cgroups.
            let own = systemd(handler).unwrap_or(false);
            if own == default {
                return Finding::ok(
                    SUBJECT,
                    format!(
                        "cgroup driver of runtime handler {name:?} is {driver}, as containerd \
                         reports to kubelet"
                    ),
                );
            }
            let is_shim_only = handlers.shim_only.contains(name);
            let enable = if is_shim_only { ENABLE_SHIM_ONLY } else { ENABLE };
            Finding::fail(
                SUBJECT,
                format!(
                    "SystemdCgroup of runtime handler {name:?} is {own}, but containerd reports \
                     {driver} to kubelet, because of {by}: containers of this handler cannot start"
                ),
                format!(
                    "{enable}; or set SystemdCgroup = {default} under \
                     [….containerd.runtimes.{name}.options], then {restart}"
                ),
            )
        })
        .collect()
}

fn name(systemd: bool) -> &'static str {
    if systemd { "systemd" } else { "cgroupfs" }
}

fn is_of_runc(handler: &Table) -> bool {
    handler.get("runtime_type").and_then(Value::as_str) == Some(RUNC)
}

/// `SystemdCgroup` of a handler's options; without the key it is false, without options it is not
/// said.
fn systemd(handler: &Table) -> Option<bool> {
    let options = handler.get("options")?;
    Some(options.get("SystemdCgroup").and_then(Value::as_bool).unwrap_or(false))
}

/// The cgroup driver that containerd reports to kubelet, true for systemd, and its source: the
/// default handler, or else the first other handler by name that sets it, or else the node's init.
fn default_driver(handlers: &Handlers, systemd_runs: bool) -> (String, bool) {
    let default = if handlers.default.is_empty() { DEFAULT } else { &handlers.default };
    let rest =
        handlers.all.keys().map(String::as_str).chain([DEFAULT]).filter(|name| *name != default);
    let mut rest: Vec<&str> = rest.collect();
    rest.sort_unstable();
    rest.dedup();
    for name in [default].into_iter().chain(rest) {
        let set = handlers.all.get(name);
        let said = match set {
            Some(handler)
                if is_of_runc(handler)
                    || name == DEFAULT && !handler.contains_key("runtime_type") =>
            {
                systemd(handler)
            }
            Some(_) => continue,
            None => None,
        };
        // The handler of that name has options by default, which a config adds to.
        if let Some(said) = said.or((name == DEFAULT).then_some(false)) {
            return (format!("its runtime handler {name:?}"), said);
        }
    }
    ("the node's init".to_owned(), systemd_runs)
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    fn handlers(text: &str) -> Handlers {
        let all: BTreeMap<String, Table> = toml::from_str(text).unwrap();
        Handlers { ours: vec!["ours".to_owned()], all, ..Handlers::default() }
    }

    const ON: &str = "options = { SystemdCgroup = true }\n";
    const OFF: &str = "options = { SystemdCgroup = false }\n";

    /// A handler of runc's.
    fn runc_handler(name: &str, options: &str) -> String {
        format!("[{name}]\nruntime_type = \"io.containerd.runc.v2\"\n{options}")
    }

    #[test]
    fn a_handler_makes_cgroups_as_the_default_one() {
        for (ours, default, level) in [
            ("", "", Level::Ok),
            (OFF, OFF, Level::Ok),
            (ON, ON, Level::Ok),
            (ON, "", Level::Fail),
            ("", ON, Level::Fail),
            (OFF, ON, Level::Fail),
        ] {
            let findings = cgroup_driver_findings(
                &handlers(&(runc_handler("ours", ours) + &runc_handler("runc", default))),
                true,
                "",
            );
            assert_eq!((findings.len(), findings[0].level), (1, level), "{ours} {default}");
        }
        let alone = cgroup_driver_findings(&handlers(&runc_handler("ours", "")), true, "");
        assert_eq!(
            alone[0].level,
            Level::Ok,
            "the default handler is runc, with cgroupfs: {alone:?}"
        );
    }

    #[test]
    fn the_remedy_is_the_command_of_the_handler() {
        let text = runc_handler("ours", ON) + &runc_handler("small", ON);
        let handlers = Handlers { shim_only: vec!["small".to_owned()], ..handlers(&text) };
        let findings = cgroup_driver_findings(&handlers, false, "restart it");
        let advice = |command: &str, name: &str| {
            format!(
                "{command}; or set SystemdCgroup = false under \
                 [….containerd.runtimes.{name}.options], then restart it"
            )
        };
        let expected = [advice(ENABLE, "ours"), advice(ENABLE_SHIM_ONLY, "small")];
        assert!(findings.iter().map(|finding| &finding.advice).eq(&expected), "{findings:?}");
    }

    #[test]
    fn containerd_reports_the_driver_of_the_default_handler_first() {
        let driver_of = |default: &str, text: &str, init| {
            let handlers = Handlers { default: default.to_owned(), ..handlers(text) };
            super::default_driver(&handlers, init)
        };
        let text = runc_handler("a", ON) + &runc_handler("b", OFF) + &runc_handler("ours", "");
        assert_eq!(driver_of("b", &text, true), ("its runtime handler \"b\"".to_owned(), false));
        assert_eq!(driver_of("ours", &text, false), ("its runtime handler \"a\"".to_owned(), true));
        let other = "[kata]\nruntime_type = \"io.containerd.kata.v2\"\n\
            options = { SystemdCgroup = true }\n";
        assert!(!driver_of("kata", other, true).1, "runc is there by default");
        let none = format!("{other}[runc]\nruntime_type = \"io.containerd.kata.v2\"\n");
        assert_eq!(driver_of("kata", &none, true), ("the node's init".to_owned(), true));
        // A config need not repeat the type of the handler that there is by default.
        assert!(driver_of("", "[runc]\noptions = { SystemdCgroup = true }\n", false).1);
    }
}
