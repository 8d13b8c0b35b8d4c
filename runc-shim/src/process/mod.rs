//! A process of a container or of the sandbox: its streams, and the calls that wait for it.

mod streams;
mod waiters;

pub use self::streams::ProcessStreams;
pub use self::waiters::Waiters;
