//! Port-forward by containerd's streaming server, over a websocket: one channel pair per port, data
//! and error, each opened by the server with the port number.

use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tungstenite::client::IntoClientRequest;
use tungstenite::{Message, WebSocket};

/// The sub-protocol: binary frames whose first byte is the channel.
const PROTOCOL: &str = "v4.channel.k8s.io";
/// Channel of the bytes of the first port.
const DATA: u8 = 0;
/// Channel of the errors of the first port.
const ERROR: u8 = 1;
/// How long the server may say nothing.
const READ_TIMEOUT: Duration = Duration::from_secs(20);

/// Opens the stream that a `PortForward` answered, sends `line` and answers the line that comes
/// back.
///
/// # Errors
/// The stream cannot be opened, or its error channel said so, or nothing came back.
#[allow(clippy::disallowed_methods, reason = "a test's own thread")]
pub async fn port_forward(url: &str, line: &str) -> Result<String> {
    let (url, line) = (url.to_owned(), line.to_owned());
    tokio::task::spawn_blocking(move || exchange(&url, &line)).await?
}

fn exchange(url: &str, line: &str) -> Result<String> {
    let mut socket = open(url).with_context(|| format!("open {url}"))?;
    let mut request = vec![DATA];
    request.extend_from_slice(line.as_bytes());
    request.push(b'\n');
    socket.send(Message::binary(request))?;
    let mut openings = 0;
    let mut answer = Vec::new();
    while !answer.contains(&b'\n') {
        let Message::Binary(frame) = socket.read().context("read the stream")? else { continue };
        match frame.split_first() {
            // The first frame of either channel is the port number.
            Some((&(DATA | ERROR), [_, _])) if openings < 2 => openings += 1,
            Some((&DATA, bytes)) => answer.extend_from_slice(bytes),
            Some((&ERROR, bytes)) if !bytes.is_empty() => {
                bail!("{}", String::from_utf8_lossy(bytes))
            }
            _ => {}
        }
    }
    // The answer is whole; how the stream ends is the server's affair.
    let _ = socket.close(None);
    Ok(String::from_utf8_lossy(&answer).trim_end().to_owned())
}

fn open(url: &str) -> Result<WebSocket<TcpStream>> {
    let address = url.strip_prefix("http://").context("not an http URL")?;
    let host = address.split('/').next().unwrap_or_default();
    let stream = TcpStream::connect(host).with_context(|| format!("connect {host}"))?;
    stream.set_read_timeout(Some(READ_TIMEOUT))?;
    let mut request = format!("ws://{address}").into_client_request()?;
    request.headers_mut().insert("Sec-WebSocket-Protocol", PROTOCOL.parse()?);
    let (socket, answer) = tungstenite::client(request, stream)?;
    let agreed = answer.headers().get("Sec-WebSocket-Protocol").map(|v| v.as_bytes());
    ensure!(agreed == Some(PROTOCOL.as_bytes()), "the server speaks {agreed:?}");
    Ok(socket)
}
