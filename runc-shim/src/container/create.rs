//! Creation of containers and of the processes of execs: streams, the logging program, the command
//! of the runtime that creates the process, the terminal.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use containerd_shim_protos::api::{self, Mount};
use containerd_shim_protos::events::task as task_events;
use containerd_shim_protos::shim::oci::Options;
use rustix::event::epoll::EventFlags;

use crate::container::deadlines;
use crate::container::pending_start::PendingStart;
use crate::container::state::{self, Event, Notice, State};
use crate::container::{self, Container, cgroup_with};
use crate::error::{Code, Context as _, Error};
use crate::exits;
use crate::exits::Exit;
use crate::io::console::ConsoleSocket;
use crate::io::process_streams::ProcessStreams;
use crate::io::{self, Owner, Prepared, Stdio};
use crate::log;
use crate::process_key;
use crate::process_key::ProcessKey;
use crate::reactor::Source;
use crate::root::fuse_program::FuseProgram;
use crate::root::mounts;
use crate::runtime::helper::{self, Action};
use crate::runtime::job::Purpose;
use crate::runtime::options;
use crate::runtime::{self, Place, Runtime};
use crate::shim::Shim;
use crate::sys;
use crate::ttrpc::events;
use crate::ttrpc::response::{self, Answer};
use crate::ttrpc::server::Reply;

impl Shim {
    /// Creates a container.
    pub fn create(&mut self, reply: Reply, request: api::CreateTaskRequest) -> Answer {
        if let Some(there) = self.containers.get(&request.id) {
            let what = if there.state == State::Discarding { "is being removed" } else { "exists" };
            let message = format!("container {} {what}", request.id);
            return Err(Error::new(Code::ALREADY_EXISTS, message));
        }
        if self.shutdown_deadline.is_some() {
            return Err(Error::new(Code::UNAVAILABLE, "the shim is shutting down"));
        }
        process_key::check_id(&request.id)?;
        let options = options::parse(request.options.as_ref())?;
        let bundle = PathBuf::from(&request.bundle);
        if !bundle.is_absolute() {
            let message = format!("bundle path is not absolute: {}", request.bundle);
            return Err(Error::new(Code::INVALID_ARGUMENT, message));
        }
        let container = new_container(&request, &options, &bundle, &self.namespace);
        // A failure after this point deletes the runtime's container and the mounts of the bundle.
        container.runtime.check_unknown(&request.id)?;
        options::write(&bundle, &options)?;
        let key = ProcessKey::new(&request.id, "");
        self.containers.insert(request.id.clone(), container);
        // Kept until the container is created: only then the event is sent.
        self.create_events.insert(request.id.clone(), create_event(&request));
        let begun = if request.rootfs.is_empty() {
            self.prepare(&key, Some(reply))
        } else {
            self.mount_rootfs(&key, reply, request.rootfs)
        };
        let answer = begun.or_else(|e| self.create_failed(&key, Some(reply), e));
        if answer.is_err() {
            // No command runs whose exit would release the container. What is left is removed
            // later.
            self.release(&key);
        }
        answer
    }

    /// Starts a helper that mounts the root file system of a container.
    fn mount_rootfs(&mut self, key: &ProcessKey, reply: Reply, mounts: Vec<Mount>) -> Answer {
        let by_program = mounts.iter().any(|mount| FuseProgram::of_type(&mount.type_).is_some());
        let input_file = helper::mounts_file(mounts)?;
        let input_file = Some(input_file.as_fd());
        let purpose = Purpose::Mount { by_program };
        self.run_helper(key.clone(), Some(reply), purpose, Action::Mount, input_file)?;
        let container = self.container_in_any_state(key)?;
        container.rootfs = Some(mounts::rootfs(&container.bundle));
        Ok(None)
    }

    /// Continues a creation after the helper has mounted the root file system, or has failed.
    pub fn rootfs_mounted(
        &mut self,
        key: &ProcessKey,
        reply: Option<Reply>,
        done: Result<(), Error>,
    ) -> Answer {
        done.and_then(|()| self.prepare(key, reply)).or_else(|e| self.create_failed(key, reply, e))
    }

    /// Prepares the streams of a container whose root file system is mounted, and has the runtime
    /// create the container.
    fn prepare(&mut self, key: &ProcessKey, reply: Option<Reply>) -> Answer {
        deadlines::check(reply)?;
        let container = self.container_in_any_state(key)?;
        if !container.restore.is_empty() {
            // The runtime does nothing for a container to restore before its start.
            let answer = self.created(key, None);
            self.release(key);
            return answer;
        }
        self.start_copier(key)?;
        let prepared = self.prepare_streams(key)?;
        self.await_logger(key.clone(), reply, prepared, false)
    }

    /// Prepares the streams of a process that the runtime will create. None for a process with a
    /// terminal: its streams are prepared when the runtime has sent the terminal.
    pub fn prepare_streams(&mut self, key: &ProcessKey) -> Result<Prepared, Error> {
        let owner = self.container_in_any_state(key)?.owner;
        let stdio = self.process_in_any_state(key)?.stdio.clone();
        if stdio.terminal {
            return Ok(Prepared::default());
        }
        io::prepare(&stdio, owner, key.process(), &self.namespace)
            .context("failed to create init process I/O")
    }

    /// Waits until the logging program is ready, if there is one, and then runs the process.
    pub fn await_logger(
        &mut self,
        key: ProcessKey,
        reply: Option<Reply>,
        prepared: Prepared,
        started: bool,
    ) -> Answer {
        let Some(logger) = &prepared.logger else {
            return self.run_process(key, reply, prepared, started);
        };
        let id = self.new_id();
        self.reactor.add(&logger.ready, Source::Logger(id), EventFlags::IN)?;
        self.loggers.insert(logger.pid, None);
        let deadline = Instant::now() + io::logger::READY_TIMEOUT;
        self.pending_starts.insert(id, PendingStart { key, reply, prepared, deadline, started });
        Ok(None)
    }

    /// Continues a start when the logging program has reported that it is ready, or has failed.
    pub fn logger_ready(&mut self, id: u32) {
        let Some(pending) = self.pending_starts.get(&id) else { return };
        let Some(logger) = &pending.prepared.logger else { return };
        if let Some(ready) = logger.is_ready() {
            self.logger_done(id, ready);
        }
    }

    /// Fails a start whose logging program was not ready in time.
    pub fn logger_late(&mut self, id: u32) {
        let late = Error::new(Code::DEADLINE_EXCEEDED, "logging binary is not ready in time");
        self.logger_done(id, Err(late));
    }

    /// Cancels the creation of a container for a Delete, which is queued: containerd deletes a
    /// container whose Create it has given up, and would not know of one that is created after
    /// that. Kills the command that runs, and starts no other.
    pub fn cancel_creation(&mut self, key: &ProcessKey) {
        for job in self.jobs.values_mut().filter(|job| job.key == *key) {
            (job.limit, job.is_cancelled) = (Some(Instant::now()), true);
        }
        let waits = |pending: &PendingStart| pending.key == *key;
        let pending = self.pending_starts.iter().find(|(_, pending)| waits(pending));
        if let Some(id) = pending.map(|(id, _)| *id) {
            self.logger_done(id, Err(Error::state("the container is being deleted")));
        }
    }

    fn logger_done(&mut self, id: u32, ready: Result<(), Error>) {
        let Some(pending) = self.pending_starts.remove(&id) else { return };
        let PendingStart { key, reply, prepared, started, .. } = pending;
        // A logging program that has exited was reaped: its pid may have been reused.
        let pid = prepared.logger.as_ref().map(|logger| logger.pid);
        let pid = pid.filter(|pid| self.loggers.contains_key(pid));
        if let (Err(_), Some(pid)) = (&ready, pid) {
            self.end_logger(pid);
        }
        if let Ok(process) = self.process_in_any_state(&key) {
            process.logger = pid;
        }
        let answer = ready
            .and_then(|()| self.run_process(key.clone(), reply, prepared, started))
            .or_else(|e| self.process_failed(&key, reply, e, started));
        if let Some(reply) = reply {
            self.respond(reply, answer);
        }
        self.release(&key);
    }

    /// Handles a failed start: the process was not created, or it was created (`made`) and cannot
    /// be used and is killed.
    fn process_failed(
        &mut self,
        key: &ProcessKey,
        reply: Option<Reply>,
        e: Error,
        made: bool,
    ) -> Answer {
        self.exits.resolve_start(key, None);
        if key.exec.is_empty() && matches!(self.container_in_any_state(key)?.state, State::Creating)
        {
            return self.create_failed(key, reply, e);
        }
        if made {
            self.end_unusable(key);
            // Other processes of an exec may have the terminal open: it hangs up.
            let console = self.process_in_any_state(key).ok().and_then(|it| it.console.take());
            self.copiers.close(&key.id, console.into_iter().collect());
        }
        if key.exec.is_empty() {
            self.change(key, Event::StartFailed);
        } else {
            self.exec_failed(key);
        }
        Err(e)
    }

    /// Kills a process that the runtime has just created and whose start has failed.
    fn end_unusable(&mut self, key: &ProcessKey) {
        let Ok(pid) = self.pid_of(key) else { return };
        if !self.is_known(pid) && exits::is_child(pid) {
            // Not reaped yet, so the pid cannot have been reused.
            let _ = sys::kill(pid, libc::SIGKILL);
        }
    }

    /// Has the runtime create the process whose streams are prepared; or, if it was created with a
    /// terminal already (`started`), begins to copy its streams.
    fn run_process(
        &mut self,
        key: ProcessKey,
        reply: Option<Reply>,
        prepared: Prepared,
        started: bool,
    ) -> Answer {
        if started {
            if key.exec.is_empty() {
                deadlines::check(reply)?;
            }
            let pid = self.pid_of(&key)?;
            self.attach(&key, prepared)?;
            return self.process_made(&key, pid);
        }
        if !key.exec.is_empty() {
            // It may have exited while the logging program started.
            self.check_not_exited(&key.id)?;
        }
        let stdio = self.process_in_any_state(&key)?.stdio.clone();
        let console = self.console_socket(&key.id, &stdio)?;
        let container = self.container_in_any_state(&key)?;
        let bundle = container.open_bundle()?;
        let pid_file = pid_file(&container.bundle, &key).display().to_string();
        let path = container.bundle.display().to_string();
        let (no_pivot, no_keyring) = (container.no_pivot_root, container.no_new_keyring);
        let restore = container.restore.clone();
        let mut arguments: Vec<&str> = Vec::new();
        let (input_path, mut input_file) = (runtime::input_path(), None);
        let purpose: fn(Option<ConsoleSocket>) -> Purpose;
        if key.exec.is_empty() && !restore.is_empty() {
            arguments.extend(restore.iter().map(String::as_str));
            purpose = Purpose::Restore;
        } else if key.exec.is_empty() {
            arguments.extend(["create", "--bundle", &path, "--pid-file", &pid_file]);
            arguments.extend(no_pivot.then_some("--no-pivot"));
            arguments.extend(no_keyring.then_some("--no-new-keyring"));
            purpose = Purpose::Create;
        } else {
            arguments.extend(["exec", "--process", &input_path, "--detach"]);
            arguments.extend(["--pid-file", &pid_file]);
            let spec =
                container.execs.get_mut(&key.exec).map(|exec| std::mem::take(&mut exec.spec));
            input_file = Some(runtime::memory_file_of(&spec.unwrap_or_default())?);
            purpose = Purpose::Exec;
        }
        let name = console.as_ref().map(|console| console.name().to_owned());
        if let Some(name) = &name {
            arguments.extend(["--console-socket", name]);
        }
        arguments.push(&key.id);
        let child = prepared.child.each_ref().map(|fd| fd.as_ref().map(|fd| fd.as_fd()));
        let place = Place {
            stdio: Some(child),
            directory: Some(bundle.as_fd()),
            input_file: input_file.as_ref().map(|input_file| input_file.as_fd()),
        };
        self.run_in(key.clone(), reply, purpose(console), &arguments, &place)?;
        self.exits.begin_start(&key);
        // The streams are copied once the process is created: until then the runtime writes its
        // own errors to them.
        let process = self.process_in_any_state(&key)?;
        process.stdin = prepared.stdin.filter(|_| !process.stdin_closed);
        process.prepared = prepared.streams;
        self.copiers.close(&key.id, prepared.child.into_iter().flatten().collect());
        Ok(None)
    }

    /// Begins to copy the streams of a process.
    fn attach(&mut self, key: &ProcessKey, prepared: Prepared) -> Result<(), Error> {
        let mut streams = std::mem::take(&mut self.process_in_any_state(key)?.prepared);
        streams.extend(prepared.streams);
        let ids = streams.into_iter().map(|stream| self.copiers.add(&key.id, stream));
        let ids = ids.collect::<Result<Vec<u32>, Error>>()?;
        let process = self.process_in_any_state(key)?;
        process.streams = ids;
        if prepared.stdin.is_some() && !process.stdin_closed {
            process.stdin = prepared.stdin;
        }
        Ok(())
    }

    /// Continues after the runtime has created a process: receives its terminal, if it has one, and
    /// begins to copy.
    fn take_over(
        &mut self,
        key: &ProcessKey,
        reply: Option<Reply>,
        console: Option<ConsoleSocket>,
    ) -> Answer {
        let Some(console) = console else {
            return self.run_process(key.clone(), reply, Prepared::default(), true);
        };
        let master = console.receive()?;
        let terminal = master.try_clone();
        let process = self.process_in_any_state(key)?;
        let stdio = process.stdio.clone();
        // First: the last close of a terminal may block, and is left to the copier thread, also
        // if the streams cannot be prepared.
        let former = process.console.replace(master);
        self.copiers.close(&key.id, former.into_iter().collect());
        let prepared = io::terminal(&stdio, &terminal?, key.process(), &self.namespace)
            .context("failed to start console copy")?;
        self.await_logger(key.clone(), reply, prepared, true)
    }

    /// Continues a Create, a restore or the start of an exec after the command of the runtime that
    /// creates the process has ended.
    pub fn launched(
        &mut self,
        key: &ProcessKey,
        reply: Option<Reply>,
        console: Option<ConsoleSocket>,
        done: Result<(), Error>,
    ) -> Answer {
        let made = done.is_ok();
        done.and_then(|()| self.take_over(key, reply, console))
            .or_else(|e| self.process_failed(key, reply, e, made))
    }

    fn pid_of(&mut self, key: &ProcessKey) -> Result<i32, Error> {
        let bundle = &self.container_in_any_state(key)?.bundle;
        runtime::read_pid(&pid_file(bundle, key))
    }

    /// Ends the start of a process, which has this pid; see [`exits::Exits::resolve_start`]. Fails
    /// if the pid is that of another live child, whose exit would be attributed to this process.
    pub fn resolve_start(&mut self, key: &ProcessKey, pid: i32) -> Result<Option<Exit>, Error> {
        let file = self.containers.get(&key.id).map(|it| pid_file(&it.bundle, key));
        let file = file.unwrap_or_default();
        let exit = self.exits.resolve_start(key, Some((pid, &file)));
        if exit.is_none() && self.is_known(pid) {
            let file = file.display();
            let reason = format!("pid file {file} has pid {pid}, which is another process");
            return Err(Error::unknown(reason));
        }
        Ok(exit)
    }

    /// Whether a live child is a command, a process of a container or a logging program already.
    fn is_known(&self, pid: i32) -> bool {
        self.jobs.contains_key(&pid)
            || self.processes.contains_key(&pid)
            || self.loggers.contains_key(&pid)
    }

    /// Completes a Create, a restore or the start of an exec: the process has this pid, and its
    /// streams are copied.
    fn process_made(&mut self, key: &ProcessKey, pid: i32) -> Answer {
        if !key.exec.is_empty() {
            return self.exec_started(key, pid);
        }
        if matches!(self.container_in_any_state(key)?.state, State::Starting { .. }) {
            return self.started(key, pid);
        }
        let exit = self.resolve_start(key, pid)?;
        if exit.is_none() {
            self.processes.insert(pid, key.clone());
            // Only here: a reaped process has no cgroup, and its pid may have been reused.
            let container = self.container_in_any_state(key)?;
            container.cgroup = cgroup_with(&container.bundle, &key.id, pid);
        }
        let answer = self.created(key, Some(pid))?;
        self.watch_oom_kills(&key.id);
        if let Some(exit) = exit {
            self.process_exited(key, exit);
        }
        Ok(answer)
    }

    fn created(&mut self, key: &ProcessKey, pid: Option<i32>) -> Answer {
        let container = self.container_in_any_state(key)?;
        let (next, _) = state::step(container.state, Event::Created(pid)).map_err(Error::state)?;
        container.state = next;
        let pid = response::unsigned(pid.unwrap_or(0));
        if let Some(mut event) = self.create_events.remove(&key.id) {
            event.pid = pid;
            self.events.send(events::CREATE, &event, &self.reactor);
        }
        let mut response = api::CreateTaskResponse::new();
        response.pid = pid;
        response::now(&response)
    }

    /// Changes a container's state and announces the change. Logs and ignores an event that is not
    /// allowed in the state.
    pub fn change(&mut self, key: &ProcessKey, event: Event) {
        let Some(container) = self.containers.get_mut(&key.id) else { return };
        let before = container.state;
        match state::step(before, event) {
            Ok((next, notice)) => {
                container.state = next;
                if notice != Notice::Nothing {
                    self.announce(&key.id, notice);
                }
            }
            Err(reason) => {
                let id = &key.id;
                log::warn(format_args!("container {id}: {event} while it is {before}: {reason}"));
            }
        }
    }
}

/// The file into which the runtime writes the pid of a process.
pub fn pid_file(bundle: &Path, key: &ProcessKey) -> PathBuf {
    match key.exec.as_str() {
        "" => bundle.join("init.pid"),
        // The prefix keeps an exec with any id from overwriting the container's file.
        exec => bundle.join(format!("exec-{exec}.pid")),
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

fn new_container(
    request: &api::CreateTaskRequest,
    options: &Options,
    bundle: &Path,
    namespace: &str,
) -> Container {
    let stdio = Stdio {
        stdin: request.stdin.clone(),
        stdout: request.stdout.clone(),
        stderr: request.stderr.clone(),
        terminal: request.terminal,
    };
    Container {
        bundle: bundle.to_owned(),
        runtime: Runtime {
            binary: options.binary_name.clone(),
            root: options::root_of(&options.root, namespace),
            systemd_cgroup: options.systemd_cgroup,
        },
        owner: Owner { uid: options.io_uid, gid: options.io_gid },
        state: State::Creating,
        process: ProcessStreams { stdio, ..ProcessStreams::default() },
        execs: BTreeMap::new(),
        rootfs: None,
        own_pid_namespace: container::has_own_pid_namespace(bundle),
        no_pivot_root: options.no_pivot_root,
        no_new_keyring: options.no_new_keyring,
        restore: options::restore_arguments(request, options, bundle),
        cgroups_path: container::cgroups_path(bundle),
        cgroup: None,
        may_have_left_cgroup: false,
        busy: Some(VecDeque::new()),
        killing_remaining: false,
        drain: None,
        retry: None,
    }
}
