//! Which cgroup a pause process gets.

use std::ffi::{CStr, CString};
use std::io;
use std::path::PathBuf;

use super::slice::{self, Scope};
use crate::error::StepError;
use crate::id::SandboxId;

/// The name of a pause process's cgroup. It is all that a driver must know of a plan to adopt a
/// pause process and to clean up after it, and all that is kept of the plan while the pause process
/// lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupRef {
    /// The sandbox id.
    pub id: SandboxId,
    /// The value of `Plan::cgroup_parent` of the pause process.
    pub cgroup_parent: Box<str>,
}

/// The cgroup of a pause process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Placement {
    /// Stays in the daemon's cgroup.
    Inherit,
    /// A directory, by its path below the root of every hierarchy.
    Directory(CString),
    /// A transient scope of systemd.
    Scope(Scope),
}

impl Placement {
    /// The cgroup's path below the root of every hierarchy.
    pub(crate) fn path(&self) -> Option<&CStr> {
        match self {
            Self::Inherit => None,
            Self::Directory(path) => Some(path),
            Self::Scope(scope) => Some(&scope.path),
        }
    }
}

/// Checks the cgroup parent of a `Plan`.
///
/// # Errors
/// The parent is not usable.
pub fn check_parent(parent: &str) -> Result<(), String> {
    if slice::is_slice(parent) {
        return slice::path(parent).map(drop);
    }
    parent_fault(parent).map_or(Ok(()), |fault| Err(fault.to_owned()))
}

fn parent_fault(parent: &str) -> Option<&'static str> {
    if parent.len() > 3000 {
        return Some("is longer than 3000 bytes");
    }
    if parent.contains('\0') {
        return Some("has a zero byte");
    }
    if parent.split('/').any(|part| part == ".." || part == ".") {
        return Some("has a component \"..\" or \".\"");
    }
    if parent.split('/').any(|part| part.len() > 255) {
        return Some("has a component of more than 255 bytes");
    }
    None
}

/// The placement of sandbox `id` below `parent`.
///
/// # Errors
/// The parent is not usable.
pub(crate) fn placement(parent: &str, id: &str) -> Result<Placement, StepError> {
    const WHAT: &str = "place the pause process in a cgroup below";
    let refuse = |reason: &str| {
        StepError::at(WHAT, parent, io::Error::new(io::ErrorKind::InvalidInput, reason))
    };
    if parent.is_empty() {
        return Ok(Placement::Inherit);
    }
    check_parent(parent).map_err(|fault| refuse(&fault))?;
    if slice::is_slice(parent) {
        return Scope::new(parent, id).map(Placement::Scope).map_err(|fault| refuse(&fault));
    }
    let mut path = PathBuf::new();
    path.extend(parent.split('/').filter(|part| !part.is_empty()));
    path.push(id);
    CString::new(path.into_os_string().into_encoded_bytes())
        .map(Placement::Directory)
        .map_err(|_| refuse("has a zero byte"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_that_are_refused() {
        for bad in ["..", "/a/../b", "/a/..", "./a", "/a/./b", "a\0b", "a-.slice", ".slice"] {
            assert!(check_parent(bad).is_err(), "{bad:?}");
            assert!(placement(bad, "id").is_err(), "{bad:?}");
        }
        assert!(check_parent(&"a".repeat(256)).is_err());
        assert!(check_parent(&"a/".repeat(1600)).is_err());
    }

    #[test]
    fn parents_that_are_taken() {
        let place = |parent: &str| placement(parent, "id").unwrap();
        assert_eq!(place(""), Placement::Inherit);
        let scope = Scope::new("a-b.slice", "id").unwrap();
        assert_eq!(place("a-b.slice"), Placement::Scope(scope));
        for (parent, path) in [
            ("/a.slice", c"a.slice/id"),
            ("/", c"id"),
            ("/a/b", c"a/b/id"),
            ("a//b/", c"a/b/id"),
            ("/..a/b..", c"..a/b../id"),
        ] {
            assert_eq!(place(parent), Placement::Directory(path.to_owned()), "{parent:?}");
        }
    }
}
