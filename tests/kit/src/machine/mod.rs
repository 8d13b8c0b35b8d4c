//! What the machine itself tells: processes, mounts, cgroups.

pub mod cgroup;
pub mod keeper;
pub mod mounts;
pub mod processes;
