//! The report of a cloned child to its parent: the step that it is in and how that failed.

use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering::Relaxed};

use crate::sys::{self, Errno};

/// Written by the child, read by the parent when the child has ended or executed its program.
#[derive(Debug, Default)]
pub(crate) struct ChildReport {
    step: AtomicUsize,
    errno: AtomicI32,
}

impl ChildReport {
    /// Forgets an earlier child.
    pub(crate) fn reset(&self) {
        self.enter(0);
        self.errno.store(0, Relaxed);
    }

    /// The child begins a step.
    pub(crate) fn enter(&self, step: usize) {
        self.step.store(step, Relaxed);
    }

    /// The child ends, and reports the error of its step.
    pub(crate) fn exit(&self, result: Result<(), Errno>) -> ! {
        let Err(errno) = result else { sys::exit(0) };
        self.errno.store(errno.raw_os_error(), Relaxed);
        sys::exit(1)
    }

    /// The last step that was begun.
    pub(crate) fn step(&self) -> usize {
        self.step.load(Relaxed)
    }

    /// The error of that step.
    pub(crate) fn errno(&self) -> Option<Errno> {
        Some(self.errno.load(Relaxed)).filter(|errno| *errno != 0).map(Errno::from_raw_os_error)
    }
}
