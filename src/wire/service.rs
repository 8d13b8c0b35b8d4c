//! The interface that the wire calls: the RPCs of a controller.

use std::future::Future;
use std::sync::Arc;

use crate::controller::Controller;
use crate::podsandbox::{
    CreateRequest, Error, Exit, Metric, Platform, SandboxInfo, SandboxSummary, StartResponse,
    StatusReport,
};

/// The nine RPCs of `sandbox.Controller` and what operators ask, as [`Controller`] has them; tests
/// put others in its place.
///
/// A future that is dropped is a caller who gave up: work that must finish runs in a task of its
/// own.
pub trait SandboxService: Send + Sync + 'static {
    /// See [`Controller::create`].
    fn create(&self, request: CreateRequest) -> impl Future<Output = Result<(), Error>> + Send;
    /// See [`Controller::start`].
    fn start(&self, id: &str) -> impl Future<Output = Result<StartResponse, Error>> + Send;
    /// See [`Controller::platform`].
    fn platform(&self, id: &str) -> impl Future<Output = Result<Platform, Error>> + Send;
    /// See [`Controller::stop`].
    fn stop(&self, id: &str) -> impl Future<Output = Result<(), Error>> + Send;
    /// See [`Controller::wait`]. It borrows nothing and keeps no id, because it is pending for as
    /// long as its sandbox lives.
    fn wait(self: Arc<Self>, id: String) -> impl Future<Output = Result<Exit, Error>> + Send;
    /// See [`Controller::status`].
    fn status(
        &self,
        id: &str,
        verbose: bool,
    ) -> impl Future<Output = Result<StatusReport, Error>> + Send;
    /// See [`Controller::shutdown`].
    fn shutdown(&self, id: &str) -> impl Future<Output = Result<(), Error>> + Send;
    /// See [`Controller::metrics`].
    fn metrics(&self, id: &str) -> impl Future<Output = Result<Metric, Error>> + Send;
    /// See [`Controller::update`].
    fn update(
        &self,
        id: &str,
        info: SandboxInfo,
        fields: Vec<String>,
    ) -> impl Future<Output = Result<(), Error>> + Send;
    /// See [`Controller::list`]. Who has nothing to tell operators need not have it.
    fn list(
        &self,
        _after: &str,
        _most: usize,
        _usage: bool,
    ) -> impl Future<Output = Result<(Vec<SandboxSummary>, bool), Error>> + Send {
        std::future::ready(Ok((Vec::new(), false)))
    }
    /// See [`Controller::inspect`].
    fn inspect(&self, id: &str) -> impl Future<Output = Result<serde_json::Value, Error>> + Send {
        std::future::ready(Err(Error::NotFound { id: id.to_owned() }))
    }
}

impl SandboxService for Controller {
    async fn create(&self, request: CreateRequest) -> Result<(), Error> {
        self.create(request).await
    }

    async fn start(&self, id: &str) -> Result<StartResponse, Error> {
        self.start(id).await
    }

    async fn platform(&self, id: &str) -> Result<Platform, Error> {
        self.platform(id).await
    }

    async fn stop(&self, id: &str) -> Result<(), Error> {
        self.stop(id).await
    }

    fn wait(self: Arc<Self>, id: String) -> impl Future<Output = Result<Exit, Error>> + Send {
        Controller::wait(&self, &id)
    }

    async fn status(&self, id: &str, verbose: bool) -> Result<StatusReport, Error> {
        self.status(id, verbose).await
    }

    async fn shutdown(&self, id: &str) -> Result<(), Error> {
        self.shutdown(id).await
    }

    async fn metrics(&self, id: &str) -> Result<Metric, Error> {
        self.metrics(id).await
    }

    async fn update(&self, id: &str, info: SandboxInfo, fields: Vec<String>) -> Result<(), Error> {
        self.update(id, info, fields).await
    }

    async fn list(
        &self,
        after: &str,
        most: usize,
        usage: bool,
    ) -> Result<(Vec<SandboxSummary>, bool), Error> {
        self.list(after, most, usage).await
    }

    async fn inspect(&self, id: &str) -> Result<serde_json::Value, Error> {
        self.inspect(id).await
    }
}
