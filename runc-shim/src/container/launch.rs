//! Create and Start. [`Container::launch_next`] has the order of the steps in which a process is
//! created: those of a Create, of a Start that restores a container, and of the Start of an exec.

use std::os::fd::{AsFd as _, OwnedFd};

use containerd_shim_protos::api::Mount;
use containerd_shim_protos::events::task as task_events;

use super::Container;
use super::state::State;
use super::step::{Caller, Step, Wait};
use super::steps::check_deadline;
use crate::error::{Context as _, Error};
use crate::exec;
use crate::exits::{Exit, UNKNOWN};
use crate::io::console::ConsoleSocket;
use crate::io::readers::Readers;
use crate::io::{self, Prepared};
use crate::process_key::ProcessKey;
use crate::root::helper::{self, Action};
use crate::root::{mounts, overlay};
use crate::runtime::{self, Place};
use crate::services::Services;
use crate::sys;
use crate::ttrpc::events;
use crate::ttrpc::response::{self, Answer};
use crate::ttrpc::server::Reply;

/// A step of the creation of a process, with what the next one needs.
#[derive(Debug)]
pub enum Launch {
    /// Only in a Create: a helper mounts the root file system, or has a program mount a part of it.
    Mounting,
    /// The FIFOs of the output get readers.
    AwaitingReaders,
    /// The logging program becomes ready. The process gets these streams.
    StartingLogger(Prepared),
    /// The runtime creates the process, and sends the terminal, if it gets one, through the socket.
    /// These streams are copied afterwards.
    Creating(Option<ConsoleSocket>, Prepared),
}

impl Container {
    /// Creates the container, whose root file system has these mounts.
    pub fn create(&mut self, services: &mut Services, reply: Reply, mounts: Vec<Mount>) -> Answer {
        let caller = self.caller(Some(reply));
        if mounts.is_empty() {
            return self.launch(services, caller);
        }
        let begun = self.mount(services, &caller, mounts);
        begun.or_else(|e| self.launch_failed(services, &caller, e, false))
    }

    /// Starts the container, or restores it from a checkpoint.
    pub(super) fn start(&mut self, services: &mut Services, reply: Reply) -> Answer {
        match self.state {
            State::Restorable => self.launch(services, self.caller(Some(reply))),
            _ => self.command(services, reply, Step::Start, "start"),
        }
    }

    /// Starts an exec.
    pub(super) fn start_exec(
        &mut self,
        services: &mut Services,
        reply: Reply,
        key: &ProcessKey,
    ) -> Answer {
        self.check_not_exited()?;
        self.exec(key)?.begin_start()?;
        self.launch(services, Caller { key: key.clone(), reply: Some(reply) })
    }

    /// Begins to create a process: the first one, or that of an exec.
    fn launch(&mut self, services: &mut Services, caller: Caller) -> Answer {
        let begun = self.prepare(services, &caller);
        begun.or_else(|e| self.launch_failed(services, &caller, e, false))
    }

    /// Continues after a step has ended, with the next one.
    pub(super) fn launch_next(
        &mut self,
        services: &mut Services,
        caller: &Caller,
        ended: Launch,
        done: Result<(), Error>,
    ) -> Answer {
        let was_made = matches!(ended, Launch::Creating(..)) && done.is_ok();
        let continued = match (done, ended) {
            (Ok(()), ended) => self.launch_after(services, caller, ended),
            (Err(e), Launch::Mounting | Launch::AwaitingReaders) => Err(e),
            (Err(e), Launch::StartingLogger(streams)) | (Err(e), Launch::Creating(_, streams)) => {
                // A process that the runtime has left may hold the locks of these streams.
                services.copiers.close(&caller.key, streams.into_ends().collect());
                Err(e)
            }
        };
        continued.or_else(|e| self.launch_failed(services, caller, e, was_made))
    }

    /// Begins the step that follows one that has succeeded, or completes the call.
    fn launch_after(&mut self, services: &mut Services, caller: &Caller, ended: Launch) -> Answer {
        match ended {
            Launch::Mounting => self.prepare(services, caller),
            Launch::AwaitingReaders => {
                if caller.key != self.key {
                    self.check_not_exited()?;
                }
                self.open_streams(services, caller)
            }
            Launch::StartingLogger(streams) => self.create_process(services, caller, streams),
            Launch::Creating(Some(console), streams) => {
                self.take_terminal(services, caller, &console, streams)
            }
            Launch::Creating(None, streams) => self.attach(services, caller, streams),
        }
    }

    /// Starts a helper that mounts the root file system.
    fn mount(
        &mut self,
        services: &mut Services,
        caller: &Caller,
        mut mounts: Vec<Mount>,
    ) -> Answer {
        if std::env::var_os(runtime::VOLATILE_ROOTFS).is_some() {
            overlay::make_volatile(&mut mounts);
        }
        mounts.iter().try_for_each(mounts::check).context("failed to mount rootfs component")?;
        let mounts = helper::mounts_file(mounts)?;
        let step = Step::Launch(Launch::Mounting);
        let begun = self.run_helper(services, caller, step, Action::Mount, Some(mounts.as_fd()))?;
        self.has_rootfs = true;
        Ok(begun)
    }

    /// Waits until the output of the process has readers. The runtime does nothing for a container
    /// to restore before its start.
    fn prepare(&mut self, services: &mut Services, caller: &Caller) -> Answer {
        if caller.key == self.key {
            check_deadline(caller.reply)?;
        }
        if self.state == State::New && !self.restore.is_empty() {
            return self.created(services, 0);
        }
        let readers = Readers::of(&self.process(&caller.key)?.stdio);
        if !readers.are_there() {
            let step = Step::Launch(Launch::AwaitingReaders);
            return self.wait_for(Wait::Readers(readers), caller, step);
        }
        // Until the streams have the FIFOs open, `readers` has.
        self.open_streams(services, caller)
    }

    /// Opens the streams of the process, and waits until the logging program is ready, if there is
    /// one.
    fn open_streams(&mut self, services: &mut Services, caller: &Caller) -> Answer {
        let stdio = self.process(&caller.key)?.stdio.clone();
        if !stdio.is_none() {
            services.copiers.start(&caller.key)?;
        }
        let mut prepared =
            io::prepare(&stdio, self.owner, caller.key.process(), &services.namespace)
                .context("failed to create init process I/O")?;
        let Some(logger) = prepared.logger.take() else {
            return self.create_process(services, caller, prepared);
        };
        let step = Step::Launch(Launch::StartingLogger(prepared));
        self.begin_logger(services, caller, step, logger)
    }

    /// Has the runtime create the process.
    fn create_process(
        &mut self,
        services: &mut Services,
        caller: &Caller,
        mut streams: Prepared,
    ) -> Answer {
        let console = self.console_socket(&caller.key)?;
        let pid_file = self.pid_file(&caller.key).display().to_string();
        let (bundle, path) = (self.open_bundle()?, self.bundle.display().to_string());
        let (restore, input_path) = (self.restore.clone(), runtime::input_path());
        let mut input_file = None;
        let mut arguments: Vec<&str> = Vec::new();
        if caller.key != self.key {
            // The container may have exited while the logging program started.
            self.check_not_exited()?;
            arguments.extend(["exec", "--process", &input_path, "--detach"]);
            arguments.extend(["--pid-file", &pid_file]);
            input_file =
                Some(runtime::memory_file_of(&std::mem::take(&mut self.exec(&caller.key)?.spec))?);
        } else if !restore.is_empty() {
            arguments.extend(restore.iter().map(String::as_str));
        } else {
            arguments.extend(["create", "--bundle", &path, "--pid-file", &pid_file]);
            arguments.extend(self.no_pivot_root.then_some("--no-pivot"));
            arguments.extend(self.no_new_keyring.then_some("--no-new-keyring"));
        }
        let socket = console.as_ref().map(|console| console.name().to_owned());
        if let Some(socket) = &socket {
            arguments.extend(["--console-socket", socket]);
        }
        arguments.push(&caller.key.id);
        let child = std::mem::take(&mut streams.child);
        let place = Place {
            stdio: Some(child.each_ref().map(|fd| fd.as_ref().map(|fd| fd.as_fd()))),
            directory: Some(bundle.as_fd()),
            input_file: input_file.as_ref().map(|input_file| input_file.as_fd()),
        };
        // The streams are copied once the process is created: until then the runtime writes its
        // own errors to them.
        let step = Step::Launch(Launch::Creating(console, streams));
        let begun = self.run_in(services, caller, step, &arguments, place)?;
        services.children.begin_start(&caller.key);
        services.copiers.close(&caller.key, child.into_iter().flatten().collect());
        Ok(begun)
    }

    /// Makes the socket through which the runtime sends a terminal, if the process gets one.
    fn console_socket(&mut self, key: &ProcessKey) -> Result<Option<ConsoleSocket>, Error> {
        if !self.process(key)?.stdio.terminal {
            return Ok(None);
        }
        self.consoles = self.consoles.wrapping_add(1);
        let name = format!("pty{}.sock", self.consoles);
        ConsoleSocket::new(self.open_bundle()?.as_fd(), name)
            .context("failed to create OCI runtime console socket")
            .map(Some)
    }

    /// Receives the terminal of a process that the runtime has created.
    fn take_terminal(
        &mut self,
        services: &mut Services,
        caller: &Caller,
        console: &ConsoleSocket,
        mut streams: Prepared,
    ) -> Answer {
        let master = console.receive()?;
        let connected = streams.connect(&master);
        // Also if that has failed, the copier thread closes the terminal.
        let process = self.process(&caller.key)?;
        process.set_console(&mut services.copiers, &caller.key, Some(master));
        connected.context("failed to start console copy")?;
        self.attach(services, caller, streams)
    }

    /// Begins to copy the streams of the process, and completes the call.
    fn attach(&mut self, services: &mut Services, caller: &Caller, prepared: Prepared) -> Answer {
        let reply = caller.reply.filter(|_| caller.key == self.key);
        let pid_file = self.pid_file(&caller.key);
        let pid = match check_deadline(reply).and_then(|()| runtime::read_pid(&pid_file)) {
            Ok(pid) => pid,
            Err(e) => {
                // The process, which may run already, may hold the locks of these streams.
                services.copiers.close(&caller.key, prepared.into_ends().collect());
                return Err(e);
            }
        };
        let Prepared { streams, stdin, .. } = prepared;
        self.process(&caller.key)?.attach(&mut services.copiers, &caller.key, streams, stdin)?;
        let exit = services.children.started(&caller.key, pid);
        let exit = exit.context(format_args!("pid file {}", pid_file.display()))?;
        if caller.key != self.key {
            return self.exec_started(services, &caller.key, pid, exit);
        }
        if exit.is_none() {
            // Only here: a reaped process has no cgroup, and its pid may have been reused.
            self.cgroup = self.config.cgroup_with(&self.key.id, pid);
            self.watch_oom_kills(services, pid);
        }
        let answer = match self.state {
            State::New => self.created(services, pid),
            _ => self.started(services, pid),
        };
        if let Some(exit) = exit {
            self.process_exited(services, &caller.key, exit);
        }
        answer
    }

    /// Handles a failure: the process was not created, or it was created and cannot be used, and is
    /// killed (`was_made`).
    fn launch_failed(
        &mut self,
        services: &mut Services,
        caller: &Caller,
        e: Error,
        was_made: bool,
    ) -> Answer {
        services.children.start_failed(&caller.key);
        if caller.key == self.key && self.state == State::New {
            self.state = State::Failed;
            self.create_event = None;
            return self.remove(services, caller, Some(e));
        }
        if was_made {
            if let Ok(pid) = runtime::read_pid(&self.pid_file(&caller.key)) {
                services.children.kill_unknown(pid);
            }
            // Other processes of an exec may have the terminal open: it hangs up.
            if let Ok(process) = self.process(&caller.key) {
                process.set_console(&mut services.copiers, &caller.key, None::<OwnedFd>);
            }
        }
        if let Ok(exec) = self.exec(&caller.key) {
            // A caller of Wait must not take it for a success.
            let exit = Exit::now(UNKNOWN);
            exec.state = exec::State::Stopped(0, exit);
            exec.process.waiters.answer(services, exit);
        }
        self.announce_exit_if_done(services);
        Err(e)
    }

    /// Completes a Create; pid 0: the container is restored by its Start.
    fn created(&mut self, services: &mut Services, pid: i32) -> Answer {
        self.forget_creation();
        self.pid = pid;
        self.state.settle(if pid == 0 { State::Restorable } else { State::Created });
        let pid = response::unsigned(pid);
        if let Some(mut event) = self.create_event.take() {
            event.pid = pid;
            services.send(events::CREATE, &*event);
        }
        response::created(pid)
    }

    /// Completes the start or restore of the container, whose first process may have exited.
    fn started(&mut self, services: &mut Services, pid: i32) -> Answer {
        self.pid = pid;
        self.state.settle(State::Running);
        let pid = response::unsigned(pid);
        services.send(events::START, &events::start(&self.key.id, pid));
        self.announce_exit_if_done(services);
        response::started(pid)
    }

    /// Continues after the runtime has started the container, or has failed to. If the first
    /// process has exited and the runtime was killed (`was_interrupted`), for example because a
    /// hook hung, the container counts as started: for one that was not, containerd drops the exit
    /// code.
    pub(super) fn start_ended(
        &mut self,
        services: &mut Services,
        done: Result<(), Error>,
        was_interrupted: bool,
    ) -> Answer {
        match done {
            Ok(()) => self.started(services, self.pid),
            Err(_) if was_interrupted && self.state.has_exited() => {
                self.started(services, self.pid)
            }
            Err(e) => {
                self.announce_exit_if_done(services);
                Err(e)
            }
        }
    }

    /// Completes the start of an exec, which may have exited already.
    fn exec_started(
        &mut self,
        services: &mut Services,
        key: &ProcessKey,
        pid: i32,
        exit: Option<Exit>,
    ) -> Answer {
        self.exec(key)?.state = exec::State::Running(pid);
        let mut event = task_events::TaskExecStarted::new();
        (event.container_id, event.exec_id) = (key.id.clone(), key.exec.clone());
        event.pid = response::unsigned(pid);
        services.send_of(events::EXEC_STARTED, &event, key);
        if let Some(exit) = exit {
            self.process_exited(services, key, exit);
        } else if self.state.has_exited() && !self.config.own_pid_namespace {
            // The exec has joined the container after the remaining processes were killed, and must
            // not delay the announcement of the exit. It is not reaped yet, so its pid cannot have
            // been reused.
            let _ = sys::kill(pid, libc::SIGKILL);
        }
        response::started(response::unsigned(pid))
    }

    /// Fails if the first process has exited, so that no exec can join it.
    fn check_not_exited(&self) -> Result<(), Error> {
        if self.state.has_exited() {
            let reason = format!("container {} init process is not running", self.key.id);
            return Err(Error::state(reason));
        }
        Ok(())
    }
}
