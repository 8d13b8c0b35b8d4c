//! The calls that need no command of the runtime.

use containerd_shim_protos::api;
use containerd_shim_protos::events::task as task_events;
use containerd_shim_protos::shim::oci::ProcessDetails;
use containerd_shim_protos::types::task::{ProcessInfo, Status};
use protobuf::well_known_types::any::Any;
use protobuf::{Message, MessageField};

use super::Container;
use super::state::State;
use super::step::Step;
use crate::error::{Code, Error};
use crate::exec::{self, Exec};
use crate::io::Stdio;
use crate::process_key::{self, ProcessKey};
use crate::services::Services;
use crate::ttrpc::events;
use crate::ttrpc::response::{self, Answer};
use crate::ttrpc::server::Reply;

/// Maximum number of execs of a container that are not deleted. Each has a spec until its start.
const MAX_EXECS: usize = 1024;

impl Container {
    /// Adds an exec.
    pub(super) fn add_exec(
        &mut self,
        services: &mut Services,
        request: api::ExecProcessRequest,
    ) -> Answer {
        let id = &request.exec_id;
        if self.execs.contains_key(id) {
            return Err(Error::new(Code::ALREADY_EXISTS, format!("id {id}")));
        }
        process_key::check_id(id)?;
        if self.execs.len() >= MAX_EXECS {
            let reason = format!("the container has {MAX_EXECS} execs that are not deleted");
            return Err(Error::new(Code::RESOURCE_EXHAUSTED, reason));
        }
        let stdio = Stdio {
            stdin: request.stdin,
            stdout: request.stdout,
            stderr: request.stderr,
            terminal: request.terminal,
        };
        let spec = exec::process_json(&request.spec.value, request.terminal)?;
        self.execs.insert(id.clone(), Exec::new(stdio, spec));
        let key = ProcessKey::new(&request.id, &request.exec_id);
        let mut event = task_events::TaskExecAdded::new();
        (event.container_id, event.exec_id) = (request.id, request.exec_id);
        services.send_of(events::EXEC_ADDED, &event, &key);
        response::empty()
    }

    /// Answers Wait, when the process has exited or could not be started.
    pub(super) fn wait(
        &mut self,
        services: &mut Services,
        reply: Reply,
        key: &ProcessKey,
    ) -> Answer {
        let exit = match key.exec.as_str() {
            "" => self.state.exit(),
            _ => self.exec(key)?.state.exit(),
        };
        match exit {
            Some(exit) => response::now(&response::waited(exit)),
            None => self.process(key)?.waiters.add(services, reply),
        }
    }

    /// Answers State.
    pub(super) fn describe(&mut self, key: &ProcessKey) -> Answer {
        let bundle = self.bundle.display().to_string();
        let status = self.status();
        let (pid, status, exit) = if key.exec.is_empty() {
            (self.pid, status, self.state.exit())
        } else {
            let state = self.exec(key)?.state;
            let own = match state {
                _ if matches!(status, Status::PAUSED | Status::PAUSING) => status,
                exec::State::Running(_) => Status::RUNNING,
                exec::State::Stopped(..) => Status::STOPPED,
                exec::State::Added | exec::State::Starting => Status::CREATED,
            };
            (state.pid(), own, state.exit())
        };
        let pid = response::unsigned(pid);
        let mut response = response::state(key.process(), bundle, pid, status, exit);
        let stdio = &self.process(key)?.stdio;
        response.stdin.clone_from(&stdio.stdin);
        response.stdout.clone_from(&stdio.stdout);
        response.stderr.clone_from(&stdio.stderr);
        response.terminal = stdio.terminal;
        response::now(&response)
    }

    /// Answers Pids.
    pub(super) fn pids(&self) -> Answer {
        let mut response = api::PidsResponse::new();
        let pids = self.cgroup.as_ref().map(|cgroup| cgroup.pids()).transpose()?;
        let mut pids = pids.unwrap_or_default();
        if pids.is_empty() && self.pid != 0 {
            // When containerd starts, it deletes a task without processes, and with it an exit and
            // output that it has not received (core/runtime/v2, `loadShims`).
            pids.push(self.pid);
        }
        for pid in pids {
            let mut info = ProcessInfo::new();
            info.pid = response::unsigned(pid);
            let exec = self.execs.iter().find(|(_, exec)| exec.state.pid() == pid);
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

    /// Changes the size of a terminal.
    pub(super) fn resize(
        &mut self,
        services: &mut Services,
        key: &ProcessKey,
        request: &api::ResizePtyRequest,
    ) -> Answer {
        if !key.exec.is_empty() && self.exec(key)?.state.exit().is_some() {
            return Err(Error::state("cannot resize a stopped container"));
        }
        let console = &self.process(key)?.console;
        if let Some(console) = console.as_ref().map(|it| it.try_clone()).transpose()? {
            let size = rustix::termios::Winsize {
                ws_row: u16::try_from(request.height).unwrap_or(u16::MAX),
                ws_col: u16::try_from(request.width).unwrap_or(u16::MAX),
                ws_xpixel: 0,
                ws_ypixel: 0,
            };
            if let Some(copier) = services.copiers.find(key) {
                copier.resize(console, size);
            }
        }
        response::empty()
    }

    /// Closes standard input.
    pub(super) fn close_io(&mut self, key: &ProcessKey) -> Answer {
        self.process(key)?.close_stdin();
        response::empty()
    }

    /// Answers Stats.
    pub(super) fn stats(&self) -> Answer {
        let missing = || Error::not_found("cgroup does not exist");
        let cgroup = self.cgroup.as_ref().ok_or_else(missing)?;
        // containerd looks for OOM kills of a container that has exited, whose cgroup systemd has
        // removed.
        let is_gone = self.state.has_exited() && !cgroup.exists();
        response::metrics(if is_gone { cgroup.no_stats() } else { cgroup.stats()? })
    }

    fn status(&self) -> Status {
        let is_pausing = self.pending.iter().any(|it| matches!(it.step, Step::Pause));
        match self.state.status() {
            Status::RUNNING if is_pausing && self.state == State::Running => Status::PAUSING,
            status => status,
        }
    }
}
