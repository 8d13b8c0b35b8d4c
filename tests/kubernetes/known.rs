//! The known differences between the handlers, and the cases that cannot run.
//! `docs/compatibility.md` lists both.

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
        why: "User-mode Linux counts processor time in ticks, and the pause process needs less than \
              one; cAdvisor has no series of 0 s",
        always: false,
    },
];

/// Cases that cannot run in a lane of the test machine, and why.
pub(crate) const NOT_IN_A_LANE: &[(&str, &str)] = &[
    ("apparmor_profile", "the kernel has no AppArmor"),
    ("cgroups_of_version_2", "the machine has cgroup version 1: swap, memory QoS, PSI"),
    ("eviction_under_pressure", "kubelet measures the whole machine, which is not the test's"),
    ("systemd_cgroup_driver", "systemd does not run; `make test-kubernetes-vm` has it"),
];

/// Cases that cannot run on the node of `tests/vm`, and why.
pub(crate) const NOT_ON_A_NODE: &[(&str, &str)] = &[
    ("apparmor_profile", "the node has no program that loads profiles (apparmor_parser)"),
    ("pressure_and_swap", "the kernel of User-mode Linux has no PSI, and the node no swap"),
    ("eviction_under_pressure", "it would evict pods of other cases"),
    (INSTALLER, "its test answers for systemctl; `make test-kubernetes` runs it"),
];

pub(crate) const INSTALLER: &str = "installer_and_uninstaller";

/// Those of the machine of this run.
pub(crate) fn cannot_run(on_a_node: bool) -> &'static [(&'static str, &'static str)] {
    if on_a_node { NOT_ON_A_NODE } else { NOT_IN_A_LANE }
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
