//! Pods: described, run, asked, removed.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::config::Layout;
use crate::container::{Container, ContainerSpec};
use crate::cri::api;
use crate::cri::api::NamespaceMode;
use crate::machine::cgroup;
use crate::node::{Handler, Node};
use crate::until;

/// The wanted config of a pod. kubelet's default: a network of its own, one PID namespace
/// per container, shared IPC.
#[derive(Clone, Debug)]
pub struct PodSpec {
    config: api::PodSandboxConfig,
    cgroup_parent: Option<String>,
    omit_linux: bool,
}

impl PodSpec {
    /// A pod with this name and hostname.
    pub fn new(name: &str) -> Self {
        let metadata = api::PodSandboxMetadata {
            name: name.to_owned(),
            uid: unique(),
            namespace: "default".to_owned(),
            ..Default::default()
        };
        let namespaces = api::NamespaceOption {
            network: NamespaceMode::POD.into(),
            pid: NamespaceMode::CONTAINER.into(),
            ipc: NamespaceMode::POD.into(),
            ..Default::default()
        };
        let security = api::LinuxSandboxSecurityContext {
            namespace_options: Some(namespaces).into(),
            ..Default::default()
        };
        let config = api::PodSandboxConfig {
            metadata: Some(metadata).into(),
            hostname: name.to_owned(),
            linux: Some(api::LinuxPodSandboxConfig {
                security_context: Some(security).into(),
                ..Default::default()
            })
            .into(),
            ..Default::default()
        };
        Self { config, cgroup_parent: None, omit_linux: false }
    }

    /// With the node's network, and so its hostname.
    #[must_use]
    pub fn host_network(mut self) -> Self {
        self.namespaces().network = NamespaceMode::NODE.into();
        self.config.hostname.clear();
        self
    }

    /// Another hostname than the name; empty: the sandboxer's choice.
    #[must_use]
    pub fn hostname(mut self, hostname: &str) -> Self {
        hostname.clone_into(&mut self.config.hostname);
        self
    }

    /// Whose PID namespace the containers use.
    #[must_use]
    pub fn pid(mut self, mode: NamespaceMode) -> Self {
        self.namespaces().pid = mode.into();
        self
    }

    /// Whose IPC namespace the containers use.
    #[must_use]
    pub fn ipc(mut self, mode: NamespaceMode) -> Self {
        self.namespaces().ipc = mode.into();
        self
    }

    /// The wanted content of the pod's resolv.conf.
    #[must_use]
    pub fn dns(mut self, servers: &[&str], searches: &[&str], options: &[&str]) -> Self {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        self.config.dns_config = Some(api::DNSConfig {
            servers: words(servers),
            searches: words(searches),
            options: words(options),
            ..Default::default()
        })
        .into();
        self
    }

    /// A namespaced sysctl, by its dotted name.
    #[must_use]
    pub fn sysctl(mut self, name: &str, value: &str) -> Self {
        self.config.linux.mut_or_insert_default().sysctls.insert(name.to_owned(), value.to_owned());
        self
    }

    /// A label.
    #[must_use]
    pub fn label(mut self, name: &str, value: &str) -> Self {
        self.config.labels.insert(name.to_owned(), value.to_owned());
        self
    }

    /// Another cgroup parent than one of the pod's own below the node's; the test makes and removes
    /// it.
    #[must_use]
    pub fn cgroup_parent(mut self, path: &str) -> Self {
        self.cgroup_parent = Some(path.to_owned());
        self
    }

    /// With any other change of its config. The cgroup parent and the log directory are the node's
    /// all the same.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut api::PodSandboxConfig)) -> Self {
        change(&mut self.config);
        self
    }

    /// A config without any `linux` section, as some callers send it.
    #[must_use]
    pub fn without_linux(mut self) -> Self {
        self.omit_linux = true;
        self
    }

    /// Its config, without what the node adds.
    pub fn config(&self) -> &api::PodSandboxConfig {
        &self.config
    }

    fn namespaces(&mut self) -> &mut api::NamespaceOption {
        let linux = self.config.linux.mut_or_insert_default();
        linux.security_context.mut_or_insert_default().namespace_options.mut_or_insert_default()
    }
}

/// The objects that kubelet makes for a pod before it asks for its sandbox: the cgroup that is the
/// sandbox's parent, and the directory of the containers' logs.
#[derive(Clone, Debug)]
pub struct PodHome {
    config: api::PodSandboxConfig,
    cgroup: Option<String>,
    logs: PathBuf,
}

impl PodHome {
    pub(crate) fn make(layout: &Layout, spec: PodSpec) -> Result<Self> {
        let PodSpec { mut config, cgroup_parent, omit_linux } = spec;
        let uid = config.metadata.uid.clone();
        let logs = layout.pods().join(&uid);
        std::fs::create_dir(&logs).with_context(|| format!("make {}", logs.display()))?;
        config.log_directory = logs.to_string_lossy().into_owned();
        let mut cgroup = None;
        if omit_linux {
            config.linux.clear();
        } else {
            let parent = cgroup_parent.unwrap_or_else(|| {
                let parent = layout.pod_cgroup(&uid);
                cgroup = Some(parent.clone());
                parent
            });
            config.linux.mut_or_insert_default().cgroup_parent = parent;
        }
        if let Some(path) = &cgroup {
            cgroup::make(path)?;
        }
        Ok(Self { config, cgroup, logs })
    }

    /// The CRI config of the pod.
    pub fn config(&self) -> &api::PodSandboxConfig {
        &self.config
    }

    /// The pod's cgroup, as a path in each hierarchy, if it has one of its own.
    pub fn cgroup(&self) -> Option<&str> {
        self.cgroup.as_deref()
    }

    /// Removes both.
    ///
    /// # Errors
    /// The cgroup holds something still.
    pub fn clear(&self) -> Result<()> {
        std::fs::remove_dir_all(&self.logs)
            .with_context(|| format!("remove {}", self.logs.display()))?;
        self.cgroup.as_deref().map_or(Ok(()), cgroup::remove)
    }
}

/// A pod that was run.
#[derive(Clone, Debug)]
pub struct Pod {
    node: Arc<Node>,
    handler: Handler,
    home: PodHome,
    id: String,
}

impl Pod {
    /// A pod that was run by other means than [`Node::run`].
    pub fn new(node: &Arc<Node>, handler: Handler, home: PodHome, id: String) -> Self {
        Self { node: Arc::clone(node), handler, home, id }
    }

    /// The sandbox id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The handler that it was run by.
    pub fn handler(&self) -> Handler {
        self.handler
    }

    /// The node that it runs on.
    pub fn node(&self) -> &Arc<Node> {
        &self.node
    }

    /// Its CRI config.
    pub fn config(&self) -> &api::PodSandboxConfig {
        &self.home.config
    }

    /// Its cgroup, log directory and config.
    pub fn home(&self) -> &PodHome {
        &self.home
    }

    /// Its status.
    ///
    /// # Errors
    /// CRI's.
    pub async fn status(&self) -> Result<api::PodSandboxStatus> {
        Ok(self.node.cri().pod_sandbox_status(&self.id, false).await?.status.unwrap_or_default())
    }

    /// Whether it is ready.
    ///
    /// # Errors
    /// CRI's.
    pub async fn is_ready(&self) -> Result<bool> {
        Ok(self.status().await?.state.enum_value() == Ok(api::PodSandboxState::SANDBOX_READY))
    }

    /// Its address on the pod network; empty with host network.
    ///
    /// # Errors
    /// CRI's.
    pub async fn ip(&self) -> Result<String> {
        Ok(self.status().await?.network.ip.clone())
    }

    /// The `info` of its verbose status.
    ///
    /// # Errors
    /// CRI's, or it is no JSON.
    pub async fn info(&self) -> Result<serde_json::Value> {
        let answer = self.node.cri().pod_sandbox_status(&self.id, true).await?;
        let text = answer.info.get("info").context("the verbose status has no info")?;
        serde_json::from_str(text).with_context(|| format!("info of the verbose status: {text}"))
    }

    /// Process id of its pause, as its controller tells through containerd.
    ///
    /// # Errors
    /// The controller's, or the pause has ended.
    pub async fn pause_pid(&self) -> Result<u32> {
        let status = self
            .node
            .controller(self.handler)
            .status(&self.id, false)
            .await
            .context("controller's Status")?;
        ensure!(status.pid != 0, "the sandbox has no process: {status:?}");
        Ok(status.pid)
    }

    /// Makes a container.
    ///
    /// # Errors
    /// CRI's.
    pub async fn create(&self, spec: ContainerSpec) -> Result<Container> {
        let config = spec.config(self.config());
        let created = self.node.cri().create_container(&self.id, &config, self.config()).await;
        let id = created.context("CreateContainer")?;
        Ok(Container {
            node: Arc::clone(&self.node),
            id,
            log: self.home.logs.join(&config.log_path),
        })
    }

    /// Makes and starts a container.
    ///
    /// # Errors
    /// CRI's.
    pub async fn run(&self, spec: ContainerSpec) -> Result<Container> {
        let container = self.create(spec).await?;
        self.node.cri().start_container(container.id()).await.context("StartContainer")?;
        Ok(container)
    }

    /// Forwards a connection to `port` of the pod, sends `line` and answers the line that comes
    /// back.
    ///
    /// # Errors
    /// CRI's, or the stream's.
    pub async fn forward(&self, port: u16, line: &str) -> Result<String> {
        let url = self.node.cri().port_forward(&self.id, port).await.context("PortForward")?;
        crate::port_forward(&url, line).await
    }

    /// `StopPodSandbox`.
    ///
    /// # Errors
    /// CRI's.
    pub async fn stop(&self) -> Result<()> {
        self.node.cri().stop_pod_sandbox(&self.id).await.context("StopPodSandbox")
    }

    /// Stops and removes the pod with its containers, and what kubelet makes for a pod.
    ///
    /// # Errors
    /// CRI's, or the pod's cgroup holds something still.
    pub async fn remove(&self) -> Result<()> {
        self.stop().await?;
        self.node.cri().remove_pod_sandbox(&self.id).await.context("RemovePodSandbox")?;
        self.clear().await
    }

    /// Removes what kubelet makes for a pod, after the pod was removed.
    ///
    /// # Errors
    /// The pod's cgroup holds something still.
    pub async fn clear(&self) -> Result<()> {
        /// The last process of a cgroup may leave it a little after its exit was reported.
        const LEAVES: Duration = Duration::from_secs(10);
        if let Some(path) = &self.home.cgroup {
            until("the pod's cgroup is empty", LEAVES, async || cgroup::remove(path)).await?;
        }
        std::fs::remove_dir_all(&self.home.logs)
            .with_context(|| format!("remove {}", self.home.logs.display()))
    }
}

/// A unique name: this process and a count.
fn unique() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    format!("{:x}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}
