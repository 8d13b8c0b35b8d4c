//! The process of a container, and its OCI config.

use containerd_shim_protos::api::CloseIORequest;
use containerd_shim_protos::shim::oci::Options;
use containerd_shim_protos::types::mount::Mount;
use serde_json::{Value, json};

use super::{Pod, context};

/// The settings of a container.
#[derive(Clone, Default)]
pub struct Container {
    pub stdin: String,
    pub stdout: String,
    pub stderr: String,
    pub terminal: bool,
    /// Memory limit in bytes.
    pub memory: Option<i64>,
    /// The node's PID namespace.
    pub host_pids: bool,
    /// A cgroup in one of the pod, as kubelet names it.
    pub pod_cgroup: bool,
    /// A user namespace, in which root is this user of the node; `/tmp` is a directory of the pod
    /// whose users are mapped too.
    pub root_is: Option<u32>,
    pub checkpoint: String,
    pub options: Options,
    pub rootfs: Vec<Mount>,
}

/// Options of an overlay by which root is another user of the node.
pub const MAPPED: [&str; 2] = ["uidmap=0:70000:65536", "gidmap=0:70000:65536"];

/// A mount of a root file system.
pub fn mount(kind: &str, source: &str, options: &[&str]) -> Mount {
    let mut mount = Mount::new();
    (mount.type_, mount.source) = (kind.to_owned(), source.to_owned());
    mount.options = options.iter().map(|option| (*option).to_owned()).collect();
    mount
}

impl Pod {
    /// An overlay of the root of the pod's containers and a layer, with more options.
    pub fn overlay(&self, more: &[&str]) -> Mount {
        let layer = self.path("layer");
        std::fs::create_dir_all(&layer).unwrap();
        let lower = format!("lowerdir={}:{layer}", self.path("root"));
        mount("overlay", "overlay", &[&[lower.as_str()], more].concat())
    }

    /// Closes the standard input of a process.
    pub fn close_input(&self, id: &str, exec: &str) {
        let mut request = CloseIORequest::new();
        (request.id, request.exec_id, request.stdin) = (self.id(id), exec.to_owned(), true);
        self.client.close_io(context(), &request).unwrap();
    }

    /// A container whose runtime runs these commands of a shell first when `action` is called. One
    /// for each action of a pod.
    pub fn with_commands_before(&self, action: &str, commands: &str) -> Container {
        let path = self.path(&format!("runtime-{action}"));
        assert!(!super::exists(&path), "two of {action}");
        let runtime = super::runtime().display().to_string();
        let text =
            format!("case \" $* \" in *\" {action} \"*) {commands};; esac\nexec {runtime} \"$@\"");
        super::script(&path, &text);
        let mut with = Container::default();
        with.options.binary_name = path;
        with
    }

    /// The OCI config of a container of the pod.
    pub(super) fn config(&self, id: &str, script: &str, with: &Container) -> Value {
        let mut namespaces = vec![json!({"type": "mount"}), json!({"type": "ipc"})];
        if !with.host_pids {
            namespaces.push(json!({"type": "pid"}));
        }
        let mut mounts = vec![
            json!({"destination": "/proc", "type": "proc", "source": "proc"}),
            json!({"destination": "/dev", "type": "tmpfs", "source": "tmpfs",
                   "options": ["nosuid", "mode=755"]}),
            json!({"destination": "/dev/pts", "type": "devpts", "source": "devpts",
                   "options": ["newinstance", "ptmxmode=0666", "mode=0620"]}),
        ];
        let mut mappings = Value::Null;
        if let Some(user) = with.root_is {
            namespaces.push(json!({"type": "user"}));
            mappings = json!([{"containerID": 0, "hostID": user, "size": 65536}]);
            mounts.push(json!({"destination": "/tmp", "type": "bind", "source": self.path("data"),
                               "options": ["bind"], "uidMappings": mappings,
                               "gidMappings": mappings}));
        }
        let root = match with.rootfs.is_empty() {
            true => self.path("root"),
            false => "rootfs".to_owned(),
        };
        let parent =
            if with.pod_cgroup { format!("/kubepods-pod{}", self.id("")) } else { String::new() };
        json!({
            "ociVersion": "1.0.2",
            "process": process(script, with.terminal),
            "root": {"path": root, "readonly": true},
            "hostname": "",
            "mounts": mounts,
            "linux": {
                "namespaces": namespaces,
                "uidMappings": mappings,
                "gidMappings": mappings,
                "cgroupsPath": format!("/runc-shim{parent}/{}", self.id(id)),
                "resources": {"memory": {"limit": with.memory, "swap": with.memory}},
            },
        })
    }
}

/// A process of a container or of an exec, as an OCI config has it.
pub(super) fn process(script: &str, terminal: bool) -> Value {
    json!({
        "terminal": terminal,
        "user": {"uid": 0, "gid": 0},
        "args": ["/bin/sh", "-c", script],
        "env": ["PATH=/bin"],
        "cwd": "/",
        "noNewPrivileges": true,
        "capabilities": {
            "bounding": ["CAP_KILL"], "effective": ["CAP_KILL"], "permitted": ["CAP_KILL"],
        },
    })
}
