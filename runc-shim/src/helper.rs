//! Helpers: this program once more, for work of the kernel that may take long. A slow disk, or a
//! file system whose server does not answer, then keeps the loop from nothing. A helper ends with
//! the process that has started it, as soon as the kernel lets it.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;

use containerd_shim_protos::api::{CreateTaskRequest, Mount};
use containerd_shim_protos::ttrpc::proto::Status;
use protobuf::{EnumOrUnknown, Message as _};

use crate::error::{Code, Context as _, Error};
use crate::runtime::{self, Command, GIVEN};
use crate::{Arguments, container, mounts, sys};

/// What a helper does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Mounts the root file system of a bundle; see [`mounts_file`].
    Mount,
    /// Unmounts it.
    Unmount,
    /// Removes the cgroup of a container and kills what is in it.
    RemoveCgroup,
}

impl Action {
    /// Its word on the command line.
    pub fn word(self) -> &'static str {
        match self {
            Self::Mount => "mount",
            Self::Unmount => "unmount",
            Self::RemoveCgroup => "remove-cgroup",
        }
    }

    /// The action of a word.
    pub fn of_word(word: &str) -> Option<Self> {
        [Self::Mount, Self::Unmount, Self::RemoveCgroup]
            .into_iter()
            .find(|action| action.word() == word)
    }
}

/// What a helper works on.
#[derive(Debug, Clone, Copy)]
pub struct Work<'a> {
    /// What it does.
    pub action: Action,
    /// containerd's namespace.
    pub namespace: &'a str,
    /// The container.
    pub id: &'a str,
    /// Its bundle.
    pub bundle: &'a Path,
    /// What it mounts.
    pub given: Option<BorrowedFd<'a>>,
}

/// The mounts that a helper makes, as a file for it.
///
/// # Errors
/// There is no memory for it.
pub fn mounts_file(mounts: Vec<Mount>) -> Result<std::os::fd::OwnedFd, Error> {
    let mut request = CreateTaskRequest::new();
    request.rootfs = mounts;
    runtime::memory_file_of(&request.write_to_bytes()?)
}

/// Starts a helper.
///
/// # Errors
/// It cannot be started.
pub fn start(work: &Work<'_>) -> Result<Command, Error> {
    let words = [
        env!("CARGO_PKG_NAME"),
        "-namespace",
        work.namespace,
        "-id",
        work.id,
        "-bundle",
        &work.bundle.display().to_string(),
        work.action.word(),
    ];
    let words = words.into_iter().map(runtime::string).collect::<Result<Vec<_>, _>>()?;
    let null = File::options().read(true).write(true).open("/dev/null").context("/dev/null")?;
    let output = runtime::memory_file()?;
    // No stream of this process: who waits for its end would wait for that of the helper too.
    let mut descriptors = vec![(null.as_fd(), 0), (output.as_fd(), 1), (null.as_fd(), 2)];
    descriptors.extend(work.given.map(|given| (given, GIVEN)));
    // By this the `delete` of the command line finds it. A bundle that is gone has no mounts.
    let bundle = File::open(work.bundle).ok();
    let spawned = sys::spawn(&sys::Spawn {
        program: c"/proc/self/exe",
        arguments: &words,
        environment: &runtime::environment(),
        directory: bundle.as_ref().map(|bundle| bundle.as_fd()),
        descriptors: &descriptors,
        dies_with_parent: true,
    });
    let pid = spawned.context(format_args!("start helper to {}", work.action.word()))?;
    Ok(Command::without_log(pid, output))
}

/// Works as a helper. An error is written to standard output, as the status of a call.
///
/// # Errors
/// What has failed.
pub fn run(action: Action, arguments: &Arguments) -> Result<(), Error> {
    let done = act(action, arguments);
    if let Err(e) = &done {
        let mut status = Status::new();
        status.code = EnumOrUnknown::from_i32(e.code as i32);
        status.message.clone_from(&e.message);
        std::io::stdout().write_all(&status.write_to_bytes()?).context("write status")?;
    }
    done
}

fn act(action: Action, arguments: &Arguments) -> Result<(), Error> {
    let bundle = Path::new(&arguments.bundle);
    match action {
        Action::Mount => {
            let given = std::fs::read(runtime::given()).context("read mounts")?;
            let request = CreateTaskRequest::parse_from_bytes(&given)?;
            mounts::mount_all(&request.rootfs, &mounts::rootfs(bundle))
        }
        Action::Unmount => mounts::unmount_bundle(bundle),
        Action::RemoveCgroup => match container::cgroup_of(bundle, &arguments.id) {
            Some(cgroup) => cgroup.remove(),
            None => Ok(()),
        },
    }
}

/// Why a helper has failed: what it has written, or its status.
pub fn failure(output: &[u8], status: u32) -> Error {
    match Status::parse_from_bytes(output) {
        Ok(said) if !said.message.is_empty() => {
            Error::new(Code::of_number(said.code.value()), said.message)
        }
        _ => Error::unknown(format!("exit status {status}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_a_helper_has_its_code() {
        let mut status = Status::new();
        status.code = EnumOrUnknown::from_i32(Code::InvalidArgument as i32);
        status.message = "no such option".to_owned();
        let said = failure(&status.write_to_bytes().unwrap(), 1);
        assert_eq!(said, Error::new(Code::InvalidArgument, "no such option"));
        assert_eq!(failure(b"", 137).message, "exit status 137");
        assert_eq!(failure(b"\xff rubbish", 1).message, "exit status 1");
    }

    #[test]
    fn an_action_is_found_by_its_word() {
        for action in [Action::Mount, Action::Unmount, Action::RemoveCgroup] {
            assert_eq!(Action::of_word(action.word()), Some(action));
        }
        assert_eq!(Action::of_word("delete"), None);
    }
}
