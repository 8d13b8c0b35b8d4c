//! The RPCs of a controller.

use std::future::Future;

use crate::podsandbox::{
    CreateRequest, Error, Exit, Metric, Platform, SandboxInfo, StartResponse, StatusReport,
};
use crate::protos::inspect;

/// The nine RPCs of `sandbox.Controller` and the operator queries, as the wire calls them. Tests
/// implement it without sandboxes.
///
/// The caller of a method may drop the future: work that must complete runs in its own task.
pub trait SandboxService: Send + Sync + 'static {
    /// Checks the request and records the sandbox, which runs to its end when the future is
    /// dropped. Then waits until containerd has recorded it as a container too, or has failed to.
    ///
    /// # Errors
    /// [`Error::Invalid`], [`Error::AlreadyExists`], or the failed step; nothing is left then.
    fn create(&self, request: CreateRequest) -> impl Future<Output = Result<(), Error>> + Send;

    /// Starts a created sandbox. Runs to its end when the future is dropped; the sandbox is removed
    /// then.
    ///
    /// # Errors
    /// [`Error::State`] unless it was just created; else the failed step, and nothing is left.
    fn start(&self, id: &str) -> impl Future<Output = Result<StartResponse, Error>> + Send;

    /// The node's own platform. CRI asks this before every container, so the sandbox gets ready for
    /// one.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    fn platform(&self, id: &str) -> impl Future<Output = Result<Platform, Error>> + Send;

    /// Ends the pause process and answers when its exit is recorded and its shared memory is
    /// unmounted.
    ///
    /// # Errors
    /// The failed step; the rest continues in the background.
    fn stop(&self, id: &str) -> impl Future<Output = Result<(), Error>> + Send;

    /// Answers when the pause process has exited, before or after it did.
    ///
    /// # Errors
    /// [`Error::NotFound`], or [`Error::Quarantined`].
    fn wait(&self, id: &str) -> impl Future<Output = Result<Exit, Error>> + Send + use<Self>;

    /// The published state of the sandbox; restores its files. Waits up to 30 s after the recovery
    /// while its record cannot be read.
    ///
    /// # Errors
    /// [`Error::NotFound`], or the failed step of the restoring.
    fn status(
        &self,
        id: &str,
        verbose: bool,
    ) -> impl Future<Output = Result<StatusReport, Error>> + Send;

    /// Removes all that is left of the sandbox, after its Create if that is in progress. Unknown
    /// id: removes files that a reboot has left, and succeeds.
    ///
    /// # Errors
    /// The steps that failed, or [`Error::Timeout`] if Create does not end.
    fn shutdown(&self, id: &str) -> impl Future<Output = Result<(), Error>> + Send;

    /// Metrics of the pod's parent cgroup.
    ///
    /// # Errors
    /// [`Error::NotFound`], or the failed step.
    fn metrics(&self, id: &str) -> impl Future<Output = Result<Metric, Error>> + Send;

    /// Stores what `fields` name of `info`; without fields all of it.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Invalid`] for a field that cannot be updated, or the failed
    /// step.
    fn update(
        &self,
        id: &str,
        info: SandboxInfo,
        fields: Vec<String>,
    ) -> impl Future<Output = Result<(), Error>> + Send;

    /// At most `most` lines of the list of sandboxes, by id, of those behind `after`; and whether
    /// there are more.
    ///
    /// # Errors
    /// The failed step.
    fn list(
        &self,
        after: &str,
        most: usize,
    ) -> impl Future<Output = Result<(Vec<inspect::Sandbox>, bool), Error>> + Send;
}
