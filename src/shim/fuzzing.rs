//! Entry points of the fuzzer in `fuzz/`: what is read of the containers of shims.

pub use super::containers::cgroup::{below, containers, is_outermost};
