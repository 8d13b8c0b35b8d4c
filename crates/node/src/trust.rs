//! The check that only root can change a file.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};

use base::error::{IoContext as _, StepError};

const STEP: &str = "trust file";

/// Other users can write it: those of its group, those of an access control list, which shows in
/// the bits of the group (acl(5)), or all.
const WRITABLE: u32 = 0o022;
/// In the mode of a directory: only the owner of an entry can rename and remove it.
const STICKY: u32 = 0o1000;

/// Maximum number of links that the kernel follows on one path (path_resolution(7)).
const LINKS_MAX: usize = 40;

/// Fails if a user other than root can change the file at `path`, or put another in its place.
/// Every directory and link on the way is examined, and the ways of the links. The file need not
/// exist.
///
/// # Errors
/// The path that others can write, and by what.
pub(crate) fn check_trusted(path: &Path) -> Result<(), StepError> {
    let path = std::path::absolute(path).step_at(STEP, path)?;
    let (mut at, mut links) = (PathBuf::from("/"), 0);
    let mut rest = parts(&path);
    let mut about = fs::symlink_metadata(&at).step_at(STEP, &at)?;
    loop {
        let Some(part) = rest.pop_front() else { return check(&at, &about, false) };
        let next = match part.to_str() {
            Some("/") => PathBuf::from("/"),
            Some("..") => at.parent().unwrap_or(Path::new("/")).to_owned(),
            _ => at.join(&part),
        };
        let found = match fs::symlink_metadata(&next) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return check(&at, &about, false),
            found => found.step_at(STEP, &next)?,
        };
        // A file is replaced by another, which is written beside it: where others make files, one
        // of theirs can be in its way.
        check(&at, &about, found.is_dir() || !rest.is_empty())?;
        if !found.is_symlink() {
            (at, about) = (next, found);
            continue;
        }
        links += 1;
        if links > LINKS_MAX {
            return Err(StepError::at(STEP, next, io::Error::from_raw_os_error(libc::ELOOP)));
        }
        // A link has no permissions.
        if found.uid() != 0 {
            return Err(distrusted(&next, &found));
        }
        let target = fs::read_link(&next).step_at(STEP, &next)?;
        for part in parts(&target).into_iter().rev() {
            rest.push_front(part);
        }
    }
}

fn parts(path: &Path) -> VecDeque<OsString> {
    let parts = path.components().filter(|part| *part != Component::CurDir);
    parts.map(|part| part.as_os_str().to_owned()).collect()
}

/// `has_entry`: it is the directory of an entry on the way that is there, whose owner is examined
/// next.
fn check(place: &Path, about: &fs::Metadata, has_entry: bool) -> Result<(), StepError> {
    let mode = about.mode();
    let kept = has_entry && about.is_dir() && mode & STICKY != 0;
    if about.uid() != 0 || mode & WRITABLE != 0 && !kept {
        return Err(distrusted(place, about));
    }
    Ok(())
}

fn distrusted(place: &Path, about: &fs::Metadata) -> StepError {
    let reason = format!(
        "users other than root can write it (owner {}, group {}, mode {:o}); examine it, then: \
         chown -h root:root {place} && chmod go-w {place}",
        about.uid(),
        about.gid(),
        about.mode() & 0o7777,
        place = place.display(),
    );
    StepError::at(STEP, place, io::Error::new(io::ErrorKind::PermissionDenied, reason))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, chown, lchown, symlink};

    use super::*;

    /// Promise: only_files_of_root_count.
    #[test]
    fn what_others_can_write_is_not_trusted() {
        if kit::skip_without_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (directory, file) = (dir.path().join("d"), dir.path().join("d/f"));
        fs::create_dir(&directory).unwrap();
        fs::write(&file, "").unwrap();
        check_trusted(&file).unwrap();
        check_trusted(&directory.join("missing/x")).unwrap();
        let set = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        for (path, wrong, right) in
            [(&file, 0o646, 0o644), (&file, 0o664, 0o644), (&directory, 0o1777, 0o755)]
        {
            set(path, wrong);
            let error = check_trusted(&file).unwrap_err();
            assert_eq!((error.path(), error.io().kind()), (Some(path.as_path()), PERMISSION));
            set(path, right);
            check_trusted(&file).unwrap();
        }
        chown(&file, Some(65534), None).unwrap();
        assert!(check_trusted(&file).unwrap_err().to_string().contains("owner 65534"));
    }

    /// A user who can replace a link, or a directory of its path, decides where the file is.
    ///
    /// Promise: only_files_of_root_count.
    #[test]
    fn symlink_path_components_are_checked() {
        if kit::skip_without_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::create_dir_all(at("user/conf.d")).unwrap();
        fs::create_dir_all(at("etc")).unwrap();
        fs::create_dir_all(at("right")).unwrap();
        symlink("../user/conf.d", at("etc/target")).unwrap();
        symlink(at("right"), at("user/link")).unwrap();
        symlink("../user/link", at("etc/way")).unwrap();
        symlink("../right/../right", at("etc/root")).unwrap();
        symlink("loop", at("etc/loop")).unwrap();
        for name in ["etc/target", "etc/way", "etc/root"] {
            check_trusted(&at(name).join("x.toml")).unwrap();
        }
        chown(at("user"), Some(65534), None).unwrap();
        for name in ["etc/target", "etc/way"] {
            let error = check_trusted(&at(name).join("x.toml")).unwrap_err();
            assert_eq!(error.path(), Some(at("user").as_path()), "{name}");
        }
        check_trusted(&at("etc/root/x.toml")).unwrap();
        assert!(check_trusted(&at("etc/loop/x.toml")).is_err());
        // The owner of a link can replace it where others make files.
        fs::set_permissions(at("etc"), fs::Permissions::from_mode(0o1777)).unwrap();
        lchown(at("etc/root"), Some(65534), None).unwrap();
        assert!(check_trusted(&at("etc/root/x.toml")).is_err());
        // Beside a link, too, another can make what root writes there.
        symlink("../right/x.toml", at("etc/file")).unwrap();
        assert!(check_trusted(&at("etc/file")).is_err());
        // There another can be first to make what is missing.
        assert!(check_trusted(&at("etc/missing/x.toml")).is_err());
    }

    const PERMISSION: io::ErrorKind = io::ErrorKind::PermissionDenied;
}
