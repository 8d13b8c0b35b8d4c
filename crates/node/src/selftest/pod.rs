//! One pod from its start to its end, with the time of each step.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use protobuf::MessageField;

use super::SelftestError;
use crate::client;
use crate::shell_command;
use base::config::{CONTAINERD_NAMESPACE, CRI_PLUGIN_DIR, Config};
use base::error::{IoContext as _, StepError, StepErrors, gone};
use containerd_api::cri::CriClient;
use containerd_api::protos::cri::{
    LinuxPodSandboxConfig, LinuxSandboxSecurityContext, NamespaceMode, NamespaceOption,
    PodSandboxConfig, PodSandboxMetadata,
};
use containerd_api::protos::cri_runtime::{
    ContainerConfig, ContainerMetadata, ImageSpec, LinuxContainerConfig,
    LinuxContainerSecurityContext, PodSandboxStatusResponse,
};

/// The program in the image.
pub(super) const PROGRAM_NAME: &str = "selftest";

/// The pods' namespace of Kubernetes, which need not exist.
const NAMESPACE: &str = "pause-sandboxer-selftest";

/// Timeout for a line to appear in the container's log.
const LOGGED: Duration = Duration::from_secs(10);

/// Timeout of the command that restarts the sandboxer.
const RESTARTED: Duration = Duration::from_secs(120);

/// Seconds from SIGTERM to SIGKILL.
const GRACE: u32 = 10;

/// A step and its time.
pub(super) type Timing = (&'static str, Duration);

/// The parameters of a test pod.
#[derive(Clone, Debug)]
pub(super) struct PodPlan {
    /// The runtime handler.
    pub(super) handler: String,
    /// Whether the daemon makes its pods.
    pub(super) has_daemon: bool,
    /// Whether runc makes its cgroups by systemd.
    pub(super) systemd_cgroup: bool,
    /// Where runc has the state of its container.
    pub(super) runc_root: PathBuf,
    /// Whether it has a network of its own; otherwise the node's.
    pub(super) own_network: bool,
    /// The image of its container.
    pub(super) image: String,
    /// The command of the shell that restarts the sandboxer under it.
    pub(super) restart: Option<String>,
}

/// A pod of the test, with the parts of it that exist.
#[derive(Debug)]
pub(super) struct TestPod {
    cri: CriClient,
    plan: PodPlan,
    uid: String,
    logs: PathBuf,
    sandbox: Option<String>,
    container: Option<String>,
    network: Option<PathBuf>,
    /// The step that was begun last.
    step: &'static str,
    timings: Vec<Timing>,
}

impl TestPod {
    /// A pod with a name that no other has.
    ///
    /// # Errors
    /// The kernel has no random number.
    pub(super) fn new(cri: CriClient, plan: PodPlan) -> Result<Self, StepError> {
        let uid = super::unique()?;
        let logs = PathBuf::from(format!("/run/{NAMESPACE}-{uid}"));
        let (sandbox, container, network) = (None, None, None);
        let (step, timings) = ("make the log directory", Vec::new());
        Ok(Self { cri, plan, uid, logs, sandbox, container, network, step, timings })
    }

    fn namespaces(&self) -> NamespaceOption {
        let network = if self.plan.own_network { NamespaceMode::POD } else { NamespaceMode::NODE };
        NamespaceOption {
            network: network.into(),
            pid: NamespaceMode::CONTAINER.into(),
            ..Default::default()
        }
    }

    fn config(&self) -> PodSandboxConfig {
        let metadata = PodSandboxMetadata {
            name: format!("selftest-{}", self.uid),
            uid: self.uid.clone(),
            namespace: NAMESPACE.to_owned(),
            ..Default::default()
        };
        let security = LinuxSandboxSecurityContext {
            namespace_options: MessageField::some(self.namespaces()),
            ..Default::default()
        };
        // Both are there: the test makes no parent that would be left.
        let parent = if self.plan.systemd_cgroup { "/system.slice" } else { "/" };
        PodSandboxConfig {
            metadata: MessageField::some(metadata),
            log_directory: self.logs.display().to_string(),
            labels: HashMap::from([("app".to_owned(), NAMESPACE.to_owned())]),
            linux: MessageField::some(LinuxPodSandboxConfig {
                cgroup_parent: parent.to_owned(),
                security_context: MessageField::some(security),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    fn container_config(&self) -> ContainerConfig {
        let security = LinuxContainerSecurityContext {
            namespace_options: MessageField::some(self.namespaces()),
            ..Default::default()
        };
        let image = ImageSpec { image: self.plan.image.clone(), ..Default::default() };
        ContainerConfig {
            metadata: MessageField::some(ContainerMetadata {
                name: "main".to_owned(),
                ..Default::default()
            }),
            image: MessageField::some(image),
            command: vec![format!("/{PROGRAM_NAME}")],
            args: vec![format!("{}\n", self.uid), "wait".to_owned()],
            log_path: "main.log".to_owned(),
            linux: MessageField::some(LinuxContainerConfig {
                security_context: MessageField::some(security),
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    async fn step<T, E>(
        &mut self,
        name: &'static str,
        work: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        self.step = name;
        let begun = Instant::now();
        let done = work.await;
        self.timings.push((name, begun.elapsed()));
        done
    }

    /// All steps; the times of those that were made are kept also if one fails.
    ///
    /// # Errors
    /// The step that failed.
    pub(super) async fn run(&mut self) -> Result<(), SelftestError> {
        let cri = self.cri.clone();
        std::fs::create_dir(&self.logs).step_at("make directory", &self.logs)?;
        let config = self.config();
        let handler = self.plan.handler.clone();
        let id = self.step("run the sandbox", cri.run_pod(&config, &handler)).await;
        let id = id.map_err(|step| with_network_option(step, self.plan.own_network))?;
        self.sandbox = Some(id.clone());
        let status = cri.pod_status(&id).await?;
        self.network = network_of(&status);
        let container = self.container_config();
        let created = cri.create_container(&id, container, &config);
        let main = self.step("create the container", created).await?;
        self.container = Some(main.clone());
        self.step("start the container", cri.start_container(&main)).await?;
        let (log, uid) = (self.logs.join("main.log"), self.uid.clone());
        self.step("read its log", logged(&log, &uid)).await?;
        self.step("run a command in it", executes(&cri, &main)).await?;
        if let Some(command) = self.plan.restart.clone() {
            self.step("restart the sandboxer", restarted(&command)).await?;
            self.step("run a command again", executes(&cri, &main)).await?;
        }
        self.step("stop the container", cri.stop_container(&main, GRACE)).await?;
        self.step("remove the container", cri.remove_container(&main)).await?;
        self.step("stop the sandbox", cri.stop_pod(&id)).await?;
        self.step("remove the sandbox", cri.remove_pod(&id)).await?;
        Ok(())
    }

    /// Removes what there is of it, also if a call that was given up has made it.
    ///
    /// # Errors
    /// The steps that failed.
    pub(super) async fn clean_up(&mut self, config: &Config) -> Result<(), StepErrors> {
        let mut steps = StepErrors::default();
        match self.cri.pods().await {
            Ok(mut pods) => {
                pods.retain(|pod| pod.metadata.uid == self.uid);
                for pod in &pods {
                    self.sandbox = Some(pod.id.clone());
                    if let (None, Ok(status)) = (&self.network, self.cri.pod_status(&pod.id).await)
                    {
                        self.network = network_of(&status);
                    }
                    steps.check(self.cri.stop_pod(&pod.id).await);
                    steps.check(self.cri.remove_pod(&pod.id).await);
                }
                if pods.is_empty() && self.plan.has_daemon {
                    steps.check(self.remove_forgotten(config).await);
                }
            }
            Err(step) => steps.check(Err(step)),
        }
        let removed = gone(std::fs::remove_dir_all(&self.logs));
        steps.check(removed.step_at("remove directory", &self.logs));
        steps.into_result()
    }

    /// Removes its sandbox where CRI has forgotten it: after a failure between Create and Start,
    /// such as that of the pull of a pause image, CRI makes no call of the sandboxer.
    async fn remove_forgotten(&mut self, config: &Config) -> Result<(), StepError> {
        let all = client::list(config).await.map_err(std::io::Error::other);
        let all = all.step_at("list sandboxes of daemon", &config.socket)?;
        for sandbox in all.into_iter().filter(|sandbox| sandbox.uid == self.uid) {
            client::remove_sandbox(config, &sandbox.id).await?;
            self.sandbox = Some(sandbox.id);
        }
        Ok(())
    }

    /// Whether another program, such as kubelet, has stopped it.
    pub(super) async fn was_ended(&self) -> bool {
        use containerd_api::protos::cri::PodSandboxState::SANDBOX_READY;
        let (Some(id), Ok(pods)) = (&self.sandbox, self.cri.pods().await) else { return false };
        !pods.iter().any(|pod| pod.id == *id && pod.state.enum_value() == Ok(SANDBOX_READY))
    }

    /// The step that was begun last.
    pub(super) fn last_step(&self) -> &'static str {
        self.step
    }

    /// The times of its steps.
    pub(super) fn timings(&self) -> &[Timing] {
        &self.timings
    }

    /// The words that identify its resources, and the paths of its files.
    pub(super) fn identity(&self, config: &Config) -> (Vec<String>, Vec<PathBuf>) {
        let ids: Vec<String> =
            [&self.sandbox, &self.container].into_iter().flatten().cloned().collect();
        let mut paths: Vec<PathBuf> = self.network.iter().chain([&self.logs]).cloned().collect();
        for id in &ids {
            for directory in [&config.containerd_root, &config.containerd_state] {
                let cri = directory.join(CRI_PLUGIN_DIR);
                paths.extend([cri.join("sandboxes").join(id), cri.join("containers").join(id)]);
            }
            let tasks = Path::new("io.containerd.runtime.v2.task");
            for directory in [
                config.containerd_root.join(tasks).join(CONTAINERD_NAMESPACE),
                config.containerd_state.join(tasks).join(CONTAINERD_NAMESPACE),
                self.plan.runc_root.join(CONTAINERD_NAMESPACE),
                config.records(),
            ] {
                paths.push(directory.join(id));
            }
        }
        (ids.into_iter().chain([self.uid.clone()]).collect(), paths)
    }
}

/// Why the sandbox does not run, with the option that avoids a network that fails: the test's pod
/// has no object in Kubernetes, and some plugins need it.
fn with_network_option(step: StepError, own_network: bool) -> SelftestError {
    // containerd's words (internal/cri/server/sandbox_run.go).
    if !own_network || !step.to_string().contains("setup network for sandbox") {
        return step.into();
    }
    SelftestError::from(format!(
        "{step}; if the network plugin needs the Pod object, which the test does not create, run \
         `pause-sandboxer selftest --host-network`"
    ))
}

/// The pod's network namespace in CRI's verbose status.
fn network_of(status: &PodSandboxStatusResponse) -> Option<PathBuf> {
    let info: serde_json::Value = serde_json::from_str(status.info.get("info")?).ok()?;
    let namespaces = info.pointer("/runtimeSpec/linux/namespaces")?.as_array()?;
    let network = namespaces.iter().find(|namespace| namespace["type"] == "network")?;
    Some(PathBuf::from(network["path"].as_str()?)).filter(|path| !path.starts_with("/proc"))
}

/// Waits until the log has the line.
async fn logged(log: &Path, text: &str) -> Result<(), StepError> {
    let begun = Instant::now();
    loop {
        let read = tokio::fs::read_to_string(log).await.unwrap_or_default();
        // CRI's log format: time, stream, tag, text.
        if read.lines().any(|line| line.ends_with(&format!(" stdout F {text}"))) {
            return Ok(());
        }
        if begun.elapsed() > LOGGED {
            let reason = std::io::Error::other(format!("the line is not there: {read:?}"));
            return Err(StepError::at("read log", log, reason));
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Runs the program in the container.
async fn executes(cri: &CriClient, id: &str) -> Result<(), SelftestError> {
    const WORD: &str = "a word";
    let answer = cri.exec(id, &[&format!("/{PROGRAM_NAME}"), WORD]).await?;
    if answer.exit_code == 0 && answer.stdout == WORD.as_bytes() {
        return Ok(());
    }
    Err(SelftestError::from(format!(
        "a command in the container ended with {} and printed {:?}{:?}",
        answer.exit_code,
        String::from_utf8_lossy(&answer.stdout),
        String::from_utf8_lossy(&answer.stderr)
    )))
}

async fn restarted(command: &str) -> Result<(), SelftestError> {
    shell_command::run(command, RESTARTED).await.map_err(SelftestError::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_that_fails_names_the_option() {
        let shown = |reason: &str, own_network| {
            let step = StepError::new("RunPodSandbox", std::io::Error::other(reason.to_owned()));
            with_network_option(step, own_network).to_string()
        };
        let calico = "rpc error: code = Unknown desc = failed to setup network for sandbox \
            \"ab\": plugin type=\"calico\" failed (add): pods \"selftest-1\" not found";
        assert!(shown(calico, true).contains("; if the network plugin needs the Pod object"));
        for (reason, own_network) in [(calico, false), ("no space left on device", true)] {
            assert_eq!(shown(reason, own_network), format!("RunPodSandbox: {reason}"));
        }
    }

    #[test]
    fn the_network_namespace_is_in_the_verbose_status() {
        let info = r#"{"runtimeSpec":{"linux":{"namespaces":[{"type":"pid"},
            {"type":"network","path":"/run/netns/cni-1"}]}}}"#;
        let netns = |info: &str| {
            let info = HashMap::from([("info".to_owned(), info.to_owned())]);
            network_of(&PodSandboxStatusResponse { info, ..Default::default() })
        };
        assert_eq!(netns(info), Some("/run/netns/cni-1".into()));
        assert_eq!(netns(&info.replace("/run/netns", "/proc/1/ns")), None);
        assert_eq!(netns("{}"), None);
        assert_eq!(netns(""), None);
        assert_eq!(network_of(&PodSandboxStatusResponse::default()), None);
    }
}
