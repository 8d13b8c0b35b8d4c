//! A container: its state, the steps of what is in progress, its first process and its execs.

mod commands;
pub mod config;
mod create;
mod delete;
mod exit;
mod kill;
mod launch;
mod queries;
mod removal;
pub mod state;
mod step;
mod steps;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Instant;

use self::config::Config;
pub use self::create::create_event;
use self::state::State;
use self::step::{Pending, Step};
use crate::cgroup::Cgroup;
use crate::cgroup::oom_watch::OomWatch;
use crate::error::{Code, Context as _, Error};
use crate::exec::{self, Exec};
use crate::io::Owner;
use crate::log;
use crate::process::ProcessStreams;
use crate::process_key::ProcessKey;
use crate::runtime::Runtime;
use crate::services::Services;
use crate::ttrpc::request::{Method, Request};
use crate::ttrpc::response::{self, Answer};
use crate::ttrpc::server::Reply;

/// Maximum number of calls that wait for a pending command of a container or its execs.
const MAX_QUEUED: usize = 1024;

/// A container.
#[derive(Debug, Default)]
pub struct Container {
    /// The container's id.
    key: ProcessKey,
    /// The bundle directory, which containerd makes and removes.
    bundle: PathBuf,
    /// The runtime and its options.
    runtime: Runtime,
    /// The user and the group that own the pipes.
    owner: Owner,
    state: State,
    /// The pid of the first process; 0: there is none yet.
    pid: i32,
    /// The commands and logging programs that are being waited for, each with the step in which it
    /// is; those of execs, too.
    pending: Vec<Pending>,
    /// Calls that wait until nothing is pending for the container, or for the exec.
    queue: Vec<(Reply, Request)>,
    /// The first process.
    process: ProcessStreams,
    /// The execs by their ids.
    execs: BTreeMap<String, Exec>,
    /// The number of terminals that were asked for; it names their sockets.
    consoles: u32,
    /// This shim mounts the root file system, and has not unmounted it.
    has_rootfs: bool,
    /// The used fields of `config.json`.
    config: Config,
    /// The runtime must not use pivot_root(2).
    no_pivot_root: bool,
    /// The runtime must not create a session keyring.
    no_new_keyring: bool,
    /// Arguments that restore the container from a checkpoint; empty: it is created.
    restore: Vec<String>,
    /// The cgroup of the first process.
    cgroup: Option<Cgroup>,
    /// Reports OOM kills in that cgroup.
    oom_watch: Option<OomWatch>,
    /// The runtime was killed while it created or restored the container: it may have left a
    /// cgroup that it does not know, with processes.
    may_have_left_cgroup: bool,
    /// The TaskCreate event; sent when the creation has succeeded.
    create_event: Option<Box<containerd_shim_protos::events::task::TaskCreate>>,
    /// There is a note for the daemon that the container is being created.
    is_noted: bool,
    /// The container is deleted.
    is_gone: bool,
}

/// The error of a call for a container that does not exist.
pub fn missing() -> Error {
    Error::not_found("container not created")
}

impl Container {
    /// Whether the container is deleted, and can be forgotten.
    pub fn is_gone(&self) -> bool {
        self.is_gone
    }

    /// Whether the creation has failed, and its leftovers are being removed.
    pub fn has_failed(&self) -> bool {
        self.state == State::Failed
    }

    /// Whether the creation has succeeded.
    pub fn is_created(&self) -> bool {
        !matches!(self.state, State::New | State::Failed)
    }

    /// The pid of the first process in messages.
    pub fn pid(&self) -> u32 {
        response::unsigned(self.pid)
    }

    /// Executes a call, or has it wait for what is pending.
    ///
    /// # Errors
    /// The refusal.
    pub fn call(&mut self, services: &mut Services, reply: Reply, request: Request) -> Answer {
        if !matches!(request.method, Method::Delete) && !self.is_created() {
            return Err(missing());
        }
        let Some(request) = self.enqueue(reply, request)? else { return Ok(None) };
        let Request { key, method } = request;
        let answer = self.execute(services, reply, &key, method);
        self.release(services, &key);
        answer
    }

    fn execute(
        &mut self,
        services: &mut Services,
        reply: Reply,
        key: &ProcessKey,
        method: Method,
    ) -> Answer {
        if key.exec.is_empty() {
            self.state.check(&method)?;
        }
        match method {
            Method::Start if key.exec.is_empty() => self.start(services, reply),
            Method::Start => self.start_exec(services, reply, key),
            Method::Delete if key.exec.is_empty() => self.delete(services, reply),
            Method::Delete => self.delete_exec(services, reply, key),
            Method::Pause => self.command(services, reply, Step::Pause, "pause"),
            Method::Resume => self.command(services, reply, Step::Resume, "resume"),
            Method::Checkpoint(r) => self.checkpoint(services, reply, &r),
            Method::Kill(r) => self.kill(services, reply, key, &r),
            Method::Update(r) => self.update(services, reply, &r),
            Method::Exec(r) => self.add_exec(services, r),
            Method::Wait => self.wait(services, reply, key),
            Method::State => self.describe(key),
            Method::Pids => self.pids(),
            Method::ResizePty(r) => self.resize(services, key, &r),
            Method::CloseIo => self.close_io(key),
            Method::Stats => self.stats(),
            _ => Err(Error::new(Code::UNIMPLEMENTED, "not a call for a container")),
        }
    }

    /// Queues a request that must wait for what is pending for the container or the exec. Returns
    /// the request if it need not wait.
    fn enqueue(&mut self, reply: Reply, request: Request) -> Result<Option<Request>, Error> {
        let key = &request.key;
        let must_wait = match &request.method {
            Method::Start | Method::Delete | Method::Kill(_) | Method::Pause => true,
            Method::Resume | Method::Checkpoint(_) | Method::Update(_) => true,
            // The terminal of an exec is there once it is started.
            Method::ResizePty(_) => !key.exec.is_empty(),
            _ => false,
        };
        if !must_wait || !self.is_busy(key) {
            return Ok(Some(request));
        }
        let now = Instant::now();
        // The callers of these have given up.
        self.queue.retain(|(reply, _)| !reply.is_late(now));
        if self.queue.len() >= MAX_QUEUED {
            let reason = format!("{MAX_QUEUED} calls wait for a command of the runtime");
            return Err(Error::new(Code::RESOURCE_EXHAUSTED, reason));
        }
        let cancels = matches!(request.method, Method::Delete) && self.state == State::New;
        self.queue.push((reply, request));
        if cancels {
            self.cancel_creation();
        }
        Ok(None)
    }

    /// Whether the container is being deleted, so that its exit is announced at once.
    fn is_deleting(&self) -> bool {
        self.is_gone || self.pending.iter().any(|it| matches!(it.step, Step::Remove(..)))
    }

    /// Whether calls for the container or an exec must wait: the exec is being started; or a step
    /// is pending for the container, and not for one of its execs, or its last output is awaited.
    fn is_busy(&self, key: &ProcessKey) -> bool {
        if key.exec.is_empty() {
            return self.process.has_drain() || self.pending.iter().any(|it| it.key() == key);
        }
        self.execs.get(&key.exec).is_some_and(|exec| exec.state == exec::State::Starting)
    }

    /// Has the queued calls of the container or an exec executed, if nothing is pending for it.
    fn release(&mut self, services: &mut Services, key: &ProcessKey) {
        if !self.is_busy(key) {
            services.release(self.queue.extract_if(.., |(_, request)| request.key == *key));
            self.queue.shrink_to_fit();
        }
    }

    /// An exec.
    fn exec(&mut self, key: &ProcessKey) -> Result<&mut Exec, Error> {
        let missing = || Error::not_found(format!("process does not exist {}", key.exec));
        self.execs.get_mut(&key.exec).ok_or_else(missing)
    }

    /// The streams of a process.
    fn process(&mut self, key: &ProcessKey) -> Result<&mut ProcessStreams, Error> {
        match key.exec.as_str() {
            "" => Ok(&mut self.process),
            _ => Ok(&mut self.exec(key)?.process),
        }
    }

    /// Opens the bundle directory.
    fn open_bundle(&self) -> Result<OwnedFd, Error> {
        let opened = File::open(&self.bundle);
        opened.map(Into::into).context(format_args!("open {}", self.bundle.display()))
    }

    /// The file into which the runtime writes the pid of a process.
    fn pid_file(&self, key: &ProcessKey) -> PathBuf {
        match key.exec.as_str() {
            "" => self.bundle.join("init.pid"),
            // The prefix keeps an exec with any id from overwriting the container's file.
            exec => self.bundle.join(format!("exec-{exec}.pid")),
        }
    }

    /// Logs the failure of something that no caller waits for.
    fn log_failure(&self, e: &Error) {
        log::error(format_args!("container {}: {e}", self.key.id));
    }

    /// The time at which [`Container::handle_timeouts`] has work to do.
    pub fn deadline(&self) -> Option<Instant> {
        let pending = self.pending.iter().filter_map(Pending::deadline);
        let execs = self.execs.values().filter_map(|exec| exec.process.deadline());
        pending.chain(execs).chain(self.process.deadline()).min()
    }

    /// Ends the steps and the waits whose time is over, and continues the creations whose output
    /// has readers.
    pub fn handle_timeouts(&mut self, services: &mut Services, now: Instant) {
        self.end_late_steps(services, now);
        self.end_late_drains(services, now);
    }
}
