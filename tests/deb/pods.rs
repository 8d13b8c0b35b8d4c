//! kubelet's part: pods and containers by CRI.

use kit::Cri;
use kit::cri::api::{
    ContainerConfig, ContainerMetadata, ImageSpec, LinuxContainerConfig,
    LinuxContainerSecurityContext, LinuxPodSandboxConfig, LinuxSandboxSecurityContext,
    NamespaceMode, NamespaceOption, PodSandboxConfig, PodSandboxFilter, PodSandboxMetadata,
    PodSandboxState,
};

use super::eventually;

/// kubelet's part.
pub struct Pods {
    runtime: tokio::runtime::Runtime,
    cri: Cri,
}

fn node_namespaces() -> NamespaceOption {
    NamespaceOption {
        network: NamespaceMode::NODE.into(),
        pid: NamespaceMode::CONTAINER.into(),
        ..Default::default()
    }
}

impl Pods {
    pub fn new() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        Self { runtime, cri: Cri::new("/run/containerd/containerd.sock") }
    }

    fn config(name: &str) -> PodSandboxConfig {
        let security = LinuxSandboxSecurityContext {
            namespace_options: Some(node_namespaces()).into(),
            ..Default::default()
        };
        PodSandboxConfig {
            metadata: Some(PodSandboxMetadata {
                name: name.to_owned(),
                namespace: "default".to_owned(),
                uid: format!("uid-{name}"),
                ..Default::default()
            })
            .into(),
            linux: Some(LinuxPodSandboxConfig {
                cgroup_parent: format!("/kubepods/{name}"),
                security_context: Some(security).into(),
                ..Default::default()
            })
            .into(),
            ..Default::default()
        }
    }

    pub fn run(&self, name: &str, handler: &str) -> Result<String, String> {
        println!("# pod run --handler {handler:?} {name}");
        let ran = self.runtime.block_on(self.cri.run_pod_sandbox(&Self::config(name), handler));
        match ran {
            Ok(id) => {
                println!("{id}");
                Ok(id)
            }
            Err(e) => {
                println!("{e}");
                Err(e.to_string())
            }
        }
    }

    /// A container that does nothing.
    pub fn container(&self, pod: &str, id: &str, name: &str) -> String {
        println!("# pod container {pod} {name}");
        let security = LinuxContainerSecurityContext {
            namespace_options: Some(node_namespaces()).into(),
            ..Default::default()
        };
        let config = ContainerConfig {
            metadata: Some(ContainerMetadata { name: name.to_owned(), ..Default::default() })
                .into(),
            image: Some(ImageSpec { image: kit::TEST_IMAGE.to_owned(), ..Default::default() })
                .into(),
            // Ends when the node goes down, as kubelet has containers end: a sleep that is process
            // 1 would hold the reboot up.
            command: ["sh", "-c", "trap 'exit 0' TERM; while :; do sleep 1; done"]
                .map(str::to_owned)
                .to_vec(),
            linux: Some(LinuxContainerConfig {
                security_context: Some(security).into(),
                ..Default::default()
            })
            .into(),
            ..Default::default()
        };
        let made = self.runtime.block_on(async {
            let made = self.cri.create_container(id, &config, &Self::config(pod)).await?;
            self.cri.start_container(&made).await.map(|()| made)
        });
        let made = made.unwrap_or_else(|e| panic!("container {name} of {pod}: {e}"));
        println!("{made}");
        made
    }

    pub fn exec(&self, container: &str, command: &[&str]) -> String {
        let answer = self.runtime.block_on(self.cri.exec_sync(container, command)).unwrap();
        String::from_utf8_lossy(&answer.stdout).trim().to_owned()
    }

    /// Names and states of all pods.
    pub fn list(&self) -> Vec<(String, bool)> {
        println!("# pod list");
        let all =
            self.runtime.block_on(self.cri.list_pod_sandbox(PodSandboxFilter::default())).unwrap();
        let mut all: Vec<_> = all
            .into_iter()
            .map(|pod| {
                let ready = pod.state.enum_value() == Ok(PodSandboxState::SANDBOX_READY);
                (pod.metadata.unwrap_or_default().name, ready)
            })
            .collect();
        all.sort();
        for (name, ready) in &all {
            println!("{name}  {}", if *ready { "Ready" } else { "NotReady" });
        }
        all
    }

    pub fn ready(&self, name: &str) {
        eventually(&format!("{name} is ready"), || {
            let all = self.runtime.block_on(self.cri.list_pod_sandbox(PodSandboxFilter::default()));
            let all = all.map_err(|e| e.to_string())?;
            let pod = all.iter().find(|pod| pod.metadata.name == name).ok_or("no such pod")?;
            (pod.state.enum_value() == Ok(PodSandboxState::SANDBOX_READY))
                .then_some(())
                .ok_or_else(|| "not ready".to_owned())
        });
    }

    /// As kubelet does, until it succeeds: containerd waits before it connects again to a daemon
    /// that was not there.
    pub fn remove(&self, name: &str, id: &str) {
        println!("# pod remove {name}");
        eventually(&format!("{name} is removed"), || {
            let removed = self.runtime.block_on(async {
                self.cri.stop_pod_sandbox(id).await?;
                self.cri.remove_pod_sandbox(id).await
            });
            removed.map_err(|e| e.to_string())
        });
    }

    /// containerd answers.
    pub fn up(&self) {
        eventually("containerd answers", || {
            self.runtime.block_on(self.cri.version()).map(drop).map_err(|e| e.to_string())
        });
    }
}
