//! `examples/kind/try` on this node, with containerd's config in the form of kind's node image, and
//! stand-ins for the programs of the user's machine: the only node of the cluster is this one.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;

use super::pods::Pods;
use super::{HANDLER, quiet, run};

const CONFIG: &str = "/etc/containerd/config.toml";
const TOOLS: &str = "/root/tools";
const LOG: &str = "/root/tools/log";

/// Version 2, systemd's cgroups, a base spec, another handler and a proxy plugin whose socket does
/// not exist, as in kind's node image.
const OF_KIND: &str = r#"# The config of a node of kind.
version = 2

[proxy_plugins]
[proxy_plugins."fuse-overlayfs"]
  type = "snapshot"
  address = "/run/containerd-fuse-overlayfs.sock"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "registry.k8s.io/pause:3.10"
  tolerate_missing_hugepages_controller = true
  restrict_oom_score_adj = false
[plugins."io.containerd.grpc.v1.cri".containerd]
  discard_unpacked_layers = true
  snapshotter = "overlayfs"
  default_runtime_name = "runc"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  base_runtime_spec = "/etc/containerd/cri-base.json"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
    SystemdCgroup = true
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.test-handler]
  runtime_type = "io.containerd.runc.v2"
"#;

/// `docker exec` runs the command on this node, and `docker cp` copies to it.
const STAND_INS: [(&str, &str); 3] = [
    (
        "kind",
        "case \"$1 $2\" in 'get nodes') echo node ;; 'create cluster') echo \"kind $*\" >>$log ;; \
         esac",
    ),
    ("docker", "case $1 in cp) cp \"$2\" \"${3#node:}\" ;; exec) shift 2 && exec \"$@\" ;; esac"),
    ("kubectl", "echo \"kubectl $*\" >>$log"),
];

/// What the script does on the user's machine.
const DONE: [&str; 5] = [
    "kind create cluster --name pause-sandboxer --wait 120s",
    "label --overwrite node node pause-sandboxer/ready=true",
    "apply -f /payload/kind/pod.yaml",
    "wait --for=condition=Ready --timeout=180s pod/web",
    "get pod web -o wide",
];

/// Runs the script from the files of an archive, then a pod, and removes all of it.
pub fn try_it() {
    let pods = Pods::new();
    fs::write(CONFIG, OF_KIND).unwrap();
    quiet("ctr oci spec >/etc/containerd/cri-base.json; systemctl restart containerd");
    pods.up();
    fs::create_dir(TOOLS).unwrap();
    for (name, script) in STAND_INS {
        let path = format!("{TOOLS}/{name}");
        fs::write(&path, format!("#!/bin/sh\nlog={LOG}\n{script}\n")).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let path = format!("{TOOLS}:{}", std::env::var("PATH").unwrap());
    let output = Command::new("/payload/kind/try").arg("kind").env("PATH", path).output().unwrap();
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{text}");
    assert!(text.contains("runtime handlers of this sandboxer: \"runc-pause\""), "{text}");
    let log = fs::read_to_string(LOG).unwrap();
    assert_eq!(log.lines().count(), DONE.len(), "{log}");
    for (line, done) in log.lines().zip(DONE) {
        let of_cluster = line.starts_with("kubectl --context kind-pause-sandboxer ");
        assert!(line.ends_with(done) && (line == done || of_cluster), "{log}");
    }

    let web = pods.run_below("kubepods-web.slice", "web", HANDLER).unwrap();
    pods.container("web", &web, "main");
    let list = run("pause-sandboxer list");
    assert!(list.contains(&web[..13]) && list.contains("ready"), "{list}");
    pods.remove("web", &web);
    run("pause-sandboxer disable --restart");
    assert_eq!(fs::read_to_string(CONFIG).unwrap(), OF_KIND);
    quiet("systemctl disable --now pause-sandboxer.socket pause-sandboxer.service");
}
