//! The daemon's own directory and socket.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use nix::sys::statfs::{self, FsType};

use super::Finding;
use crate::client::NO_RESPONSE_ADVICE;
use base::config::{CONTAINERD_NAMESPACE, Config};
use containerd_api::SandboxStore;

/// Examines the state directory and the socket.
pub(super) async fn examine(config: &Config) -> Vec<Finding> {
    vec![state(&config.state_dir), socket(config).await]
}

fn state(path: &Path) -> Finding {
    const SUBJECT: &str = "state directory";
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

async fn socket(config: &Config) -> Finding {
    const SUBJECT: &str = "daemon";
    let shown = config.socket.display();
    // A daemon responds once it has recovered its pods.
    let daemon =
        SandboxStore { address: config.socket.clone(), namespace: CONTAINERD_NAMESPACE.to_owned() };
    let start = "start it: systemctl start pause-sandboxer, or pause-sandboxer serve";
    let Err(step) = daemon.responds().await else {
        return Finding::ok(SUBJECT, format!("answers on {shown}"));
    };
    match step.io().kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            Finding::fail(SUBJECT, format!("is not running: {shown}: {}", step.io()), start)
        }
        io::ErrorKind::TimedOut => {
            Finding::fail(SUBJECT, format!("no response on {shown} in time"), NO_RESPONSE_ADVICE)
        }
        io::ErrorKind::Other => Finding::fail(
            SUBJECT,
            format!("the listener on {shown} is not a gRPC server: {}", step.io()),
            "set socket to a path that only the daemon uses",
        ),
        _ => Finding::fail(SUBJECT, step.to_string(), "see journalctl -u pause-sandboxer"),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixListener;

    use super::super::Level;
    use super::*;

    #[test]
    fn an_unusable_state_directory_is_reported() {
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
    fn ext4_survives_a_reboot_and_tmpfs_does_not() {
        assert!(!lasting(statfs::TMPFS_MAGIC));
        assert!(lasting(statfs::EXT4_SUPER_MAGIC));
    }

    /// The finding for a server that reads and then sends `response`.
    async fn of_server(response: &'static [u8]) -> Finding {
        let dir = tempfile::tempdir().unwrap();
        let config = Config { socket: dir.path().join("s"), ..Config::default() };
        let listener = UnixListener::bind(&config.socket).unwrap();
        let server = std::thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            stream.read_exact(&mut [0; 24]).unwrap();
            // The client may have closed the connection already.
            let _ = stream.write_all(response);
        });
        let finding = socket(&config).await;
        server.join().unwrap();
        finding
    }

    #[tokio::test]
    async fn an_unusable_socket_is_reported() {
        for response in [&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], b""] {
            let finding = of_server(response).await;
            assert_eq!(finding.level, Level::Fail);
            assert!(finding.fact.contains("is not a gRPC server"), "{finding}");
        }
        let dir = tempfile::tempdir().unwrap();
        let config = Config { socket: dir.path().join("s"), ..Config::default() };
        assert!(socket(&config).await.fact.contains("is not running: /"));
        drop(UnixListener::bind(&config.socket).unwrap());
        assert!(socket(&config).await.fact.contains("is not running: /"));
    }
}
