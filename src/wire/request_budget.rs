//! Memory budget for the requests of all callers of one socket.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::response::MAX_MESSAGE;
use super::status::{Code, Status};

/// The budget of all requests together, bytes. Small ones do not count.
const BUDGET: usize = 4 * MAX_MESSAGE;
/// Requests up to this size need no budget, bytes: all calls except Create and Update. They must be
/// answered whatever other callers send.
const SMALL: usize = 4 << 10;
/// How long a request waits for budget, and how long one that has it may take to arrive.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// The budget for the requests of all connections of a socket.
#[derive(Clone, Debug)]
pub(super) struct RequestBudget(Arc<Semaphore>);

/// The share of a request; `None`: it is small.
pub(super) type BudgetPermit = Option<OwnedSemaphorePermit>;

impl Default for RequestBudget {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(BUDGET)))
    }
}

impl RequestBudget {
    /// Waits for budget for a message of `size` bytes.
    ///
    /// # Errors
    /// The message is larger than any may be, or other requests held the budget for too long.
    pub(super) async fn reserve(&self, size: usize) -> Result<BudgetPermit, Status> {
        if size > MAX_MESSAGE {
            let text = format!("the message has {size} bytes, at most {MAX_MESSAGE} are read");
            return Err(Status::new(Code::RESOURCE_EXHAUSTED, text));
        }
        if size <= SMALL {
            return Ok(None);
        }
        // Below 4 GiB, and the semaphore is never closed.
        match timeout(REQUEST_TIMEOUT, Arc::clone(&self.0).acquire_many_owned(size as u32)).await {
            Ok(Ok(permit)) => Ok(Some(permit)),
            _ => {
                let text = format!(
                    "other requests left no room for a message of {size} bytes for {} s",
                    REQUEST_TIMEOUT.as_secs()
                );
                Err(Status::new(Code::RESOURCE_EXHAUSTED, text))
            }
        }
    }
}

/// A request with its share of the budget.
pub(super) struct BudgetedRequest<B> {
    bytes: B,
    _permit: BudgetPermit,
}

impl<B> BudgetedRequest<B> {
    pub(super) fn new(bytes: B, permit: BudgetPermit) -> Self {
        Self { bytes, _permit: permit }
    }
}

impl<B: AsRef<[u8]>> AsRef<[u8]> for BudgetedRequest<B> {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn large_requests_wait_for_each_other_and_small_ones_do_not_wait() {
        let budget = RequestBudget::default();
        let mut permits = Vec::new();
        for _ in 0..BUDGET / MAX_MESSAGE {
            permits.push(budget.reserve(MAX_MESSAGE).await.unwrap());
        }
        assert!(budget.reserve(SMALL).await.unwrap().is_none());
        assert_eq!(budget.reserve(SMALL + 1).await.unwrap_err().code, Code::RESOURCE_EXHAUSTED);
        let waiting = tokio::spawn({
            let budget = budget.clone();
            async move { budget.reserve(MAX_MESSAGE).await.map(|permit| permit.is_some()) }
        });
        tokio::time::sleep(REQUEST_TIMEOUT / 2).await;
        assert!(!waiting.is_finished());
        permits.pop();
        assert_eq!(waiting.await.unwrap(), Ok(true));
        assert_eq!(
            budget.reserve(MAX_MESSAGE + 1).await.unwrap_err().code,
            Code::RESOURCE_EXHAUSTED
        );
    }
}
