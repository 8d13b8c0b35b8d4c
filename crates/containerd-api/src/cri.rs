//! CRI of a running containerd, as the commands for operators call it.

use std::path::PathBuf;
use std::time::Duration;

use protobuf::Message;
use protobuf::MessageField;
use protobuf::well_known_types::empty::Empty;

use super::framing::Code;
use super::grpc::GrpcEndpoint;
use crate::protos::cri::PodSandboxConfig;
use crate::protos::cri_runtime::{
    ContainerConfig, CreateContainerRequest, CreateContainerResponse, ExecSyncRequest,
    ExecSyncResponse, ImageSpec, ImageStatusRequest, ImageStatusResponse, ListPodSandboxRequest,
    ListPodSandboxResponse, PodSandbox, PodSandboxStatusRequest, PodSandboxStatusResponse,
    RemoveContainerRequest, RemoveImageRequest, RemovePodSandboxRequest, RunPodSandboxRequest,
    RunPodSandboxResponse, StartContainerRequest, StatusRequest, StatusResponse,
    StopContainerRequest, StopPodSandboxRequest,
};
use base::error::StepError;

const RUNTIME: &str = "runtime.v1.RuntimeService";
const IMAGE: &str = "runtime.v1.ImageService";

/// Timeout of a call that makes or removes something.
const WORK: Duration = Duration::from_secs(60);

/// Timeout of a query.
const QUERY: Duration = Duration::from_secs(10);

/// CRI's services.
#[derive(Clone, Debug)]
pub struct CriClient {
    endpoint: GrpcEndpoint,
}

impl CriClient {
    /// CRI of the containerd that listens at `address`.
    pub fn new(address: impl Into<PathBuf>) -> Self {
        // CRI chooses its namespace itself.
        Self { endpoint: GrpcEndpoint::new(address, "") }
    }

    async fn call<A: Message>(
        &self,
        what: &'static str,
        method: &str,
        request: &impl Message,
        within: Duration,
    ) -> Result<A, StepError> {
        Ok(self.endpoint.call(what, method, request, within).await?)
    }

    async fn runtime<A: Message>(
        &self,
        what: &'static str,
        method: &str,
        request: &impl Message,
        within: Duration,
    ) -> Result<A, StepError> {
        self.call(what, &format!("{RUNTIME}/{method}"), request, within).await
    }

    /// The runtime's conditions and handlers.
    ///
    /// # Errors
    /// The call failed.
    pub async fn status(&self) -> Result<StatusResponse, StepError> {
        self.runtime("query CRI for its status", "Status", &StatusRequest::new(), QUERY).await
    }

    /// Whether containerd serves CRI; false if it runs without that plugin.
    ///
    /// # Errors
    /// CRI does not answer, or not yet.
    pub async fn is_served(&self) -> Result<bool, StepError> {
        let (method, request) = (format!("{RUNTIME}/Status"), StatusRequest::new());
        let what = "query CRI for its status";
        match self.endpoint.call::<StatusResponse>(what, &method, &request, QUERY).await {
            Ok(_) => Ok(true),
            Err(e) if e.is(Code::UNIMPLEMENTED) => Ok(false),
            Err(e) => Err(e.step()),
        }
    }

    /// The names of the runtime handlers in an answer of [`CriClient::status`]; empty if containerd
    /// does not name them.
    pub fn handlers_of(status: StatusResponse) -> Vec<String> {
        status.runtime_handlers.into_iter().map(|handler| handler.name).collect()
    }

    /// All pods' sandboxes.
    ///
    /// # Errors
    /// The call failed.
    pub async fn pods(&self) -> Result<Vec<PodSandbox>, StepError> {
        let request = ListPodSandboxRequest::new();
        let answer: ListPodSandboxResponse =
            self.runtime("list pods of CRI", "ListPodSandbox", &request, QUERY).await?;
        Ok(answer.items)
    }

    /// Runs a pod's sandbox; its id.
    ///
    /// # Errors
    /// The call failed.
    pub async fn run_pod(
        &self,
        config: &PodSandboxConfig,
        handler: &str,
    ) -> Result<String, StepError> {
        let request = RunPodSandboxRequest {
            config: MessageField::some(config.clone()),
            runtime_handler: handler.to_owned(),
            ..Default::default()
        };
        let answer: RunPodSandboxResponse =
            self.runtime("run pod", "RunPodSandbox", &request, WORK).await?;
        Ok(answer.pod_sandbox_id)
    }

    /// State and details of a pod's sandbox.
    ///
    /// # Errors
    /// The call failed.
    pub async fn pod_status(&self, id: &str) -> Result<PodSandboxStatusResponse, StepError> {
        let request = PodSandboxStatusRequest {
            pod_sandbox_id: id.to_owned(),
            verbose: true,
            ..Default::default()
        };
        self.runtime("query status of pod", "PodSandboxStatus", &request, QUERY).await
    }

    /// Stops a pod's sandbox.
    ///
    /// # Errors
    /// The call failed.
    pub async fn stop_pod(&self, id: &str) -> Result<(), StepError> {
        let request = StopPodSandboxRequest { pod_sandbox_id: id.to_owned(), ..Default::default() };
        self.runtime::<Empty>("stop pod", "StopPodSandbox", &request, WORK).await.map(drop)
    }

    /// Removes a pod's sandbox and its containers.
    ///
    /// # Errors
    /// The call failed.
    pub async fn remove_pod(&self, id: &str) -> Result<(), StepError> {
        let request =
            RemovePodSandboxRequest { pod_sandbox_id: id.to_owned(), ..Default::default() };
        self.runtime::<Empty>("remove pod", "RemovePodSandbox", &request, WORK).await.map(drop)
    }

    /// Creates a container of a pod; its id.
    ///
    /// # Errors
    /// The call failed.
    pub async fn create_container(
        &self,
        pod: &str,
        config: ContainerConfig,
        pod_config: &PodSandboxConfig,
    ) -> Result<String, StepError> {
        let request = CreateContainerRequest {
            pod_sandbox_id: pod.to_owned(),
            config: MessageField::some(config),
            sandbox_config: MessageField::some(pod_config.clone()),
            ..Default::default()
        };
        let answer: CreateContainerResponse =
            self.runtime("create container", "CreateContainer", &request, WORK).await?;
        Ok(answer.container_id)
    }

    /// Starts a container.
    ///
    /// # Errors
    /// The call failed.
    pub async fn start_container(&self, id: &str) -> Result<(), StepError> {
        let request = StartContainerRequest { container_id: id.to_owned(), ..Default::default() };
        self.runtime::<Empty>("start container", "StartContainer", &request, WORK).await.map(drop)
    }

    /// Stops a container: SIGTERM, and SIGKILL after `grace` seconds.
    ///
    /// # Errors
    /// The call failed.
    pub async fn stop_container(&self, id: &str, grace: u32) -> Result<(), StepError> {
        let request = StopContainerRequest {
            container_id: id.to_owned(),
            timeout: grace.into(),
            ..Default::default()
        };
        self.runtime::<Empty>("stop container", "StopContainer", &request, WORK).await.map(drop)
    }

    /// Removes a container.
    ///
    /// # Errors
    /// The call failed.
    pub async fn remove_container(&self, id: &str) -> Result<(), StepError> {
        let request = RemoveContainerRequest { container_id: id.to_owned(), ..Default::default() };
        self.runtime::<Empty>("remove container", "RemoveContainer", &request, WORK).await.map(drop)
    }

    /// Runs a command in a container; its output and exit code.
    ///
    /// # Errors
    /// The call failed.
    pub async fn exec(&self, id: &str, command: &[&str]) -> Result<ExecSyncResponse, StepError> {
        let request = ExecSyncRequest {
            container_id: id.to_owned(),
            cmd: command.iter().map(|word| (*word).to_owned()).collect(),
            timeout: 20,
            ..Default::default()
        };
        self.runtime("run command in container", "ExecSync", &request, WORK).await
    }

    /// Whether CRI knows an image, and has pinned it.
    ///
    /// # Errors
    /// The call failed.
    pub async fn image(&self, name: &str) -> Result<Option<bool>, StepError> {
        let method = format!("{IMAGE}/ImageStatus");
        let request = ImageStatusRequest { image: image(name), ..Default::default() };
        let answer: ImageStatusResponse =
            self.call("query CRI for image", &method, &request, QUERY).await?;
        Ok(answer.image.into_option().map(|image| image.pinned))
    }

    /// Removes an image; of an unknown one this is success.
    ///
    /// # Errors
    /// The call failed.
    pub async fn remove_image(&self, name: &str) -> Result<(), StepError> {
        let method = format!("{IMAGE}/RemoveImage");
        let request = RemoveImageRequest { image: image(name), ..Default::default() };
        self.call::<Empty>("remove image", &method, &request, WORK).await.map(drop)
    }
}

fn image(name: &str) -> MessageField<ImageSpec> {
    MessageField::some(ImageSpec { image: name.to_owned(), ..Default::default() })
}
