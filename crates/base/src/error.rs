//! [`StepError`]: a failed operation with its path and errno.
//!
//! A leaf that every other module may import. The RPCs of a sandbox wrap a [`StepError`] into
//! `podsandbox::Error`, which adds the sandbox and decides the RPC code.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A step that failed: what was tried, on which path, and the system's answer.
///
/// Cheap to clone: every caller that waits for the same step receives it.
#[derive(Clone, Debug)]
pub struct StepError {
    what: &'static str,
    path: Option<PathBuf>,
    source: Arc<io::Error>,
}

impl StepError {
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

impl fmt::Display for StepError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.what)?;
        if let Some(path) = &self.path {
            write!(f, " {}", path.display())?;
        }
        write!(f, ": {}", self.source)
    }
}

impl std::error::Error for StepError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&*self.source)
    }
}

/// The steps of a list that failed: a list runs to its end, whatever fails on the way.
#[derive(Clone, Debug, Default)]
pub struct StepErrors(Vec<StepError>);

impl StepErrors {
    /// Success, if no step has failed.
    ///
    /// # Errors
    /// The steps that failed.
    pub fn into_result(self) -> Result<(), Self> {
        if self.0.is_empty() { Ok(()) } else { Err(self) }
    }

    /// Whether no step has failed.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds the failure of one step, if it has failed.
    pub fn check(&mut self, step: Result<(), StepError>) {
        self.0.extend(step.err());
    }

    /// Adds the failures of a list of steps.
    pub fn check_all(&mut self, steps: Result<(), Self>) {
        self.0.extend(steps.err().into_iter().flatten());
    }
}

impl From<StepError> for StepErrors {
    fn from(step: StepError) -> Self {
        Self(vec![step])
    }
}

impl FromIterator<StepError> for StepErrors {
    fn from_iter<I: IntoIterator<Item = StepError>>(steps: I) -> Self {
        Self(steps.into_iter().collect())
    }
}

impl Extend<StepError> for StepErrors {
    fn extend<I: IntoIterator<Item = StepError>>(&mut self, steps: I) {
        self.0.extend(steps);
    }
}

impl IntoIterator for StepErrors {
    type Item = StepError;
    type IntoIter = std::vec::IntoIter<StepError>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<'a> IntoIterator for &'a StepErrors {
    type Item = &'a StepError;
    type IntoIter = std::slice::Iter<'a, StepError>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter()
    }
}

impl fmt::Display for StepErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, step) in self.0.iter().enumerate() {
            f.write_str(if index == 0 { "" } else { "; " })?;
            step.fmt(f)?;
        }
        Ok(())
    }
}

/// Names the step of an I/O result.
pub trait IoContext<T> {
    /// Names the step.
    ///
    /// # Errors
    /// The result's own error, as a [`StepError`].
    fn step(self, what: &'static str) -> Result<T, StepError>;

    /// Names the step and the path that it worked on.
    ///
    /// # Errors
    /// The result's own error, as a [`StepError`].
    fn step_at(self, what: &'static str, path: impl Into<PathBuf>) -> Result<T, StepError>;
}

impl<T, E: Into<io::Error>> IoContext<T> for Result<T, E> {
    fn step(self, what: &'static str) -> Result<T, StepError> {
        self.map_err(|e| StepError::new(what, e.into()))
    }

    fn step_at(self, what: &'static str, path: impl Into<PathBuf>) -> Result<T, StepError> {
        self.map_err(|e| StepError::at(what, path, e.into()))
    }
}

/// The beginning of a text that is longer than `most` bytes, or all of it.
pub fn bounded(text: &str, most: usize) -> String {
    if text.len() <= most {
        text.to_owned()
    } else {
        format!("{}…", &text[..text.floor_char_boundary(most)])
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

    #[test]
    fn a_text_that_is_cut_ends_between_characters() {
        assert_eq!(bounded("abc", 3), "abc");
        assert_eq!(bounded("abcd", 3), "abc…");
        assert_eq!(bounded("abä", 3), "ab…");
    }
}
