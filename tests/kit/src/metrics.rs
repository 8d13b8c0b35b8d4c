//! The metrics of a daemon, as Prometheus reads them from its unix socket.

use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

/// The sum of the series whose name and labels begin with `series`; `None`: there is none.
///
/// # Errors
/// The daemon does not answer, or a value is no number.
pub async fn find(socket: &Path, series: &str) -> Result<Option<f64>> {
    let mut stream = UnixStream::connect(socket).await?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n").await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    ensure!(text.starts_with("HTTP/1.1 200 "), "{text}");
    let lines = text.lines().filter(|line| line.starts_with(series));
    let values = lines.filter_map(|line| line.rsplit_once(' ')).map(|(_, value)| value.parse());
    let values = values.collect::<Result<Vec<f64>, _>>()?;
    Ok((!values.is_empty()).then(|| values.iter().sum()))
}

/// The same, where there must be one.
///
/// # Errors
/// As of [`find`], or there is none.
pub async fn value(socket: &Path, series: &str) -> Result<f64> {
    find(socket, series).await?.with_context(|| format!("no {series}"))
}
