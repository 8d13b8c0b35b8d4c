//! Code that the daemon and the node tools share.

pub mod config;
pub mod error;
pub mod id;
pub mod platform;
pub mod replace_file;
pub mod runtime;
pub mod sysctl;
pub mod time;
