//! The calls for the task of the pod's sandbox.

use std::ops::ControlFlow;

use containerd_shim_protos::api;
use containerd_shim_protos::events::task as task_events;
use containerd_shim_protos::types::task::Status;
use protobuf::MessageField;

use crate::container::create;
use crate::error::{Code, Error};
use crate::exits::{Exit, UNKNOWN, has_ended};
use crate::io::process_streams::WAITERS;
use crate::sandbox::{PauseProcess, Sandbox, Stage};
use crate::shim::Shim;
use crate::ttrpc::events;
use crate::ttrpc::request::{Request, task_of};
use crate::ttrpc::response::{self, Answer};
use crate::ttrpc::server::Reply;

impl Shim {
    /// Sets the pause process of the sandbox. Succeeds if it is already set to the same process.
    pub fn set_pause(&mut self, pause: PauseProcess) -> Answer {
        if pause.id != self.id {
            let reason = format!("this is the shim of sandbox {}", self.id);
            return Err(Error::new(Code::INVALID_ARGUMENT, reason));
        }
        if let Some(known) = &self.sandbox {
            if known.pause == pause && known.exit.is_none() {
                return response::empty();
            }
            if known.stage != Stage::Known && known.exit.is_none() {
                return Err(Error::state("the sandbox already has another pause process"));
            }
        }
        if self.containers.contains_key(&pause.id) {
            return Err(Error::new(Code::ALREADY_EXISTS, "a container has the sandbox's id"));
        }
        self.sandbox = Some(Sandbox::open(pause, &self.reactor)?);
        response::empty()
    }

    /// Answers a call for the sandbox's task, or returns a request that is not for this task.
    pub fn sandbox_call(&mut self, reply: Reply, request: Request) -> ControlFlow<Answer, Request> {
        let Some(sandbox) = &mut self.sandbox else {
            return match request {
                // The sandbox is not a container that the runtime could create.
                Request::Create(r) if r.id == self.id => {
                    ControlFlow::Break(Err(Error::state("pause process not set")))
                }
                other => ControlFlow::Continue(other),
            };
        };
        if task_of(&request) != Some((sandbox.pause.id.as_str(), true)) {
            return ControlFlow::Continue(request);
        }
        if !matches!(request, Request::Create(_))
            && let Err(e) = sandbox.created()
        {
            return ControlFlow::Break(Err(e));
        }
        ControlFlow::Break(match request {
            Request::Create(r) => self.create_sandbox(&r),
            Request::Start(_) => self.start_sandbox(),
            Request::Delete(_) => self.delete_sandbox(),
            Request::Wait(_) => self.wait_sandbox(reply),
            Request::Kill(r) => sandbox.kill(r.signal),
            Request::State(_) => sandbox.state(),
            Request::Pids(_) => sandbox.pids(),
            Request::Stats(_) => sandbox.stats(),
            Request::CloseIo(_) => response::empty(),
            _ => Err(Error::new(Code::UNIMPLEMENTED, "the sandbox runs no container")),
        })
    }

    /// The pid of the sandbox's task, if `id` is its id.
    pub fn sandbox_pid(&self, id: &str) -> Option<u32> {
        let sandbox = self.sandbox.as_ref().filter(|sandbox| sandbox.pause.id == id)?;
        (sandbox.stage != Stage::Known).then(|| sandbox.pid())
    }

    /// Creates the sandbox's task. It may exist already if containerd has forgotten it, because
    /// containerd creates no task that it knows.
    fn create_sandbox(&mut self, request: &api::CreateTaskRequest) -> Answer {
        let Some(sandbox) = self.sandbox.as_mut().filter(|sandbox| sandbox.exit.is_none()) else {
            return Err(Error::state("the pause process has exited"));
        };
        sandbox.stage = Stage::Created;
        sandbox.bundle.clone_from(&request.bundle);
        let mut event = create::create_event(request);
        event.pid = sandbox.pid();
        self.events.send(events::CREATE, &event, &self.reactor);
        let mut response = api::CreateTaskResponse::new();
        response.pid = event.pid;
        response::now(&response)
    }

    fn start_sandbox(&mut self) -> Answer {
        let Some(sandbox) = self.sandbox.as_mut().filter(|sandbox| sandbox.exit.is_none()) else {
            return Err(Error::state("the pause process has exited"));
        };
        if sandbox.stage == Stage::Started {
            return Err(Error::state("cannot start a running container"));
        }
        sandbox.stage = Stage::Started;
        let mut event = task_events::TaskStart::new();
        (event.container_id, event.pid) = (sandbox.pause.id.clone(), sandbox.pid());
        self.events.send(events::START, &event, &self.reactor);
        let mut response = api::StartResponse::new();
        response.pid = event.pid;
        response::now(&response)
    }

    fn delete_sandbox(&mut self) -> Answer {
        // The exit of the pause process may not have been handled yet.
        self.pause_process_ready();
        let Some(sandbox) = &mut self.sandbox else { return response::empty() };
        if sandbox.status() == Status::RUNNING {
            return Err(Error::state("cannot delete a running process"));
        }
        sandbox.stage = Stage::Known;
        let mut response = api::DeleteResponse::new();
        response.pid = sandbox.pid();
        if let Some(exit) = sandbox.exit {
            response.exit_status = exit.status;
            response.exited_at = MessageField::some(exit.at());
        }
        let mut event = task_events::TaskDelete::new();
        (event.container_id, event.id) = (sandbox.pause.id.clone(), sandbox.pause.id.clone());
        (event.pid, event.exit_status) = (response.pid, response.exit_status);
        event.exited_at = response.exited_at.clone();
        self.events.send(events::DELETE, &event, &self.reactor);
        response::now(&response)
    }

    fn wait_sandbox(&mut self, reply: Reply) -> Answer {
        let Some(sandbox) = &mut self.sandbox else { return Ok(None) };
        if let Some(exit) = sandbox.exit {
            return response::now(&response::waited(exit));
        }
        sandbox.waiters.retain(|waiter| self.server.is_connected(*waiter));
        // Refuses the new call, not an older one: CRI's Wait is the first, and CRI takes its error
        // for the exit of the container and kills the container (`handleContainerExit`).
        if sandbox.waiters.len() >= WAITERS {
            return Err(Error::new(Code::RESOURCE_EXHAUSTED, "too many calls wait for this"));
        }
        sandbox.waiters.push(reply);
        Ok(None)
    }

    /// Handles the exit of the pause process, if it has exited.
    pub fn pause_process_ready(&mut self) {
        let Some(sandbox) = &mut self.sandbox else { return };
        // Dropping the pidfd closes it and so removes it from epoll.
        let Some(process) = sandbox.process.take_if(|process| has_ended(process)) else { return };
        drop(process);
        let exit = Exit::now(UNKNOWN);
        sandbox.exit = Some(exit);
        let waiters = std::mem::take(&mut sandbox.waiters);
        if sandbox.stage == Stage::Started {
            let mut event = task_events::TaskExit::new();
            (event.container_id, event.id) = (sandbox.pause.id.clone(), sandbox.pause.id.clone());
            (event.pid, event.exit_status) = (sandbox.pid(), exit.status);
            event.exited_at = MessageField::some(exit.at());
            self.events.send(events::EXIT, &event, &self.reactor);
        }
        self.answer_waiters(waiters, exit);
    }
}
