//! Helpers: processes of this program that do kernel work that may take long, so that a slow disk
//! or a file system that does not answer does not block the main loop. The kernel kills a helper
//! when the process that started it exits; a helper that hangs in the kernel exits later.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;

use containerd_shim_protos::api::{CreateTaskRequest, Mount};
use protobuf::Message as _;

use crate::arguments::Arguments;
use crate::cgroup::Cgroup;
use crate::error::{Context as _, Error};
use crate::root::mounts;
use crate::runtime::command::Command;
use crate::runtime::{self, INPUT_FD};
use crate::sys;

/// The action of a helper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Mounts the root file system of a bundle; see [`mounts_file`].
    Mount,
    /// Unmounts the root file system of a bundle.
    Unmount,
    /// Kills the processes in the cgroup of a container and removes the cgroup.
    RemoveCgroup,
}

impl Action {
    /// The word on the command line that selects the action.
    pub fn word(self) -> &'static str {
        match self {
            Self::Mount => "mount",
            Self::Unmount => "unmount",
            Self::RemoveCgroup => "remove-cgroup",
        }
    }

    /// The action that a word selects.
    pub fn of_word(word: &str) -> Option<Self> {
        [Self::Mount, Self::Unmount, Self::RemoveCgroup]
            .into_iter()
            .find(|action| action.word() == word)
    }
}

/// A file in memory that contains the mounts for a helper.
///
/// # Errors
/// The file cannot be created.
pub fn mounts_file(mounts: Vec<Mount>) -> Result<std::os::fd::OwnedFd, Error> {
    let mut request = CreateTaskRequest::new();
    request.rootfs = mounts;
    runtime::memory_file_of(&request.write_to_bytes()?)
}

/// Starts a helper for a container and its bundle. `input_file` has the mounts to make, see
/// [`mounts_file`], or the `cgroupsPath` of the config.
///
/// # Errors
/// The helper cannot be started.
pub fn start(
    action: Action,
    namespace: &str,
    id: &str,
    bundle: &Path,
    input_file: Option<BorrowedFd<'_>>,
) -> Result<Command, Error> {
    let (program, path) = (env!("CARGO_PKG_NAME"), bundle.display().to_string());
    let words = [program, "-namespace", namespace, "-id", id, "-bundle", &path, action.word()];
    let words = words.into_iter().map(runtime::string).collect::<Result<Vec<_>, _>>()?;
    let null = runtime::null()?;
    let output = runtime::memory_file_of(b"")?;
    // Not the streams of this process: a reader that waits until they are closed would also wait
    // for the helper.
    let mut descriptors = vec![(null.as_fd(), 0), (output.as_fd(), 1), (null.as_fd(), 2)];
    descriptors.extend(input_file.map(|input_file| (input_file, INPUT_FD)));
    // The working directory identifies the helper to `cleanup::delete`. A bundle that was removed
    // has no mounts.
    let bundle = File::open(bundle).ok();
    let spawned = sys::spawn(&sys::Spawn {
        program: c"/proc/self/exe",
        arguments: &words,
        environment: &runtime::environment(),
        directory: bundle.as_ref().map(|bundle| bundle.as_fd()),
        descriptors: &descriptors,
        dies_with_parent: true,
    });
    let pid = spawned.context(format_args!("start helper to {}", action.word()))?;
    Ok(Command::helper(pid, output))
}

/// Runs as a helper. Writes an error to standard output.
///
/// # Errors
/// The action has failed.
pub fn run(action: Action, arguments: &Arguments) -> Result<(), Error> {
    let done = act(action, arguments);
    if let Err(e) = &done {
        write!(std::io::stdout(), "{e}").context("write error")?;
    }
    done
}

fn act(action: Action, arguments: &Arguments) -> Result<(), Error> {
    let bundle = Path::new(&arguments.bundle);
    match action {
        Action::Mount => {
            let request = CreateTaskRequest::parse_from_bytes(&input("read mounts")?)?;
            mounts::mount_all(&request.rootfs, bundle)
        }
        Action::Unmount => mounts::unmount_bundle(bundle),
        Action::RemoveCgroup => {
            let path = String::from_utf8(input("read cgroup")?)
                .map_err(|_| Error::unknown("read cgroup: the path is not UTF-8"))?;
            Cgroup::named(&path, &arguments.id).map_or(Ok(()), |cgroup| cgroup.remove())
        }
    }
}

/// The content of the input file, which is closed then: a program that the helper runs does not get
/// it. `step` is for the error.
///
/// # Errors
/// The file is not open, or cannot be read.
fn input(step: &str) -> Result<Vec<u8>, Error> {
    let closed = || Error::unknown(format!("{step}: descriptor {INPUT_FD} is not open"));
    let file = sys::inherited(INPUT_FD).ok_or_else(closed)?;
    let mut content = Vec::new();
    File::from(file).read_to_end(&mut content).context(step)?;
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_action_is_found_by_its_word() {
        for action in [Action::Mount, Action::Unmount, Action::RemoveCgroup] {
            assert_eq!(Action::of_word(action.word()), Some(action));
        }
        assert_eq!(Action::of_word("delete"), None);
    }
}
