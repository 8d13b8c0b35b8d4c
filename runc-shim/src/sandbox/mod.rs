//! The pod's sandbox as a task: the daemon names the pause process, and containerd calls the shim
//! for it as for a container (`ctr tasks ls`, cAdvisor). The pause process is a child of the
//! daemon: the shim watches and signals it by a pidfd and cannot reap it, so that its exit status
//! is unknown.
//!
//! ```text
//!         SetPause         Create            Start           the pause process has exited
//!  (none) --------> known --------> created -------> running -------------------> stopped
//!                     ^               | Delete                                       | Delete
//!                     +---------------+----------------------------------------------+
//! ```

mod calls;

use std::os::fd::OwnedFd;

use containerd_shim_protos::api;
use containerd_shim_protos::types::task::{ProcessInfo, Status};
use process_identity::has_ended;
use rustix::event::epoll::EventFlags;
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::cgroup::Cgroup;
use crate::error::{Code, Context as _, Error};
use crate::exits::{Exit, start_time};
use crate::process::Waiters;
use crate::reactor::{Reactor, Source};
use crate::ttrpc::pause_process::PauseProcess;
use crate::ttrpc::response::{self, Answer};

/// The stage of the task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The pause process is known, and containerd has no task.
    Known,
    /// The task was created and not started.
    Created,
    /// The task was started; also after the exit of the pause process.
    Started,
}

/// The sandbox of the pod.
#[derive(Debug)]
pub struct Sandbox {
    /// The pause process.
    pause: PauseProcess,
    /// The pidfd of the pause process; `None` after its exit.
    process: Option<OwnedFd>,
    /// The stage of the task.
    stage: Stage,
    /// The exit of the pause process.
    exit: Option<Exit>,
    /// The bundle that containerd made for the task.
    bundle: String,
    /// The calls that wait for the exit of the pause process.
    waiters: Waiters,
}

impl Sandbox {
    /// Opens a pidfd of the process that `pause` identifies, unless its pid was reused.
    pub fn open(pause: PauseProcess, reactor: &Reactor) -> Result<Self, Error> {
        let pid = Pid::from_raw(pause.pid).ok_or_else(|| Error::not_found("no pid"))?;
        let gone = || Error::not_found(format!("process {} is not the pause process", pause.pid));
        let process = rustix::process::pidfd_open(pid, PidfdFlags::empty()).map_err(|_| gone())?;
        // Compared after the pidfd was opened, because the pid may have been reused before.
        if start_time(pause.pid) != Some(pause.start_time) || has_ended(&process) {
            return Err(gone());
        }
        reactor
            .add(&process, Source::PauseProcess, EventFlags::IN)
            .context("watch the pause process")?;
        let (bundle, waiters) = Default::default();
        Ok(Self { pause, process: Some(process), stage: Stage::Known, exit: None, bundle, waiters })
    }

    /// Whether the sandbox has this pause process already; false: another one may take its place.
    ///
    /// # Errors
    /// Another pause process runs for a task.
    pub fn keeps(&self, pause: &PauseProcess) -> Result<bool, Error> {
        if self.pause == *pause && self.exit.is_none() {
            return Ok(true);
        }
        if self.stage != Stage::Known && self.exit.is_none() {
            return Err(Error::state("the sandbox already has another pause process"));
        }
        Ok(false)
    }

    /// The pid of the task, if containerd has one with this id.
    pub fn task_pid(&self, id: &str) -> Option<u32> {
        (self.pause.id == id && self.stage != Stage::Known).then(|| self.pid())
    }

    /// The pid in messages.
    fn pid(&self) -> u32 {
        response::unsigned(self.pause.pid)
    }

    /// Whether containerd has a task and the pause process runs. Queries the kernel, because the
    /// main loop may not have handled the exit yet.
    pub fn runs(&self) -> bool {
        self.stage != Stage::Known && !self.process.as_ref().is_none_or(has_ended)
    }

    /// The status of the task.
    fn status(&self) -> Status {
        match (self.stage, self.exit) {
            (_, Some(_)) => Status::STOPPED,
            (Stage::Started, None) => Status::RUNNING,
            (Stage::Known | Stage::Created, None) => Status::CREATED,
        }
    }

    /// Fails if containerd has no task.
    fn created(&self) -> Result<(), Error> {
        if self.stage == Stage::Known {
            return Err(Error::not_found("container not created"));
        }
        Ok(())
    }

    /// Answers State.
    fn state(&self) -> Answer {
        let (bundle, status) = (self.bundle.clone(), self.status());
        response::now(&response::state(&self.pause.id, bundle, self.pid(), status, self.exit))
    }

    /// Answers Pids.
    fn pids(&self) -> Answer {
        let mut response = api::PidsResponse::new();
        if self.exit.is_none() {
            let mut info = ProcessInfo::new();
            info.pid = self.pid();
            response.processes.push(info);
        }
        response::now(&response)
    }

    /// Signals the pause process. As with containerd's built-in controller, its exit stops the pod.
    fn kill(&self, signal: u32) -> Answer {
        let finished = || Error::not_found("process already finished");
        let process = self.process.as_ref().ok_or_else(finished)?;
        let signal = i32::try_from(signal).ok().and_then(Signal::from_named_raw);
        let signal = signal.ok_or_else(|| Error::new(Code::INVALID_ARGUMENT, "no such signal"))?;
        match rustix::process::pidfd_send_signal(process, signal) {
            Ok(()) => response::empty(),
            Err(rustix::io::Errno::SRCH) => Err(finished()),
            Err(e) => Err(Error::from(std::io::Error::from(e)).context("signal the pause process")),
        }
    }

    /// Answers Stats.
    fn stats(&self) -> Answer {
        let missing = || Error::not_found("cgroup does not exist");
        let cgroup = self.process.as_ref().and_then(|process| {
            // The process still runs after its cgroup was read, so that the pid was not reused.
            Cgroup::of_process(self.pause.pid).filter(|_| !has_ended(process))
        });
        response::metrics(cgroup.ok_or_else(missing)?.stats()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Promise: foreign_process_survives.
    #[test]
    fn only_the_named_process_is_taken() {
        let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let pause = PauseProcess { id: "a".to_owned(), pid, start_time: start_time(pid).unwrap() };
        let reactor = Reactor::new().unwrap();
        let other = PauseProcess { start_time: pause.start_time + 1, ..pause.clone() };
        let refused = Sandbox::open(other, &reactor).unwrap_err();
        assert_eq!(refused.message, format!("process {pid} is not the pause process"));
        let sandbox = Sandbox::open(pause.clone(), &reactor).unwrap();
        assert!(!sandbox.runs(), "without a task");
        assert!(sandbox.kill(0).is_err() && sandbox.kill(u32::MAX).is_err());
        sandbox.kill(9).unwrap();
        assert!(!child.wait().unwrap().success());
        assert_eq!(sandbox.kill(9).unwrap_err().code, Code::NOT_FOUND);
        assert_eq!(Sandbox::open(pause, &reactor).unwrap_err().code, Code::NOT_FOUND);
    }
}
