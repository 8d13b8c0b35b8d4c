//! The root file systems of containers, and the helper processes that make and undo their mounts.

pub mod descendants;
pub mod fuse_program;
pub mod helper;
pub mod idmap;
pub mod loop_device;
pub mod mounts;
pub mod overlay;
