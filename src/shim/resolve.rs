//! Where the shim of a runtime is.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

use crate::error::{IoContext as _, StepError};

const FIND: &str = "find the shim of runtime";

/// Finds the shim of `runtime` as containerd does (`ShimManager.resolveRuntimePath`): an absolute
/// path is the shim itself; the name `….NAME.VERSION` means `containerd-shim-NAME-VERSION`, in
/// `path` or beside containerd, which listens at `containerd`.
///
/// # Errors
/// There is none, or `runtime` is no name of one.
pub fn find_binary(runtime: &str, path: &str, containerd: &Path) -> Result<PathBuf, StepError> {
    if Path::new(runtime).is_absolute() {
        return check(Path::new(runtime));
    }
    let name = name(runtime).step_at(FIND, runtime)?;
    let listed = std::env::split_paths(path).filter(|dir| dir.is_absolute());
    if let Some(found) = listed.map(|dir| dir.join(&name)).find(|file| executable(file)) {
        return Ok(found);
    }
    let found =
        containerd_directory(containerd).map(|dir| dir.join(&name)).filter(|file| executable(file));
    found.ok_or_else(|| {
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

fn executable(file: &Path) -> bool {
    check(file).is_ok()
}

/// The directory of the program that listens at containerd's socket.
fn containerd_directory(socket: &Path) -> Option<PathBuf> {
    let stream = UnixStream::connect(socket).ok()?;
    let listener = getsockopt(&stream, PeerCredentials).ok()?.pid();
    let program = std::fs::read_link(format!("/proc/{listener}/exe")).ok()?;
    program.parent().map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

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
        let socket = dir.path().join("s");
        let _listener = UnixListener::bind(&socket).unwrap();
        let ours = std::env::current_exe().unwrap();
        let beside = ours.parent().unwrap().join("containerd-shim-besidetest-v1");
        let put = |file: &Path, mode| {
            std::fs::write(file, "").unwrap();
            std::fs::set_permissions(file, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        let runtime = "x.besidetest.v1";
        let path = dir.path().to_str().unwrap();
        let error = find_binary(runtime, path, &socket).unwrap_err().to_string();
        assert!(
            error.contains(runtime)
                && error.contains("containerd-shim-besidetest-v1 not found in PATH"),
            "{error}"
        );
        put(&beside, 0o755);
        let found = find_binary(runtime, path, &socket);
        let listed = dir.path().join("containerd-shim-besidetest-v1");
        put(&listed, 0o644);
        let refused = find_binary(runtime, path, &socket);
        put(&listed, 0o755);
        let first = find_binary(runtime, path, &socket);
        std::fs::remove_file(&beside).unwrap();
        assert_eq!(found.unwrap(), beside);
        assert_eq!(refused.unwrap(), beside);
        assert_eq!(first.unwrap(), listed);
        assert_eq!(find_binary(listed.to_str().unwrap(), "", &socket).unwrap(), listed);
    }
}
