//! The targets of the comparison and their node: one containerd that knows every target, and their
//! daemons.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result};
use kit::controller::{CONFIG_TYPE, Controller, any, api};
use kit::{Node, Options, PodSpec};
use protobuf::Message;
use serde_json::json;

use crate::account::Account;
use crate::daemon::{BINARY, Daemon};
use crate::netns;

/// containerd's own controller.
pub(crate) const BUILTIN: &str = "builtin";
/// The same with other shims in place of `containerd-shim-runc-v2`, which are of interest with
/// containers only: that of containerd's rust-extensions, and this project's.
pub(crate) const BUILTIN_WITH: [Target; 2] =
    [Target::named("builtin_rust_shim"), Target::named("builtin_own_shim")];
/// The former, which `make bench` installs from crates.io.
const RUST_SHIM: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/target/tools/bin/containerd-shim-runc-v2-rs");
/// This project's with its native driver.
pub(crate) const OURS: &str = "ours";
/// A sandboxer that does nothing.
pub(crate) const FLOOR: &str = "floor";

/// This project's daemons: name and lines of config.
const DAEMONS: [(&str, &str); 1] = [(OURS, "")];

/// Type of the extension in which CRI describes the pod (containerd `sandboxstore.Metadata`).
const METADATA_TYPE: &str = "github.com/containerd/cri/pkg/store/sandbox/Metadata";

/// One sandboxer under measurement.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    pub(crate) name: &'static str,
    /// Whether containers run in its pods.
    pub(crate) runs_containers: bool,
}

impl Target {
    /// The one of this name, in whose pods containers run.
    pub(crate) const fn named(name: &'static str) -> Self {
        Self { name, runs_containers: true }
    }

    /// The CRI runtime handler that has it.
    pub(crate) fn handler(&self) -> String {
        if self.name == BUILTIN { "runc".to_owned() } else { format!("runc-{}", self.name) }
    }

    /// Whether it starts no program for a pod, so that it can be asked hundreds of times in a
    /// second.
    pub(crate) fn is_fast(&self) -> bool {
        matches!(self.name, OURS | FLOOR)
    }

    /// The name of the controller in containerd.
    pub(crate) fn sandboxer(&self) -> &'static str {
        if self.name == BUILTIN { "podsandbox" } else { self.name }
    }
}

/// The node with all of it.
#[derive(Debug)]
pub(crate) struct Setup {
    pub(crate) node: Arc<Node>,
    pub(crate) targets: Vec<Target>,
    pub(crate) daemons: BTreeMap<&'static str, Daemon>,
    pub(crate) accounts: BTreeMap<&'static str, Account>,
    pub(crate) networks: Vec<PathBuf>,
    ids: AtomicU64,
}

impl Setup {
    /// Starts containerd and all daemons.
    pub(crate) async fn new() -> Result<Self> {
        let names: Vec<&'static str> =
            DAEMONS.iter().map(|(name, _)| *name).chain([FLOOR]).collect();
        let handlers = names.iter().map(|name| handler(name)).chain(shim_handlers());
        let containerd_config = handlers.collect();
        let node =
            Node::start(Options { containerd_config, lean: true, ..Options::default() }).await?;
        // A file of its own: shims of one file share pages, and those of `OURS` are measured too.
        let own = Path::new(BINARY).with_file_name(kit::shim::NAME);
        std::fs::copy(own, node.layout().top.join(kit::shim::NAME)).context("copy the shim")?;
        let mut daemons = BTreeMap::from([(FLOOR, Daemon::floor(&node)?)]);
        for (name, settings) in DAEMONS {
            daemons.insert(name, Daemon::ours(&node, name, settings)?);
        }
        let mut accounts = BTreeMap::new();
        for name in names.iter().copied().chain([BUILTIN, "pods"]) {
            let below = if name == "pods" { String::new() } else { format!("/bench-{name}") };
            accounts.insert(name, Account::at(&format!("{}{below}", node.layout().cgroup()))?);
        }
        accounts[BUILTIN].take(node.containerd_pid()?)?;
        for (name, daemon) in &mut daemons {
            daemon.start().await.with_context(|| format!("start {name}"))?;
            accounts[name].take(daemon.pid()?)?;
        }
        let networks = netns::make(&node.layout().state().join("bench-netns"), 16)?;
        let targets = [BUILTIN]
            .iter()
            .chain(&names)
            .map(|name| Target { name, runs_containers: *name != FLOOR });
        let targets = targets.collect();
        Ok(Self { node, targets, daemons, accounts, networks, ids: AtomicU64::new(0) })
    }

    /// The target of this name.
    pub(crate) fn target(&self, name: &str) -> &Target {
        self.targets.iter().find(|target| target.name == name).expect("a target of the setup")
    }

    /// Its controller, through containerd.
    pub(crate) fn controller(&self, target: &Target) -> Controller {
        Controller::new(self.node.layout().containerd_socket(), target.sandboxer())
    }

    /// An id as containerd makes them up.
    pub(crate) fn id(&self) -> String {
        format!("be{:062x}", self.ids.fetch_add(1, Ordering::Relaxed))
    }

    /// Some network namespace for it.
    pub(crate) fn network(&self, id: &str) -> String {
        let number = id.bytes().map(usize::from).sum::<usize>() % self.networks.len();
        self.networks[number].to_string_lossy().into_owned()
    }

    /// The request by which CRI creates a pod's sandbox.
    pub(crate) fn request(
        &self,
        controller: &Controller,
        target: &Target,
        id: &str,
        config: &kit::cri::api::PodSandboxConfig,
    ) -> Result<api::ControllerCreateRequest> {
        let network = self.network(id);
        let mut request = controller.create_request(id);
        request.options = Some(any(CONFIG_TYPE, config.write_to_bytes()?)).into();
        request.netns_path = network.clone();
        // The built-in takes the pod from here and not from the options.
        let pod = json!({
            "metadata": {
                "name": config.metadata.name,
                "uid": config.metadata.uid,
                "namespace": config.metadata.namespace,
            },
            "hostname": config.hostname,
            "log_directory": config.log_directory,
            "linux": {
                "cgroup_parent": config.linux.cgroup_parent,
                "security_context": { "namespace_options": { "pid": 1 } },
            },
        });
        let metadata = json!({ "Version": "v1", "Metadata": {
            "ID": id, "Name": id, "Config": pod, "NetNSPath": network,
            "RuntimeHandler": target.handler(),
        }});
        let extension = any(METADATA_TYPE, serde_json::to_vec(&metadata)?);
        request.sandbox.mut_or_insert_default().extensions.insert("metadata".to_owned(), extension);
        Ok(request)
    }

    /// Makes the cgroup and the log directory of a pod that is started again and again.
    pub(crate) fn home(&self, name: &str) -> Result<kit::PodHome> {
        self.node.prepare(PodSpec::new(name))
    }
}

/// containerd's config of the handlers of [`BUILTIN_WITH`].
fn shim_handlers() -> [String; 2] {
    let [rust, own] = BUILTIN_WITH.map(|target| target.name);
    let copy = format!("{{top}}/{}", kit::shim::NAME);
    [(rust, RUST_SHIM), (own, &copy)]
        .map(|(name, path)| runtime(name, &format!("runtime_path = \"{path}\"")))
}

/// containerd's config of one more handler and its sandboxer.
fn handler(name: &str) -> String {
    let plugin = format!(
        r#"
[proxy_plugins.{name}]
type = "sandbox"
address = "{{top}}/{name}.sock"
"#
    );
    plugin + &runtime(name, &format!("sandboxer = \"{name}\""))
}

/// containerd's config of a handler for runc, with one more setting.
fn runtime(name: &str, setting: &str) -> String {
    let table =
        format!(r#"plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc-{name}"#);
    format!(
        r#"
[{table}]
runtime_type = "io.containerd.runc.v2"
{setting}
cni_conf_dir = "{{top}}/cni/conf"

[{table}.options]
Root = "{{top}}/runc"
"#
    )
}
