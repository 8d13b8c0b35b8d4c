//! Ids of containers and processes.

use crate::error::{Code, Error};

/// Maximum length of an id, bytes. Ids of containerd have at most 76.
const LONGEST_ID: usize = 128;

/// Identifies a process: the first one of a container, or an exec.
#[derive(Debug, Default, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProcessKey {
    /// The container.
    pub id: String,
    /// The exec; empty: the first process.
    pub exec: String,
}

impl ProcessKey {
    /// The key of a process.
    pub fn new(id: &str, exec: &str) -> Self {
        Self { id: id.to_owned(), exec: exec.to_owned() }
    }

    /// The id of the process in events and answers.
    pub fn process(&self) -> &str {
        if self.exec.is_empty() { &self.id } else { &self.exec }
    }
}

/// Checks an id, which becomes a part of paths and an argument of the runtime.
pub fn check_id(id: &str) -> Result<(), Error> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._+-".contains(&byte);
    let named = id.starts_with(|first: char| first.is_ascii_alphanumeric());
    if named && id.len() <= LONGEST_ID && id.bytes().all(plain) {
        return Ok(());
    }
    Err(Error::new(Code::INVALID_ARGUMENT, format!("malformed id {id:.80?}")))
}
