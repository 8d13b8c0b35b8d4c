//! The targets: each decodes one kind of input and asserts what must hold of it, not only that nothing panics.

mod bootstrap;
mod calls;
mod config;
mod create;
mod proc;
mod record;

/// Inputs to begin with, by name.
pub type Seeds = Vec<(String, Vec<u8>)>;

/// One kind of input.
pub struct Target {
    /// Its name, also that of its directories of seeds and corpus.
    pub name: &'static str,
    /// Decodes an input and asserts what must hold.
    pub run: fn(&[u8]),
    /// Inputs to begin with, made of real messages.
    pub seeds: fn() -> Seeds,
    /// The bytes of memory that a byte of input may take.
    pub memory: usize,
}

/// All of them.
pub const TARGETS: &[Target] = &[
    Target { name: "bootstrap", run: bootstrap::run, seeds: bootstrap::seeds, memory: 64 },
    Target { name: "calls", run: calls::run, seeds: calls::seeds, memory: 256 },
    Target { name: "config", run: config::run, seeds: config::seeds, memory: 1024 },
    Target { name: "create", run: create::run, seeds: create::seeds, memory: 1024 },
    Target { name: "proc", run: proc::run, seeds: proc::seeds, memory: 256 },
    Target { name: "record", run: record::run, seeds: record::seeds, memory: 256 },
];

/// An error's text: there is one, it fits a line of the log, and a caller's bytes are not in it as they came.
pub fn assert_told(error: &str) {
    assert!(!error.trim().is_empty(), "an error says nothing");
    assert!(error.len() <= 8 << 10, "an error has {} bytes: {:.200}", error.len(), error);
}
