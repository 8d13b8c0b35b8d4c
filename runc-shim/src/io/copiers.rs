//! The copier threads of the pod: one for each container that has streams, so that a container
//! which blocks its thread delays no other one.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::epoll::EventFlags;

use super::copier::{self, Copier};
use super::stream::Stream;
use crate::error::{Code, Context as _, Error};
use crate::reactor::{Reactor, Source};

/// Maximum number of threads of deleted containers that have not ended. Beyond it no container gets
/// a thread. A thread does not end while a process of another container, or of another pod, holds
/// the lock of a stream that the deleted container has passed to it.
const MAX_BLOCKED: usize = 64;

/// The threads.
#[derive(Debug)]
pub struct Copiers {
    /// By the ids of the containers.
    copiers: BTreeMap<String, Copier>,
    /// The threads of deleted containers that have not ended.
    left: Vec<Copier>,
    notify_eventfd: Arc<OwnedFd>,
}

impl Copiers {
    /// No thread yet. `reactor` reports [`Source::Copier`] when streams may have ended.
    pub fn new(reactor: &Reactor) -> io::Result<Self> {
        let notify_eventfd = Arc::new(copier::eventfd()?);
        reactor.add(&notify_eventfd, Source::Copier, EventFlags::IN)?;
        Ok(Self { copiers: BTreeMap::new(), left: Vec::new(), notify_eventfd })
    }

    /// Starts the thread of a container, if it has none, and checks that it can take the streams of
    /// another process.
    ///
    /// # Errors
    /// The kernel has no memory or thread for it, or threads sleep in the kernel.
    pub fn start(&mut self, id: &str) -> Result<(), Error> {
        if let Some(copier) = self.copiers.get(id) {
            return copier.check_queue();
        }
        self.left.retain(|copier| !copier.has_ended());
        if self.left.len() >= MAX_BLOCKED {
            let reason = format!(
                "{MAX_BLOCKED} copier threads of deleted containers are blocked: processes hold \
                 the kernel's locks of their streams"
            );
            return Err(Error::new(Code::RESOURCE_EXHAUSTED, reason));
        }
        let started = Copier::start(id, Arc::clone(&self.notify_eventfd));
        self.copiers.insert(id.to_owned(), started.context("start copier thread")?);
        Ok(())
    }

    /// The thread of a container, if it has one.
    pub fn find(&mut self, id: &str) -> Option<&mut Copier> {
        self.copiers.get_mut(id)
    }

    /// Begins to copy a stream of a container and returns its id.
    pub fn add(&mut self, id: &str, stream: Stream) -> Result<u32, Error> {
        let missing = || Error::unknown("the container has no copier thread");
        Ok(self.find(id).ok_or_else(missing)?.add(stream))
    }

    /// Has a container's thread close descriptors that the container shares.
    pub fn close(&mut self, id: &str, ends: Vec<OwnedFd>) {
        // Without a thread, the container has no streams.
        if let Some(copier) = self.find(id) {
            copier.close(ends);
        }
    }

    /// Whether an output stream of a container has not ended.
    pub fn is_copying(&self, id: &str, stream: u32) -> bool {
        self.copiers.get(id).is_some_and(|copier| copier.is_copying(stream))
    }

    /// Has the thread of a deleted container end when its streams have ended. Does not wait for it.
    pub fn end(&mut self, id: &str) {
        if let Some(copier) = self.copiers.remove(id) {
            copier.end();
            self.left.push(copier);
        }
    }

    /// The streams that have ended since the last call: container, and id of the stream.
    pub fn take_ended(&mut self) -> io::Result<Vec<(String, u32)>> {
        copier::clear(&self.notify_eventfd);
        let mut all = Vec::new();
        for (id, copier) in &mut self.copiers {
            all.extend(copier.take_ended()?.into_iter().map(|stream| (id.clone(), stream)));
        }
        for copier in &mut self.left {
            copier.take_ended()?;
        }
        self.left.retain(|copier| !copier.has_ended());
        Ok(all)
    }

    /// Whether commands are queued or executed, or output of a deleted process is being copied.
    pub fn has_pending_work(&self) -> bool {
        self.copiers.values().chain(&self.left).any(Copier::has_pending_work)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_that_do_not_end_are_bounded() {
        let mut copiers = Copiers::new(&Reactor::new().unwrap()).unwrap();
        let start = || Copier::start("b", Arc::new(copier::eventfd().unwrap())).unwrap();
        copiers.left.extend((0..MAX_BLOCKED).map(|_| start()));
        assert_eq!(copiers.start("a").unwrap_err().code, Code::RESOURCE_EXHAUSTED);
        copiers.left.iter().for_each(Copier::end);
        let begun = std::time::Instant::now();
        while copiers.start("a").is_err() {
            assert!(begun.elapsed().as_secs() < 60, "the threads do not end");
            std::thread::yield_now();
        }
        assert!(copiers.left.len() < MAX_BLOCKED);
    }
}
