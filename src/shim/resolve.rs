//! Where the shim of a runtime is.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use crate::error::{IoContext as _, StepError};
use crate::process::inheritance::Inheritance;

const FIND: &str = "find the shim of runtime";

/// Finds the shim of `runtime` as containerd does (`ShimManager.resolveRuntimePath`): an absolute
/// path is the shim itself; the name `….NAME.VERSION` means `containerd-shim-NAME-VERSION`, in
/// containerd's `PATH` or beside containerd.
///
/// # Errors
/// There is none, or `runtime` is no name of one.
pub fn find_binary(runtime: &str, inheritance: &Inheritance) -> Result<PathBuf, StepError> {
    if Path::new(runtime).is_absolute() {
        return check(Path::new(runtime));
    }
    let name = name(runtime).step_at(FIND, runtime)?;
    let path = inheritance.path();
    let listed = std::env::split_paths(&path).filter(|dir| dir.is_absolute());
    let mut files = listed.chain(inheritance.parent_directory.clone()).map(|dir| dir.join(&name));
    files.find(|file| check(file).is_ok()).ok_or_else(|| {
        let path = path.display();
        let reason = format!("{name} not found in PATH ({path}) or next to the containerd binary");
        StepError::at(FIND, runtime, io::Error::new(io::ErrorKind::NotFound, reason))
    })
}

/// The shim at `path`.
///
/// # Errors
/// It is no file that can be executed.
fn check(path: &Path) -> Result<PathBuf, StepError> {
    let meta = std::fs::metadata(path).step_at("find shim", path)?;
    if meta.is_file() && meta.permissions().mode() & 0o111 != 0 {
        return Ok(path.to_owned());
    }
    Err(StepError::at("find shim", path, io::ErrorKind::PermissionDenied.into()))
}

/// The file's name of the shim of a runtime that is given by name.
///
/// # Errors
/// It is no such name.
pub(super) fn name(runtime: &str) -> io::Result<String> {
    let mut parts = runtime.rsplit('.');
    let (version, kind) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let proper = |part: &str| !part.is_empty() && !part.contains('/');
    if runtime.starts_with('.') || runtime.contains('/') || !proper(version) || !proper(kind) {
        let reason = "is neither an absolute path nor a name such as io.containerd.runc.v2";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
    }
    Ok(format!("containerd-shim-{kind}-{version}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_containerd() {
        assert_eq!(name("io.containerd.runc.v2").unwrap(), "containerd-shim-runc-v2");
        assert_eq!(name("kata.v2").unwrap(), "containerd-shim-kata-v2");
        for bad in [
            "",
            "runc",
            ".runc.v2",
            "io.containerd..v2",
            "a/b.c",
            "../x.y.z",
            "io.containerd.runc.",
        ] {
            assert!(name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn path_is_searched_before_the_directory_of_containerd() {
        let dir = tempfile::tempdir().unwrap();
        let beside_dir = tempfile::tempdir().unwrap();
        let beside = beside_dir.path().join("containerd-shim-besidetest-v1");
        let mut inheritance = Inheritance::read("self").unwrap();
        inheritance.environment = vec![format!("PATH={}", dir.path().display()).into()];
        inheritance.parent_directory = Some(beside_dir.path().to_owned());
        let put = |file: &Path, mode| {
            std::fs::write(file, "").unwrap();
            std::fs::set_permissions(file, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        let runtime = "x.besidetest.v1";
        let error = find_binary(runtime, &inheritance).unwrap_err().to_string();
        assert!(
            error.contains(runtime)
                && error.contains("containerd-shim-besidetest-v1 not found in PATH"),
            "{error}"
        );
        put(&beside, 0o755);
        let found = find_binary(runtime, &inheritance);
        let listed = dir.path().join("containerd-shim-besidetest-v1");
        put(&listed, 0o644);
        let refused = find_binary(runtime, &inheritance);
        put(&listed, 0o755);
        let first = find_binary(runtime, &inheritance);
        assert_eq!(found.unwrap(), beside);
        assert_eq!(refused.unwrap(), beside);
        assert_eq!(first.unwrap(), listed);
        assert_eq!(find_binary(listed.to_str().unwrap(), &inheritance).unwrap(), listed);
    }
}
