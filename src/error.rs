//! What went wrong in one step of the work: the step, the path and the errno.
//!
//! A leaf that every other module may import. The verbs of a sandbox wrap a [`Step`] into
//! [`crate::podsandbox::Error`], which adds the sandbox and decides the RPC code.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A step that failed: what was tried, on which path, and the system's answer.
///
/// Cheap to clone: every caller who waits for the same step is told of it.
#[derive(Clone, Debug)]
pub struct Step {
    what: &'static str,
    path: Option<PathBuf>,
    source: Arc<io::Error>,
}

impl Step {
    /// A failed step that concerns no path.
    pub fn new(what: &'static str, source: io::Error) -> Self {
        Self { what, path: None, source: Arc::new(source) }
    }

    /// A failed step on `path`.
    pub fn at(what: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Self {
        Self { what, path: Some(path.into()), source: Arc::new(source) }
    }

    /// The step's name, as in the message.
    pub fn what(&self) -> &'static str {
        self.what
    }

    /// The path that the step worked on, if it had one.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The system's answer.
    pub fn io(&self) -> &io::Error {
        &self.source
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.what)?;
        if let Some(path) = &self.path {
            write!(f, " {}", path.display())?;
        }
        write!(f, ": {}", self.source)
    }
}

impl std::error::Error for Step {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&*self.source)
    }
}

/// Names the step of an I/O result.
pub trait IoContext<T> {
    /// Names the step.
    ///
    /// # Errors
    /// The result's own error, as a [`Step`].
    fn step(self, what: &'static str) -> Result<T, Step>;

    /// Names the step and the path that it worked on.
    ///
    /// # Errors
    /// The result's own error, as a [`Step`].
    fn step_at(self, what: &'static str, path: impl Into<PathBuf>) -> Result<T, Step>;
}

impl<T, E: Into<io::Error>> IoContext<T> for Result<T, E> {
    fn step(self, what: &'static str) -> Result<T, Step> {
        self.map_err(|e| Step::new(what, e.into()))
    }

    fn step_at(self, what: &'static str, path: impl Into<PathBuf>) -> Result<T, Step> {
        self.map_err(|e| Step::at(what, path, e.into()))
    }
}

/// A removal of what is gone already is success.
///
/// # Errors
/// Any other error of the removal.
pub fn gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_names_step_path_and_errno() {
        let e: Result<(), _> = Err(io::Error::from_raw_os_error(libc::EBUSY));
        let step = e.step_at("unmount", "/run/x/shm").unwrap_err();
        assert_eq!(step.to_string(), "unmount /run/x/shm: Device or resource busy (os error 16)");
    }
}
