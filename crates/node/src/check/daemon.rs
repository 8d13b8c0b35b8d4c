//! The daemon: whether it answers, and its sandboxes.

use std::io;

use super::{Finding, Level};
use crate::client::{self, ClientError, Sandbox, TIMEOUT};
use crate::daemon_process::silence;
use base::config::{CONTAINERD_NAMESPACE, Config};
use containerd_api::GrpcEndpoint;

const SUBJECT: &str = "daemon";

/// What shims, pause processes and the daemon take at most, beside containerd (measured:
/// docs/performance.md#the-budget-of-a-node).
const MEMORY: &str = "kube-reserved needs 10Mi for it and 0.11Mi for each pod";

/// Asks the daemon. Also returns its sandboxes, if it answers.
pub(super) async fn examine(config: &Config) -> (Finding, Option<Vec<Sandbox>>) {
    let answers = socket(config).await;
    if answers.level != Level::Ok {
        return (answers, None);
    }
    match client::list(config).await {
        Ok(all) => (Finding::ok(SUBJECT, format!("{}; {MEMORY}", answers.fact)), Some(all)),
        Err(e) => {
            let level =
                if matches!(e, ClientError::Down { .. }) { Level::Fail } else { Level::Warn };
            let fact = format!("does not list its sandboxes: {e}");
            let advice = "systemctl restart pause-sandboxer; pods keep running".to_owned();
            (Finding { level, subject: SUBJECT, fact, advice }, None)
        }
    }
}

async fn socket(config: &Config) -> Finding {
    let shown = config.socket.display();
    // A daemon responds once it has recovered its pods.
    let daemon = GrpcEndpoint::new(&config.socket, CONTAINERD_NAMESPACE);
    let start = "start it: systemctl start pause-sandboxer, or pause-sandboxer serve";
    let answer = tokio::time::timeout(TIMEOUT, daemon.responds()).await;
    let kind = match &answer {
        Ok(Ok(())) => return Finding::ok(SUBJECT, format!("answers on {shown}")),
        Ok(Err(step)) => step.io().kind(),
        Err(_) => io::ErrorKind::TimedOut,
    };
    let reason = answer.ok().and_then(Result::err).map(|step| step.io().to_string());
    let reason = reason.unwrap_or_default();
    match kind {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            Finding::fail(SUBJECT, format!("is not running: {shown}: {reason}"), start)
        }
        // The queue of a socket is full whose listener accepts no connection.
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
            let (reason, advice) = silence(&config.state_dir);
            let limit = TIMEOUT.as_secs();
            Finding::fail(
                SUBJECT,
                format!("no response on {shown} within {limit} s: {reason}"),
                advice,
            )
        }
        io::ErrorKind::Other => Finding::fail(
            SUBJECT,
            format!("the listener on {shown} is not a gRPC server: {reason}"),
            "set socket to a path that only the daemon uses",
        ),
        _ => Finding::fail(
            SUBJECT,
            format!("{shown}: {reason}"),
            "see journalctl -u pause-sandboxer",
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::fd::AsRawFd as _;
    use std::os::unix::net::UnixListener;

    use nix::sys::socket::{Shutdown, shutdown};

    use super::*;

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
        let listener = UnixListener::bind(&config.socket).unwrap();
        // Closing it is not enough: the child of another test may have it until it executes.
        shutdown(listener.as_raw_fd(), Shutdown::Both).unwrap();
        assert!(socket(&config).await.fact.contains("is not running: /"));
    }

    #[tokio::test]
    async fn a_daemon_that_does_not_answer_is_asked_for_two_seconds() {
        let dir = tempfile::tempdir().unwrap();
        let config = Config {
            socket: dir.path().join("s"),
            state_dir: dir.path().to_owned(),
            ..Config::default()
        };
        let _listener = UnixListener::bind(&config.socket).unwrap();
        let begun = std::time::Instant::now();
        let (finding, sandboxes) = examine(&config).await;
        assert!(begun.elapsed() < 4 * TIMEOUT, "{:?}", begun.elapsed());
        assert!(finding.level == Level::Fail && sandboxes.is_none(), "{finding}");
        assert!(finding.fact.ends_with("within 2 s: no daemon runs, and systemd holds its socket"));
    }
}
