//! The known differences between the handlers, which `docs/compatibility.md` lists.

/// A known difference. `*` stands for any text.
pub(crate) struct Known {
    pub(crate) case: &'static str,
    pub(crate) fact: &'static str,
    pub(crate) builtin: &'static str,
    pub(crate) ours: &'static str,
    pub(crate) why: &'static str,
    /// Every run of the case shows it; otherwise the run fails.
    pub(crate) always: bool,
}

pub(crate) const DIFFERENCES: &[Known] = &[
    Known {
        case: "shared_pid_namespace",
        fact: "its arguments",
        builtin: "/pause",
        ours: "/pause *",
        why: "a new daemon recognises a pause process without a record by the id in its arguments",
        always: true,
    },
    Known {
        case: "oom",
        fact: "*: reason",
        builtin: "Error",
        ours: "OOMKilled",
        why: "systemd may remove the cgroup before containerd's shim has read its count of kills; \
              the own shim then reads that of the pod",
        always: false,
    },
    Known {
        case: "metrics",
        fact: "cadvisor: container_cpu_usage_seconds_total of sandbox",
        builtin: "1",
        ours: "none",
        why: "User-mode Linux counts processor time in ticks, and the pause process needs less \
              than one; cAdvisor has no series of 0 s",
        always: false,
    },
];

/// The case of the Helm chart and the installer.
pub(crate) const INSTALLER: &str = "installer_and_uninstaller";

/// Cases that cannot run on the machine of this run, and why.
pub(crate) fn cannot_run(on_a_node: bool) -> &'static [(&'static str, &'static str)] {
    if on_a_node {
        &[(INSTALLER, "its test answers for systemctl; `make test-kubernetes` runs it")]
    } else {
        &[]
    }
}

/// Whether a text matches a pattern, in which `*` stands for any text.
pub(crate) fn matches(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| text.strip_prefix(first)) else {
        return false;
    };
    let parts: Vec<&str> = parts.collect();
    let Some((last, middle)) = parts.split_last() else { return rest.is_empty() };
    for part in middle {
        let Some((_, after)) = rest.split_once(part) else { return false };
        rest = after;
    }
    rest.ends_with(last)
}
