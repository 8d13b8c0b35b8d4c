//! The callers that wait in the queue of an endpoint's socket, and get no shim.

use std::fs::File;
use std::ops::ControlFlow;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::io::Errno;

use super::Endpoint;
use crate::error::{IoContext as _, StepError};
use crate::exit::{SHIM, retry};

/// A descriptor that the daemon holds for the time when there is no other: a connection can be
/// closed only after it is accepted, and then has a descriptor.
#[derive(Debug)]
pub struct SpareDescriptor(Mutex<Option<File>>);

impl SpareDescriptor {
    /// Reserves the descriptor.
    pub fn new() -> Self {
        Self(Mutex::new(Self::reserve()))
    }

    fn reserve() -> Option<File> {
        File::open("/dev/null").ok()
    }

    /// Disconnects all callers that wait at a listening socket now.
    fn disconnect(&self, listener: BorrowedFd<'_>) -> rustix::io::Result<()> {
        // The flag is the socket's, not the descriptor's: a shim may have cleared it.
        rustix::io::ioctl_fionbio(listener, true)?;
        let mut spare = self.0.lock();
        let result = loop {
            match rustix::net::accept(listener) {
                Ok(_) | Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => break Ok(()),
                Err(Errno::MFILE | Errno::NFILE) if spare.take().is_some() => {}
                Err(e) => break Err(e),
            }
        };
        if spare.is_none() {
            *spare = Self::reserve();
        }
        result
    }
}

impl Endpoint {
    /// Disconnects the callers that wait now. Retries what fails until the end of the endpoint.
    pub(super) async fn disconnect_callers(self: &Arc<Self>) {
        retry(
            SHIM,
            || self.changed.notified(),
            async |failures| match self.blocking(Self::try_disconnect).await.flatten() {
                Err(step) if !self.state().ended => {
                    if failures == 0 {
                        log::error!(sandbox = self.shim.id();
                            "failed to disconnect callers of the pod's shim; retrying: {step}");
                    }
                    ControlFlow::Continue(())
                }
                _ => ControlFlow::Break(()),
            },
        )
        .await;
    }

    pub(super) fn try_disconnect(self: &Arc<Self>) -> Result<(), StepError> {
        let Some(listener) = self.state().listener.clone() else { return Ok(()) };
        self.shims.spare.disconnect(listener.as_fd()).step("accept callers of shim")
    }
}
