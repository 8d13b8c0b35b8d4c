//! Work that is done beside other work, where there is a thread to spare.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crate::error::Step;

/// A job that another thread may take while its owner does something else. It never waits for a thread: when the owner needs the
/// result and nobody has begun, the owner does it.
pub struct Beside(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    done: Condvar,
}

enum State {
    Offered(Job),
    Taken,
    Done(Result<(), Step>),
}

type Job = Box<dyn FnOnce() -> Result<(), Step> + Send>;

impl Beside {
    /// Offers a job to the runtime's blocking threads. To be called on one of them.
    pub fn offer(job: impl FnOnce() -> Result<(), Step> + Send + 'static) -> Self {
        let shared = Arc::new(Shared { state: Mutex::new(State::Offered(Box::new(job))), done: Condvar::new() });
        let other = Arc::clone(&shared);
        tokio::task::spawn_blocking(move || other.run());
        Self(shared)
    }

    /// The job's result: does it, or waits for who does.
    ///
    /// # Errors
    /// The job's.
    pub fn finish(self) -> Result<(), Step> {
        self.0.run();
        let mut state = self.0.state();
        loop {
            match std::mem::replace(&mut *state, State::Taken) {
                State::Done(result) => return result,
                other => *state = other,
            }
            state = self.0.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does the job unless somebody has begun.
    fn run(&self) {
        let mut state = self.state();
        let job = match std::mem::replace(&mut *state, State::Taken) {
            State::Offered(job) => job,
            other => return *state = other,
        };
        drop(state);
        // The owner must not wait for ever.
        let result = catch_unwind(AssertUnwindSafe(job))
            .unwrap_or_else(|_| Err(Step::new("run job", std::io::Error::other("panicked"))));
        *self.state() = State::Done(result);
        self.done.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

    use super::*;

    fn failed(what: &'static str) -> Result<(), Step> {
        Err(Step::new(what, std::io::Error::other("on order")))
    }

    /// On a runtime with so many blocking threads, one of which is the owner's.
    fn on<T: Send + 'static>(threads: usize, owner: impl FnOnce() -> T + Send + 'static) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(threads).build().unwrap();
        runtime.block_on(async { tokio::task::spawn_blocking(owner).await.unwrap() })
    }

    #[test]
    fn the_owner_does_it_where_no_thread_is_to_spare() {
        let (owner, worker) = on(1, || {
            let ran = Arc::new(Mutex::new(None));
            let seen = Arc::clone(&ran);
            let beside = Beside::offer(move || {
                *seen.lock().unwrap() = Some(std::thread::current().id());
                Ok(())
            });
            beside.finish().unwrap();
            (std::thread::current().id(), ran.lock().unwrap().unwrap())
        });
        assert_eq!(owner, worker);
    }

    #[test]
    fn it_is_done_once_and_waited_for() {
        for threads in [1, 2, 8] {
            let times = on(threads, || {
                let times = Arc::new(AtomicU32::new(0));
                let counted = Arc::clone(&times);
                let beside = Beside::offer(move || {
                    counted.fetch_add(1, SeqCst);
                    failed("count")
                });
                assert_eq!(beside.finish().unwrap_err().what(), "count");
                times
            });
            assert_eq!(times.load(SeqCst), 1);
        }
    }

    #[test]
    fn a_panic_is_a_failed_step() {
        for threads in [1, 2] {
            let e = on(threads, || Beside::offer(|| panic!("on order")).finish().unwrap_err());
            assert_eq!(e.to_string(), "run job: panicked");
        }
    }
}
