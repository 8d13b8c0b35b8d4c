//! Entry points of the fuzzer in `fuzz/`: what shims say, and what is read of their containers.

pub use super::bootstrap::Bootstrap;
pub use super::containers::cgroup::{below, containers, is_outermost};
