//! What is known of the cases: differences between the handlers, and cases that cannot run.
//! `docs/kubernetes.md` shows both.

/// A difference. `*` stands for anything.
pub(crate) struct Known {
    pub(crate) case: &'static str,
    pub(crate) fact: &'static str,
    pub(crate) builtin: &'static str,
    pub(crate) ours: &'static str,
    pub(crate) why: &'static str,
}

/// Each is seen in every run of its case, or must go.
pub(crate) const DIFFERENCES: &[Known] = &[
    Known {
        case: "metrics",
        fact: "cadvisor: container_* of sandbox",
        builtin: "*",
        ours: "none",
        why: "cAdvisor finds a sandbox as a labelled container with a task; pods of an external \
              sandboxer have none",
    },
    Known {
        case: "metrics",
        fact: "summary: .network.*",
        builtin: "there",
        ours: "none",
        why: "kubelet takes a pod's network from cAdvisor's series of its sandbox",
    },
    Known {
        case: "shared_pid_namespace",
        fact: "its arguments",
        builtin: "/pause",
        ours: "/pause *",
        why: "the pause process has the id of its sandbox as an argument, for ps on the node",
    },
];

/// Cases that cannot run on the test machine, and why.
pub(crate) const CANNOT_RUN: &[(&str, &str)] = &[];

/// Why a case is skipped.
pub(crate) fn why_not(case: &str) -> Option<&'static str> {
    CANNOT_RUN.iter().find(|(name, _)| *name == case).map(|(_, why)| *why)
}

/// Whether a text is as a pattern, in which `*` stands for anything.
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
