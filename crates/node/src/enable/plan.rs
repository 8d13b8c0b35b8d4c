//! The contents that `enable` writes, and the check of the config that containerd merges from them.

use std::path::Path;

use toml::{Table, Value};

use super::drop_in;
use super::{EnableError, Enablement, refuse};
use crate::check::containerd::{self as node, IMAGES, Mode, RUNTIME, enabled, shim_only};
use base::config::Config;
use base::error::IoContext as _;
use base::runtime::check_served;

/// The handler whose settings are taken over where the default one's cannot be.
const RUNC: &str = "runc";

/// The runtime whose handlers it can be.
const RUNTIME_OF_RUNC: &str = "io.containerd.runc.v2";

/// The sandboxer's name in a config that does not have it yet.
const SANDBOXER: &str = "pause-sandboxer";

/// The name of containerd's built-in controller.
const BUILT_IN: &str = "podsandbox";

/// The config version that every containerd 2 reads.
const COMMON_VERSION: i64 = 3;

/// The handler to add, checked.
#[derive(Debug)]
pub(super) struct HandlerPlan {
    /// The sandboxer's name in containerd.
    pub(super) sandboxer: String,
    /// The shim beside this program, for the built-in controller.
    pub(super) shim: Option<String>,
    /// The handler whose settings it takes over.
    pub(super) base: String,
    /// The settings of that handler.
    pub(super) settings: Table,
    /// containerd's merged config before the change.
    pub(super) before: Table,
    /// The handlers of the previous drop-in, if there was one: these may change.
    pub(super) replaced: Option<Vec<String>>,
}

impl HandlerPlan {
    /// Decides what to add to a merged config. `old` is the text of the drop-in that is there.
    ///
    /// # Errors
    /// That handler is defined elsewhere, or there is none whose settings can be taken over.
    pub(super) fn new(
        wanted: &Enablement,
        before: Table,
        old: Option<&str>,
    ) -> Result<Self, EnableError> {
        let config = &wanted.change.subject.config;
        let (sandboxer, shim) = controller(wanted, &before, old)?;
        let known = node::all(&before, config);
        let own_handlers = old.map(drop_in::handlers_of).unwrap_or_default();
        let is_ours = |name: &String| known.has(name) || own_handlers.contains(name);
        let is_own = known.of(wanted.mode).contains(&wanted.handler)
            || own_handlers.contains(&wanted.handler);
        if known.all.contains_key(&wanted.handler) && !is_own {
            return refuse(format!(
                "runtime handler {:?} is defined elsewhere: use --handler NAME with another name",
                wanted.handler
            ));
        }
        let is_runc = |name: &String| {
            let kind = known.all.get(name).and_then(|handler| handler.get("runtime_type"));
            !is_ours(name) && kind.and_then(Value::as_str) == Some(RUNTIME_OF_RUNC)
        };
        let default = match known.default.as_str() {
            "" => RUNC.to_owned(),
            named => named.to_owned(),
        };
        let base = match &wanted.options_of {
            Some(named) => named.clone(),
            // kubelet makes cgroups as the default handler does.
            None if is_runc(&default) => default,
            None => {
                let earlier = old.and_then(enabled::base).map(str::to_owned);
                earlier.filter(is_runc).unwrap_or_else(|| RUNC.to_owned())
            }
        };
        let settings = match known.all.get(&base) {
            Some(settings) if !is_ours(&base) => settings.clone(),
            Some(_) => {
                return refuse(format!(
                    "runtime handler {base:?} is this sandboxer's own: use --options-of NAME with \
                     another handler"
                ));
            }
            None => {
                let all: Vec<&String> = known.all.keys().filter(|name| !is_ours(name)).collect();
                return refuse(format!(
                    "containerd has no runtime handler {base:?}: use --options-of NAME with one of \
                     {all:?}"
                ));
            }
        };
        let runtime = settings.get("runtime_type").and_then(Value::as_str).unwrap_or_default();
        check_served(runtime).map_err(|reason| {
            format!("the settings of runtime handler {base:?} cannot be copied: {reason}")
        })?;
        if shim.is_some() && runtime != RUNTIME_OF_RUNC {
            return refuse(format!("runtime handler {base:?} has options of another runtime"));
        }
        let replaced = old.map(|_| own_handlers);
        Ok(Self { sandboxer, shim, base, settings, before, replaced })
    }

    /// The version of a config file that is created: one that every supported containerd reads,
    /// because an older containerd may be installed later.
    pub(super) fn new_file_version(&self) -> i64 {
        let newest = self.before.get("version").and_then(Value::as_integer);
        newest.unwrap_or(COMMON_VERSION).min(COMMON_VERSION)
    }

    /// Fails unless the merged config has the handler as it was wanted, and everything else as it
    /// was before.
    ///
    /// # Errors
    /// The setting that is different.
    pub(super) fn verify(&self, wanted: &Enablement, after: &Table) -> Result<(), String> {
        let config = &wanted.change.subject.config;
        if wanted.mode == Mode::Sandboxer {
            node::proxy(after, config).map_err(|finding| finding.fact)?;
        }
        let known = node::all(after, config);
        let there = known.all.get(&wanted.handler);
        if !known.of(wanted.mode).contains(&wanted.handler) {
            let handler = &wanted.handler;
            return Err(format!("containerd's merged config has no runtime handler {handler:?}"));
        }
        let mut expected = self.handler_table();
        let mut there = there.map(drop_in::taken_over).unwrap_or_default();
        for table in [&mut expected, &mut there] {
            // Not every version knows it.
            table.remove("disable_pause_image_pull");
        }
        if there != expected {
            return Err(format!(
                "another file overrides settings of runtime handler {:?}: {there}",
                wanted.handler
            ));
        }
        if wanted.default && known.default != wanted.handler {
            return Err(format!(
                "another file makes {:?} the default handler: run its `enable` without --default \
                 first, or remove default_runtime_name from that file",
                known.default
            ));
        }
        if !known.default.is_empty() && !known.all.contains_key(&known.default) {
            return Err(format!(
                "another file makes {:?} the default handler, without which containerd does not \
                 serve CRI: remove default_runtime_name from it, or keep the handler \
                 with --handler NAME",
                known.default
            ));
        }
        let mut own = self.replaced.clone().unwrap_or_default();
        own.push(wanted.handler.clone());
        let default = node::all(&self.before, config).default;
        if !wanted.default && known.default != default && !own.contains(&default) {
            return Err(format!(
                "containerd would change its default handler from {default:?} to {:?}: with the \
                 import that `enable` adds, it reads another file too, which sets \
                 default_runtime_name. Remove that line",
                known.default
            ));
        }
        let rest = self.replaced.is_none().then_some(wanted);
        unchanged(&self.before, after, &own, rest, config)
    }
}

/// The sandboxer of the handler, and the shim that it names.
fn controller(
    wanted: &Enablement,
    before: &Table,
    old: Option<&str>,
) -> Result<(String, Option<String>), EnableError> {
    let config = &wanted.change.subject.config;
    if wanted.mode == Mode::ShimOnly {
        let shim = shim_only::program().step("find shim beside this program")?;
        return Ok((BUILT_IN.to_owned(), Some(shim.display().to_string())));
    }
    if let Ok(name) = node::proxy(before, config) {
        return Ok((name, None));
    }
    refuse_other_daemon(before, old, &config.socket)?;
    Ok((SANDBOXER.to_owned(), None))
}

/// Fails if the name of a new proxy plugin is taken by one that the drop-in `old` does not define:
/// the drop-in would redirect the runtime handlers of another daemon to this one.
fn refuse_other_daemon(
    before: &Table,
    old: Option<&str>,
    socket: &Path,
) -> Result<(), EnableError> {
    let address_in = |table: &Table| {
        let plugin = table.get("proxy_plugins")?.get(SANDBOXER)?;
        plugin.get("address")?.as_str().map(str::to_owned)
    };
    let own = old.and_then(|old| address_in(&old.parse().ok()?));
    let is_ours = |address: &str| {
        let path = address.strip_prefix("unix://").unwrap_or(address);
        node::same_file(Path::new(path), socket) || own.as_deref() == Some(address)
    };
    match address_in(before) {
        Some(address) if !is_ours(&address) => refuse(format!(
            "containerd has a proxy plugin {SANDBOXER:?} with the address {address:?}, which is \
             not the socket of this sandboxer's config: correct `socket` there, or rename the \
             plugin"
        )),
        _ => Ok(()),
    }
}

/// Fails if runtime handlers that are not of the sandboxer's `own` ones differ, or, with a command,
/// anything else that it does not change. [`HandlerPlan::verify`] compares the default handler.
pub(super) fn unchanged(
    before: &Table,
    after: &Table,
    own: &[String],
    command: Option<&Enablement>,
    config: &Config,
) -> Result<(), String> {
    let handlers = |table: &Table| {
        let mut handlers = node::all(table, config).all;
        handlers.retain(|name, _| !own.contains(name));
        handlers
    };
    let (old, new) = (handlers(before), handlers(after));
    if let Some((name, _)) = old.iter().find(|(name, settings)| new.get(*name) != Some(settings)) {
        let how = if new.contains_key(name) { "change" } else { "lose" };
        return Err(format!("containerd would {how} runtime handler {name:?}"));
    }
    let Some(command) = command else { return Ok(()) };
    let rest = |table: &Table| {
        let mut rest = table.clone();
        for key in ["imports", "version", "proxy_plugins"] {
            rest.remove(key);
        }
        let pinned = &[IMAGES, "pinned_images"][..];
        for path in [
            &[RUNTIME, "containerd", "runtimes"][..],
            &[RUNTIME, "containerd", "default_runtime_name"],
        ]
        .into_iter()
        .chain(command.offline.then_some(pinned))
        {
            remove(rest.get_mut("plugins").and_then(Value::as_table_mut), path);
        }
        rest
    };
    match first_difference(&rest(before), &rest(after)) {
        Some(key) => Err(format!("containerd would change its setting {key}")),
        None => Ok(()),
    }
}

fn remove(table: Option<&mut Table>, path: &[&str]) {
    match (table, path) {
        (Some(table), [key]) => drop(table.remove(*key)),
        (Some(table), [key, rest @ ..]) => {
            remove(table.get_mut(*key).and_then(Value::as_table_mut), rest);
        }
        _ => {}
    }
}

/// The path of the first key whose value differs.
fn first_difference(before: &Table, after: &Table) -> Option<String> {
    let keys = before.keys().chain(after.keys().filter(|key| !before.contains_key(*key)));
    keys.filter(|key| before.get(*key) != after.get(*key)).find_map(|key| {
        match (before.get(key), after.get(key)) {
            (Some(Value::Table(before)), Some(Value::Table(after))) => {
                first_difference(before, after).map(|rest| format!("{key}.{rest}"))
            }
            _ => Some(key.clone()),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::enablement;
    use super::*;

    const MERGED: &str = "version = 3\nroot = '/r'\n\
        [plugins.'io.containerd.cri.v1.images'.pinned_images]\nsandbox = 'pause:1'\n\
        [plugins.'io.containerd.cri.v1.runtime'.containerd]\ndefault_runtime_name = 'runc'\n\
        [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]\n\
        runtime_type = 'io.containerd.runc.v2'\nsandboxer = 'podsandbox'\n\
        options = { SystemdCgroup = true, Root = '' }\n\
        [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia]\n\
        runtime_type = 'io.containerd.runc.v2'\nsandboxer = 'podsandbox'\n\
        options = { BinaryName = '/nvidia' }\n\
        [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.kata]\n\
        runtime_type = 'io.containerd.kata.v2'\nsandboxer = 'podsandbox'\n";

    fn merged(default: &str) -> Table {
        MERGED.replace("name = 'runc'", &format!("name = '{default}'")).parse().unwrap()
    }

    fn plan(wanted: &Enablement, default: &str, old: Option<&str>) -> Result<HandlerPlan, String> {
        HandlerPlan::new(wanted, merged(default), old).map_err(|e| e.to_string())
    }

    #[test]
    fn the_plugin_of_another_daemon_keeps_its_address() {
        let plugin = |address: &str| {
            format!("[proxy_plugins.pause-sandboxer]\ntype = 'sandbox'\naddress = '{address}'\n")
        };
        let wanted = enablement();
        let config = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]\n\
            runtime_type = 'io.containerd.runc.v2'\n";
        let plan = |address: &str, old: Option<&str>| {
            let before = format!("{}{config}", plugin(address)).parse().unwrap();
            HandlerPlan::new(&wanted, before, old)
        };
        let error = plan("/run/other.sock", None).unwrap_err().to_string();
        assert!(error.contains("/run/other.sock"), "{error}");
        // The drop-in of an earlier `enable`, before the socket changed.
        plan("/run/other.sock", Some(&plugin("/run/other.sock"))).unwrap();
        plan("/run/other.sock", Some(&plugin("/run/older.sock"))).unwrap_err();
        let own = wanted.change.subject.config.socket.display().to_string();
        plan(&own, None).unwrap();
        let typeless = format!("[proxy_plugins.pause-sandboxer]\naddress = '{own}'\n{config}");
        HandlerPlan::new(&wanted, typeless.parse().unwrap(), None).unwrap();
    }

    #[test]
    fn the_base_is_the_default_handler_if_it_is_of_runc() {
        let wanted = enablement();
        assert_eq!(plan(&wanted, "runc", None).unwrap().base, "runc");
        assert_eq!(plan(&wanted, "", None).unwrap().base, "runc");
        assert_eq!(plan(&wanted, "nvidia", None).unwrap().base, "nvidia");
        assert_eq!(plan(&wanted, "kata", None).unwrap().base, "runc");
        let named = |base: &str| Enablement { options_of: Some(base.to_owned()), ..enablement() };
        assert_eq!(plan(&named("nvidia"), "runc", None).unwrap().base, "nvidia");
        let error = plan(&named("kata"), "runc", None).unwrap_err();
        assert!(error.contains("leave `sandboxer` out of its handler"), "{error}");
        let error = plan(&named("crun"), "runc", None).unwrap_err();
        assert!(
            error.contains(
                "no runtime handler \"crun\": use --options-of NAME with one of [\"kata\""
            ),
            "{error}"
        );
        // The handler that was the default before this one became it.
        let first = plan(&wanted, "nvidia", None).unwrap();
        let text = first.drop_in(&wanted, None).unwrap();
        assert_eq!(plan(&wanted, "runc-pause", Some(&text)).unwrap().base, "nvidia");
    }

    #[test]
    fn a_new_config_file_is_of_a_version_that_every_containerd_reads() {
        let mut newest = merged("runc");
        newest.insert("version".to_owned(), 4.into());
        for before in [newest, merged("runc"), Table::new()] {
            let plan = HandlerPlan { before, ..plan(&enablement(), "runc", None).unwrap() };
            assert_eq!(plan.new_file_version(), 3);
        }
    }

    #[test]
    fn a_handler_of_the_shim_has_the_built_in_controller() {
        let small = Mode::ShimOnly.handler().to_owned();
        let wanted = Enablement { mode: Mode::ShimOnly, handler: small, ..enablement() };
        let made = plan(&wanted, "runc", None).unwrap();
        let text = made.drop_in(&wanted, None).unwrap();
        let table: Table = text.parse().unwrap();
        assert!(!table.contains_key("proxy_plugins"), "{text}");
        let handler = &table["plugins"][RUNTIME]["containerd"]["runtimes"]["runc-small"];
        let shim = shim_only::program().unwrap().display().to_string();
        let expected = format!(
            "runtime_type = 'io.containerd.runc.v2'\nsandboxer = 'podsandbox'\n\
             runtime_path = '{shim}'\noptions = {{ SystemdCgroup = true }}\n"
        );
        assert_eq!(handler.as_table(), Some(&expected.parse().unwrap()));
        assert_eq!(enabled::options(&text).unwrap(), ["--shim-only"]);
        // Neither mode takes over the handler of the other, nor its settings.
        let mut merged = merged("runc-small");
        let runtimes = &mut merged["plugins"][RUNTIME]["containerd"]["runtimes"];
        runtimes.as_table_mut().unwrap().insert("runc-small".to_owned(), handler.clone());
        let plan = |wanted: &Enablement| HandlerPlan::new(wanted, merged.clone(), None);
        assert_eq!(plan(&wanted).unwrap().base, "runc");
        assert_eq!(plan(&enablement()).unwrap().base, "runc");
        let other = Enablement { mode: Mode::Sandboxer, ..wanted.clone() };
        assert!(plan(&other).unwrap_err().to_string().contains("is defined elsewhere"));
        let kata = Enablement { options_of: Some("kata".to_owned()), ..wanted };
        assert!(plan(&kata).is_err());
    }

    #[test]
    fn what_containerd_makes_of_it_is_compared() {
        let wanted = enablement();
        let plan = plan(&wanted, "runc", None).unwrap();
        let added = plan.drop_in(&wanted, None).unwrap();
        let after_of = |wanted: &Enablement, change: (&str, &str)| -> Result<(), String> {
            let mut table = merged("runc");
            let more: Table = added.parse().unwrap();
            table.insert("proxy_plugins".to_owned(), more["proxy_plugins"].clone());
            let handler = more["plugins"][RUNTIME]["containerd"]["runtimes"]["runc-pause"].clone();
            let runtimes = &mut table["plugins"][RUNTIME]["containerd"]["runtimes"];
            runtimes.as_table_mut().unwrap().insert("runc-pause".to_owned(), handler);
            let text = table.to_string();
            let changed = text.replace(change.0, change.1);
            assert!(change.0.is_empty() || changed != text, "{} is not in\n{text}", change.0);
            plan.verify(wanted, &changed.parse().unwrap())
        };
        let after = |change: (&str, &str)| after_of(&wanted, change);
        after(("", "")).unwrap();
        let default = Enablement { default: true, ..wanted.clone() };
        let error = after_of(&default, ("", "")).unwrap_err();
        let part = "makes \"runc\" the default handler: run its `enable` without --default first";
        assert!(error.contains(part), "{error}");
        let offline = Enablement { offline: true, ..wanted.clone() };
        after_of(&offline, ("pause:1", "pause:2")).unwrap();
        for (from, to, part) in [
            ("/r\"", "/x\"", "would change its setting root"),
            ("pause:1", "pause:2", "would change its setting plugins.io.containerd.cri.v1.images"),
            (
                "name = \"runc\"",
                "name = \"nvidia\"",
                "would change its default handler from \"runc\" to \"nvidia\"",
            ),
            ("/nvidia", "/other", "would change runtime handler \"nvidia\""),
            ("runtimes.kata]", "kata]", "would lose runtime handler \"kata\""),
            ("runtimes.runc-pause]", "runc-pause]", "no runtime handler \"runc-pause\""),
            (
                "runtimes.runc-pause.options]\nSystemdCgroup = true",
                "runtimes.runc-pause.options]\nSystemdCgroup = false",
                "another file overrides settings",
            ),
        ] {
            let error = after((from, to)).unwrap_err();
            assert!(error.contains(part), "{error} lacks {part}");
        }
    }
}
