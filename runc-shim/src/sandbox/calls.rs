//! The calls for the task of the pod's sandbox.

use containerd_shim_protos::api;
use containerd_shim_protos::types::task::Status;
use process_identity::has_ended;

use super::{Sandbox, Stage};
use crate::container::create_event;
use crate::error::{Code, Error};
use crate::exits::{Exit, UNKNOWN};
use crate::process_key::ProcessKey;
use crate::services::Services;
use crate::ttrpc::events;
use crate::ttrpc::request::Method;
use crate::ttrpc::response::{self, Answer};
use crate::ttrpc::server::Reply;

impl Sandbox {
    /// Answers a call for the sandbox's task.
    pub fn call(&mut self, services: &mut Services, reply: Reply, method: Method) -> Answer {
        if !matches!(method, Method::Create(_)) {
            self.created()?;
        }
        match method {
            Method::Create(r) => self.create(services, &r),
            Method::Start => self.start(services),
            Method::Delete => self.delete(services),
            Method::Wait => self.wait(services, reply),
            Method::Kill(r) => self.kill(r.signal),
            Method::State => self.state(),
            Method::Pids => self.pids(),
            Method::Stats => self.stats(),
            Method::CloseIo => response::empty(),
            _ => Err(Error::new(Code::UNIMPLEMENTED, "the sandbox runs no container")),
        }
    }

    fn check_pause(&self) -> Result<(), Error> {
        match self.exit {
            None => Ok(()),
            Some(_) => Err(Error::state("the pause process has exited")),
        }
    }

    /// Creates the sandbox's task. It may exist already if containerd has forgotten it, because
    /// containerd creates no task that it knows.
    fn create(&mut self, services: &mut Services, request: &api::CreateTaskRequest) -> Answer {
        self.check_pause()?;
        self.stage = Stage::Created;
        self.bundle.clone_from(&request.bundle);
        let mut event = create_event(request);
        event.pid = self.pid();
        services.send(events::CREATE, &event);
        response::created(event.pid)
    }

    fn start(&mut self, services: &mut Services) -> Answer {
        self.check_pause()?;
        if self.stage == Stage::Started {
            return Err(Error::state("cannot start a running container"));
        }
        self.stage = Stage::Started;
        services.send(events::START, &events::start(&self.pause.id, self.pid()));
        response::started(self.pid())
    }

    fn delete(&mut self, services: &mut Services) -> Answer {
        // The exit of the pause process may not have been handled yet.
        self.process_ready(services);
        if self.status() == Status::RUNNING {
            return Err(Error::state("cannot delete a running process"));
        }
        self.stage = Stage::Known;
        let response = response::deleted(self.pid(), self.exit);
        let mut event = events::delete(&self.pause.id, &response);
        event.id.clone_from(&self.pause.id);
        services.send(events::DELETE, &event);
        response::now(&response)
    }

    fn wait(&mut self, services: &mut Services, reply: Reply) -> Answer {
        match self.exit {
            Some(exit) => response::now(&response::waited(exit)),
            None => self.waiters.add(services, reply),
        }
    }

    /// Handles the exit of the pause process, if it has exited.
    pub fn process_ready(&mut self, services: &mut Services) {
        // Dropping the pidfd closes it and so removes it from epoll.
        let Some(process) = self.process.take_if(|process| has_ended(&*process)) else { return };
        drop(process);
        let exit = Exit::now(UNKNOWN);
        self.exit = Some(exit);
        if self.stage == Stage::Started {
            let key = ProcessKey::new(&self.pause.id, "");
            services.send(events::EXIT, &events::exit(&key, self.pid(), exit));
        }
        self.waiters.answer(services, exit);
    }
}
