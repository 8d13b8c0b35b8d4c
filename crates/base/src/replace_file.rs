//! Replaces a file as a whole: at its place there is never less than all of it.

use std::ffi::OsString;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use crate::error::{IoContext as _, StepError};

/// The extension that a file has beside its place.
const NEW: &str = "new";

/// Where [`replace_file`] writes before it moves.
pub fn temporary(path: &Path) -> PathBuf {
    path.with_added_extension(NEW)
}

/// Where [`replace_lasting_file`] writes before it moves: its directory has files of others, of
/// which none has such a name.
pub fn lasting_temporary(path: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".pause-sandboxer");
    path.with_file_name(name)
}

/// Writes a file with these permissions beside its place and moves it there. What fails leaves
/// nothing beside it.
///
/// # Errors
/// The failed step; the old file is still there then.
pub fn replace_file(path: &Path, permissions: u32, content: &[u8]) -> Result<(), StepError> {
    replace(path, &temporary(path), permissions, content, |_| Ok(()))
}

/// As [`replace_file`], for a file that must survive a loss of power, and whose permissions the
/// umask does not change. It is written at [`lasting_temporary`].
///
/// # Errors
/// As [`replace_file`]; if the last step fails, that of the directory, the new file is in its
/// place.
pub fn replace_lasting_file(
    path: &Path,
    permissions: u32,
    content: &[u8],
) -> Result<(), StepError> {
    replace(path, &lasting_temporary(path), permissions, content, |file| {
        file.set_permissions(fs::Permissions::from_mode(permissions))?;
        file.sync_all()
    })?;
    sync_directory_of(path)
}

/// Writes the entries of a file's directory to the disk.
///
/// # Errors
/// The failed step.
pub fn sync_directory_of(path: &Path) -> Result<(), StepError> {
    let named = path.parent().filter(|directory| !directory.as_os_str().is_empty());
    let directory = named.unwrap_or(Path::new("."));
    let synced = fs::File::open(directory).and_then(|directory| directory.sync_all());
    synced.step_at("write directory", directory)
}

fn replace(
    path: &Path,
    temporary: &Path,
    permissions: u32,
    content: &[u8],
    complete: impl FnOnce(&mut fs::File) -> io::Result<()>,
) -> Result<(), StepError> {
    let mut options = fs::File::options();
    options.write(true).create(true).truncate(true).mode(permissions);
    let written = options.custom_flags(libc::O_NOFOLLOW).open(temporary).and_then(|mut file| {
        file.write_all(content)?;
        complete(&mut file)
    });
    let replaced = match written.step_at("write file", temporary) {
        Ok(()) => fs::rename(temporary, path).step_at("replace file", path),
        failed => failed,
    };
    replaced.inspect_err(|_| {
        let _ = fs::remove_file(temporary);
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_file_is_replaced_or_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.json");
        replace_file(&path, 0o600, b"1").unwrap();
        replace_file(&path, 0o600, b"2").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"2");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        fs::write(temporary(&path), "of another").unwrap();
        replace_lasting_file(&path, 0o666, b"2").unwrap();
        assert_eq!(fs::read(temporary(&path)).unwrap(), b"of another");
        fs::remove_file(temporary(&path)).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o666);
        // Nothing is written through a link.
        symlink(dir.path().join("other"), temporary(&path)).unwrap();
        let e = replace_file(&path, 0o600, b"3").unwrap_err().to_string();
        assert!(e.starts_with("write file") && e.contains("a.json.new"), "{e}");
        assert_eq!(fs::read(&path).unwrap(), b"2");
        // A directory cannot be replaced by a file.
        let directory = dir.path().join("d");
        fs::create_dir(&directory).unwrap();
        assert!(replace_file(&directory, 0o600, b"4").is_err());
        let mut names: Vec<_> =
            fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["a.json", "d"]);
    }
}
