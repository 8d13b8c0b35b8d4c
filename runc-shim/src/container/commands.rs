//! Pause, Resume, Update and Checkpoint: a command of the runtime each.

use std::os::fd::AsFd as _;
use std::path::PathBuf;

use containerd_shim_protos::api;
use containerd_shim_protos::events::task as task_events;

use super::Container;
use super::state::State;
use super::step::Step;
use crate::error::{Code, Error};
use crate::runtime::{self, Place, options};
use crate::services::Services;
use crate::ttrpc::events;
use crate::ttrpc::response::{self, Answer};
use crate::ttrpc::server::Reply;

impl Container {
    /// Has the runtime execute a command that needs nothing but the container.
    pub(super) fn command(
        &mut self,
        services: &mut Services,
        reply: Reply,
        step: Step,
        word: &str,
    ) -> Answer {
        let caller = self.caller(Some(reply));
        self.run(services, &caller, step, &[word, &caller.key.id])
    }

    /// Handles the end of a pause.
    pub(super) fn pause_ended(
        &mut self,
        services: &mut Services,
        done: Result<(), Error>,
    ) -> Answer {
        done?;
        if self.state.settle(State::Paused) {
            let mut event = task_events::TaskPaused::new();
            event.container_id.clone_from(&self.key.id);
            services.send(events::PAUSED, &event);
        }
        response::empty()
    }

    /// Handles the end of a resume. `may_have_resumed`: the command was killed, and may have
    /// resumed the container before.
    pub(super) fn resume_ended(
        &mut self,
        services: &mut Services,
        done: Result<(), Error>,
        may_have_resumed: bool,
    ) -> Answer {
        let is_resumed = done.is_ok() || may_have_resumed && !self.is_frozen();
        if is_resumed && self.state.settle(State::Running) {
            let mut event = task_events::TaskResumed::new();
            event.container_id.clone_from(&self.key.id);
            services.send(events::RESUMED, &event);
        }
        done.and_then(|()| response::empty())
    }

    /// Changes the container's resources.
    pub(super) fn update(
        &mut self,
        services: &mut Services,
        reply: Reply,
        request: &api::UpdateTaskRequest,
    ) -> Answer {
        let resources = &request.resources.value;
        serde_json::from_slice::<serde::de::IgnoredAny>(resources)
            .map_err(|e| Error::new(Code::INVALID_ARGUMENT, format!("resources: {e}")))?;
        let file = runtime::memory_file_of(resources)?;
        let place = Place { input_file: Some(file.as_fd()), ..Place::default() };
        let (caller, input_path) = (self.caller(Some(reply)), runtime::input_path());
        let arguments = ["update", "--resources", &input_path, &caller.key.id];
        self.run_in(services, &caller, Step::Update, &arguments, place)
    }

    /// Writes a checkpoint of a container.
    pub(super) fn checkpoint(
        &mut self,
        services: &mut Services,
        reply: Reply,
        request: &api::CheckpointTaskRequest,
    ) -> Answer {
        let options = options::parse_checkpoint(request.options.as_ref())?;
        let parent = options::checkpoint_parent(&options)?;
        let own = self.bundle.join("work").join("criu-work");
        let removed = options.work_path.is_empty().then(|| own.clone());
        let work =
            if removed.is_some() { own.display().to_string() } else { options.work_path.clone() };
        let mut arguments = vec!["checkpoint", "--image-path", &request.path, "--work-path", &work];
        for (flag, set) in [
            ("--tcp-established", options.open_tcp),
            ("--ext-unix-sk", options.external_unix_sockets),
            ("--shell-job", options.terminal),
            ("--file-locks", options.file_locks),
            ("--leave-running", !options.exit),
        ] {
            arguments.extend(set.then_some(flag));
        }
        if !parent.is_empty() {
            arguments.extend(["--parent-path", &parent]);
        }
        if !options.cgroups_mode.is_empty() {
            arguments.extend(["--manage-cgroups-mode", &options.cgroups_mode]);
        }
        for namespace in &options.empty_namespaces {
            arguments.extend(["--empty-ns", namespace]);
        }
        arguments.push(&request.id);
        let step = Step::Checkpoint { path: request.path.clone(), work: removed };
        self.run(services, &self.caller(Some(reply)), step, &arguments)
    }

    pub(super) fn checkpoint_ended(
        &mut self,
        services: &mut Services,
        path: &str,
        work: Option<PathBuf>,
        done: Result<(), Error>,
    ) -> Answer {
        let dump = self.bundle.join("criu-dump.log");
        if let (Err(_), Some(work)) = (&done, &work) {
            // The runtime may have failed before it wrote the log.
            let _ = std::fs::copy(work.join("dump.log"), &dump);
        }
        if let Some(work) = work {
            let _ = std::fs::remove_dir_all(work);
        }
        done.map_err(|e| Error {
            message: format!("{} path= {}", e.message, dump.display()),
            ..e
        })?;
        let mut event = task_events::TaskCheckpointed::new();
        (event.container_id, event.checkpoint) = (self.key.id.clone(), path.to_owned());
        services.send(events::CHECKPOINTED, &event);
        response::empty()
    }
}
