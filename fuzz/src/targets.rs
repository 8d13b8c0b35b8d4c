//! The targets: each decodes one kind of input and asserts what must hold of it, not only that
//! nothing panics.

mod calls;
mod connection;
mod create;
mod grpc;
mod proc;
mod shim_calls;
mod shim_files;
mod shim_frames;
mod status;
mod ttrpc;
mod words;

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
    /// Those that it may take beside them.
    pub frame: usize,
}

/// The largest message length in a frame of ttrpc, bytes; it is reserved before the message
/// arrives.
const FRAME: usize = 16 << 20;

/// The largest length in a packed field of numbers, bytes: the `protobuf` crate reserves memory for
/// ten million numbers before it reads one.
const PACKED: usize = 10_000_000 * size_of::<i64>();

/// All of them.
pub const TARGETS: &[Target] = &[
    Target { name: "calls", run: calls::run, seeds: calls::seeds, memory: 256, frame: 0 },
    Target { name: "create", run: create::run, seeds: create::seeds, memory: 1024, frame: PACKED },
    Target { name: "grpc", run: grpc::run, seeds: grpc::seeds, memory: 1024, frame: 0 },
    Target { name: "proc", run: proc::run, seeds: proc::seeds, memory: 256, frame: 0 },
    Target {
        name: "shim_calls",
        run: shim_calls::run,
        seeds: shim_calls::seeds,
        memory: 512,
        frame: PACKED,
    },
    Target {
        name: "shim_files",
        run: shim_files::run,
        seeds: shim_files::seeds,
        memory: 512,
        frame: 0,
    },
    Target {
        name: "shim_frames",
        run: shim_frames::run,
        seeds: shim_frames::seeds,
        memory: 256,
        frame: 0,
    },
    Target { name: "status", run: status::run, seeds: status::seeds, memory: 256, frame: 0 },
    Target { name: "ttrpc", run: ttrpc::run, seeds: ttrpc::seeds, memory: 1024, frame: FRAME },
    Target { name: "words", run: words::run, seeds: words::seeds, memory: 256, frame: 0 },
];

/// An error's text: there is one, it fits a line of the log, and a caller's bytes are not in it as
/// they came.
pub fn assert_told(error: &str) {
    assert!(!error.trim().is_empty(), "an error says nothing");
    assert!(error.len() <= 8 << 10, "an error has {} bytes: {:.200}", error.len(), error);
}
