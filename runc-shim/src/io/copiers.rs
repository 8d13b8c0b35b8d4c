//! The copier threads of the pod: one for each process that has streams, so that a process which
//! blocks its thread delays no other one.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::epoll::EventFlags;

use super::copier::{self, Copier};
use crate::error::{Code, Context as _, Error};
use crate::process_key::ProcessKey;
use crate::reactor::{Reactor, Source};

/// Maximum number of threads of deleted processes of one container that have not ended. Beyond it
/// no process of the container gets a thread. A thread does not end while a process holds the lock
/// of a stream that the deleted process has left or passed to it.
const MAX_BLOCKED: usize = 64;

/// The same for the whole pod: a process may pass its streams to one of another container.
const MAX_BLOCKED_OF_POD: usize = 1024;

/// The threads.
#[derive(Debug)]
pub struct Copiers {
    copiers: BTreeMap<ProcessKey, Copier>,
    /// The threads of deleted processes that have not ended, by the ids of the containers.
    left: Vec<(String, Copier)>,
    notify_eventfd: Arc<OwnedFd>,
}

impl Copiers {
    /// No thread yet. `reactor` reports [`Source::Copier`] when streams may have ended.
    pub fn new(reactor: &Reactor) -> io::Result<Self> {
        let notify_eventfd = Arc::new(copier::eventfd()?);
        reactor.add(&notify_eventfd, Source::Copier, EventFlags::IN)?;
        Ok(Self { copiers: BTreeMap::new(), left: Vec::new(), notify_eventfd })
    }

    /// Starts the thread of a process, if it has none.
    ///
    /// # Errors
    /// The kernel has no memory or thread for it, or threads sleep in the kernel.
    pub fn start(&mut self, key: &ProcessKey) -> Result<(), Error> {
        if self.copiers.contains_key(key) {
            return Ok(());
        }
        self.left.retain(|(_, copier)| !copier.has_ended());
        let blocked = self.left.iter().filter(|(id, _)| *id == key.id).count();
        if blocked >= MAX_BLOCKED || self.left.len() >= MAX_BLOCKED_OF_POD {
            let reason = format!(
                "{blocked} copier threads of deleted processes of the container, and {} of the \
                 pod, have not ended: processes hold the kernel's locks of their streams, or the \
                 streams are not read",
                self.left.len()
            );
            return Err(Error::new(Code::RESOURCE_EXHAUSTED, reason));
        }
        let started = Copier::start(&key.id, Arc::clone(&self.notify_eventfd));
        self.copiers.insert(key.clone(), started.context("start copier thread")?);
        Ok(())
    }

    /// The thread of a process, if it has one.
    pub fn find(&mut self, key: &ProcessKey) -> Option<&mut Copier> {
        self.copiers.get_mut(key)
    }

    /// Has a process's thread close descriptors that the process shares.
    pub fn close(&mut self, key: &ProcessKey, ends: Vec<OwnedFd>) {
        // Without a thread, the process has no streams.
        if let Some(copier) = self.find(key) {
            copier.close(ends);
        }
    }

    /// Whether an output stream of a process has not ended.
    pub fn is_copying(&self, key: &ProcessKey) -> bool {
        self.copiers.get(key).is_some_and(Copier::is_copying)
    }

    /// Has the thread of a deleted process end when its streams have ended. Does not wait for it.
    pub fn end(&mut self, key: &ProcessKey) {
        if let Some(copier) = self.copiers.remove(key) {
            copier.end();
            self.left.push((key.id.clone(), copier));
        }
    }

    /// The processes of which output streams have ended since the last call.
    pub fn take_ended(&mut self) -> io::Result<Vec<ProcessKey>> {
        copier::clear(&self.notify_eventfd);
        let mut all = Vec::new();
        for (key, copier) in &mut self.copiers {
            if copier.take_ended()? {
                all.push(key.clone());
            }
        }
        for (_, copier) in &mut self.left {
            copier.take_ended()?;
        }
        self.left.retain(|(_, copier)| !copier.has_ended());
        Ok(all)
    }

    /// Whether commands are queued or executed, or output of a deleted process is being copied.
    pub fn has_pending_work(&self) -> bool {
        let left = self.left.iter().map(|(_, copier)| copier);
        self.copiers.values().chain(left).any(Copier::has_pending_work)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_do_not_end_are_bounded() {
        let mut copiers = Copiers::new(&Reactor::new().unwrap()).unwrap();
        let start = || Copier::start("a", Arc::new(copier::eventfd().unwrap())).unwrap();
        copiers.left.extend((0..MAX_BLOCKED).map(|_| ("a".to_owned(), start())));
        let key = ProcessKey::new("a", "e");
        assert_eq!(copiers.start(&key).unwrap_err().code, Code::RESOURCE_EXHAUSTED);
        copiers.start(&ProcessKey::new("b", "e")).unwrap();
        copiers.left.iter().for_each(|(_, copier)| copier.end());
        let begun = std::time::Instant::now();
        while copiers.start(&key).is_err() {
            assert!(begun.elapsed().as_secs() < 60, "the threads do not end");
            std::thread::yield_now();
        }
        assert!(copiers.left.len() < MAX_BLOCKED);
    }
}
