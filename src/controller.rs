//! The nine verbs of `sandbox.Controller`: sandbox id to sandbox. No wire types, no system calls.

use crate::podsandbox::{CreateRequest, Error, Exit, Metric, Platform, SandboxInfo, Started, StatusReport};

/// All sandboxes of the daemon.
#[derive(Debug, Default)]
pub struct Controller {}

impl Controller {
    /// Checks the request and records the sandbox.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn create(&self, request: CreateRequest) -> Result<(), Error> {
        Err(Error::NotFound { id: request.id })
    }

    /// Starts a created sandbox. Runs to its end when the future is dropped.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn start(&self, id: &str) -> Result<Started, Error> {
        Err(Error::NotFound { id: id.to_owned() })
    }

    /// The node's own platform.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn platform(&self, id: &str) -> Result<Platform, Error> {
        Err(Error::NotFound { id: id.to_owned() })
    }

    /// Ends the pause and answers when its exit is recorded.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn stop(&self, id: &str) -> Result<(), Error> {
        Err(Error::NotFound { id: id.to_owned() })
    }

    /// Answers when the pause has ended.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn wait(&self, id: &str) -> Result<Exit, Error> {
        Err(Error::NotFound { id: id.to_owned() })
    }

    /// What is published of the sandbox, and mends its files.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn status(&self, id: &str, _verbose: bool) -> Result<StatusReport, Error> {
        Err(Error::NotFound { id: id.to_owned() })
    }

    /// Removes all that is left of the sandbox. Unknown id: success.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn shutdown(&self, _id: &str) -> Result<(), Error> {
        Ok(())
    }

    /// Metrics of the pod's parent cgroup.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn metrics(&self, id: &str) -> Result<Metric, Error> {
        Err(Error::NotFound { id: id.to_owned() })
    }

    /// Stores what `fields` name of `info`; without fields all of it.
    ///
    /// # Errors
    /// See [`Error`].
    pub async fn update(&self, id: &str, _info: SandboxInfo, _fields: Vec<String>) -> Result<(), Error> {
        Err(Error::NotFound { id: id.to_owned() })
    }
}
