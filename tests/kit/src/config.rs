//! The files that a node's programs are configured with, and where everything of a node is.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::json;
use sha2::{Digest, Sha256};

use crate::image::PAUSE_IMAGE;
use crate::machine::cgroup_driver::CgroupDriver;
use crate::node::{Handler, Options, Snapshotter};
use crate::parts::Parts;
use crate::program::write_program;
use crate::teardown;

/// containerd's namespace of everything that CRI makes.
pub(crate) const NAMESPACE: &str = "k8s.io";
/// The name under which containerd knows the sandboxer.
pub(crate) const SANDBOXER: &str = "pause-sandboxer";

/// Where everything of a node is. Paths are short: a unix socket's has at most 107 bytes.
#[derive(Clone, Debug)]
pub struct Layout {
    /// The node's scratch directory; all else is below it.
    pub top: PathBuf,
    /// The node's name: of the directory, the bridge, the pod network and the cgroup that is the
    /// parent of all pods'.
    pub name: String,
}

impl Layout {
    /// containerd's `root`.
    pub fn root(&self) -> PathBuf {
        self.top.join("root")
    }

    /// containerd's `state`.
    pub fn state(&self) -> PathBuf {
        self.top.join("state")
    }

    /// containerd's gRPC socket.
    pub fn containerd_socket(&self) -> PathBuf {
        self.top.join("c.sock")
    }

    /// The sandboxer's gRPC socket.
    pub fn sandboxer_socket(&self) -> PathBuf {
        self.top.join("s.sock")
    }

    /// The sandboxer's state directory.
    pub fn sandboxer_state(&self) -> PathBuf {
        self.top.join("sandboxer")
    }

    /// Directory of programs that containerd finds before those of its `PATH`
    /// (`/opt/containerd/bin` of a node); containerd creates it.
    pub fn programs(&self) -> PathBuf {
        self.top.join("opt/bin")
    }

    /// The sandboxer's config file.
    pub fn sandboxer_config(&self) -> PathBuf {
        self.top.join("sandboxer.toml")
    }

    /// containerd's socket for plugins of NRI.
    pub fn nri_socket(&self) -> PathBuf {
        self.top.join("nri.sock")
    }

    /// containerd's log.
    pub fn containerd_log(&self) -> PathBuf {
        self.top.join("logs/containerd.log")
    }

    /// The sandboxer's log.
    pub fn sandboxer_log(&self) -> PathBuf {
        self.top.join("logs/sandboxer.log")
    }

    /// The cgroup that is the parent of all pods' cgroups, as a path in each hierarchy.
    pub fn cgroup(&self) -> String {
        match CgroupDriver::chosen() {
            CgroupDriver::Cgroupfs => format!("/{}", self.name),
            // systemd puts a slice into those whose names it begins with.
            CgroupDriver::Systemd => {
                format!("/{}.slice/{}.slice", teardown::PREFIX.trim_end_matches('-'), self.name)
            }
        }
    }

    /// The cgroup of a pod, by what tells it from others: the parent of its pause's and its
    /// containers'.
    pub(crate) fn pod_cgroup(&self, uid: &str) -> String {
        match CgroupDriver::chosen() {
            CgroupDriver::Cgroupfs => format!("{}/pod{uid}", self.cgroup()),
            CgroupDriver::Systemd => {
                format!("{}/{}-pod{}.slice", self.cgroup(), self.name, uid.replace('-', "_"))
            }
        }
    }

    /// The bind-mounted network namespaces of the pods.
    pub fn netns(&self) -> PathBuf {
        self.state().join("io.containerd.grpc.v1.cri/netns")
    }

    /// The files of a sandbox that CRI mounts into containers: hostname, hosts, resolv.conf.
    pub fn sandbox_files(&self, id: &str) -> PathBuf {
        self.root().join("io.containerd.grpc.v1.cri/sandboxes").join(id)
    }

    /// The shared memory of a sandbox that CRI mounts into containers.
    pub fn sandbox_shm(&self, id: &str) -> PathBuf {
        self.state().join("io.containerd.grpc.v1.cri/sandboxes").join(id).join("shm")
    }

    /// The socket of the shim of a sandbox's containers: outside of the node's directory, where
    /// containerd has it.
    pub fn shim_socket(&self, id: &str) -> PathBuf {
        let name = format!("{}/{NAMESPACE}/{id}", self.containerd_socket().display());
        Path::new("/run/containerd/s").join(crate::image::hex(&Sha256::digest(name)))
    }

    /// The node's pods' subnet: 4094 addresses, derived from the node's name.
    pub(crate) fn subnet(&self) -> String {
        let hash = Sha256::digest(&self.name);
        format!("10.{}.{}.0/20", 64 + hash[0] % 64, hash[1] & 0xf0)
    }

    /// containerd's config file.
    pub fn containerd_config(&self) -> PathBuf {
        self.top.join("containerd.toml")
    }

    pub(crate) fn images(&self) -> PathBuf {
        self.top.join("images.tar")
    }

    pub(crate) fn pods(&self) -> PathBuf {
        self.top.join("pods")
    }

    fn cni(&self) -> PathBuf {
        self.top.join("cni")
    }
}

/// Makes the directories and config files of a node.
pub(crate) fn write(
    layout: &Layout,
    parts: &Parts,
    snapshotter: &Snapshotter,
    options: &Options,
) -> Result<()> {
    for directory in
        ["root", "state", "runc", "logs", "pods", "opt", "nri", "cni/bin", "cni/conf", "cni/badnet"]
    {
        let directory = layout.top.join(directory);
        fs::create_dir_all(&directory).with_context(|| format!("make {}", directory.display()))?;
    }
    network(layout, parts)?;
    let extra = options.containerd_config.replace("{top}", &layout.top.to_string_lossy());
    let containerd = options.containerd_config_head.clone()
        + &containerd(layout, parts, snapshotter.name, options)
        + &snapshotter.config
        + &extra;
    fs::write(layout.containerd_config(), containerd).context("write containerd's config")?;
    fs::write(layout.sandboxer_config(), sandboxer(layout, &options.sandboxer_config))
        .context("write the sandboxer's config")
}

fn containerd(layout: &Layout, parts: &Parts, snapshotter: &str, options: &Options) -> String {
    let (level, cri) = (if options.lean { "info" } else { "debug" }, &options.cri_config);
    let top = layout.top.display();
    let mut text = format!(
        r#"version = 3
root = "{top}/root"
state = "{top}/state"

[grpc]
address = "{socket}"

[debug]
level = "{level}"

[plugins."io.containerd.internal.v1.opt"]
path = "{top}/opt"

[plugins."io.containerd.nri.v1.nri"]
socket_path = "{top}/nri.sock"
plugin_path = "{top}/nri/plugins"
plugin_config_path = "{top}/nri/conf"

[plugins."io.containerd.cri.v1.images"]
snapshotter = "{snapshotter}"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{PAUSE_IMAGE}"

[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = {restricted}
netns_mounts_under_state_dir = true
{cri}
[plugins."io.containerd.cri.v1.runtime".cni]
{bin_dirs}
conf_dir = "{top}/cni/conf"

[plugins."io.containerd.cri.v1.runtime".containerd]
default_runtime_name = "{default}"

[proxy_plugins.{SANDBOXER}]
type = "sandbox"
address = "{sandboxer}"
"#,
        socket = layout.containerd_socket().display(),
        sandboxer = layout.sandboxer_socket().display(),
        restricted = oom_restricted(),
        default = Handler::Builtin.name(),
        bin_dirs = if parts.version().starts_with("2.0.") {
            format!("bin_dir = \"{top}/cni/bin\"")
        } else {
            format!("bin_dirs = [\"{top}/cni/bin\"]")
        },
    );
    let systemd = CgroupDriver::chosen() == CgroupDriver::Systemd;
    let builtin_shim = options.builtin_shim.clone().or_else(crate::shim::of_builtin);
    for handler in Handler::ALL {
        let shim = builtin_shim.as_ref().filter(|_| handler == Handler::Builtin);
        let shim = shim.map(|path| format!("runtime_path = {path:?}\n")).unwrap_or_default();
        for (name, cni) in [(handler.name(), "conf"), (handler.with_bad_netns(), "badnet")] {
            let table =
                format!(r#"[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.{name}"#);
            text += &format!(
                r#"
{table}]
runtime_type = "io.containerd.runc.v2"
{shim}sandboxer = "{sandboxer}"
cni_conf_dir = "{top}/cni/{cni}"

{table}.options]
Root = "{top}/runc"
SystemdCgroup = {systemd}
"#,
                sandboxer = handler.sandboxer(),
            );
        }
    }
    text
}

/// `rest` are the lines that follow.
fn sandboxer(layout: &Layout, rest: &str) -> String {
    let named = rest.lines().any(|line| line.starts_with("shim = "));
    let shim = (!named).then(|| format!("shim = {:?}\n", crate::shim::setting()));
    shim.unwrap_or_default()
        + &format!(
            r#"socket = "{socket}"
state_dir = "{state_dir}"
containerd_root = "{root}"
containerd_state = "{state}"
containerd_address = "{address}"
restrict_oom_score_adj = {restricted}
log_level = "debug"
"#,
            socket = layout.sandboxer_socket().display(),
            state_dir = layout.sandboxer_state().display(),
            root = layout.root().display(),
            state = layout.state().display(),
            address = layout.containerd_socket().display(),
            restricted = oom_restricted(),
        )
}

/// Whether this machine lets no process lower `oom_score_adj`: a test machine may lack
/// CAP_SYS_RESOURCE, a node has it.
fn oom_restricted() -> bool {
    const CAP_SYS_RESOURCE: u64 = 1 << 24;
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    effective
        .and_then(|set| u64::from_str_radix(set.trim(), 16).ok())
        .is_none_or(|set| set & CAP_SYS_RESOURCE == 0)
}

/// The pod network, and a second one that spoils the netns that it is given.
fn network(layout: &Layout, parts: &Parts) -> Result<()> {
    let bin = layout.cni().join("bin");
    for plugin in ["bridge", "host-local", "loopback"] {
        let target = parts.cni_plugins().join(plugin);
        symlink(&target, bin.join(plugin)).with_context(|| format!("link {}", target.display()))?;
    }
    let bridge = json!({
        "type": "bridge",
        "bridge": layout.name,
        "isGateway": true,
        "ipam": {
            "type": "host-local",
            "ranges": [[{ "subnet": layout.subnet() }]],
            "routes": [{ "dst": "0.0.0.0/0" }],
            "dataDir": layout.cni().join("ipam"),
        },
    });
    let network =
        |plugins| json!({ "cniVersion": "1.0.0", "name": layout.name, "plugins": plugins });
    let write = |file: &str, network: serde_json::Value| {
        let path = layout.cni().join(file);
        fs::write(&path, network.to_string()).with_context(|| format!("write {}", path.display()))
    };
    write("conf/10-pods.conflist", network(json!([bridge])))?;
    write("badnet/10-pods.conflist", network(json!([{ "type": "unmount-netns" }])))?;

    // A CNI plugin may do anything; this one leaves containerd with the path of a file that is no
    // namespace.
    let plugin = bin.join("unmount-netns");
    let script = r#"#!/bin/sh
case $CNI_COMMAND in
ADD)
    # The loopback plugin works at the same time and needs the namespace; libcni notes its end.
    while [ ! -e "/var/lib/cni/results/cni-loopback-$CNI_CONTAINERID-lo" ]; do sleep 0.01; done
    umount "$CNI_NETNS" && echo '{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.2/32"}]}'
    ;;
VERSION) echo '{"cniVersion":"1.0.0","supportedVersions":["1.0.0"]}' ;;
esac
"#;
    write_program(&plugin, script.as_bytes())
}
