//! An inbox that holds no memory while it is empty, as it is with nearly every sandbox at nearly every time. The channels of the
//! runtime make room for 32 messages at once and keep it.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// The end that takes messages out. When it is dropped nobody can send any more, and what was not taken is dropped.
pub struct Inbox<T>(Arc<Shared<T>>);

/// An end that puts messages in.
pub struct Sender<T>(Arc<Shared<T>>);

struct Shared<T> {
    queue: Mutex<Queue<T>>,
    filled: Notify,
}

struct Queue<T> {
    messages: VecDeque<T>,
    closed: bool,
}

/// An empty inbox.
pub fn inbox<T>() -> (Sender<T>, Inbox<T>) {
    let queue = Mutex::new(Queue { messages: VecDeque::new(), closed: false });
    let shared = Arc::new(Shared { queue, filled: Notify::new() });
    (Sender(Arc::clone(&shared)), Inbox(shared))
}

impl<T> Shared<T> {
    /// A panic elsewhere leaves the queue whole.
    fn turn(&self) -> MutexGuard<'_, Queue<T>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Sender<T> {
    /// Puts a message in.
    ///
    /// # Errors
    /// The message, when nobody takes messages out any more.
    pub fn send(&self, message: T) -> Result<(), T> {
        let mut queue = self.0.turn();
        if queue.closed {
            return Err(message);
        }
        queue.messages.push_back(message);
        drop(queue);
        self.0.filled.notify_one();
        Ok(())
    }
}

impl<T> Inbox<T> {
    /// Takes the oldest message; waits for one. Nothing is lost when the future is dropped.
    pub async fn recv(&mut self) -> T {
        loop {
            if let Some(message) = self.take() {
                return message;
            }
            // One that was put in since then has left a permit.
            self.0.filled.notified().await;
        }
    }

    fn take(&self) -> Option<T> {
        let mut queue = self.0.turn();
        let message = queue.messages.pop_front();
        if queue.messages.is_empty() {
            queue.messages = VecDeque::new();
        }
        message
    }
}

impl<T> Drop for Inbox<T> {
    fn drop(&mut self) {
        let mut queue = self.0.turn();
        queue.closed = true;
        let left = std::mem::take(&mut queue.messages);
        drop(queue);
        // What they hold may send to this very inbox when it is dropped.
        drop(left);
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> fmt::Debug for Sender<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sender")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn messages_come_in_their_order_also_from_before_and_while_waiting() {
        let (sender, mut inbox) = inbox();
        sender.send(1).unwrap();
        sender.send(2).unwrap();
        assert_eq!((inbox.recv().await, inbox.recv().await), (1, 2));
        assert_eq!(inbox.0.turn().messages.capacity(), 0);
        let waiting = tokio::spawn(async move { (inbox.recv().await, inbox.recv().await) });
        tokio::task::yield_now().await;
        sender.send(3).unwrap();
        tokio::task::yield_now().await;
        sender.send(4).unwrap();
        assert_eq!(waiting.await.unwrap(), (3, 4));
        assert_eq!(sender.send(5), Err(5));
    }

    #[tokio::test]
    async fn a_receiver_that_gave_up_loses_nothing() {
        let (sender, mut inbox) = inbox();
        let short = std::time::Duration::from_millis(1);
        assert!(tokio::time::timeout(short, inbox.recv()).await.is_err());
        sender.send(1).unwrap();
        assert_eq!(inbox.recv().await, 1);
    }

    #[test]
    fn what_was_not_taken_is_dropped() {
        let (sender, inbox) = inbox();
        let (reply, answer) = tokio::sync::oneshot::channel::<()>();
        sender.send(reply).unwrap();
        drop(inbox);
        assert!(answer.blocking_recv().is_err());
    }
}
