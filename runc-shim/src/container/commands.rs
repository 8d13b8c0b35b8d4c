//! Pause, Resume, Update and Checkpoint: a command of the runtime each.

use std::os::fd::AsFd as _;
use std::path::PathBuf;

use containerd_shim_protos::api;
use containerd_shim_protos::events::task as task_events;

use super::Container;
use super::state::{self, Event, State};
use super::step::Step;
use crate::error::{Code, Error};
use crate::runtime::{self, Place, options};
use crate::services::Services;
use crate::ttrpc::events;
use crate::ttrpc::response::{self, Answer};
use crate::ttrpc::server::Reply;

impl Container {
    /// Pauses or resumes the container.
    pub(super) fn pause(&mut self, services: &mut Services, reply: Reply, event: Event) -> Answer {
        let (next, _) = state::step(self.state, event).map_err(Error::state)?;
        let (step, word) = match event {
            Event::Pause => (Step::Pause, "pause"),
            _ => (Step::Resume, "resume"),
        };
        let caller = self.caller(Some(reply));
        self.run(services, &caller, step, &[word, &caller.key.id], Place::default())?;
        self.state = next;
        Ok(None)
    }

    /// Handles the end of a pause or resume. `may_have_resumed`: the command was killed, and may
    /// have resumed the container before.
    pub(super) fn pause_ended(
        &mut self,
        services: &mut Services,
        done: Result<(), Error>,
        may_have_resumed: bool,
    ) -> Answer {
        let resumed = may_have_resumed && !self.is_frozen();
        let event = if done.is_ok() || resumed { Event::Done } else { Event::Failed };
        // The container may have exited meanwhile.
        if let Ok((next, notice)) = state::step(self.state, event) {
            self.state = next;
            self.announce(services, notice);
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
        if self.state.has_exited() {
            return Err(Error::state("cannot update a stopped container"));
        }
        let resources = &request.resources.value;
        serde_json::from_slice::<serde::de::IgnoredAny>(resources)
            .map_err(|e| Error::new(Code::INVALID_ARGUMENT, format!("resources: {e}")))?;
        let file = runtime::memory_file_of(resources)?;
        let place = Place { input_file: Some(file.as_fd()), ..Place::default() };
        let (caller, input_path) = (self.caller(Some(reply)), runtime::input_path());
        let arguments = ["update", "--resources", &input_path, &caller.key.id];
        self.run(services, &caller, Step::Update, &arguments, place)?;
        Ok(None)
    }

    /// Writes a checkpoint of a container.
    pub(super) fn checkpoint(
        &mut self,
        services: &mut Services,
        reply: Reply,
        request: &api::CheckpointTaskRequest,
    ) -> Answer {
        let options = options::parse_checkpoint(request.options.as_ref())?;
        match self.state {
            State::Running { .. } | State::Paused { .. } => {}
            state if state.has_exited() => {
                return Err(Error::state("cannot checkpoint a stopped container"));
            }
            _ => return Err(Error::state("cannot checkpoint a task in created state")),
        }
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
        if !options.cgroups_mode.is_empty() {
            arguments.extend(["--manage-cgroups-mode", &options.cgroups_mode]);
        }
        for namespace in &options.empty_namespaces {
            arguments.extend(["--empty-ns", namespace]);
        }
        arguments.push(&request.id);
        let step = Step::Checkpoint { path: request.path.clone(), work: removed };
        self.run(services, &self.caller(Some(reply)), step, &arguments, Place::default())?;
        Ok(None)
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
