//! containerd's records of containers, and their tasks, as far as a sandbox is one of them.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::Duration;

use containerd_shim_protos::shim::oci::Options;
use protobuf::well_known_types::any::Any;
use protobuf::well_known_types::empty::Empty;
use protobuf::{Message as _, MessageField};

use super::framing::Code;
use super::{CALL_TIMEOUT, CallError, GrpcEndpoint};
use crate::protos::containers::{
    Container, ContainerRuntime, CreateContainerRequest, DeleteContainerRequest,
    GetContainerRequest, GetContainerResponse, ListContainerMessage, ListContainersRequest,
};
use crate::protos::tasks::{
    CreateTaskRequest, DeleteTaskRequest, GetTaskRequest, GetTaskResponse, StartTaskRequest,
    TaskStatus,
};
use base::error::StepError;

const CONTAINERS: &str = "containerd.services.containers.v1.Containers";
const TASKS: &str = "containerd.services.tasks.v1.Tasks";

/// The extension that marks the records of a daemon; its value is the daemon's state directory. No
/// label, as the labels are the built-in controller's.
const MARK: &str = "io.pause-sandboxer.state-dir";

/// `type_url` of an OCI runtime spec (containerd `typeurl` of `specs.Spec`).
const SPEC: &str = "types.containerd.io/opencontainers/runtime-spec/1/Spec";

/// `type_url` of runc's options.
const RUNC_OPTIONS: &str = "containerd.runc.v1.Options";

/// Filter for the containers that CRI labels as sandboxes (containerd `filterLabel`).
const SANDBOXES: &str = r#"labels."io.cri-containerd.kind"==sandbox"#;

/// How long containerd may take to record a container. On a busy node it writes the records of many
/// pods one after another, and each of its writes waits for the disk.
pub const CREATE_TIMEOUT: Duration = Duration::from_secs(60);

/// The contents of containerd's container record of a sandbox.
#[derive(Clone, Debug)]
pub struct SandboxContainer {
    /// The sandbox id.
    pub id: String,
    /// The same labels as on a container of the built-in controller.
    pub labels: BTreeMap<String, String>,
    /// Runtime name.
    pub runtime: String,
    /// The runtime handler's options.
    pub runtime_options: Option<Any>,
    /// The OCI runtime spec, JSON.
    pub spec: Vec<u8>,
}

/// The owner of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordOwner {
    /// There is none.
    Missing,
    /// This daemon's, or an earlier one's with the same state directory.
    Own,
    /// Another's.
    Foreign,
}

/// The state of a task in containerd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskState {
    /// There is none.
    Missing,
    /// It is to be started.
    Created,
    /// It runs as this process.
    Running(u32),
    /// It has ended, or its shim does not answer.
    Other,
}

/// containerd's containers and tasks.
#[derive(Clone, Debug)]
pub struct Containers {
    at: GrpcEndpoint,
    mark: Vec<u8>,
}

impl Containers {
    /// The containers of the containerd `at`, with the records of the daemon with that state
    /// directory.
    pub fn new(at: GrpcEndpoint, state_dir: &Path) -> Self {
        Self { at, mark: state_dir.as_os_str().as_bytes().to_vec() }
    }

    /// Whether containerd knows the sandbox.
    ///
    /// # Errors
    /// containerd does not say.
    pub async fn knows_sandbox(&self, id: &str) -> Result<bool, StepError> {
        self.at.knows(id).await
    }

    /// The owner of the record of `id`.
    ///
    /// # Errors
    /// containerd does not say.
    pub async fn owner(&self, id: &str) -> Result<RecordOwner, CallError> {
        let request = GetContainerRequest { id: id.to_owned(), ..Default::default() };
        let method = format!("{CONTAINERS}/Get");
        let what = "query containerd for the container";
        match self.at.call::<GetContainerResponse>(what, &method, &request, CALL_TIMEOUT).await {
            Err(e) if e.is(Code::NOT_FOUND) => Ok(RecordOwner::Missing),
            Err(e) => Err(e),
            Ok(answer) if self.is_own(&answer.container) => Ok(RecordOwner::Own),
            Ok(_) => Ok(RecordOwner::Foreign),
        }
    }

    fn is_own(&self, container: &Container) -> bool {
        container.extensions.get(MARK).is_some_and(|mark| mark.value == self.mark)
    }

    /// The ids of all records of this daemon's sandboxes.
    ///
    /// # Errors
    /// containerd does not say.
    pub async fn own(&self) -> Result<Vec<String>, CallError> {
        let mut ids = Vec::new();
        let filters = vec![SANDBOXES.to_owned()];
        let request = ListContainersRequest { filters, ..Default::default() };
        let each = |message: ListContainerMessage| {
            if self.is_own(&message.container) {
                ids.push(message.container.id.clone());
            }
        };
        let method = format!("{CONTAINERS}/ListStream");
        self.at.stream("list sandboxes' containers", &method, &request, CALL_TIMEOUT, each).await?;
        Ok(ids)
    }

    /// Records a sandbox. An existing record is [`RecordOwner::Own`] or foreign, and stays as it
    /// is; a new one is own.
    ///
    /// # Errors
    /// containerd refuses, or does not answer.
    pub async fn create(&self, container: &SandboxContainer) -> Result<RecordOwner, CallError> {
        let any = |type_url: &str, value: &[u8]| Any {
            type_url: type_url.to_owned(),
            value: value.to_vec(),
            ..Default::default()
        };
        let runtime = ContainerRuntime {
            name: container.runtime.clone(),
            options: container.runtime_options.clone().into(),
            ..Default::default()
        };
        let record = Container {
            id: container.id.clone(),
            labels: container.labels.clone().into_iter().collect(),
            runtime: MessageField::some(runtime),
            spec: MessageField::some(any(SPEC, &container.spec)),
            extensions: [(MARK.to_owned(), any(MARK, &self.mark))].into(),
            sandbox: container.id.clone(),
            ..Default::default()
        };
        let request =
            CreateContainerRequest { container: MessageField::some(record), ..Default::default() };
        let method = format!("{CONTAINERS}/Create");
        let what = "record the sandbox as a container";
        match self.at.call::<Empty>(what, &method, &request, CREATE_TIMEOUT).await {
            // An earlier attempt whose answer was lost may have recorded it.
            Err(e) if e.is(Code::ALREADY_EXISTS) => self.owner(&container.id).await,
            Err(e) => Err(e),
            Ok(_) => Ok(RecordOwner::Own),
        }
    }

    /// Removes the record of `id` with its task, if it is this daemon's.
    ///
    /// # Errors
    /// containerd refuses, or does not answer.
    pub async fn remove(&self, id: &str) -> Result<(), CallError> {
        if self.owner(id).await? != RecordOwner::Own {
            return Ok(());
        }
        self.delete_task(id).await?;
        let request = DeleteContainerRequest { id: id.to_owned(), ..Default::default() };
        let method = format!("{CONTAINERS}/Delete");
        let what = "remove the sandbox's container";
        match self.at.call::<Empty>(what, &method, &request, CALL_TIMEOUT).await {
            Err(e) if e.is(Code::NOT_FOUND) => Ok(()),
            other => other.map(drop),
        }
    }

    /// Creates the task of a record, at a Task endpoint of version 3: `PROTOCOL+URL`. False: there
    /// is one.
    ///
    /// # Errors
    /// containerd or the endpoint refuses, or does not answer.
    pub async fn create_task(&self, id: &str, address: &str) -> Result<bool, CallError> {
        const VERSION: u32 = 3;
        let options = Options {
            task_api_address: address.to_owned(),
            task_api_version: VERSION,
            ..Default::default()
        };
        let request = CreateTaskRequest {
            container_id: id.to_owned(),
            // For releases before 2.3; later ones do not look at it if the fields are set.
            options: MessageField::some(Any {
                type_url: RUNC_OPTIONS.to_owned(),
                value: options.write_to_bytes().unwrap_or_default(),
                ..Default::default()
            }),
            task_api_address: address.to_owned(),
            task_api_version: VERSION,
            ..Default::default()
        };
        let method = format!("{TASKS}/Create");
        match self
            .at
            .call::<Empty>("create the sandbox's task", &method, &request, CALL_TIMEOUT)
            .await
        {
            Err(e) if e.is(Code::ALREADY_EXISTS) => Ok(false),
            Err(e) => Err(e),
            Ok(_) => Ok(true),
        }
    }

    /// Starts a task that is created.
    ///
    /// # Errors
    /// containerd or the endpoint refuses, or does not answer.
    pub async fn start_task(&self, id: &str) -> Result<(), CallError> {
        let request = StartTaskRequest { container_id: id.to_owned(), ..Default::default() };
        let method = format!("{TASKS}/Start");
        self.at
            .call::<Empty>("start the sandbox's task", &method, &request, CALL_TIMEOUT)
            .await
            .map(drop)
    }

    /// The state of a task.
    ///
    /// # Errors
    /// containerd does not answer.
    pub async fn task(&self, id: &str) -> Result<TaskState, CallError> {
        let request = GetTaskRequest { container_id: id.to_owned(), ..Default::default() };
        let method = format!("{TASKS}/Get");
        let what = "query containerd for the sandbox's task";
        match self.at.call::<GetTaskResponse>(what, &method, &request, CALL_TIMEOUT).await {
            Err(e) if e.is(Code::NOT_FOUND) => Ok(TaskState::Missing),
            Err(lost @ CallError::Lost(_)) => Err(lost),
            // Other errors come from the pod's shim.
            Err(_) => Ok(TaskState::Other),
            Ok(answer) => Ok(match answer.process.status.enum_value() {
                Ok(TaskStatus::CREATED) => TaskState::Created,
                Ok(TaskStatus::RUNNING) => TaskState::Running(answer.process.pid),
                _ => TaskState::Other,
            }),
        }
    }

    /// Deletes a task that does not run. Gone already is success. A task whose shim has gone is
    /// deleted, and the call refused all the same: it is to be tried again.
    ///
    /// # Errors
    /// containerd or the endpoint refuses, or does not answer.
    pub async fn delete_task(&self, id: &str) -> Result<(), CallError> {
        let request = DeleteTaskRequest { container_id: id.to_owned(), ..Default::default() };
        let method = format!("{TASKS}/Delete");
        let mut again = true;
        loop {
            match self
                .at
                .call::<Empty>("delete the sandbox's task", &method, &request, CALL_TIMEOUT)
                .await
            {
                Err(e) if e.is(Code::NOT_FOUND) => return Ok(()),
                Err(CallError::Refused { .. }) if again => again = false,
                other => return other.map(drop),
            }
        }
    }
}
