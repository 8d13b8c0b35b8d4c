//! The daemon's metrics over HTTP, on a unix socket or a loopback port.
//!
//! A client delays no one else: the number of connections is limited, and each has one request and
//! a timeout. A failure to serve is logged; pods do not depend on it.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Semaphore;

use crate::config::Metrics;
use crate::controller::Controller;
use crate::error::{IoContext as _, StepError};
use crate::pool::{self, Class};
use crate::telemetry::CONTENT_TYPE;
use crate::wire;

/// Maximum number of concurrent connections; more wait in the socket's backlog.
const AT_ONCE: usize = 16;
/// Timeout of a connection.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum size of a request's head, bytes.
const LONGEST_HEAD: usize = 8 << 10;
/// Delay between two attempts to bind or accept.
const RETRY: Duration = Duration::from_secs(1);
/// A text is reused for this time, so that many clients cost as much as one.
const MAX_AGE: Duration = Duration::from_millis(200);

/// A listener of either kind.
enum MetricsListener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

/// A connection of either kind.
trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> Stream for T {}

impl MetricsListener {
    async fn bind(address: &Metrics) -> Result<Option<Self>, StepError> {
        Ok(match address {
            Metrics::Off => None,
            Metrics::Unix(path) => {
                let parent = path.parent().unwrap_or(Path::new("/"));
                fs::create_dir_all(parent).step_at("make directory", parent)?;
                let listener = wire::bind(path)?;
                Some(Self::Unix(UnixListener::from_std(listener).step_at("watch", path)?))
            }
            Metrics::Tcp(address) => Some(Self::Tcp(
                TcpListener::bind(address).await.step_at("bind", address.to_string())?,
            )),
        })
    }

    async fn accept(&self) -> io::Result<Box<dyn Stream>> {
        Ok(match self {
            Self::Unix(listener) => Box::new(listener.accept().await?.0),
            Self::Tcp(listener) => Box::new(listener.accept().await?.0),
        })
    }
}

/// Serves the metrics of `controller` at `address` forever; returns at once if they are off.
pub async fn serve(controller: Arc<Controller>, address: Metrics) {
    let mut logged = false;
    let listener = loop {
        match MetricsListener::bind(&address).await {
            Ok(Some(listener)) => break listener,
            Ok(None) => return,
            Err(e) if !logged => {
                logged = true;
                log::error!("failed to serve metrics; retrying: {e}");
            }
            Err(_) => {}
        }
        tokio::time::sleep(RETRY).await;
    };
    log::info!(address = address.to_string(); "serving metrics");
    let permits = Arc::new(Semaphore::new(AT_ONCE));
    let source = Arc::new(Source { controller, last: tokio::sync::Mutex::new(None) });
    loop {
        // Never closed.
        let Ok(permit) = Arc::clone(&permits).acquire_owned().await else { return };
        match listener.accept().await {
            Ok(stream) => {
                let source = Arc::clone(&source);
                tokio::spawn(async move {
                    let _permit = permit;
                    match tokio::time::timeout(TIMEOUT, serve_request(stream, &source)).await {
                        Ok(Ok(())) => {}
                        Ok(Err(e)) => log::debug!("metrics connection failed: {e}"),
                        Err(_) => log::debug!("metrics connection timed out"),
                    }
                });
            }
            Err(e) => {
                log::warn!("failed to accept metrics connection; retrying: {e}");
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}

/// The source of the text, with the last text.
struct Source {
    controller: Arc<Controller>,
    last: tokio::sync::Mutex<Option<(Instant, Arc<str>)>>,
}

impl Source {
    async fn text(&self) -> io::Result<Arc<str>> {
        let mut last = self.last.lock().await;
        if let Some((at, text)) = &*last
            && at.elapsed() < MAX_AGE
        {
            return Ok(Arc::clone(text));
        }
        let controller = Arc::clone(&self.controller);
        let text =
            pool::run(Class::Query, move || controller.telemetry().text(&controller.census()));
        let text: Arc<str> = text.await.map_err(io::Error::other)?.into();
        *last = Some((Instant::now(), Arc::clone(&text)));
        Ok(text)
    }
}

/// Answers the one request of a connection (RFC 9112).
async fn serve_request(mut stream: Box<dyn Stream>, source: &Source) -> io::Result<()> {
    let mut head = Vec::with_capacity(512);
    while !head.windows(4).any(|end| end == b"\r\n\r\n") {
        if head.len() > LONGEST_HEAD {
            return reply(
                &mut stream,
                "431 Request Header Fields Too Large",
                "text/plain",
                "",
                true,
            )
            .await;
        }
        if stream.read_buf(&mut head).await? == 0 {
            return Ok(());
        }
    }
    let (method, path) = request(&head);
    match (method, path) {
        ("GET" | "HEAD", "/metrics") => {
            reply(&mut stream, "200 OK", CONTENT_TYPE, &source.text().await?, method == "GET").await
        }
        ("GET" | "HEAD", _) => {
            reply(&mut stream, "404 Not Found", "text/plain", "ask for /metrics\n", method == "GET")
                .await
        }
        _ => reply(&mut stream, "405 Method Not Allowed", "text/plain", "ask by GET\n", true).await,
    }
}

/// Method and path of a request's first line; empty where it has none.
fn request(head: &[u8]) -> (&str, &str) {
    let line = head.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let mut words = std::str::from_utf8(line).unwrap_or_default().split(' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    (method, target.split('?').next().unwrap_or_default())
}

async fn reply(
    stream: &mut Box<dyn Stream>,
    status: &str,
    kind: &str,
    body: &str,
    whole: bool,
) -> io::Result<()> {
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\
         \r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await?;
    if whole {
        stream.write_all(body.as_bytes()).await?;
    }
    stream.shutdown().await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests() {
        assert_eq!(request(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"), ("GET", "/metrics"));
        assert_eq!(request(b"GET /metrics?x=1 HTTP/1.1\r\n\r\n"), ("GET", "/metrics"));
        assert_eq!(request(b"\r\n\r\n"), ("", ""));
        assert_eq!(request(b"\xff\xfe x\r\n\r\n"), ("", ""));
    }
}
