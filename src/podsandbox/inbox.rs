//! An inbox that holds no memory while it is empty, as it is with nearly every sandbox at nearly
//! every time. The channels of the runtime make room for 32 messages at once and keep it.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// The end that takes messages out. When it is dropped nobody can send any more, and what was not
/// taken is dropped.
pub struct Inbox<T>(Arc<Shared<T>>);

/// An end that puts messages in.
pub struct Sender<T>(Arc<Shared<T>>);

type Shared<T> = Mutex<Queue<T>>;

struct Queue<T> {
    messages: VecDeque<T>,
    /// Who takes messages out waits for one.
    taker: Option<Waker>,
    closed: bool,
}

/// An empty inbox.
pub fn inbox<T>() -> (Sender<T>, Inbox<T>) {
    let shared =
        Arc::new(Mutex::new(Queue { messages: VecDeque::new(), taker: None, closed: false }));
    (Sender(Arc::clone(&shared)), Inbox(shared))
}

/// A panic elsewhere leaves the queue whole.
fn turn<T>(shared: &Shared<T>) -> MutexGuard<'_, Queue<T>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T> Sender<T> {
    /// Puts a message in.
    ///
    /// # Errors
    /// The message, when nobody takes messages out any more.
    pub fn send(&self, message: T) -> Result<(), T> {
        let mut queue = turn(&self.0);
        if queue.closed {
            return Err(message);
        }
        queue.messages.push_back(message);
        let taker = queue.taker.take();
        drop(queue);
        if let Some(taker) = taker {
            taker.wake();
        }
        Ok(())
    }
}

impl<T> Inbox<T> {
    /// Takes the oldest message; without one, wakes the caller when there is one.
    pub fn poll_recv(&mut self, cx: &mut Context<'_>) -> Poll<T> {
        let mut queue = turn(&self.0);
        let Some(message) = queue.messages.pop_front() else {
            match &mut queue.taker {
                Some(taker) => taker.clone_from(cx.waker()),
                taker => *taker = Some(cx.waker().clone()),
            }
            return Poll::Pending;
        };
        if queue.messages.is_empty() {
            queue.messages = VecDeque::new();
        }
        Poll::Ready(message)
    }
}

impl<T> Drop for Inbox<T> {
    fn drop(&mut self) {
        let mut queue = turn(&self.0);
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
    use std::future::poll_fn;

    use super::*;

    async fn recv<T>(inbox: &mut Inbox<T>) -> T {
        poll_fn(|cx| inbox.poll_recv(cx)).await
    }

    #[tokio::test]
    async fn messages_come_in_their_order_also_from_before_and_while_waiting() {
        let (sender, mut inbox) = inbox();
        sender.send(1).unwrap();
        sender.send(2).unwrap();
        assert_eq!((recv(&mut inbox).await, recv(&mut inbox).await), (1, 2));
        assert_eq!(turn(&inbox.0).messages.capacity(), 0);
        let waiting = tokio::spawn(async move { (recv(&mut inbox).await, recv(&mut inbox).await) });
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
        assert!(tokio::time::timeout(short, recv(&mut inbox)).await.is_err());
        sender.send(1).unwrap();
        assert_eq!(recv(&mut inbox).await, 1);
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
