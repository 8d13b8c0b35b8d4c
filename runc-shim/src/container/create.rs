//! Create: what is checked before it, and its end. [`super::launch`] has its steps.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;

use containerd_shim_protos::api;
use containerd_shim_protos::events::task as task_events;

use super::Container;
use super::config::Config;
use super::state::{self, Event, State};
use super::step::Caller;
use crate::error::{Code, Error};
use crate::io::{Owner, Stdio};
use crate::process::ProcessStreams;
use crate::process_key::{self, ProcessKey};
use crate::runtime::{Runtime, options};
use crate::services::Services;
use crate::ttrpc::events;
use crate::ttrpc::response::{self, Answer};
use crate::ttrpc::server::Reply;

impl Container {
    /// The container of a Create, which must be created next. Writes the options into its bundle.
    ///
    /// # Errors
    /// The request is malformed, or the runtime has a container with this id.
    pub fn new(request: &api::CreateTaskRequest, namespace: &str) -> Result<Self, Error> {
        process_key::check_id(&request.id)?;
        let options = options::parse(request.options.as_ref())?;
        let bundle = PathBuf::from(&request.bundle);
        if !bundle.is_absolute() {
            let message = format!("bundle path is not absolute: {}", request.bundle);
            return Err(Error::new(Code::INVALID_ARGUMENT, message));
        }
        let runtime = Runtime {
            binary: options.binary_name.clone(),
            root: options::root_of(&options.root, namespace),
            systemd_cgroup: options.systemd_cgroup,
        };
        // A failure after this point deletes the runtime's container and the mounts of the bundle.
        runtime.check_unknown(&request.id)?;
        options::write(&bundle, &options)?;
        let stdio = Stdio {
            stdin: request.stdin.clone(),
            stdout: request.stdout.clone(),
            stderr: request.stderr.clone(),
            terminal: request.terminal,
        };
        Ok(Self {
            key: ProcessKey::new(&request.id, ""),
            runtime,
            owner: Owner { uid: options.io_uid, gid: options.io_gid },
            state: State::Creating,
            pending: Vec::new(),
            queue: VecDeque::new(),
            process: ProcessStreams::new(stdio),
            execs: BTreeMap::new(),
            consoles: 0,
            has_rootfs: false,
            config: Config::read(&bundle),
            no_pivot_root: options.no_pivot_root,
            no_new_keyring: options.no_new_keyring,
            restore: options::restore_arguments(request, &options, &bundle),
            bundle,
            cgroup: None,
            oom_watch: None,
            may_have_left_cgroup: false,
            must_force: false,
            retry: None,
            create_event: Some(Box::new(create_event(request))),
            is_gone: false,
        })
    }

    /// Creates the container.
    pub fn create(
        &mut self,
        services: &mut Services,
        reply: Reply,
        request: api::CreateTaskRequest,
    ) -> Answer {
        self.launch_with_mounts(services, reply, request.rootfs)
    }

    /// Completes a Create; without a pid that of a container to restore.
    pub(super) fn created(&mut self, services: &mut Services, pid: Option<i32>) -> Answer {
        let (next, _) = state::step(self.state, Event::Created(pid)).map_err(Error::state)?;
        self.state = next;
        let pid = response::unsigned(pid.unwrap_or(0));
        if let Some(mut event) = self.create_event.take() {
            event.pid = pid;
            services.send(events::CREATE, &*event);
        }
        response::created(pid)
    }

    /// Handles a failed Create: removes the leftovers of the container, and then fails the call
    /// with `reason`.
    pub(super) fn create_failed(
        &mut self,
        services: &mut Services,
        caller: &Caller,
        reason: Error,
    ) -> Answer {
        self.change(services, Event::CreateFailed);
        self.create_event = None;
        self.discard(services, caller, Some(reason))
    }
}

/// The TaskCreate event of a Create.
pub fn create_event(request: &api::CreateTaskRequest) -> task_events::TaskCreate {
    let mut event = task_events::TaskCreate::new();
    event.container_id.clone_from(&request.id);
    event.bundle.clone_from(&request.bundle);
    event.rootfs.clone_from(&request.rootfs);
    event.checkpoint.clone_from(&request.checkpoint);
    let io = event.io.mut_or_insert_default();
    io.stdin.clone_from(&request.stdin);
    io.stdout.clone_from(&request.stdout);
    io.stderr.clone_from(&request.stderr);
    io.terminal = request.terminal;
    event
}
