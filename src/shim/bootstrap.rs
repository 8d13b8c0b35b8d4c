//! Input and output of a shim's `start`: the output has address and protocol of the server that it
//! started.

use std::io;
use std::path::{Path, PathBuf};

use containerd_shim_protos::bootstrap_api::{BootstrapParams, BootstrapResult, Extension};
use protobuf::well_known_types::any::Any;
use protobuf::{Message as _, MessageField};
use serde::{Deserialize, Serialize};

use super::{Runtime, ShimSettings};
use crate::containerd::SandboxStore;
use crate::error::{IoContext as _, StepError, bounded};

/// The first containerd that gives shims its parameters as a message of their own; before, the
/// runtime's options alone.
const BOOTSTRAP_SINCE: (u32, u32) = (2, 3);

/// The newest supported version of the Task API.
const NEWEST: u32 = 3;

/// The oldest, which is that of a shim that says nothing of it.
const OLDEST: u32 = 2;

/// Where a shim's server listens. Also the form in which it is recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bootstrap {
    /// Version of the Task API.
    pub version: u32,
    /// `unix://PATH`, or `unix:PATH`.
    pub address: String,
    /// `ttrpc`; no other is supported.
    pub protocol: String,
}

impl Bootstrap {
    /// Reads what `start` wrote to its standard output, in any of the forms that containerd takes
    /// (`parseStartResponse`): the protobuf message of containerd 2.3, the JSON of 2.0, or an
    /// address alone, which means version 2.
    ///
    /// # Errors
    /// It is none of them, or its version, protocol or address is not supported.
    pub fn parse(said: &[u8]) -> io::Result<Self> {
        let read = Self::message(said).or_else(|| Self::json(said)).or_else(|| Self::address(said));
        let refuse = |reason: String| Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        let shown = |text: &str| bounded(text, 100);
        let Some(read) = read else {
            return refuse(format!("invalid address: {:?}", shown(&String::from_utf8_lossy(said))));
        };
        if !(OLDEST..=NEWEST).contains(&read.version) {
            return refuse(format!("unsupported Task API version {}", read.version));
        }
        if !read.protocol.eq_ignore_ascii_case("ttrpc") {
            return refuse(format!("unsupported protocol {:?}", shown(&read.protocol)));
        }
        if !read.socket().is_absolute() {
            return refuse(format!(
                "{:?} is not an address of a unix socket",
                shown(&read.address)
            ));
        }
        Ok(read)
    }

    fn message(said: &[u8]) -> Option<Self> {
        let result = BootstrapResult::parse_from_bytes(said).ok()?;
        let version = u32::try_from(result.version).ok()?;
        // Most texts are no message, and what is read from one by chance has no address.
        (!result.address.is_empty()).then_some(Self {
            version,
            address: result.address,
            protocol: result.protocol,
        })
    }

    fn json(said: &[u8]) -> Option<Self> {
        let read: Self = serde_json::from_slice(said.trim_ascii()).ok()?;
        (read.version >= OLDEST).then_some(read)
    }

    fn address(said: &[u8]) -> Option<Self> {
        let address = std::str::from_utf8(said).ok()?.trim();
        let one = !address.is_empty()
            && !address.contains(char::is_whitespace)
            && !address.contains(char::is_control);
        one.then(|| Self {
            version: OLDEST,
            address: address.to_owned(),
            protocol: "ttrpc".to_owned(),
        })
    }

    /// The path of the socket.
    pub fn socket(&self) -> PathBuf {
        let path = self.address.strip_prefix("unix:").unwrap_or(&self.address);
        // Of `//` and a path as of a path alone.
        Path::new(path.strip_prefix("//").unwrap_or(path)).to_owned()
    }

    /// The address as Start answers it, `PROTOCOL+URL`.
    pub fn endpoint(&self) -> String {
        format!("ttrpc+unix://{}", self.socket().display())
    }
}

/// What `start` is given on standard input for group `id`: what the node's containerd gives to
/// shims of its own.
///
/// # Errors
/// containerd does not say of which release it is.
pub async fn input(
    settings: &ShimSettings,
    id: &str,
    runtime: &Runtime,
) -> Result<Vec<u8>, StepError> {
    let options = runtime.options.as_ref().map(|(type_url, value)| Any {
        type_url: type_url.clone(),
        value: value.clone(),
        ..Default::default()
    });
    let containerd = SandboxStore {
        address: settings.containerd_address.clone(),
        namespace: settings.containerd_namespace.clone(),
    };
    let version = containerd.version().await?;
    let encoded = if since(&version) < BOOTSTRAP_SINCE {
        options.map_or(Ok(Vec::new()), |options| options.write_to_bytes())
    } else {
        let extension =
            |options| Extension { value: MessageField::some(options), ..Default::default() };
        let parameters = BootstrapParams {
            instance_id: id.to_owned(),
            namespace: settings.containerd_namespace.clone(),
            containerd_version: version,
            containerd_ttrpc_address: settings.containerd_ttrpc(),
            containerd_grpc_address: settings.containerd_address.display().to_string(),
            containerd_binary: "containerd".to_owned(),
            extensions: options.map(extension).into_iter().collect(),
            ..Default::default()
        };
        parameters.write_to_bytes()
    };
    encoded.map_err(io::Error::other).step("encode what the shim is given")
}

/// The release of a version such as `v2.3.4`; an unknown one is new.
fn since(version: &str) -> (u32, u32) {
    let mut numbers =
        version.trim_start_matches('v').split(['.', '-', '+', '~']).map(|part| part.parse().ok());
    numbers.next().flatten().zip(numbers.next().flatten()).unwrap_or((u32::MAX, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bootstrap(version: u32, address: &str) -> Bootstrap {
        Bootstrap { version, address: address.to_owned(), protocol: "ttrpc".to_owned() }
    }

    #[test]
    fn every_form_that_containerd_accepts() {
        let address = "unix:///run/containerd/s/0123";
        assert_eq!(
            Bootstrap::parse(format!("{address}\n").as_bytes()).unwrap(),
            bootstrap(2, address)
        );
        let json = format!(r#"{{"version":3,"address":"{address}","protocol":"ttrpc"}}"#);
        assert_eq!(Bootstrap::parse(json.as_bytes()).unwrap(), bootstrap(3, address));
        let message = BootstrapResult {
            version: 3,
            address: address.to_owned(),
            protocol: "ttrpc".to_owned(),
            ..Default::default()
        };
        let read = Bootstrap::parse(&message.write_to_bytes().unwrap()).unwrap();
        assert_eq!(read, bootstrap(3, address));
        assert_eq!(read.socket(), Path::new("/run/containerd/s/0123"));
        assert_eq!(read.endpoint(), "ttrpc+unix:///run/containerd/s/0123");
        assert_eq!(bootstrap(2, "/run/s/1").socket(), Path::new("/run/s/1"));
    }

    #[test]
    fn unusable_answers_are_errors_with_the_reason() {
        for (said, reason) in [
            (&b""[..], "invalid address"),
            (b"\n", "invalid address"),
            (b"panic: no such thing\ngoroutine 1", "invalid address"),
            (b"\xff\xfe\x00", "invalid address"),
            (b"relative/path", "is not an address of a unix socket"),
            (b"vsock://2:1024", "is not an address of a unix socket"),
            (
                br#"{"version":4,"address":"unix:///s","protocol":"ttrpc"}"#,
                "unsupported Task API version 4",
            ),
            (
                br#"{"version":3,"address":"unix:///s","protocol":"grpc"}"#,
                "unsupported protocol \"grpc\"",
            ),
            (
                br#"{"version":1,"address":"unix:///s","protocol":"ttrpc"}"#,
                "is not an address of a unix socket",
            ),
        ] {
            let error = Bootstrap::parse(said).unwrap_err().to_string();
            assert!(error.contains(reason), "{said:?}: {error}");
        }
    }

    #[test]
    fn releases() {
        assert_eq!(since("v2.3.4"), (2, 3));
        assert_eq!(since("2.1.9~ds1"), (2, 1));
        assert_eq!(since("v2.4.0-beta.0"), (2, 4));
        assert!(since("unknown") > BOOTSTRAP_SINCE);
    }
}
