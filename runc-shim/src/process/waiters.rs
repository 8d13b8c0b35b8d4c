//! The calls of Wait that are pending for one process.

use std::time::Instant;

use crate::error::{Code, Error};
use crate::exits::Exit;
use crate::services::Services;
use crate::ttrpc::response::{self, Answer};
use crate::ttrpc::server::Reply;

/// Maximum number of calls that wait for the exit of one process.
const MAX_WAITERS: usize = 1024;

/// The callers that wait for the exit of one process.
#[derive(Debug, Default)]
pub struct Waiters(Vec<Reply>);

impl Waiters {
    /// Adds a caller, and removes those who do not wait any more.
    ///
    /// # Errors
    /// [`MAX_WAITERS`] callers wait.
    pub fn add(&mut self, services: &mut Services, reply: Reply) -> Answer {
        let now = Instant::now();
        self.0.retain(|it| services.server.is_connected(*it) && !it.is_late(now));
        // Refuses the new call, not an older one: CRI's Wait is the first, and CRI takes its error
        // for the exit of the container and kills the container (`handleContainerExit`).
        if self.0.len() >= MAX_WAITERS {
            return Err(Error::new(Code::RESOURCE_EXHAUSTED, "too many calls wait for this"));
        }
        self.0.push(reply);
        Ok(None)
    }

    /// Answers all callers.
    pub fn answer(&mut self, services: &mut Services, exit: Exit) {
        for waiter in std::mem::take(&mut self.0) {
            services.respond(waiter, response::now(&response::waited(exit)));
        }
    }

    /// Fails all calls, because the process was deleted.
    pub fn fail(&mut self, services: &mut Services) {
        for waiter in std::mem::take(&mut self.0) {
            services.respond(waiter, Err(Error::not_found("process was deleted")));
        }
    }
}
