//! The directories of the daemon and of containerd: whether the files of pods have a place there.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use nix::sys::statfs::{self, FsType};
use nix::sys::statvfs::{FsFlags, Statvfs, statvfs};

use super::{Finding, Level};
use base::config::Config;

const SUBJECT: &str = "state directory";

/// The space that a directory must have for the files of pods, which take some kB each.
const LEAST_BYTES: u64 = 1 << 20;

/// The number of files that a directory must have space for.
const LEAST_FILES: u64 = 64;

/// Examines the state directory, and the space of all directories with the files of pods.
pub(super) fn examine(config: &Config) -> Vec<Finding> {
    let state = state_directory(&config.state_dir);
    let mut findings = Vec::new();
    if state.level == Level::Fail {
        findings.push(state);
    } else {
        let full = full_directory(SUBJECT, &config.state_dir);
        findings.push(full.unwrap_or(state));
    }
    findings.extend(full_directory("containerd", &config.containerd_root));
    findings.extend(full_directory("containerd", &config.containerd_state));
    findings
}

/// The finding about a directory in which no file can be made. One that does not exist is judged by
/// the directory that it will be in.
fn full_directory(subject: &'static str, path: &Path) -> Option<Finding> {
    let existing = path.ancestors().find(|path| path.exists())?;
    let (fact, advice) = obstacle(&statvfs(existing).ok()?)?;
    let fact = format!("{} is on a file system that {fact}, so no pod can start", path.display());
    Some(Finding::fail(subject, fact, format!("{advice} {}", existing.display())))
}

/// What keeps files from being made on a file system, and the beginning of the remedy.
fn obstacle(fs: &Statvfs) -> Option<(String, &'static str)> {
    const SPACE: &str = "remove files or enlarge it: df -h and df -i";
    let bytes = fs.blocks_available().saturating_mul(fs.fragment_size());
    if fs.flags().contains(FsFlags::ST_RDONLY) {
        const MOUNT: &str = "see dmesg for the reason, and mount it writable: findmnt --target";
        return Some(("is read-only".to_owned(), MOUNT));
    }
    if bytes < LEAST_BYTES {
        return Some((format!("has {bytes} bytes left"), SPACE));
    }
    // Some file systems have no fixed number of files, and report 0 of 0.
    if fs.files_available() < LEAST_FILES && fs.files() > 0 {
        return Some((format!("has {} inodes left", fs.files_available()), SPACE));
    }
    None
}

fn state_directory(path: &Path) -> Finding {
    let shown = path.display();
    let meta = match path.metadata() {
        Ok(meta) => meta,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Finding::ok(
                SUBJECT,
                format!("{shown} does not exist yet; the daemon creates it"),
            );
        }
        Err(e) => {
            return Finding::fail(
                SUBJECT,
                format!("{shown}: {e}"),
                "set state_dir to a directory that root can create",
            );
        }
    };
    if !meta.is_dir() {
        return Finding::fail(
            SUBJECT,
            format!("{shown} is not a directory"),
            "remove it or set state_dir to another path",
        );
    }
    if meta.uid() != 0 || meta.mode() & 0o022 != 0 {
        let fact = format!(
            "users other than root can write {shown} (owner {}, mode {:o})",
            meta.uid(),
            meta.mode() & 0o7777
        );
        return Finding::fail(
            SUBJECT,
            fact,
            format!("examine its content, then: chown root:root {shown} && chmod 0700 {shown}"),
        );
    }
    match statfs::statfs(path) {
        Ok(fs) if lasting(fs.filesystem_type()) => Finding::warn(
            SUBJECT,
            format!("{shown} is on a disk, so its records survive a reboot"),
            "drain the node, then set state_dir to a directory on a tmpfs such as /run",
        ),
        Ok(_) => Finding::ok(SUBJECT, shown.to_string()),
        Err(e) => Finding::warn(
            SUBJECT,
            format!("statfs {shown}: {e}"),
            "make sure that it is on a tmpfs such as /run",
        ),
    }
}

/// Whether the files of the file system survive a reboot.
fn lasting(kind: FsType) -> bool {
    // RAMFS_MAGIC of linux/magic.h, which nix does not name.
    const RAMFS: FsType = FsType(0x8584_58f6);
    kind != statfs::TMPFS_MAGIC && kind != RAMFS
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    #[test]
    fn an_unusable_state_directory_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(state_directory(&dir.path().join("none")).level, Level::Ok);
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert_eq!(state_directory(&file).level, Level::Fail);
        std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o777))
            .unwrap();
        let finding = state_directory(dir.path());
        assert_eq!(finding.level, Level::Fail);
        assert!(finding.fact.contains("mode 777"), "{finding}");
    }

    #[test]
    fn ext4_survives_a_reboot_and_tmpfs_does_not() {
        assert!(!lasting(statfs::TMPFS_MAGIC));
        assert!(lasting(statfs::EXT4_SUPER_MAGIC));
    }

    /// A full and a read-only one are made in `tests/check`, which needs root.
    #[test]
    fn a_directory_with_space_is_no_finding() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(full_directory("x", dir.path()), None);
        assert_eq!(full_directory("x", &dir.path().join("not/yet")), None);
    }
}
