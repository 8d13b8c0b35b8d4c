//! The daemon's own directory and socket.

use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use nix::sys::statfs::{self, FsType};

use super::Finding;
use crate::config::Config;

/// What may be asked of a living daemon at most.
const PATIENCE: Duration = Duration::from_secs(5);

/// The client's side of an HTTP/2 connection (RFC 9113, 3.4) and an empty SETTINGS frame (6.5).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// Looks at the state directory and the socket.
pub(super) fn look(config: &Config) -> Vec<Finding> {
    vec![state(&config.state_dir), socket(&config.socket)]
}

fn state(path: &Path) -> Finding {
    const SUBJECT: &str = "state directory";
    let shown = path.display();
    let meta = match path.metadata() {
        Ok(meta) => meta,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Finding::ok(SUBJECT, format!("{shown} will be made by the daemon"));
        }
        Err(e) => {
            return Finding::fail(
                SUBJECT,
                format!("{shown}: {e}"),
                "set state_dir to a directory that root can make",
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
            "{shown} belongs to user {} with mode {:o}, so others than root may write it",
            meta.uid(),
            meta.mode() & 0o7777
        );
        return Finding::fail(
            SUBJECT,
            fact,
            format!("chown root:root {shown} && chmod 0700 {shown}"),
        );
    }
    match statfs::statfs(path) {
        Ok(fs) if lasting(fs.filesystem_type()) => Finding::warn(
            SUBJECT,
            format!("{shown} is on a disk, its records outlive a reboot"),
            "set state_dir to a directory on a tmpfs such as /run",
        ),
        Ok(_) => Finding::ok(SUBJECT, shown.to_string()),
        Err(e) => Finding::warn(
            SUBJECT,
            format!("statfs {shown}: {e}"),
            "see that it is on a tmpfs such as /run",
        ),
    }
}

/// Whether the file system keeps its files over a reboot.
fn lasting(kind: FsType) -> bool {
    // RAMFS_MAGIC of linux/magic.h, which nix does not name.
    const RAMFS: FsType = FsType(0x8584_58f6);
    kind != statfs::TMPFS_MAGIC && kind != RAMFS
}

fn socket(path: &Path) -> Finding {
    const SUBJECT: &str = "daemon";
    let shown = path.display();
    let start = "start it: systemctl start pause-sandboxer, or pause-sandboxer serve";
    match settings_frame(path) {
        Ok(true) => Finding::ok(SUBJECT, format!("answers on {shown}")),
        Ok(false) => Finding::fail(
            SUBJECT,
            format!("what listens on {shown} does not speak gRPC"),
            "set socket to a path of the daemon's own",
        ),
        Err(e) => match e.kind() {
            io::ErrorKind::NotFound => {
                Finding::warn(SUBJECT, format!("does not run: no {shown}"), start)
            }
            io::ErrorKind::ConnectionRefused => {
                Finding::warn(SUBJECT, format!("does not run: nobody listens on {shown}"), start)
            }
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Finding::fail(
                SUBJECT,
                format!("no answer on {shown} within {} s", PATIENCE.as_secs()),
                "it may still recover its pods: see its log",
            ),
            _ => Finding::fail(SUBJECT, format!("{shown}: {e}"), "see the daemon's log"),
        },
    }
}

/// Whether the server on the socket at `path` begins an HTTP/2 connection as it must, with a
/// SETTINGS frame.
fn settings_frame(path: &Path) -> io::Result<bool> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(PREFACE)?;
    let mut header = [0; 9];
    match stream.read_exact(&mut header) {
        Ok(()) => Ok(header[3] == 4),
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    use super::super::Level;
    use super::*;

    #[test]
    fn state_directories() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(state(&dir.path().join("none")).level, Level::Ok);
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert_eq!(state(&file).level, Level::Fail);
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
        let finding = state(dir.path());
        assert_eq!(finding.level, Level::Fail);
        assert!(finding.fact.contains("mode 777"), "{finding}");
    }

    #[test]
    fn file_systems() {
        assert!(!lasting(statfs::TMPFS_MAGIC));
        assert!(lasting(statfs::EXT4_SUPER_MAGIC));
    }

    /// What `check` says of a server that reads the preface and then sends `answer`.
    fn of_server(answer: &'static [u8]) -> Finding {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            stream.read_exact(&mut [0; PREFACE.len()]).unwrap();
            stream.write_all(answer).unwrap();
        });
        let finding = socket(&path);
        server.join().unwrap();
        finding
    }

    #[test]
    fn sockets() {
        assert_eq!(of_server(b"\0\0\0\x04\0\0\0\0\0").level, Level::Ok);
        assert_eq!(of_server(b"HTTP/1.1 400 Bad Request\r\n").level, Level::Fail);
        assert_eq!(of_server(b"").level, Level::Fail);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        assert!(socket(&path).fact.contains("does not run: no "));
        drop(UnixListener::bind(&path).unwrap());
        assert!(socket(&path).fact.contains("nobody listens"));
    }
}
