//! The Task service: decodes calls, and answers those that need no command of the runtime.

use std::ops::ControlFlow;

use containerd_shim_protos::api;
use containerd_shim_protos::events::task as task_events;
use containerd_shim_protos::shim::oci::ProcessDetails;
use containerd_shim_protos::types::task::{ProcessInfo, Status};
use protobuf::well_known_types::any::Any;
use protobuf::{EnumOrUnknown, Message, MessageField};

use crate::container::state::{Event, State};
use crate::error::{Code, Error};
use crate::exec::{self, Exec};
use crate::exits::Exit;
use crate::io::Stdio;
use crate::io::process_streams::{ProcessStreams, WAITERS};
use crate::process_key;
use crate::process_key::ProcessKey;
use crate::sandbox::Sandbox;
use crate::shim::Shim;
use crate::ttrpc::events;
use crate::ttrpc::request::{self, Request};
use crate::ttrpc::response::{self, Answer};
use crate::ttrpc::server::{Call, Reply};

/// Maximum number of calls that wait for a pending command of one container or exec.
const MAX_QUEUED: usize = 1024;

/// Maximum number of execs of a container that are not deleted. Each has a spec until its start.
const MAX_EXECS: usize = 1024;

impl Shim {
    /// Decodes and executes a call.
    pub fn call(&mut self, call: Call) {
        let Call { reply, request } = call;
        let decoded = request::decode(&request.service, &request.method, &request.payload);
        drop(request);
        match decoded {
            Ok(request) => self.dispatch(reply, request),
            Err(e) => self.server.respond(reply, Err(e), &self.reactor),
        }
    }

    /// Executes a request and answers it, unless it is answered later.
    pub fn dispatch(&mut self, reply: Reply, request: Request) {
        let answer = self.act(reply, request);
        self.respond(reply, answer);
    }

    /// Answers a call, unless it is answered later.
    pub fn respond(&mut self, reply: Reply, answer: Answer) {
        if let Some(answer) = answer.transpose() {
            self.server.respond(reply, answer, &self.reactor);
        }
    }

    /// Answers calls of Wait.
    pub fn answer_waiters(&mut self, waiters: Vec<Reply>, exit: Exit) {
        for waiter in waiters {
            let answer = response::now(&response::waited(exit));
            self.respond(waiter, answer);
        }
    }

    fn act(&mut self, reply: Reply, request: Request) -> Answer {
        let request = match self.sandbox_call(reply, request) {
            ControlFlow::Break(answer) => return answer,
            ControlFlow::Continue(request) => request,
        };
        let Some(request) = self.queue(reply, request)? else { return Ok(None) };
        match request {
            Request::Create(r) => self.create(reply, *r),
            Request::Start(r) if r.exec_id.is_empty() => self.start(reply, &r.id),
            Request::Start(r) => self.start_exec(reply, &ProcessKey::new(&r.id, &r.exec_id)),
            Request::Delete(r) if r.exec_id.is_empty() => self.delete(reply, &r.id),
            Request::Delete(r) => self.delete_exec(reply, &ProcessKey::new(&r.id, &r.exec_id)),
            Request::Pause(r) => self.pause(reply, &r.id, Event::Pause),
            Request::Resume(r) => self.pause(reply, &r.id, Event::Resume),
            Request::Checkpoint(r) => self.checkpoint(reply, &r),
            Request::Kill(r) => self.kill(reply, &r),
            Request::Update(r) => self.update(reply, &r),
            Request::Exec(r) => self.add_exec(r),
            Request::Wait(r) => self.wait(reply, &ProcessKey::new(&r.id, &r.exec_id)),
            Request::State(r) => self.state(&ProcessKey::new(&r.id, &r.exec_id)),
            Request::Pids(r) => self.pids(&r.id),
            Request::ResizePty(r) => self.resize(&r),
            Request::CloseIo(r) => self.close_io(&ProcessKey::new(&r.id, &r.exec_id)),
            Request::Stats(r) => self.stats(&r.id),
            Request::Connect(r) => self.connect(&r.id),
            Request::Shutdown => {
                let sandbox = self.sandbox.as_ref().is_some_and(Sandbox::runs);
                if self.containers.is_empty() && !sandbox {
                    self.begin_shutdown();
                }
                response::empty()
            }
            Request::SetPause(pause) => self.set_pause(pause),
        }
    }

    /// Queues a request that must wait for a pending command of its container or exec. Returns the
    /// request if it need not wait.
    fn queue(&mut self, reply: Reply, request: Request) -> Result<Option<Request>, Error> {
        let key = match &request {
            Request::Start(r) => ProcessKey::new(&r.id, &r.exec_id),
            Request::Delete(r) => ProcessKey::new(&r.id, &r.exec_id),
            Request::Kill(r) => ProcessKey::new(&r.id, &r.exec_id),
            Request::Pause(r) => ProcessKey::new(&r.id, ""),
            Request::Resume(r) => ProcessKey::new(&r.id, ""),
            Request::Checkpoint(r) => ProcessKey::new(&r.id, ""),
            Request::Update(r) => ProcessKey::new(&r.id, ""),
            // The terminal of an exec is there once it is started.
            Request::ResizePty(r) if !r.exec_id.is_empty() => ProcessKey::new(&r.id, &r.exec_id),
            _ => return Ok(Some(request)),
        };
        let is_delete = matches!(request, Request::Delete(_));
        let container =
            if is_delete { self.container_in_any_state(&key)? } else { self.container(&key.id)? };
        let is_creating = container.state == State::Creating;
        let queue = if key.exec.is_empty() {
            container.busy.as_mut()
        } else {
            let exec = container.execs.get_mut(&key.exec);
            let starting = |exec: &&mut Exec| exec.state == exec::state::State::Starting;
            exec.filter(starting).map(|exec| &mut exec.queue)
        };
        match queue {
            Some(queue) if queue.len() >= MAX_QUEUED => {
                let reason = format!("{MAX_QUEUED} calls wait for a command of the runtime");
                Err(Error::new(Code::RESOURCE_EXHAUSTED, reason))
            }
            Some(queue) => {
                queue.push_back((reply, request));
                if is_delete && is_creating {
                    self.cancel_creation(&key);
                }
                Ok(None)
            }
            None => Ok(Some(request)),
        }
    }

    fn add_exec(&mut self, request: api::ExecProcessRequest) -> Answer {
        let id = &request.exec_id;
        let container = self.container(&request.id)?;
        if container.execs.contains_key(id) {
            return Err(Error::new(Code::ALREADY_EXISTS, format!("id {id}")));
        }
        process_key::check_id(id)?;
        if container.execs.len() >= MAX_EXECS {
            let reason = format!("the container has {MAX_EXECS} execs that are not deleted");
            return Err(Error::new(Code::RESOURCE_EXHAUSTED, reason));
        }
        match container.state {
            State::Restorable => return Err(Error::state("cannot exec in a created state")),
            State::Pausing { .. } | State::Paused { .. } => {
                return Err(Error::state("cannot exec in a paused state"));
            }
            state if state.has_exited() => {
                return Err(Error::state("cannot exec in a stopped state"));
            }
            _ => {}
        }
        let stdio = Stdio {
            stdin: request.stdin,
            stdout: request.stdout,
            stderr: request.stderr,
            terminal: request.terminal,
        };
        let spec = exec::process_json(&request.spec.value, request.terminal)?;
        let process = ProcessStreams { stdio, ..ProcessStreams::default() };
        let (queue, drain) = Default::default();
        let exec = Exec { state: exec::state::State::Added, process, spec, queue, drain };
        container.execs.insert(id.clone(), exec);
        let key = ProcessKey::new(&request.id, &request.exec_id);
        let mut event = task_events::TaskExecAdded::new();
        (event.container_id, event.exec_id) = (request.id, request.exec_id);
        self.events.send_of_exec(events::EXEC_ADDED, &event, &key, &self.reactor);
        response::empty()
    }

    /// The exit of a process, if it has exited or could not be started.
    fn ended(&mut self, key: &ProcessKey) -> Result<Option<Exit>, Error> {
        if key.exec.is_empty() {
            return Ok(self.container(&key.id)?.state.exit());
        }
        Ok(self.exec(key)?.state.exit())
    }

    fn wait(&mut self, reply: Reply, key: &ProcessKey) -> Answer {
        if let Some(exit) = self.ended(key)? {
            return response::now(&response::waited(exit));
        }
        let there: Vec<Reply> = {
            let waiters = std::mem::take(&mut self.process(key)?.waiters);
            waiters.into_iter().filter(|waiter| self.server.is_connected(*waiter)).collect()
        };
        let process = self.process(key)?;
        process.waiters = there;
        // Refuses the new call, not an older one: CRI's Wait is the first, and CRI takes its error
        // for the exit of the container and kills the container (`handleContainerExit`).
        if process.waiters.len() >= WAITERS {
            return Err(Error::new(Code::RESOURCE_EXHAUSTED, "too many calls wait for this"));
        }
        process.waiters.push(reply);
        Ok(None)
    }

    fn state(&mut self, key: &ProcessKey) -> Answer {
        let container = self.container(&key.id)?;
        let mut response = api::StateResponse::new();
        response.bundle = container.bundle.display().to_string();
        let status = status(container.state);
        let (pid, status, exit) = if key.exec.is_empty() {
            (container.state.pid(), status, container.state.exit())
        } else {
            let state = self.exec(key)?.state;
            let own = match state {
                _ if matches!(status, Status::PAUSED | Status::PAUSING) => status,
                exec::state::State::Running { .. } => Status::RUNNING,
                exec::state::State::Stopped { .. } => Status::STOPPED,
                _ => Status::CREATED,
            };
            (state.pid(), own, state.exit())
        };
        response.id = key.process().to_owned();
        response.pid = response::unsigned(pid);
        response.status = EnumOrUnknown::new(status);
        let stdio = &self.process(key)?.stdio;
        response.stdin.clone_from(&stdio.stdin);
        response.stdout.clone_from(&stdio.stdout);
        response.stderr.clone_from(&stdio.stderr);
        response.terminal = stdio.terminal;
        if let Some(exit) = exit {
            response.exit_status = exit.status;
            response.exited_at = MessageField::some(exit.at());
        }
        response::now(&response)
    }

    fn pids(&mut self, id: &str) -> Answer {
        let container = self.container(id)?;
        let mut response = api::PidsResponse::new();
        let pids = container.cgroup.as_ref().map(|cgroup| cgroup.pids()).transpose()?;
        let mut pids = pids.unwrap_or_default();
        if pids.is_empty() && container.state.pid() != 0 {
            // When containerd starts, it deletes a task without processes, and with it an exit and
            // output that it has not received (core/runtime/v2, `loadShims`).
            pids.push(container.state.pid());
        }
        for pid in pids {
            let mut info = ProcessInfo::new();
            info.pid = response::unsigned(pid);
            let exec = container.execs.iter().find(|(_, exec)| exec.state.pid() == pid);
            if let Some((exec, _)) = exec {
                let mut details = ProcessDetails::new();
                details.exec_id.clone_from(exec);
                let mut any = Any::new();
                any.type_url = "containerd.runc.v1.ProcessDetails".to_owned();
                any.value = details.write_to_bytes()?;
                info.info = MessageField::some(any);
            }
            response.processes.push(info);
        }
        response::now(&response)
    }

    fn resize(&mut self, request: &api::ResizePtyRequest) -> Answer {
        let key = ProcessKey::new(&request.id, &request.exec_id);
        if !key.exec.is_empty() && self.exec(&key)?.state.exit().is_some() {
            return Err(Error::state("cannot resize a stopped container"));
        }
        let console = self.process(&key)?.console.as_ref();
        if let Some(console) = console.map(|console| console.try_clone()).transpose()? {
            let size = rustix::termios::Winsize {
                ws_row: u16::try_from(request.height).unwrap_or(u16::MAX),
                ws_col: u16::try_from(request.width).unwrap_or(u16::MAX),
                ws_xpixel: 0,
                ws_ypixel: 0,
            };
            if let Some(copier) = self.copiers.find(&key.id) {
                copier.resize(console, size)?;
            }
        }
        response::empty()
    }

    fn close_io(&mut self, key: &ProcessKey) -> Answer {
        let process = self.process(key)?;
        (process.stdin, process.stdin_closed) = (None, true);
        response::empty()
    }

    fn stats(&mut self, id: &str) -> Answer {
        let container = self.container(id)?;
        let missing = || Error::not_found("cgroup does not exist");
        let stats = container.cgroup.as_ref().ok_or_else(missing)?.stats()?;
        let mut response = api::StatsResponse::new();
        response.stats = MessageField::some(stats);
        response::now(&response)
    }

    fn connect(&mut self, id: &str) -> Answer {
        let mut response = api::ConnectResponse::new();
        response.shim_pid = std::process::id();
        if let Ok(container) = self.container(id) {
            response.task_pid = response::unsigned(container.state.pid());
        } else if let Some(pid) = self.sandbox_pid(id) {
            response.task_pid = pid;
        }
        response::now(&response)
    }
}

fn status(state: State) -> Status {
    match state {
        State::Creating | State::Discarding | State::Created { .. } => Status::CREATED,
        State::Restorable | State::Starting { .. } => Status::CREATED,
        State::Running { .. } | State::Exiting { .. } => Status::RUNNING,
        State::Pausing { .. } => Status::PAUSING,
        State::Paused { .. } | State::Resuming { .. } => Status::PAUSED,
        State::Deleting { exit: None, .. } => Status::CREATED,
        State::Stopped { .. } | State::Deleting { .. } => Status::STOPPED,
    }
}
