//! A client of containerd's CRI socket.

use std::path::PathBuf;
use std::time::Duration;

use protobuf::Message;

/// CRI's messages.
#[allow(ambiguous_glob_reexports, reason = "both have a `file_descriptor`, which no test uses")]
pub mod api {
    pub use containerd_api::protos::cri::*;
    pub use containerd_api::protos::cri_runtime::*;
}

use crate::grpc::{AnswerStream, Client, INTERNAL, Status};

/// The default deadline of a call; more than any call of a sane node takes.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// The runtime and image services of one containerd.
#[derive(Debug)]
pub struct Cri {
    client: Client,
}

impl Cri {
    /// A client of the CRI server at `socket`.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self { client: Client::new(socket) }
    }

    /// `RunPodSandbox`: the new sandbox's id.
    ///
    /// # Errors
    /// The server's status.
    pub async fn run_pod_sandbox(
        &self,
        config: &api::PodSandboxConfig,
        handler: &str,
    ) -> Result<String, Status> {
        self.run_pod_sandbox_within(config, handler, DEADLINE).await
    }

    /// `RunPodSandbox` by a caller that gives up after `deadline`.
    ///
    /// # Errors
    /// The server's status, or DEADLINE_EXCEEDED.
    pub async fn run_pod_sandbox_within(
        &self,
        config: &api::PodSandboxConfig,
        handler: &str,
        deadline: Duration,
    ) -> Result<String, Status> {
        let request = api::RunPodSandboxRequest {
            config: Some(config.clone()).into(),
            runtime_handler: handler.to_owned(),
            ..Default::default()
        };
        let answer: api::RunPodSandboxResponse =
            self.call("RunPodSandbox", &request, deadline).await?;
        Ok(answer.pod_sandbox_id)
    }

    /// `StopPodSandbox`.
    ///
    /// # Errors
    /// The server's status.
    pub async fn stop_pod_sandbox(&self, id: &str) -> Result<(), Status> {
        let request =
            api::StopPodSandboxRequest { pod_sandbox_id: id.to_owned(), ..Default::default() };
        self.call::<api::StopPodSandboxResponse>("StopPodSandbox", &request, DEADLINE)
            .await
            .map(drop)
    }

    /// `RemovePodSandbox`.
    ///
    /// # Errors
    /// The server's status.
    pub async fn remove_pod_sandbox(&self, id: &str) -> Result<(), Status> {
        let request =
            api::RemovePodSandboxRequest { pod_sandbox_id: id.to_owned(), ..Default::default() };
        self.call::<api::RemovePodSandboxResponse>("RemovePodSandbox", &request, DEADLINE)
            .await
            .map(drop)
    }

    /// `PodSandboxStatus`.
    ///
    /// # Errors
    /// The server's status.
    pub async fn pod_sandbox_status(
        &self,
        id: &str,
        verbose: bool,
    ) -> Result<api::PodSandboxStatusResponse, Status> {
        let request = api::PodSandboxStatusRequest {
            pod_sandbox_id: id.to_owned(),
            verbose,
            ..Default::default()
        };
        self.call("PodSandboxStatus", &request, DEADLINE).await
    }

    /// `ListPodSandbox`.
    ///
    /// # Errors
    /// The server's status.
    pub async fn list_pod_sandbox(
        &self,
        filter: api::PodSandboxFilter,
    ) -> Result<Vec<api::PodSandbox>, Status> {
        let request =
            api::ListPodSandboxRequest { filter: Some(filter).into(), ..Default::default() };
        let answer: api::ListPodSandboxResponse =
            self.call("ListPodSandbox", &request, DEADLINE).await?;
        Ok(answer.items)
    }

    /// `PodSandboxStats`.
    ///
    /// # Errors
    /// The server's status.
    pub async fn pod_sandbox_stats(&self, id: &str) -> Result<api::PodSandboxStats, Status> {
        let request =
            api::PodSandboxStatsRequest { pod_sandbox_id: id.to_owned(), ..Default::default() };
        let answer: api::PodSandboxStatsResponse =
            self.call("PodSandboxStats", &request, DEADLINE).await?;
        Ok(answer.stats.unwrap_or_default())
    }

    /// `ListPodSandboxStats` of one pod, or of all with an empty id.
    ///
    /// # Errors
    /// The server's status.
    pub async fn list_pod_sandbox_stats(
        &self,
        id: &str,
    ) -> Result<Vec<api::PodSandboxStats>, Status> {
        let filter = api::PodSandboxStatsFilter { id: id.to_owned(), ..Default::default() };
        let request =
            api::ListPodSandboxStatsRequest { filter: Some(filter).into(), ..Default::default() };
        let answer: api::ListPodSandboxStatsResponse =
            self.call("ListPodSandboxStats", &request, DEADLINE).await?;
        Ok(answer.stats)
    }

    /// `PortForward`: the URL of the stream.
    ///
    /// # Errors
    /// The server's status.
    pub async fn port_forward(&self, id: &str, port: u16) -> Result<String, Status> {
        let request = api::PortForwardRequest {
            pod_sandbox_id: id.to_owned(),
            port: vec![i32::from(port)],
            ..Default::default()
        };
        let answer: api::PortForwardResponse = self.call("PortForward", &request, DEADLINE).await?;
        Ok(answer.url)
    }

    /// `CreateContainer`: the new container's id.
    ///
    /// # Errors
    /// The server's status.
    pub async fn create_container(
        &self,
        sandbox: &str,
        config: &api::ContainerConfig,
        sandbox_config: &api::PodSandboxConfig,
    ) -> Result<String, Status> {
        let request = api::CreateContainerRequest {
            pod_sandbox_id: sandbox.to_owned(),
            config: Some(config.clone()).into(),
            sandbox_config: Some(sandbox_config.clone()).into(),
            ..Default::default()
        };
        let answer: api::CreateContainerResponse =
            self.call("CreateContainer", &request, DEADLINE).await?;
        Ok(answer.container_id)
    }

    /// `StartContainer`.
    ///
    /// # Errors
    /// The server's status.
    pub async fn start_container(&self, id: &str) -> Result<(), Status> {
        let request =
            api::StartContainerRequest { container_id: id.to_owned(), ..Default::default() };
        self.call::<api::StartContainerResponse>("StartContainer", &request, DEADLINE)
            .await
            .map(drop)
    }

    /// `StopContainer`; after `grace` whole seconds it is killed.
    ///
    /// # Errors
    /// The server's status.
    pub async fn stop_container(&self, id: &str, grace: Duration) -> Result<(), Status> {
        let timeout = i64::try_from(grace.as_secs()).unwrap_or(i64::MAX);
        let request = api::StopContainerRequest {
            container_id: id.to_owned(),
            timeout,
            ..Default::default()
        };
        self.call::<api::StopContainerResponse>("StopContainer", &request, DEADLINE + grace)
            .await
            .map(drop)
    }

    /// `RemoveContainer`.
    ///
    /// # Errors
    /// The server's status.
    pub async fn remove_container(&self, id: &str) -> Result<(), Status> {
        let request =
            api::RemoveContainerRequest { container_id: id.to_owned(), ..Default::default() };
        self.call::<api::RemoveContainerResponse>("RemoveContainer", &request, DEADLINE)
            .await
            .map(drop)
    }

    /// `ContainerStatus`.
    ///
    /// # Errors
    /// The server's status.
    pub async fn container_status(&self, id: &str) -> Result<api::ContainerStatus, Status> {
        let request =
            api::ContainerStatusRequest { container_id: id.to_owned(), ..Default::default() };
        let answer: api::ContainerStatusResponse =
            self.call("ContainerStatus", &request, DEADLINE).await?;
        Ok(answer.status.unwrap_or_default())
    }

    /// `ListContainers`.
    ///
    /// # Errors
    /// The server's status.
    pub async fn list_containers(
        &self,
        filter: api::ContainerFilter,
    ) -> Result<Vec<api::Container>, Status> {
        let request =
            api::ListContainersRequest { filter: Some(filter).into(), ..Default::default() };
        let answer: api::ListContainersResponse =
            self.call("ListContainers", &request, DEADLINE).await?;
        Ok(answer.containers)
    }

    /// `ExecSync`.
    ///
    /// # Errors
    /// The server's status.
    pub async fn exec_sync(
        &self,
        id: &str,
        command: &[&str],
    ) -> Result<api::ExecSyncResponse, Status> {
        self.exec_sync_within(id, command, 30).await
    }

    /// `ExecSync` of a command that may run for this many seconds.
    ///
    /// # Errors
    /// The server's status.
    pub async fn exec_sync_within(
        &self,
        id: &str,
        command: &[&str],
        timeout: i64,
    ) -> Result<api::ExecSyncResponse, Status> {
        let request = api::ExecSyncRequest {
            container_id: id.to_owned(),
            cmd: command.iter().map(|word| (*word).to_owned()).collect(),
            timeout,
            ..Default::default()
        };
        self.call("ExecSync", &request, DEADLINE).await
    }

    /// `GetContainerEvents`; each answer is an encoded `ContainerEventResponse`.
    ///
    /// # Errors
    /// UNAVAILABLE when there is no connection.
    pub(crate) async fn container_events(&self) -> Result<AnswerStream, Status> {
        self.client.stream("runtime.v1.RuntimeService/GetContainerEvents", Vec::new()).await
    }

    /// `Status`: the conditions of the runtime.
    ///
    /// # Errors
    /// The server's status.
    pub async fn runtime_conditions(&self) -> Result<Vec<api::RuntimeCondition>, Status> {
        let answer: api::StatusResponse =
            self.call("Status", &api::StatusRequest::new(), DEADLINE).await?;
        Ok(answer.status.unwrap_or_default().conditions)
    }

    /// `Version`.
    ///
    /// # Errors
    /// The server's status.
    pub async fn version(&self) -> Result<api::VersionResponse, Status> {
        self.call("Version", &api::VersionRequest::new(), DEADLINE).await
    }

    /// `RemoveImage`, by any of its names.
    ///
    /// # Errors
    /// The gRPC status.
    pub async fn remove_image(&self, name: &str) -> Result<(), Status> {
        let spec = api::ImageSpec { image: name.to_owned(), ..Default::default() };
        let request = api::RemoveImageRequest { image: Some(spec).into(), ..Default::default() };
        self.client
            .unary("runtime.v1.ImageService/RemoveImage", encode(&request)?, Some(DEADLINE))
            .await
            .map(drop)
    }

    /// `ImageStatus`: the image's id, if there is one of this name.
    ///
    /// # Errors
    /// The server's status.
    pub async fn image_id(&self, name: &str) -> Result<Option<String>, Status> {
        let spec = api::ImageSpec { image: name.to_owned(), ..Default::default() };
        let request = api::ImageStatusRequest { image: Some(spec).into(), ..Default::default() };
        let body = self
            .client
            .unary("runtime.v1.ImageService/ImageStatus", encode(&request)?, Some(DEADLINE))
            .await?;
        Ok(decode::<api::ImageStatusResponse>(&body)?.image.into_option().map(|image| image.id))
    }

    async fn call<A: Message>(
        &self,
        method: &str,
        request: &impl Message,
        deadline: Duration,
    ) -> Result<A, Status> {
        let path = format!("runtime.v1.RuntimeService/{method}");
        decode(&self.client.unary(&path, encode(request)?, Some(deadline)).await?)
    }
}

pub(crate) fn encode(message: &impl Message) -> Result<Vec<u8>, Status> {
    message.write_to_bytes().map_err(|e| Status::new(INTERNAL, format!("encode the request: {e}")))
}

pub(crate) fn decode<M: Message>(bytes: &[u8]) -> Result<M, Status> {
    M::parse_from_bytes(bytes).map_err(|e| Status::new(INTERNAL, format!("decode the answer: {e}")))
}
