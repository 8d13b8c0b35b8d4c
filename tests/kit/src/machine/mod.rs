//! State of the machine itself: processes, mounts, cgroups.

pub mod cgroup;
pub mod cgroup_driver;
pub mod freezer;
pub mod mounts;
pub mod processes;
