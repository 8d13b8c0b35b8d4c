//! Where an owner publishes and everybody reads: a value, and whoever waits for it to change. Of
//! the runtime's own channel for this there would be half a kilobyte in every sandbox.

use std::fmt;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use tokio::sync::Notify;

/// The end that publishes. When it is dropped nothing changes any more.
pub struct Publisher<T>(Arc<Shared<T>>);

/// An end that reads.
pub struct Reader<T>(Arc<Shared<T>>);

struct Shared<T> {
    /// The value, and whether nothing will change any more.
    now: Mutex<(T, bool)>,
    changed: Notify,
}

/// A board with a first value.
pub fn board<T: Copy>(value: T) -> (Publisher<T>, Reader<T>) {
    let shared = Arc::new(Shared { now: Mutex::new((value, false)), changed: Notify::new() });
    (Publisher(Arc::clone(&shared)), Reader(shared))
}

impl<T> Shared<T> {
    /// A panic elsewhere leaves the value whole.
    fn now(&self) -> MutexGuard<'_, (T, bool)> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Copy> Publisher<T> {
    /// What is published.
    pub fn get(&self) -> T {
        self.0.now().0
    }

    /// Publishes a change.
    pub fn change(&self, change: impl FnOnce(&mut T)) {
        change(&mut self.0.now().0);
        self.0.changed.notify_waiters();
    }
}

impl<T: Copy> Reader<T> {
    /// What is published.
    pub fn get(&self) -> T {
        self.0.now().0
    }

    /// Waits until `look` finds something in what is published; `None` when it never will.
    #[expect(
        clippy::manual_async_fn,
        reason = "the arguments of an async fn are in its future twice, and this one is in every Wait"
    )]
    pub fn wait_for<F>(&self, look: impl Fn(T) -> Option<F>) -> impl Future<Output = Option<F>> {
        async move {
            loop {
                let mut changed = pin!(self.0.changed.notified());
                // From here on no change is missed.
                changed.as_mut().enable();
                if let Poll::Ready(found) = self.look(&look) {
                    return found;
                }
                changed.await;
            }
        }
    }

    fn look<F>(&self, look: impl Fn(T) -> Option<F>) -> Poll<Option<F>> {
        let (value, closed) = *self.0.now();
        match look(value) {
            None if !closed => Poll::Pending,
            found => Poll::Ready(found),
        }
    }
}

impl<T> Drop for Publisher<T> {
    fn drop(&mut self) {
        self.0.now().1 = true;
        self.0.changed.notify_waiters();
    }
}

impl<T> Clone for Reader<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T: fmt::Debug + Copy> fmt::Debug for Reader<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Reader").field(&self.0.now().0).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn even(number: u32) -> Option<u32> {
        Some(number).filter(|number| number.is_multiple_of(2))
    }

    #[tokio::test]
    async fn readers_see_the_last_value_and_wait_for_another() {
        let (publisher, reader) = board(1_u32);
        let waiting: Vec<_> = (0..3)
            .map(|_| {
                let reader = reader.clone();
                tokio::spawn(async move { reader.wait_for(even).await })
            })
            .collect();
        tokio::task::yield_now().await;
        publisher.change(|number| *number = 3);
        tokio::task::yield_now().await;
        publisher.change(|number| *number = 4);
        for waiting in waiting {
            assert_eq!(waiting.await.unwrap(), Some(4));
        }
        assert_eq!((publisher.get(), reader.get()), (4, 4));
        assert_eq!(reader.wait_for(even).await, Some(4));
    }

    #[tokio::test]
    async fn nothing_is_waited_for_when_nothing_changes_any_more() {
        let (publisher, reader) = board(1_u32);
        let waiting = tokio::spawn({
            let reader = reader.clone();
            async move { reader.wait_for(even).await }
        });
        tokio::task::yield_now().await;
        drop(publisher);
        assert_eq!(waiting.await.unwrap(), None);
        assert_eq!(reader.wait_for(even).await, None);
        assert_eq!(reader.get(), 1);
    }
}
