//! Settings of the daemon: one checked [`Config`] from the config file and the flags.

use std::path::PathBuf;
use std::time::Duration;

/// How the pods' cgroups are made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CgroupDriver {
    /// By the form of `cgroup_parent`: a name that ends in `.slice` means systemd.
    #[default]
    Auto,
    /// Directories of the cgroup file system.
    Cgroupfs,
    /// Transient scopes, asked of systemd over D-Bus.
    Systemd,
}

/// Every setting of the daemon, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// gRPC socket that containerd dials; the ttrpc socket has `.ttrpc` appended.
    pub socket: PathBuf,
    /// Records and private mounts.
    pub state_dir: PathBuf,
    /// containerd's `root`.
    pub containerd_root: PathBuf,
    /// containerd's `state`.
    pub containerd_state: PathBuf,
    /// containerd's gRPC socket; part of the name of a pod's shim socket.
    pub containerd_address: PathBuf,
    /// containerd's namespace of CRI.
    pub containerd_namespace: String,
    /// How the pods' cgroups are made.
    pub cgroup_driver: CgroupDriver,
    /// Never ask for an `oom_score_adj` below the daemon's own (CRI `restrict_oom_score_adj`).
    pub restrict_oom_score_adj: bool,
    /// Pods may bind ports below 1024 (CRI `enable_unprivileged_ports`).
    pub enable_unprivileged_ports: bool,
    /// Pods may send ICMP echo without a capability (CRI `enable_unprivileged_icmp`).
    pub enable_unprivileged_icmp: bool,
    /// A sandbox that was not started this long after its creation is removed.
    pub abandoned_after: Duration,
    /// How often sandboxes that nobody has ever asked about are looked for; containerd is asked about them.
    pub forgotten_interval: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            socket: "/run/pause-sandboxer/pause-sandboxer.sock".into(),
            state_dir: "/run/pause-sandboxer".into(),
            containerd_root: "/var/lib/containerd".into(),
            containerd_state: "/run/containerd".into(),
            containerd_address: "/run/containerd/containerd.sock".into(),
            containerd_namespace: "k8s.io".to_owned(),
            cgroup_driver: CgroupDriver::Auto,
            restrict_oom_score_adj: false,
            enable_unprivileged_ports: false,
            enable_unprivileged_icmp: false,
            abandoned_after: Duration::from_secs(3600),
            forgotten_interval: Duration::from_secs(60),
        }
    }
}
