//! The access of other processes to the shim.

use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

use containerd_shim_protos::api::StateRequest;
use containerd_shim_protos::ttrpc::Code;

use crate::pod::{self, code, context};

/// A user without privileges.
const USER: u32 = 65_534;

/// Runs a program as [`USER`].
fn as_user(program: &str) -> Command {
    let mut command = Command::new(program);
    command.uid(USER).gid(USER).stdout(Stdio::null());
    command
}

/// Whether a process of the same user can read the memory of this one.
fn can_read(process: &Child) -> bool {
    let environment = format!("/proc/{}/environ", process.id());
    as_user("cat").arg(environment).stderr(Stdio::null()).status().unwrap().success()
}

/// The kernel lets no process of the same user read or trace the shim, and writes no core of it:
/// all three depend on whether it can be dumped. As root it could be read by a privileged process
/// in any case, so it runs as another user here.
#[test]
fn no_process_of_the_same_user_can_read_the_shim() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o711)).unwrap();
    let (program, socket) = (dir.path().join("shim"), dir.path().join("s"));
    // A program that the user cannot read could not be dumped for this reason alone.
    kit::write_program(&program, &std::fs::read(pod::program()).unwrap()).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    let mut shim = as_user("/bin/sh")
        .args(["-c", "exec \"$0\" -namespace test 3<&0 0</dev/null"])
        .arg(&program)
        .stdin(Stdio::from(OwnedFd::from(listener)))
        .spawn()
        .unwrap();
    let mut other = as_user("sleep").arg("1000").spawn().unwrap();
    // It serves when it is answered.
    let client = pod::connect(&socket);
    let missing = client.state(context(), &StateRequest::new()).unwrap_err();
    assert_eq!(code(&missing), Code::NOT_FOUND);
    let owner = |process: &Child| {
        std::fs::metadata(format!("/proc/{}/environ", process.id())).unwrap().uid()
    };
    let seen = [(can_read(&other), owner(&other)), (can_read(&shim), owner(&shim))];
    for process in [&mut shim, &mut other] {
        process.kill().unwrap();
        process.wait().unwrap();
    }
    assert_eq!(seen, [(true, USER), (false, 0)]);
}
