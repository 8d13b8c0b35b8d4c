//! The pod's sandbox as a task: the daemon names the pause process, and containerd calls the shim
//! for it as for a container (`ctr tasks ls`, cAdvisor). The pause is a child of the daemon: the
//! shim watches and signals it by a pidfd and cannot reap it, so that its exit status is unknown.
//!
//! ```text
//!         SetPause         Create            Start           the pause has ended
//!  (none) --------> known --------> created -------> running -------------------> stopped
//!                     ^               | Delete                                       | Delete
//!                     +---------------+----------------------------------------------+
//! ```

use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::time::Instant;

use containerd_shim_protos::api;
use containerd_shim_protos::events::task as task_events;
use containerd_shim_protos::types::task::{ProcessInfo, Status};
use protobuf::{EnumOrUnknown, MessageField};
use rustix::event::epoll::EventFlags;
use rustix::process::{Pid, PidfdFlags, Signal};
use serde::Deserialize;

use crate::cgroup::Cgroup;
use crate::error::{Code, Context as _, Error};
use crate::exits::{Exit, UNKNOWN, has_ended, start_time};
use crate::reactor::{Reactor, Source};
use crate::server::Reply;
use crate::shim::Shim;
use crate::task::{self, Answer, Request, WAITERS};
use crate::{create, events};

/// The daemon's own service at a pod's socket. A shim without it answers UNIMPLEMENTED.
pub const SERVICE: &str = "pause_sandboxer.shim.v1.Sandbox";

/// Its method.
const SET_PAUSE: &str = "SetPause";

/// The request of SetPause, JSON: it identifies the pause process. The answer is empty.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Pause {
    /// The sandbox id.
    id: String,
    /// The pid in the node's PID namespace.
    pid: i32,
    /// Field 22 of `/proc/PID/stat`, clock ticks after boot.
    start_time: u64,
}

impl Pause {
    /// Decodes a request.
    ///
    /// # Errors
    /// The request is malformed, or for another method.
    pub fn decode(method: &str, payload: &[u8]) -> Result<Self, Error> {
        if method != SET_PAUSE {
            return Err(Error::new(Code::Unimplemented, format!("method {method}")));
        }
        let malformed = |reason: String| Error::new(Code::InvalidArgument, reason);
        let pause: Self =
            serde_json::from_slice(payload).map_err(|e| malformed(format!("SetPause: {e}")))?;
        task::check_id(&pause.id)?;
        if pause.pid <= 1 {
            return Err(malformed(format!("SetPause: invalid pid {}", pause.pid)));
        }
        Ok(pause)
    }
}

/// The stage of the task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The pause is known, and containerd has no task.
    Known,
    /// The task was created and not started.
    Created,
    /// The task was started; also after the exit of the pause.
    Started,
}

/// The sandbox of the pod.
#[derive(Debug)]
pub struct Sandbox {
    pause: Pause,
    /// The pidfd of the pause; `None` after its exit.
    process: Option<OwnedFd>,
    stage: Stage,
    exit: Option<Exit>,
    bundle: String,
    waiters: Vec<Reply>,
}

impl Sandbox {
    /// Opens a pidfd of the process that `pause` identifies, unless its pid was reused.
    fn open(pause: Pause, reactor: &Reactor) -> Result<Self, Error> {
        let pid = Pid::from_raw(pause.pid).ok_or_else(|| Error::not_found("no pid"))?;
        let gone = || Error::not_found(format!("process {} is not the pause", pause.pid));
        let process = rustix::process::pidfd_open(pid, PidfdFlags::empty()).map_err(|_| gone())?;
        // Compared after the pidfd was opened, because the pid may have been reused before.
        if start_time(pause.pid) != Some(pause.start_time) || has_ended(&process) {
            return Err(gone());
        }
        reactor.add(&process, Source::Pause, EventFlags::IN).context("watch the pause")?;
        let (bundle, waiters) = Default::default();
        Ok(Self { pause, process: Some(process), stage: Stage::Known, exit: None, bundle, waiters })
    }

    /// The calls that wait for the exit of the pause.
    pub fn waiters(&self) -> &[Reply] {
        &self.waiters
    }

    /// Removes and returns the calls whose deadline has passed.
    pub fn take_late_waiters(&mut self, now: Instant) -> Vec<Reply> {
        self.waiters.extract_if(.., |waiter| waiter.is_late(now)).collect()
    }

    fn pid(&self) -> u32 {
        task::unsigned(self.pause.pid)
    }

    /// Whether containerd has a task and the pause runs. Asks the kernel, because the main loop may
    /// not have handled the exit yet.
    pub fn runs(&self) -> bool {
        self.stage != Stage::Known && !self.process.as_ref().is_none_or(has_ended)
    }

    fn status(&self) -> Status {
        match (self.stage, self.exit) {
            (_, Some(_)) => Status::STOPPED,
            (Stage::Started, None) => Status::RUNNING,
            (Stage::Known | Stage::Created, None) => Status::CREATED,
        }
    }

    fn created(&self) -> Result<(), Error> {
        if self.stage == Stage::Known {
            return Err(Error::not_found("container not created"));
        }
        Ok(())
    }

    fn state(&self) -> Answer {
        let mut response = api::StateResponse::new();
        response.id.clone_from(&self.pause.id);
        response.bundle.clone_from(&self.bundle);
        response.pid = self.pid();
        response.status = EnumOrUnknown::new(self.status());
        if let Some(exit) = self.exit {
            response.exit_status = exit.status;
            response.exited_at = MessageField::some(exit.at());
        }
        task::now(&response)
    }

    fn pids(&self) -> Answer {
        let mut response = api::PidsResponse::new();
        if self.exit.is_none() {
            let mut info = ProcessInfo::new();
            info.pid = self.pid();
            response.processes.push(info);
        }
        task::now(&response)
    }

    /// Signals the pause. As with containerd's built-in controller, its exit stops the pod.
    fn kill(&self, signal: u32) -> Answer {
        let finished = || Error::not_found("process already finished");
        let process = self.process.as_ref().ok_or_else(finished)?;
        let signal = i32::try_from(signal).ok().and_then(Signal::from_named_raw);
        let signal = signal.ok_or_else(|| Error::new(Code::InvalidArgument, "no such signal"))?;
        match rustix::process::pidfd_send_signal(process, signal) {
            Ok(()) => task::empty(),
            Err(rustix::io::Errno::SRCH) => Err(finished()),
            Err(e) => Err(Error::from(std::io::Error::from(e)).context("signal the pause")),
        }
    }

    fn stats(&self) -> Answer {
        let missing = || Error::not_found("cgroup does not exist");
        let cgroup = self.process.as_ref().and_then(|process| {
            // The pause still runs after its cgroup was read, so that the pid was not reused.
            Cgroup::of(self.pause.pid).filter(|_| !has_ended(process))
        });
        let mut response = api::StatsResponse::new();
        response.stats = MessageField::some(cgroup.ok_or_else(missing)?.stats()?);
        task::now(&response)
    }
}

impl Shim {
    /// Sets the pause process of the sandbox. Succeeds if it is already set to the same process.
    pub fn set_pause(&mut self, pause: Pause) -> Answer {
        if pause.id != self.id {
            let reason = format!("this is the shim of sandbox {}", self.id);
            return Err(Error::new(Code::InvalidArgument, reason));
        }
        if let Some(known) = &self.sandbox {
            if known.pause == pause && known.exit.is_none() {
                return task::empty();
            }
            if known.stage != Stage::Known && known.exit.is_none() {
                return Err(Error::state("the sandbox already has another pause"));
            }
        }
        if self.containers.contains_key(&pause.id) {
            return Err(Error::new(Code::AlreadyExists, "a container has the sandbox's id"));
        }
        self.sandbox = Some(Sandbox::open(pause, &self.reactor)?);
        task::empty()
    }

    /// Answers a call for the sandbox's task, or returns a request that is not for this task.
    pub fn sandbox_call(&mut self, reply: Reply, request: Request) -> ControlFlow<Answer, Request> {
        let Some(sandbox) = &mut self.sandbox else {
            return match request {
                // The sandbox is not a container that the runtime could create.
                Request::Create(r) if r.id == self.id => {
                    ControlFlow::Break(Err(Error::state("the daemon has not named the pause")))
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
            Request::CloseIo(_) => task::empty(),
            _ => Err(Error::new(Code::Unimplemented, "the sandbox runs no container")),
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
            return Err(Error::state("the pause has exited"));
        };
        sandbox.stage = Stage::Created;
        sandbox.bundle.clone_from(&request.bundle);
        let mut event = create::create_event(request);
        event.pid = sandbox.pid();
        self.events.send(events::CREATE, &event, &self.reactor);
        let mut response = api::CreateTaskResponse::new();
        response.pid = event.pid;
        task::now(&response)
    }

    fn start_sandbox(&mut self) -> Answer {
        let Some(sandbox) = self.sandbox.as_mut().filter(|sandbox| sandbox.exit.is_none()) else {
            return Err(Error::state("the pause has exited"));
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
        task::now(&response)
    }

    fn delete_sandbox(&mut self) -> Answer {
        // The exit of the pause may not have been handled yet.
        self.pause_ready();
        let Some(sandbox) = &mut self.sandbox else { return task::empty() };
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
        task::now(&response)
    }

    fn wait_sandbox(&mut self, reply: Reply) -> Answer {
        let Some(sandbox) = &mut self.sandbox else { return Ok(None) };
        if let Some(exit) = sandbox.exit {
            return task::now(&task::waited(Some(exit)));
        }
        sandbox.waiters.retain(|waiter| self.server.is_connected(*waiter));
        // Refuses the new call, not an older one: CRI's Wait is the first, and CRI takes its error
        // for the exit of the container and kills the container (`handleContainerExit`).
        if sandbox.waiters.len() >= WAITERS {
            return Err(Error::new(Code::ResourceExhausted, "too many calls wait for this"));
        }
        sandbox.waiters.push(reply);
        Ok(None)
    }

    /// Handles the exit of the pause, if it has exited.
    pub fn pause_ready(&mut self) {
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
        for waiter in waiters {
            let answer = task::now(&task::waited(Some(exit)));
            self.answer(waiter, answer);
        }
    }
}

/// The task that a request is for, and whether it is for the task's first process.
fn task_of(request: &Request) -> Option<(&str, bool)> {
    Some(match request {
        Request::State(r) => (&r.id, r.exec_id.is_empty()),
        Request::Create(r) => (&r.id, true),
        Request::Start(r) => (&r.id, r.exec_id.is_empty()),
        Request::Delete(r) => (&r.id, r.exec_id.is_empty()),
        Request::Pids(r) => (&r.id, true),
        Request::Pause(r) => (&r.id, true),
        Request::Resume(r) => (&r.id, true),
        Request::Checkpoint(r) => (&r.id, true),
        Request::Kill(r) => (&r.id, r.exec_id.is_empty()),
        Request::Exec(r) => (&r.id, true),
        Request::ResizePty(r) => (&r.id, r.exec_id.is_empty()),
        Request::CloseIo(r) => (&r.id, r.exec_id.is_empty()),
        Request::Update(r) => (&r.id, true),
        Request::Wait(r) => (&r.id, r.exec_id.is_empty()),
        Request::Stats(r) => (&r.id, true),
        Request::Connect(_) | Request::SetPause(_) | Request::Shutdown => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_named_process_is_taken() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let pause = Pause { id: "a".to_owned(), pid, start_time: start_time(pid).unwrap() };
        let reactor = Reactor::new().unwrap();
        let other = Pause { start_time: pause.start_time + 1, ..pause.clone() };
        let refused = Sandbox::open(other, &reactor).unwrap_err();
        assert_eq!(refused.message, format!("process {pid} is not the pause"));
        let sandbox = Sandbox::open(pause.clone(), &reactor).unwrap();
        assert!(!sandbox.runs(), "without a task");
        assert!(sandbox.kill(0).is_err() && sandbox.kill(u32::MAX).is_err());
        sandbox.kill(9).unwrap();
        assert!(!child.wait().unwrap().success());
        assert_eq!(sandbox.kill(9).unwrap_err().code, Code::NotFound);
        assert_eq!(Sandbox::open(pause, &reactor).unwrap_err().code, Code::NotFound);
    }

    #[test]
    fn a_request_names_a_sandbox_and_a_process() {
        let decode = |json: &str| Pause::decode(SET_PAUSE, json.as_bytes());
        let pause = Pause { id: "a".to_owned(), pid: 7, start_time: 8 };
        assert_eq!(decode(r#"{"id":"a","pid":7,"start_time":8}"#).unwrap(), pause);
        // A later daemon may send more fields.
        assert_eq!(decode(r#"{"id":"a","pid":7,"start_time":8,"x":1}"#).unwrap(), pause);
        for malformed in [
            "",
            r#"{"id":"a","pid":7}"#,
            r#"{"id":"a","pid":1,"start_time":8}"#,
            r#"{"id":"a","pid":-7,"start_time":8}"#,
            r#"{"id":"../a","pid":7,"start_time":8}"#,
        ] {
            assert_eq!(decode(malformed).unwrap_err().code, Code::InvalidArgument, "{malformed}");
        }
        assert_eq!(Pause::decode("Other", b"").unwrap_err().code, Code::Unimplemented);
    }
}
