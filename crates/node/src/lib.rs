//! The node tools of pause-sandboxer: `check`, `enable`, `disable` and `selftest`. They read and
//! change what is on the node: containerd and its config, kubelet's handlers, systemd's units, the
//! running daemon. They have no code of the daemon.

pub mod check;
pub mod client;
pub mod daemon_process;
pub mod enable;
pub mod oci_image;
pub mod selftest;
mod shell_command;
mod stop_signal;
mod trust;
