//! A direct client of `containerd.services.sandbox.v1.Controller`: on the sandboxer's own socket,
//! or on containerd's, which passes the calls to the controller that a request names.

use std::path::PathBuf;
use std::time::Duration;

use containerd_api::framing::NAMESPACE;
use protobuf::Message;
use protobuf::well_known_types::any::Any;

/// The controller's messages, and containerd's types in them.
pub mod api {
    pub use containerd_api::protos::controller::*;
    pub use containerd_api::protos::types::{Metric, Platform, Sandbox, sandbox};
}

use crate::cri::{decode, encode};
use crate::grpc::{Client, Status};

/// The type URL of a pod's config, as containerd writes it.
pub const CONFIG_TYPE: &str = "runtime.v1.PodSandboxConfig";

/// The deadline of a call that answers at once.
const DEADLINE: Duration = Duration::from_secs(30);

/// A sandbox controller behind a gRPC socket.
#[derive(Debug)]
pub struct Controller {
    client: Client,
    sandboxer: String,
}

impl Controller {
    /// The controller at `socket`. `sandboxer` names it in the requests, which only containerd's
    /// own socket looks at.
    pub fn new(socket: impl Into<PathBuf>, sandboxer: &str) -> Self {
        Self::of_namespace(socket, sandboxer, "k8s.io")
    }

    /// The same, asked in this namespace of containerd's.
    pub fn of_namespace(socket: impl Into<PathBuf>, sandboxer: &str, namespace: &str) -> Self {
        let client = Client::new(socket).header(NAMESPACE, namespace);
        Self { client, sandboxer: sandboxer.to_owned() }
    }

    /// `Create` with a CRI config, as containerd asks for it.
    ///
    /// # Errors
    /// The server's status.
    pub async fn create(
        &self,
        id: &str,
        config: &crate::cri::api::PodSandboxConfig,
        netns_path: &str,
    ) -> Result<(), Status> {
        let mut request = self.create_request(id);
        request.options = Some(any(CONFIG_TYPE, encode(config)?)).into();
        request.netns_path = netns_path.to_owned();
        self.create_raw(&request).await
    }

    /// A `Create` request without options, for the caller to fill.
    pub fn create_request(&self, id: &str) -> api::ControllerCreateRequest {
        let runtime =
            api::sandbox::Runtime { name: "io.containerd.runc.v2".into(), ..Default::default() };
        let sandbox = api::Sandbox {
            sandbox_id: id.to_owned(),
            runtime: Some(runtime).into(),
            sandboxer: self.sandboxer.clone(),
            ..Default::default()
        };
        api::ControllerCreateRequest {
            sandbox_id: id.to_owned(),
            sandbox: Some(sandbox).into(),
            sandboxer: self.sandboxer.clone(),
            ..Default::default()
        }
    }

    /// `Create` with any request.
    ///
    /// # Errors
    /// The server's status.
    pub async fn create_raw(&self, request: &api::ControllerCreateRequest) -> Result<(), Status> {
        self.call::<api::ControllerCreateResponse>("Create", request, Some(DEADLINE))
            .await
            .map(drop)
    }

    /// Any method with any bytes.
    ///
    /// # Errors
    /// The server's status.
    pub async fn raw(&self, method: &str, body: Vec<u8>) -> Result<Vec<u8>, Status> {
        Ok(self.client.unary(&path(method), body, Some(DEADLINE)).await?.to_vec())
    }

    /// `Start`.
    ///
    /// # Errors
    /// The server's status.
    pub async fn start(&self, id: &str) -> Result<api::ControllerStartResponse, Status> {
        self.call("Start", &self.request(id), Some(DEADLINE)).await
    }

    /// `Platform`.
    ///
    /// # Errors
    /// The server's status.
    pub async fn platform(&self, id: &str) -> Result<api::Platform, Status> {
        let answer: api::ControllerPlatformResponse =
            self.call("Platform", &self.request(id), Some(DEADLINE)).await?;
        Ok(answer.platform.unwrap_or_default())
    }

    /// `Stop`.
    ///
    /// # Errors
    /// The server's status.
    pub async fn stop(&self, id: &str) -> Result<(), Status> {
        let request = api::ControllerStopRequest {
            sandbox_id: id.to_owned(),
            sandboxer: self.sandboxer.clone(),
            ..Default::default()
        };
        self.call::<api::ControllerStopResponse>("Stop", &request, Some(DEADLINE)).await.map(drop)
    }

    /// `Wait`, without a deadline.
    ///
    /// # Errors
    /// The server's status.
    pub async fn wait(&self, id: &str) -> Result<api::ControllerWaitResponse, Status> {
        self.call("Wait", &self.request(id), None).await
    }

    /// `Status`.
    ///
    /// # Errors
    /// The server's status.
    pub async fn status(
        &self,
        id: &str,
        verbose: bool,
    ) -> Result<api::ControllerStatusResponse, Status> {
        let request = api::ControllerStatusRequest {
            sandbox_id: id.to_owned(),
            verbose,
            sandboxer: self.sandboxer.clone(),
            ..Default::default()
        };
        self.call("Status", &request, Some(DEADLINE)).await
    }

    /// `Shutdown`.
    ///
    /// # Errors
    /// The server's status.
    pub async fn shutdown(&self, id: &str) -> Result<(), Status> {
        self.call::<api::ControllerShutdownResponse>("Shutdown", &self.request(id), Some(DEADLINE))
            .await
            .map(drop)
    }

    /// `Metrics`.
    ///
    /// # Errors
    /// The server's status.
    pub async fn metrics(&self, id: &str) -> Result<api::Metric, Status> {
        let answer: api::ControllerMetricsResponse =
            self.call("Metrics", &self.request(id), Some(DEADLINE)).await?;
        Ok(answer.metrics.unwrap_or_default())
    }

    /// `Update` of these fields.
    ///
    /// # Errors
    /// The server's status.
    pub async fn update(
        &self,
        id: &str,
        sandbox: api::Sandbox,
        fields: &[&str],
    ) -> Result<(), Status> {
        let request = api::ControllerUpdateRequest {
            sandbox_id: id.to_owned(),
            sandboxer: self.sandboxer.clone(),
            sandbox: Some(sandbox).into(),
            fields: fields.iter().map(|field| (*field).to_owned()).collect(),
            ..Default::default()
        };
        self.call::<api::ControllerUpdateResponse>("Update", &request, Some(DEADLINE))
            .await
            .map(drop)
    }

    /// Start, Platform, Wait, Shutdown and Metrics ask with the same fields.
    fn request(&self, id: &str) -> api::ControllerStartRequest {
        api::ControllerStartRequest {
            sandbox_id: id.to_owned(),
            sandboxer: self.sandboxer.clone(),
            ..Default::default()
        }
    }

    async fn call<A: Message>(
        &self,
        method: &str,
        request: &impl Message,
        deadline: Option<Duration>,
    ) -> Result<A, Status> {
        decode(&self.client.unary(&path(method), encode(request)?, deadline).await?)
    }
}

/// A typed payload.
pub fn any(type_url: &str, value: Vec<u8>) -> Any {
    Any { type_url: type_url.to_owned(), value, ..Default::default() }
}

fn path(method: &str) -> String {
    format!("containerd.services.sandbox.v1.Controller/{method}")
}
