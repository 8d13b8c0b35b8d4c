//! The wire: frames of ttrpc, the server for containerd's calls, and the events for containerd.

pub mod events;
pub mod frame;
pub mod pause_process;
pub mod request;
pub mod response;
pub mod server;
