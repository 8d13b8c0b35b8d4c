//! The root file systems of containers. A helper process makes and undoes the mounts.

pub mod fuse_program;
pub mod idmap;
pub mod loop_device;
pub mod mark;
pub mod mount_copy;
pub mod mounts;
pub mod overlay;
