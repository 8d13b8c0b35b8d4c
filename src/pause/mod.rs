//! The pause process of a sandbox and the drivers that make it.
//!
//! A [`Driver`] turns a checked [`Plan`] into a running [`Process`]. Drivers know nothing of RPCs,
//! states or wire types.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::cgroup::CgroupRef;
use crate::error::{StepError, StepErrors};
use crate::id::SandboxId;
use crate::process::{Adoption, Identity, Process};

pub mod binary;
mod child;
pub mod native;
mod orphans;
mod rootfs;
mod seccomp;
mod userns;

/// The owner of the namespace of one kind that a pod uses (CRI `NamespaceMode`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Namespace {
    /// The pod's own, made at Start.
    Private,
    /// The node's.
    Node,
}

/// One line of `/proc/PID/uid_map` or `gid_map` (user_namespaces(7)); ids, not bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IdMapping {
    /// First id inside the namespace.
    pub container_id: u32,
    /// First id on the node.
    pub host_id: u32,
    /// How many ids are mapped.
    pub length: u32,
}

/// The pod's user namespace (CRI `UserNamespace` with mode POD).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserNamespace {
    /// The one uid mapping.
    pub uid: IdMapping,
    /// The one gid mapping.
    pub gid: IdMapping,
}

/// All that a driver must know to make one pause process. Made from the CRI config and checked at
/// Create.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The sandbox id; a valid containerd identifier, so safe as one path component.
    pub id: SandboxId,
    /// Bind-mounted network namespace; `None`: the node's network.
    pub netns: Option<PathBuf>,
    /// PID namespace.
    pub pid: Namespace,
    /// IPC namespace.
    pub ipc: Namespace,
    /// UTS namespace; the node's with host network.
    pub uts: Namespace,
    /// Set in a private UTS namespace; at most 64 bytes (sethostname(2)). Empty: left as the
    /// node's.
    pub hostname: String,
    /// `None`: the node's user namespace. With `netns`, the namespace that owns it is joined;
    /// without, a new one is made.
    pub userns: Option<UserNamespace>,
    /// Namespaced sysctls as dotted name and value, in order; set before the program runs.
    pub sysctls: Vec<(String, String)>,
    /// Where the pause process's cgroup is: in a path of the cgroup file system, or in the systemd
    /// slice of this bare name (`….slice` without a slash). Empty: the daemon's own cgroup is kept.
    pub cgroup_parent: String,
    /// For `/proc/PID/oom_score_adj`; already raised to the daemon's own value when restricted.
    pub oom_score_adj: i32,
    /// SELinux label of the process; empty where it has none of its own: SELinux is off, or the pod
    /// is privileged.
    pub selinux_label: String,
    /// The pod may have privileged containers, which can write to the sysfs of its network.
    #[serde(default)]
    pub privileged: bool,
}

/// The value of the built-in controller (`defaultSandboxOOMAdj`).
const OOM_SCORE_ADJ: i32 = -998;

/// The `oom_score_adj` of a pause process; where it is `restricted`, it is not below the daemon's
/// own (containerd `WithPodOOMScoreAdj`).
pub fn oom_score_adj(restricted: bool) -> i32 {
    let own = || std::fs::read_to_string("/proc/self/oom_score_adj").ok()?.trim().parse().ok();
    not_below(restricted.then(|| own().unwrap_or(0)))
}

fn not_below(own: Option<i32>) -> i32 {
    own.unwrap_or(OOM_SCORE_ADJ).max(OOM_SCORE_ADJ)
}

impl Plan {
    /// A pause process with namespaces of its own on the node's network, and nothing else.
    pub fn new(id: SandboxId) -> Self {
        Self {
            id,
            netns: None,
            pid: Namespace::Private,
            ipc: Namespace::Private,
            uts: Namespace::Private,
            hostname: String::new(),
            userns: None,
            sysctls: Vec::new(),
            cgroup_parent: String::new(),
            oom_score_adj: OOM_SCORE_ADJ,
            selinux_label: String::new(),
            privileged: false,
        }
    }

    /// The name of its cgroup.
    pub fn cgroup_ref(&self) -> CgroupRef {
        CgroupRef { id: self.id.clone(), cgroup_parent: self.cgroup_parent.as_str().into() }
    }
}

/// Makes, adopts and cleans up pause processes. Its methods block and are called off the runtime's
/// workers.
pub trait Driver: Send + Sync + fmt::Debug {
    /// Makes the cgroup and the process of a sandbox.
    ///
    /// # Errors
    /// The failed step, also when it failed in the child; all that was made has been undone then.
    fn start(&self, plan: &Plan) -> Result<Box<dyn Process>, StepError>;

    /// Finds a recorded process again after a restart of the daemon.
    fn adopt(&self, cgroup: &CgroupRef, identity: &Identity) -> Adoption;

    /// Removes what outlives the process: its cgroup and whatever the driver keeps for it. Gone
    /// already is success.
    ///
    /// # Errors
    /// Every step that failed; the others were done all the same.
    fn cleanup(&self, cgroup: &CgroupRef) -> Result<(), StepErrors>;

    /// Whether the kernel has killed a process of the cgroup because memory had run out; false
    /// where that is not known.
    fn oom_killed(&self, _cgroup: &CgroupRef) -> bool {
        false
    }

    /// Ends the pause processes that an earlier daemon of the same state directory has made and
    /// whose sandboxes are not `recorded` as started, and removes their cgroups. For recovery,
    /// before anything is started.
    ///
    /// # Errors
    /// Every step that failed; the others were done all the same.
    fn kill_orphans(&self, recorded: &dyn Fn(&str) -> bool) -> Result<(), StepErrors>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restricted_score_is_not_below_the_daemons_own() {
        assert_eq!(oom_score_adj(false), -998);
        assert_eq!([Some(0), Some(-999), None].map(not_below), [0, -998, -998]);
    }
}
