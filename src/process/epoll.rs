//! Descriptors of all sandboxes under one watch of the runtime's: an epoll instance of our own,
//! which the runtime watches. A descriptor that the runtime watches itself takes 256 bytes and
//! the future that waits for it hundreds more, and every sandbox has two.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::task::Waker;

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use parking_lot::Mutex;
use tokio::io::unix::AsyncFd;

use crate::error::{IoContext as _, StepError};
use crate::sys;

/// Events that are taken at once.
const AT_ONCE: usize = 64;

/// The watch.
#[derive(Debug)]
pub(crate) struct Watch {
    epoll: Epoll,
    wakers: Mutex<Wakers>,
}

#[derive(Debug, Default)]
struct Wakers {
    /// By the number that the descriptor's events have.
    of: HashMap<u64, Waker>,
    /// Numbers that were given.
    given: u64,
    /// A task takes the events.
    attended: bool,
}

impl Watch {
    /// A watch of nothing yet.
    ///
    /// # Errors
    /// The failed step.
    pub(crate) fn new() -> Result<Arc<Self>, StepError> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).step("make an epoll instance")?;
        Ok(Arc::new(Self { epoll, wakers: Mutex::default() }))
    }

    /// Wakes `waker` if `file` is readable, and each time that it becomes so, until the answer is
    /// dropped. To be called on the runtime.
    ///
    /// # Errors
    /// epoll_ctl(2)'s.
    pub(crate) fn readable(
        self: &Arc<Self>,
        file: Arc<OwnedFd>,
        waker: Waker,
    ) -> io::Result<Watched> {
        let mut wakers = self.wakers.lock();
        if !wakers.attended {
            // Another number for the same instance: it is the runtime's until its task ends.
            let ready = sys::watch(Arc::new(self.epoll.0.try_clone()?))?;
            tokio::spawn(wake_on_events(EventTaskGuard(Arc::downgrade(self)), ready));
            wakers.attended = true;
        }
        wakers.given += 1;
        let number = wakers.given;
        // By edge: no reader takes from a descriptor what makes it readable.
        self.epoll
            .add(&*file, EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, number))?;
        wakers.of.insert(number, waker);
        Ok(Watched { watch: Arc::clone(self), file, number })
    }

    /// Wakes those whose descriptors have become readable. Whether there may be more.
    fn wake(&self) -> nix::Result<bool> {
        let mut events = [EpollEvent::empty(); AT_ONCE];
        let count = match self.epoll.wait(&mut events, EpollTimeout::ZERO) {
            Err(Errno::EINTR) => return Ok(true),
            other => other?,
        };
        for event in events.iter().take(count) {
            let waker = self.wakers.lock().of.get(&event.data()).cloned();
            // A waker that panics must not prevent that the others are woken.
            let _ = waker.map(|waker| catch_unwind(AssertUnwindSafe(|| waker.wake())));
        }
        Ok(count == AT_ONCE)
    }
}

/// The task that takes the events; when it ends, the next descriptor begins another.
struct EventTaskGuard(Weak<Watch>);

impl Drop for EventTaskGuard {
    fn drop(&mut self) {
        if let Some(watch) = self.0.upgrade() {
            watch.wakers.lock().attended = false;
        }
    }
}

async fn wake_on_events(attendance: EventTaskGuard, ready: AsyncFd<Arc<OwnedFd>>) {
    // An error: the runtime is shutting down.
    while let Ok(mut now) = ready.readable().await {
        let Some(watch) = attendance.0.upgrade() else { return };
        loop {
            match watch.wake() {
                Ok(true) => {}
                Ok(false) => break,
                Err(e) => {
                    log::error!("epoll_wait failed: {e}");
                    break;
                }
            }
        }
        now.clear_ready();
    }
}

/// A descriptor that is watched until this is dropped.
pub struct Watched {
    watch: Arc<Watch>,
    file: Arc<OwnedFd>,
    number: u64,
}

impl Drop for Watched {
    fn drop(&mut self) {
        // While it is still open here: elsewhere it may be for longer, and the watch would
        // continue.
        let removed = self.watch.epoll.delete(&*self.file);
        let waker = self.watch.wakers.lock().of.remove(&self.number);
        // What it holds may be watched itself.
        drop(waker);
        if let Err(e) = removed {
            log::warn!("failed to remove a descriptor from epoll: {e}");
        }
    }
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Watched").field(&self.file).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
    use std::task::Wake;

    use tokio::sync::Notify;

    use super::*;

    #[derive(Default)]
    struct Bell {
        rung: AtomicUsize,
        now: Notify,
    }

    impl Wake for Bell {
        fn wake(self: Arc<Self>) {
            self.rung.fetch_add(1, SeqCst);
            self.now.notify_one();
        }
    }

    fn pair() -> (UnixStream, Arc<OwnedFd>) {
        let (near, far) = UnixStream::pair().unwrap();
        (near, Arc::new(far.into()))
    }

    #[tokio::test]
    async fn a_watch_wakes_for_earlier_and_later_input() {
        let watch = Watch::new().unwrap();
        let ((mut near, far), bell) = (pair(), Arc::new(Bell::default()));
        near.write_all(b"1").unwrap();
        let watched = watch.readable(far.clone(), bell.clone().into()).unwrap();
        bell.now.notified().await;
        near.write_all(b"2").unwrap();
        bell.now.notified().await;
        drop(watched);
        near.write_all(b"3").unwrap();
        // Another one's event comes behind it.
        let (mut other, far) = pair();
        let after = Arc::new(Bell::default());
        let _watched = watch.readable(far, after.clone().into()).unwrap();
        other.write_all(b"4").unwrap();
        after.now.notified().await;
        assert_eq!(bell.rung.load(SeqCst), 2);
        assert_eq!(watch.wakers.lock().of.len(), 1);
    }

    #[tokio::test]
    async fn a_descriptor_with_a_duplicate_is_removed_from_epoll() {
        let watch = Watch::new().unwrap();
        let ((mut near, far), bell) = (pair(), Arc::new(Bell::default()));
        let elsewhere = far.try_clone().unwrap();
        drop(watch.readable(far, bell.clone().into()).unwrap());
        near.write_all(b"1").unwrap();
        let again = Arc::new(Bell::default());
        let _watched = watch.readable(Arc::new(elsewhere), again.clone().into()).unwrap();
        again.now.notified().await;
        assert_eq!(bell.rung.load(SeqCst), 0);
    }

    #[tokio::test]
    async fn a_waker_that_panics_does_not_affect_others() {
        struct PanicOnWake;
        impl Wake for PanicOnWake {
            fn wake(self: Arc<Self>) {
                panic!("on order");
            }
        }
        let watch = Watch::new().unwrap();
        let pairs: Vec<_> = (0..2 * AT_ONCE).map(|_| pair()).collect();
        let bell = Arc::new(Bell::default());
        let waker = |number: usize| {
            if number.is_multiple_of(2) {
                Arc::new(PanicOnWake).into()
            } else {
                bell.clone().into()
            }
        };
        let _watched: Vec<_> = pairs
            .iter()
            .enumerate()
            .map(|(n, (_, far))| watch.readable(far.clone(), waker(n)).unwrap())
            .collect();
        for (near, _) in &pairs {
            let mut near = near;
            near.write_all(b"1").unwrap();
        }
        while bell.rung.load(SeqCst) < AT_ONCE {
            bell.now.notified().await;
        }
        assert!(watch.wakers.lock().attended);
    }

    #[test]
    fn a_second_runtime_uses_the_watch_after_the_first_ended() {
        let watch = Watch::new().unwrap();
        let (mut near, far) = pair();
        for _ in 0..2 {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let bell = Arc::new(Bell::default());
                let _watched = watch.readable(far.clone(), bell.clone().into()).unwrap();
                near.write_all(b"1").unwrap();
                bell.now.notified().await;
            });
        }
    }
}
