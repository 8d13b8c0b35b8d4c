//! The root of a pause process that a shim runs, and what else of it is mounted in the bundle.

use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::{fs, io};

use nix::mount::{MntFlags, MsFlags, mount, umount2};

use super::bundle::Bundle;
use crate::error::{IoContext as _, StepError};
use crate::pause::{Plan, binary, native};

/// Name of the pause program in the root of a sandbox.
const PAUSE: &str = "pause";

/// Where the pod's user namespace is pinned, below its bundle.
pub fn user_namespace(bundle: &Path) -> PathBuf {
    bundle.join("user")
}

/// The root in a bundle.
pub struct Rootfs {
    bundle: Bundle,
}

impl Rootfs {
    /// The root in `bundle`. Nothing is made yet.
    pub fn new(bundle: Bundle) -> Self {
        Self { bundle }
    }

    fn path(&self) -> PathBuf {
        self.bundle.dir().join("rootfs")
    }

    /// Makes the bundle with `spec` in it, a root that holds the pause program and belongs to the
    /// root of the pod's user namespace, and a pin of that. Who goes there passes the directories
    /// from `state_dir` on. Blocks.
    ///
    /// # Errors
    /// The failed step; call [`Rootfs::unmount`] then.
    pub fn make_rootfs(&self, spec: &[u8], plan: &Plan, state_dir: &Path) -> Result<(), StepError> {
        let dir = self.bundle.dir();
        made(fs::DirBuilder::new().mode(0o700).create(dir)).step_at("make directory", dir)?;
        let config = dir.join("config.json");
        fs::write(&config, spec).step_at("write file", config)?;
        let root = self.path();
        made(fs::DirBuilder::new().mode(0o755).create(&root)).step_at("make directory", &root)?;
        // A file system of its own, for what is below /run may not be executed on many nodes.
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        mount(Some("pause"), &root, Some("tmpfs"), flags, Some("mode=755,size=65536"))
            .step_at("mount root", &root)?;
        let program = root.join(PAUSE);
        fs::write(&program, binary::PROGRAM).step_at("write pause program", &program)?;
        let executable = fs::Permissions::from_mode(0o555);
        fs::set_permissions(&program, executable).step_at("write pause program", &program)?;
        let Some(userns) = plan.userns else { return Ok(()) };
        if let Some(netns) = &plan.netns {
            native::pin_owner(netns, &user_namespace(dir))?;
        }
        let (uid, gid) = (userns.uid.host_id, userns.gid.host_id);
        // The root of a user namespace makes what is mounted on, and must get here first.
        chown(&root, Some(uid), Some(gid)).step_at("give root to the user namespace", &root)?;
        make_traversable(dir, state_dir)
    }

    /// Unmounts what is mounted in the bundle. Gone already is success.
    ///
    /// # Errors
    /// Every step that failed.
    pub fn unmount(&self) -> Result<(), Vec<StepError>> {
        // The first the shim takes off itself when it deletes the pause process.
        let mounted = [self.path(), user_namespace(self.bundle.dir())];
        let failed: Vec<StepError> =
            mounted.iter().filter_map(|path| unmount(path).err()).collect();
        if failed.is_empty() { Ok(()) } else { Err(failed) }
    }
}

/// Lets every user through to `bundle`, as the root of a user namespace must get to the root below
/// it; no other user may list it.
fn make_traversable(bundle: &Path, state_dir: &Path) -> Result<(), StepError> {
    for dir in bundle.ancestors().take_while(|dir| dir.starts_with(state_dir)) {
        let mode = fs::metadata(dir).step_at("stat directory", dir)?.permissions().mode();
        let passed = fs::set_permissions(dir, fs::Permissions::from_mode(mode & 0o7777 | 0o011));
        passed.step_at("let the user namespace pass", dir)?;
    }
    Ok(())
}

/// "Gone already" is success.
fn unmount(path: &Path) -> Result<(), StepError> {
    match umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
        Ok(()) | Err(nix::Error::EINVAL | nix::Error::ENOENT) => Ok(()),
        Err(e) => Err(StepError::at("unmount", path, e.into())),
    }
}

/// "There already" is success.
fn made(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}
