//! kubelet and containerd must make cgroups in the same way.

use std::path::Path;

use toml::{Table, Value};

use super::Finding;

const SUBJECT: &str = "kubelet";

/// Where kubeadm and most distributions keep kubelet's config.
const FILE: &str = "/var/lib/kubelet/config.yaml";

/// Looks at kubelet's config, if it is where it mostly is, beside the handlers that name `sandboxer`.
pub(super) fn look(handlers: &[(String, Table)]) -> Vec<Finding> {
    match std::fs::read_to_string(Path::new(FILE)) {
        Ok(text) => judge(&text, handlers),
        Err(_) => Vec::new(),
    }
}

/// `text` is kubelet's config; of its keys one of the outermost level is looked for.
fn judge(text: &str, handlers: &[(String, Table)]) -> Vec<Finding> {
    let value = text.lines().find_map(|line| line.strip_prefix("cgroupDriver:"));
    let value = value.map(|value| value.split_once(" #").map_or(value, |(value, _)| value));
    // kubelet's own default.
    let driver = value.map_or("cgroupfs", |value| value.trim().trim_matches(['"', '\'']));
    let systemd = driver == "systemd";
    handlers
        .iter()
        .filter(|(_, handler)| handler.get("runtime_type").and_then(Value::as_str) == Some("io.containerd.runc.v2"))
        .map(|(name, handler)| {
            let set = handler.get("options").and_then(|options| options.get("SystemdCgroup")?.as_bool()).unwrap_or(false);
            if set == systemd {
                return Finding::ok(SUBJECT, format!("cgroupDriver is {driver}, as of runtime handler {name:?}"));
            }
            Finding::fail(
                SUBJECT,
                format!("cgroupDriver is {driver}, but SystemdCgroup of runtime handler {name:?} is {set}: its containers will not start"),
                format!("set SystemdCgroup = {systemd} under [….containerd.runtimes.{name}.options], then systemctl restart containerd"),
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    #[test]
    fn drivers_must_agree() {
        let handler = |systemd: &str| {
            let text = format!("runtime_type = \"io.containerd.runc.v2\"\n{systemd}");
            [("x".to_owned(), toml::from_str(&text).unwrap())]
        };
        let on = handler("options = { SystemdCgroup = true }");
        for (text, handlers, level) in [
            ("a: 1\ncgroupDriver: systemd\n", &on, Level::Ok),
            ("cgroupDriver: \"systemd\"", &handler(""), Level::Fail),
            ("cgroupDriver: systemd # as containerd", &on, Level::Ok),
            ("cgroupDriver: cgroupfs", &on, Level::Fail),
            ("a: 1", &handler("options = { SystemdCgroup = false }"), Level::Ok),
        ] {
            assert_eq!(judge(text, handlers)[0].level, level, "{text}");
        }
    }
}
