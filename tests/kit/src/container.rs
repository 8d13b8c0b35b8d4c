//! Containers of a pod: described, run, asked, removed.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::config::NAMESPACE;
use crate::cri::api;
use crate::image::TEST_IMAGE;
use crate::node::Node;
use crate::until;

/// The wanted config of a container.
#[derive(Clone, Debug)]
pub struct ContainerSpec {
    config: api::ContainerConfig,
}

impl ContainerSpec {
    /// A container of the test image that runs `command`.
    pub fn new(name: &str, command: &[&str]) -> Self {
        let config = api::ContainerConfig {
            metadata: Some(api::ContainerMetadata { name: name.to_owned(), ..Default::default() })
                .into(),
            image: Some(api::ImageSpec { image: TEST_IMAGE.to_owned(), ..Default::default() })
                .into(),
            command: command.iter().map(|word| (*word).to_owned()).collect(),
            log_path: format!("{name}.log"),
            ..Default::default()
        };
        Self { config }
    }

    /// A container that runs a shell script.
    pub fn sh(name: &str, script: &str) -> Self {
        Self::new(name, &["sh", "-c", script])
    }

    /// A container that does nothing for an hour.
    pub fn sleeping(name: &str) -> Self {
        Self::new(name, &["sleep", "3600"])
    }

    /// The how-manyeth container of this name in its pod.
    #[must_use]
    pub fn attempt(mut self, attempt: u32) -> Self {
        self.config.metadata.mut_or_insert_default().attempt = attempt;
        self
    }

    /// With another capability, by its name without `CAP_`.
    #[must_use]
    pub fn capability(mut self, name: &str) -> Self {
        let security =
            self.config.linux.mut_or_insert_default().security_context.mut_or_insert_default();
        security.capabilities.mut_or_insert_default().add_capabilities.push(name.to_owned());
        self
    }

    /// With any other change of its config; its namespaces are the pod's all the same.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut api::ContainerConfig)) -> Self {
        change(&mut self.config);
        self
    }

    /// Privileged.
    #[must_use]
    pub fn privileged(mut self) -> Self {
        self.config
            .linux
            .mut_or_insert_default()
            .security_context
            .mut_or_insert_default()
            .privileged = true;
        self
    }

    /// The config, with the namespaces that the pod asked for.
    pub(crate) fn config(mut self, pod: &api::PodSandboxConfig) -> api::ContainerConfig {
        if let Some(security) = pod.linux.as_ref().and_then(|linux| linux.security_context.as_ref())
        {
            let ours =
                self.config.linux.mut_or_insert_default().security_context.mut_or_insert_default();
            ours.namespace_options = security.namespace_options.clone();
        }
        self.config
    }
}

/// A container that was started.
#[derive(Clone, Debug)]
pub struct Container {
    pub(crate) node: Arc<Node>,
    pub(crate) id: String,
    pub(crate) log: PathBuf,
}

impl Container {
    /// The container id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The file of its log.
    pub fn log_path(&self) -> &Path {
        &self.log
    }

    /// Its bundle, which has the config of the runtime.
    pub fn bundle(&self) -> PathBuf {
        let tasks = self.node.layout().state().join("io.containerd.runtime.v2.task");
        tasks.join(NAMESPACE).join(&self.id)
    }

    /// Runs a command in it.
    ///
    /// # Errors
    /// CRI's; a command that fails is none.
    pub async fn exec(&self, command: &[&str]) -> Result<api::ExecSyncResponse> {
        self.node
            .cri()
            .exec_sync(&self.id, command)
            .await
            .with_context(|| format!("ExecSync {command:?}"))
    }

    /// Runs a shell script in it and answers its output.
    ///
    /// # Errors
    /// CRI's, or the script failed.
    pub async fn sh(&self, script: &str) -> Result<String> {
        let answer = self.exec(&["sh", "-c", script]).await?;
        let (out, err) =
            (String::from_utf8_lossy(&answer.stdout), String::from_utf8_lossy(&answer.stderr));
        ensure!(answer.exit_code == 0, "`{script}` ended with {}: {out}{err}", answer.exit_code);
        Ok(out.into_owned())
    }

    /// Its status.
    ///
    /// # Errors
    /// CRI's.
    pub async fn status(&self) -> Result<api::ContainerStatus> {
        Ok(self.node.cri().container_status(&self.id).await?)
    }

    /// Waits until it has ended; its exit code.
    ///
    /// # Errors
    /// It has not within `limit`.
    pub async fn exited(&self, limit: Duration) -> Result<i32> {
        until("the container has ended", limit, async || {
            let status = self.status().await?;
            ensure!(
                status.state.enum_value() == Ok(api::ContainerState::CONTAINER_EXITED),
                "it is {:?}",
                status.state
            );
            Ok(status.exit_code)
        })
        .await
    }

    /// The lines of its log, each with its stream: `stdout` or `stderr`.
    ///
    /// # Errors
    /// The file cannot be read, or a line is not in CRI's format: time, stream, `F` or `P`, text.
    pub fn log(&self) -> Result<Vec<(String, String)>> {
        let text = std::fs::read_to_string(&self.log)
            .with_context(|| format!("read {}", self.log.display()))?;
        text.lines()
            .map(|line| {
                let mut words = line.splitn(4, ' ').skip(1);
                let (stream, _tag, text) = (words.next(), words.next(), words.next());
                let stream = stream.with_context(|| format!("line of a log: {line:?}"))?;
                Ok((stream.to_owned(), text.unwrap_or_default().to_owned()))
            })
            .collect()
    }

    /// Kills it.
    ///
    /// # Errors
    /// CRI's.
    pub async fn stop(&self) -> Result<()> {
        self.node.cri().stop_container(&self.id, Duration::ZERO).await.context("StopContainer")
    }

    /// Removes it.
    ///
    /// # Errors
    /// CRI's.
    pub async fn remove(&self) -> Result<()> {
        self.node.cri().remove_container(&self.id).await.context("RemoveContainer")
    }
}
