//! Room for requests: how much of the requests of a socket's callers is held at a time.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::response::MAX_MESSAGE;
use super::status::{Code, Status};

/// What all requests together may hold, bytes; those that are small not counted.
const ROOM: usize = 4 * MAX_MESSAGE;
/// Requests up to it need no room, bytes: all calls but Create and Update, which must be answered
/// whatever others send.
const SMALL: usize = 4 << 10;
/// How long a request waits for room, and how long one that has it may take to come.
pub(super) const WITHIN: Duration = Duration::from_secs(10);

/// Room for the requests of all connections of a socket.
#[derive(Clone, Debug)]
pub(super) struct Room(Arc<Semaphore>);

/// What a request holds of it; `None` where it is small.
pub(super) type HeldRoom = Option<OwnedSemaphorePermit>;

impl Default for Room {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(ROOM)))
    }
}

impl Room {
    /// Waits for room for a message of `size` bytes.
    ///
    /// # Errors
    /// The message is larger than any may be, or others held the room for too long.
    pub(super) async fn reserve(&self, size: usize) -> Result<HeldRoom, Status> {
        if size > MAX_MESSAGE {
            let text = format!("the message has {size} bytes, at most {MAX_MESSAGE} are read");
            return Err(Status::new(Code::RESOURCE_EXHAUSTED, text));
        }
        if size <= SMALL {
            return Ok(None);
        }
        // Below 4 GiB, and the semaphore is never closed.
        match timeout(WITHIN, Arc::clone(&self.0).acquire_many_owned(size as u32)).await {
            Ok(Ok(held)) => Ok(Some(held)),
            _ => {
                let text = format!(
                    "other requests left no room for a message of {size} bytes for {} s",
                    WITHIN.as_secs()
                );
                Err(Status::new(Code::RESOURCE_EXHAUSTED, text))
            }
        }
    }
}

/// A request with the room that it holds.
pub(super) struct HeldRequest<B> {
    bytes: B,
    _held: HeldRoom,
}

impl<B> HeldRequest<B> {
    pub(super) fn new(bytes: B, held: HeldRoom) -> Self {
        Self { bytes, _held: held }
    }
}

impl<B: AsRef<[u8]>> AsRef<[u8]> for HeldRequest<B> {
    fn as_ref(&self) -> &[u8] {
        self.bytes.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn large_requests_wait_for_each_other_and_small_ones_do_not_wait() {
        let room = Room::default();
        let mut held = Vec::new();
        for _ in 0..ROOM / MAX_MESSAGE {
            held.push(room.reserve(MAX_MESSAGE).await.unwrap());
        }
        assert!(room.reserve(SMALL).await.unwrap().is_none());
        assert_eq!(room.reserve(SMALL + 1).await.unwrap_err().code, Code::RESOURCE_EXHAUSTED);
        let waiting = tokio::spawn({
            let room = room.clone();
            async move { room.reserve(MAX_MESSAGE).await.map(|held| held.is_some()) }
        });
        tokio::time::sleep(WITHIN / 2).await;
        assert!(!waiting.is_finished());
        held.pop();
        assert_eq!(waiting.await.unwrap(), Ok(true));
        assert_eq!(room.reserve(MAX_MESSAGE + 1).await.unwrap_err().code, Code::RESOURCE_EXHAUSTED);
    }
}
