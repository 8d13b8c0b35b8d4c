//! Whether the daemon runs the installed program: after an upgrade it must be restarted.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use node::check::Finding;
use node::daemon_process::DaemonProcess;

use crate::config::Config;

/// Compares the program of the running daemon with this one.
pub(super) fn examine(config: &Config) -> Option<Finding> {
    let daemon = DaemonProcess::find(&config.state_dir)?;
    // Another finding says that the daemon has ended.
    if is_same(&daemon.executable(), Path::new("/proc/self/exe")).unwrap_or(true) {
        return None;
    }
    let fact = format!(
        "process {} runs another build of {} than this program, which is version {}",
        daemon.pid,
        daemon.program.display(),
        env!("CARGO_PKG_VERSION")
    );
    Some(Finding::warn("daemon", fact, "systemctl restart pause-sandboxer; pods keep running"))
}

fn is_same(one: &Path, other: &Path) -> io::Result<bool> {
    let (about, about_other) = (fs::metadata(one)?, fs::metadata(other)?);
    let file = |meta: &fs::Metadata| (meta.dev(), meta.ino());
    Ok(file(&about) == file(&about_other)
        || about.len() == about_other.len() && fs::read(one)? == fs::read(other)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_compared_by_their_content() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::write(&path, text).unwrap();
            path
        };
        let (one, copy, other) = (file("one", "a"), file("copy", "a"), file("other", "b"));
        assert!(is_same(&one, &one).unwrap() && is_same(&one, &copy).unwrap());
        assert!(!is_same(&one, &other).unwrap());
        assert!(is_same(&one, &dir.path().join("none")).is_err());
    }
}
