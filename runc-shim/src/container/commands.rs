//! Running commands of the runtime and running helpers, and what happens when they end.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::PathBuf;
use std::time::Instant;

use containerd_shim_protos::api;
use containerd_shim_protos::events::task as task_events;
use rustix::event::epoll::EventFlags;

use crate::container::deadlines;
use crate::container::state::{Event, Notice};
use crate::error::{Code, Context as _, Error};
use crate::exits::Exit;
use crate::io::Stdio;
use crate::io::console::ConsoleSocket;
use crate::process_key::ProcessKey;
use crate::reactor::{Source, UNWATCHED_WAIT};
use crate::root::mark;
use crate::runtime::command::Command;
use crate::runtime::helper::{self, Action, Work};
use crate::runtime::job::{Job, Purpose};
use crate::runtime::options;
use crate::runtime::output_pipe::{Progress, Watch};
use crate::runtime::{self, Place};
use crate::shim::Shim;
use crate::ttrpc::events;
use crate::ttrpc::response::{self, Answer};
use crate::ttrpc::server::Reply;

impl Shim {
    /// Starts a command of the runtime. A container is busy until a command for it, and not for one
    /// of its execs, has ended.
    pub fn run_for(
        &mut self,
        key: ProcessKey,
        reply: Option<Reply>,
        purpose: Purpose,
        arguments: &[&str],
    ) -> Result<(), Error> {
        let place = Place::default();
        self.run_in(key, reply, purpose, arguments, &place)
    }

    /// [`Shim::run_for`] with descriptors for the command.
    pub fn run_in(
        &mut self,
        key: ProcessKey,
        reply: Option<Reply>,
        purpose: Purpose,
        arguments: &[&str],
        place: &Place<'_>,
    ) -> Result<(), Error> {
        if purpose.is_limited() {
            deadlines::check(reply)?;
        }
        let missing = || Error::not_found("container not created");
        let container = self.containers.get_mut(&key.id).ok_or_else(missing)?;
        // The working directory identifies the commands of a dead shim to `cleanup::delete`.
        let bundle = container.open_bundle().ok();
        let here = bundle.as_ref().map(|bundle| bundle.as_fd());
        let place = Place { directory: place.directory.or(here), ..*place };
        let mut command = container.runtime.start(arguments, &place)?;
        if key.exec.is_empty() {
            container.busy.get_or_insert_default();
        }
        self.watch_output(&mut command);
        self.jobs.insert(command.pid, Job::new(command, purpose, key, reply));
        Ok(())
    }

    /// Starts a helper for a container, which is busy until the helper has exited.
    pub fn run_helper(
        &mut self,
        key: ProcessKey,
        reply: Option<Reply>,
        purpose: Purpose,
        action: Action,
        input_file: Option<BorrowedFd<'_>>,
    ) -> Result<(), Error> {
        let missing = || Error::not_found("container not created");
        let container = self.containers.get_mut(&key.id).ok_or_else(missing)?;
        let (namespace, bundle) = (self.namespace.as_str(), container.bundle.as_path());
        let work = Work { action, namespace, id: &key.id, bundle, input_file };
        let mut command = helper::start(&work)?;
        container.busy.get_or_insert_default();
        self.watch_output(&mut command);
        self.jobs.insert(command.pid, Job::new(command, purpose, key, reply));
        Ok(())
    }

    /// Has epoll report what a command writes.
    fn watch_output(&mut self, command: &mut Command) {
        for pipe in command.pipes_mut() {
            pipe.id = self.new_id();
            let source = Source::Output(pipe.id);
            if self.reactor.add(&*pipe, source, EventFlags::IN).is_ok() {
                pipe.watch = Watch::Epoll;
            }
        }
    }

    /// Has epoll report no more what a command has written: a process that is being started may
    /// have a copy of the pipe.
    fn unwatch_output(&self, command: &mut Command) {
        for pipe in command.pipes_mut().filter(|pipe| pipe.watch == Watch::Epoll) {
            let _ = self.reactor.remove(&*pipe);
        }
    }

    /// Reads what a command has written.
    pub fn output_ready(&mut self, id: u32) {
        let mut pipes = self.jobs.values_mut().flat_map(|job| job.command.pipes_mut());
        let Some(pipe) = pipes.find(|pipe| pipe.watch == Watch::Epoll && pipe.id == id) else {
            return;
        };
        if pipe.read() == Progress::Ended {
            pipe.watch = Watch::Ended;
            // It fails only if nothing is watched.
            let _ = self.reactor.remove(&*pipe);
        }
    }

    /// When the pipes that epoll cannot watch are read: the node has no memory or too many watches.
    pub fn output_deadline(&self) -> Option<Instant> {
        let mut pipes = self.jobs.values().flat_map(|job| job.command.open_pipes());
        let is_unwatched = pipes.any(|pipe| pipe.watch == Watch::Timer);
        is_unwatched.then(|| Instant::now() + UNWATCHED_WAIT)
    }

    /// Reads these pipes.
    pub fn read_unwatched_output(&mut self) {
        let pipes = self.jobs.values_mut().flat_map(|job| job.command.pipes_mut());
        for pipe in pipes.filter(|pipe| pipe.watch == Watch::Timer) {
            if pipe.read() == Progress::Ended {
                pipe.watch = Watch::Ended;
            }
        }
    }

    /// Handles the exit of a command or helper.
    pub fn finished(&mut self, job: Job, exit: Exit) {
        let Job { mut command, purpose, key, reply, limit, is_cancelled, was_killed } = job;
        self.unwatch_output(&mut command);
        // Also by another program, such as the kernel's OOM killer.
        let was_interrupted = was_killed || exit.is_by_signal();
        let may_be_frozen = was_interrupted && purpose.may_freeze();
        let bundle = self.containers.get(&key.id).map(|container| container.bundle.clone());
        let mut done = |what: &str| match exit.status {
            0 => Ok(()),
            status => {
                let e = command.failure(what, status, bundle.as_deref());
                Err(if was_killed { deadlines::ended(&e, is_cancelled) } else { e })
            }
        };
        // A command may also succeed at the moment at which it is killed.
        let in_time = |()| deadlines::check(reply).and_then(|()| deadlines::check_limit(limit));
        if let Some(container) = self.containers.get_mut(&key.id) {
            container.may_have_left_cgroup |= was_interrupted && purpose.makes_cgroup();
        }
        let answer = match purpose {
            Purpose::Create(console) => {
                let created = done("OCI runtime create failed").and_then(in_time);
                self.launched(&key, reply, console, created)
            }
            Purpose::Mount { by_program } => {
                let mounted = done("failed to mount rootfs component").and_then(in_time);
                self.end_failed_mount(&key, command.pid, by_program && mounted.is_err());
                self.rootfs_mounted(&key, reply, mounted)
            }
            Purpose::Discard(reason) => {
                self.runtime_discarded(&key, reply, reason, done("failed to delete task"))
            }
            Purpose::DiscardCgroup(reason) => {
                self.cgroup_discarded(&key, reply, reason, done("remove cgroup"))
            }
            Purpose::DiscardMounts(reason) => {
                self.mounts_discarded(&key, reply, reason, done("failed rootfs umount"))
            }
            Purpose::Start => self.start_finished(&key, done("OCI runtime start failed")),
            Purpose::Restore(console) => {
                self.launched(&key, reply, console, done("OCI runtime restore failed"))
            }
            Purpose::Exec(console) => {
                self.launched(&key, reply, console, done("OCI runtime exec failed"))
            }
            Purpose::Delete(attempt) => {
                self.runtime_deleted(&key, reply, attempt, done("failed to delete task"))
            }
            Purpose::RemoveCgroup(reason) => {
                self.cgroup_removed(&key, reply, reason, done("remove cgroup"))
            }
            Purpose::Unmount => self.unmounted(&key, done("failed rootfs umount")),
            Purpose::Kill(signal) => {
                let done = done("").map_err(|e| runtime::kill_error(without_prefix(e)));
                self.killed(&key, signal, done)
            }
            Purpose::KillRemaining => {
                self.remaining_killed(&key, done("OCI runtime killall failed"));
                Ok(None)
            }
            Purpose::Pause => self.pause_finished(&key, done("OCI runtime pause failed"), false),
            Purpose::Resume => {
                // A command that was killed may have resumed the container before.
                let resumed = was_interrupted && !self.is_frozen(&key);
                self.pause_finished(&key, done("OCI runtime resume failed"), resumed)
            }
            Purpose::Update => done("OCI runtime update failed").and_then(|()| response::empty()),
            Purpose::Checkpoint(path, work) => {
                let done = done("OCI runtime checkpoint failed");
                self.checkpoint_finished(&key, &path, work, done)
            }
        };
        if may_be_frozen {
            self.thaw_running(&key);
        }
        if let Some(reply) = reply {
            self.respond(reply, answer);
        }
        self.release(&key);
    }

    /// Kills what a program that has failed to mount has left: it may still be going to mount.
    fn end_failed_mount(&self, key: &ProcessKey, helper: i32, has_failed: bool) {
        if has_failed {
            let mark = mark::entry(&self.namespace, &key.id);
            deadlines::end_processes(helper, Some(&mark));
        }
    }

    fn killed(&mut self, key: &ProcessKey, signal: i32, done: Result<(), Error>) -> Answer {
        if done.is_ok() && signal == libc::SIGKILL {
            self.thaw(key);
        }
        done.and_then(|()| response::empty())
    }

    /// Runs the queued calls of a container or exec, if nothing else is pending for it.
    pub fn release(&mut self, key: &ProcessKey) {
        let Some(container) = self.containers.get_mut(&key.id) else { return };
        if key.exec.is_empty() {
            let is_own = |job: &Job| job.key == *key;
            let waits = self.pending_starts.values().any(|pending| pending.key == *key);
            if waits || container.drain.is_some() || self.jobs.values().any(is_own) {
                return;
            }
            for (reply, request) in container.busy.take().unwrap_or_default() {
                self.dispatch(reply, request);
            }
        } else if let Some(exec) = container.execs.get_mut(&key.exec)
            && exec.state != crate::exec::state::State::Starting
        {
            for (reply, request) in std::mem::take(&mut exec.queue) {
                self.dispatch(reply, request);
            }
        }
    }

    /// Pauses or resumes a container.
    pub fn pause(&mut self, reply: Reply, id: &str, event: Event) -> Answer {
        let container = self.container(id)?;
        let before = container.state;
        let (next, _) = crate::container::state::step(before, event).map_err(Error::state)?;
        container.state = next;
        let (purpose, word) = match event {
            Event::Pause => (Purpose::Pause, "pause"),
            _ => (Purpose::Resume, "resume"),
        };
        let run = self.run_for(ProcessKey::new(id, ""), Some(reply), purpose, &[word, id]);
        if run.is_err() {
            self.container(id)?.state = before;
        }
        run.map(|()| None)
    }

    /// Handles the end of a pause or resume. `resumed`: the failed command has resumed the
    /// container.
    fn pause_finished(
        &mut self,
        key: &ProcessKey,
        done: Result<(), Error>,
        resumed: bool,
    ) -> Answer {
        let event = if done.is_ok() || resumed { Event::Done } else { Event::Failed };
        let container = self.container(&key.id)?;
        // The container may have exited meanwhile.
        if let Ok((next, notice)) = crate::container::state::step(container.state, event) {
            container.state = next;
            self.announce(&key.id, notice);
        }
        done.and_then(|()| response::empty())
    }

    /// Sends the event that belongs to a change of a container's state.
    pub fn announce(&mut self, id: &str, notice: Notice) {
        match notice {
            Notice::Nothing => {}
            Notice::Started(pid) => {
                let mut event = task_events::TaskStart::new();
                (event.container_id, event.pid) = (id.to_owned(), response::unsigned(pid));
                self.events.send(events::START, &event, &self.reactor);
            }
            Notice::Paused => {
                let mut event = task_events::TaskPaused::new();
                event.container_id = id.to_owned();
                self.events.send(events::PAUSED, &event, &self.reactor);
            }
            Notice::Resumed => {
                let mut event = task_events::TaskResumed::new();
                event.container_id = id.to_owned();
                self.events.send(events::RESUMED, &event, &self.reactor);
            }
            Notice::Exited(pid, exit) => self.announce_exit(&ProcessKey::new(id, ""), pid, exit),
        }
    }

    /// Changes a container's resources.
    pub fn update(&mut self, reply: Reply, request: &api::UpdateTaskRequest) -> Answer {
        let container = self.container(&request.id)?;
        if container.state.has_exited() {
            return Err(Error::state("cannot update a stopped container"));
        }
        let resources = &request.resources.value;
        serde_json::from_slice::<serde::de::IgnoredAny>(resources)
            .map_err(|e| Error::new(Code::INVALID_ARGUMENT, format!("resources: {e}")))?;
        let file = runtime::memory_file_of(resources)?;
        let place = Place { input_file: Some(file.as_fd()), ..Place::default() };
        let input_path = runtime::input_path();
        let arguments = ["update", "--resources", &input_path, &request.id];
        let key = ProcessKey::new(&request.id, "");
        self.run_in(key, Some(reply), Purpose::Update, &arguments, &place)?;
        Ok(None)
    }

    /// Writes a checkpoint of a container.
    pub fn checkpoint(&mut self, reply: Reply, request: &api::CheckpointTaskRequest) -> Answer {
        use crate::container::state::State;
        let options = options::parse_checkpoint(request.options.as_ref())?;
        let container = self.container(&request.id)?;
        match container.state {
            State::Running { .. } | State::Paused { .. } => {}
            state if state.has_exited() => {
                return Err(Error::state("cannot checkpoint a stopped container"));
            }
            _ => return Err(Error::state("cannot checkpoint a task in created state")),
        }
        let own = container.bundle.join("work").join("criu-work");
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
        let purpose = Purpose::Checkpoint(request.path.clone(), removed);
        self.run_for(ProcessKey::new(&request.id, ""), Some(reply), purpose, &arguments)?;
        Ok(None)
    }

    fn checkpoint_finished(
        &mut self,
        key: &ProcessKey,
        path: &str,
        work: Option<PathBuf>,
        done: Result<(), Error>,
    ) -> Answer {
        let dump = self.container(&key.id)?.bundle.join("criu-dump.log");
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
        (event.container_id, event.checkpoint) = (key.id.clone(), path.to_owned());
        self.events.send(events::CHECKPOINTED, &event, &self.reactor);
        response::empty()
    }

    /// Makes the socket through which the runtime sends a terminal, if the process gets one.
    pub fn console_socket(
        &mut self,
        id: &str,
        stdio: &Stdio,
    ) -> Result<Option<ConsoleSocket>, Error> {
        if !stdio.terminal {
            return Ok(None);
        }
        let name = format!("pty{}.sock", self.new_id());
        let container = self.containers.get(id).ok_or_else(|| Error::not_found("container"))?;
        let bundle = container.open_bundle()?;
        ConsoleSocket::new(bundle.as_fd(), name)
            .context("failed to create OCI runtime console socket")
            .map(Some)
    }
}

fn without_prefix(e: Error) -> Error {
    Error { message: e.message.trim_start_matches(": ").to_owned(), ..e }
}

/// Logs the failure of a command that no caller waits for.
pub fn log_failure(key: &ProcessKey, e: &Error) {
    crate::log::error(format_args!("container {}: {e}", key.id));
}
