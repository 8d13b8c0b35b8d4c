//! What containerd writes to `start`, and what it reads from it.

use containerd_shim_protos::bootstrap_api::{BootstrapParams, BootstrapResult};
use containerd_shim_protos::shim::oci::Options;
use protobuf::Message as _;
use protobuf::well_known_types::any::Any;
use serde_json::json;

use crate::error::{Context as _, Error};
use crate::runtime::options;

/// containerd's directory of sockets if the input does not name one, as with containerd before 2.3.
const SOCKET_DIR: &str = "/run/containerd/s";

/// The version of the shim's protocol. Version 3 differs by the name of the Task service, which the
/// server has too, and by this: with it, containerd runs `start` for the first container of a pod
/// only, and when the shim has died it runs `delete` for that container only. The others would keep
/// running without a shim.
const VERSION: i32 = 2;

const PROTOCOL: &str = "ttrpc";

/// The decoded input.
#[derive(Debug, PartialEq)]
pub struct Bootstrap {
    /// The caller expects a `BootstrapResult`: containerd 2.3 or later.
    has_params: bool,
    /// The options of runc.
    pub options: Options,
    /// The directory for the socket.
    pub socket_dir: String,
    /// The address of containerd's ttrpc socket; empty: the environment has it.
    pub events: String,
}

impl Bootstrap {
    /// Decodes the input: `BootstrapParams`, an `Any` with the options, or nothing. An `Any` may
    /// decode as `BootstrapParams`, so id and namespace must be those of the command line.
    ///
    /// # Errors
    /// The input is malformed.
    pub fn decode(input: &[u8], id: &str, namespace: &str) -> Result<Self, Error> {
        let params = BootstrapParams::parse_from_bytes(input)
            .ok()
            .filter(|params| params.instance_id == id && params.namespace == namespace);
        let Some(params) = params else {
            let any = Any::parse_from_bytes(input).context("standard input")?;
            return Ok(Self {
                has_params: false,
                options: runc_options(&[any])?,
                socket_dir: SOCKET_DIR.to_owned(),
                events: String::new(),
            });
        };
        let extensions: Vec<Any> =
            params.extensions.into_iter().filter_map(|it| it.value.into_option()).collect();
        let socket_dir = params.socket_dir.filter(|directory| !directory.is_empty());
        let socket_dir = socket_dir.unwrap_or_else(|| SOCKET_DIR.to_owned());
        if !socket_dir.starts_with('/') {
            return Err(Error::unknown(format!("socket directory {socket_dir:?} is relative")));
        }
        Ok(Self {
            has_params: true,
            options: runc_options(&extensions)?,
            socket_dir,
            events: params.containerd_ttrpc_address,
        })
    }

    /// The output for the address of the server.
    ///
    /// # Errors
    /// It cannot be encoded.
    pub fn answer(&self, address: String) -> Result<Vec<u8>, Error> {
        if !self.has_params {
            let parts = json!({ "version": VERSION, "address": address, "protocol": PROTOCOL });
            return Ok(parts.to_string().into_bytes());
        }
        let mut result = BootstrapResult::new();
        (result.version, result.address) = (VERSION, address);
        result.protocol = PROTOCOL.to_owned();
        Ok(result.write_to_bytes()?)
    }
}

/// The options of runc among these; a Create refuses others.
fn runc_options(all: &[Any]) -> Result<Options, Error> {
    options::parse(all.iter().find(|any| options::are_of_runc(any)))
}

#[cfg(test)]
mod tests {
    use containerd_shim_protos::bootstrap_api::Extension;
    use proptest::prelude::*;

    use super::*;

    fn options() -> (Options, Any) {
        let mut options = Options::new();
        options.shim_cgroup = "/shims".to_owned();
        let mut any = Any::new();
        any.type_url = "types.containerd.io/containerd.runc.v1.Options".to_owned();
        any.value = options.write_to_bytes().unwrap();
        (options, any)
    }

    fn params(id: &str) -> BootstrapParams {
        let (_, any) = options();
        let mut other = Any::new();
        other.type_url = "containerd.io/cri.v1.PodSandboxConfig".to_owned();
        let mut params = BootstrapParams::new();
        (params.instance_id, params.namespace) = (id.to_owned(), "k8s.io".to_owned());
        params.containerd_ttrpc_address = "/c.ttrpc".to_owned();
        params.extensions = [other, any]
            .map(|any| {
                let mut extension = Extension::new();
                extension.value = Some(any).into();
                extension
            })
            .into();
        params
    }

    #[test]
    fn each_form_of_the_input_is_decoded_and_answered_in_kind() {
        let (options, any) = options();
        let decode = |input: &[u8]| Bootstrap::decode(input, "a", "k8s.io").unwrap();
        let mut named = params("a");
        named.socket_dir = Some("/run/s".to_owned());
        let new = decode(&named.write_to_bytes().unwrap());
        assert_eq!((&new.options, new.socket_dir.as_str()), (&options, "/run/s"));
        assert_eq!(new.events, "/c.ttrpc");
        let answer = new.answer("unix:///x".to_owned()).unwrap();
        let answer = BootstrapResult::parse_from_bytes(&answer).unwrap();
        assert_eq!((answer.version, answer.address.as_str()), (2, "unix:///x"));
        assert_eq!(answer.protocol, "ttrpc");
        assert_eq!(decode(&params("a").write_to_bytes().unwrap()).socket_dir, SOCKET_DIR);

        let old = decode(&any.write_to_bytes().unwrap());
        assert_eq!((&old.options, old.socket_dir.as_str()), (&options, SOCKET_DIR));
        let answer: serde_json::Value =
            serde_json::from_slice(&old.answer("unix:///x".to_owned()).unwrap()).unwrap();
        let expected = json!({ "version": 2, "address": "unix:///x", "protocol": "ttrpc" });
        assert_eq!(answer, expected);
        assert_eq!(decode(b"").options, Options::new());
    }

    #[test]
    fn an_any_that_decodes_as_params_stays_an_any() {
        // Field 1 of both is a string, and field 2 of the one may be the UTF-8 of the other.
        let mut any = Any::new();
        (any.type_url, any.value) = ("a".to_owned(), b"k8s.io".to_vec());
        let input = any.write_to_bytes().unwrap();
        assert!(BootstrapParams::parse_from_bytes(&input).is_ok());
        assert!(!Bootstrap::decode(&input, "b", "k8s.io").unwrap().has_params);
        assert!(!Bootstrap::decode(&input, "a", "moby").unwrap().has_params);
    }

    #[test]
    fn malformed_input_is_refused() {
        let mut relative = params("a");
        relative.socket_dir = Some("run/s".to_owned());
        for input in [relative.write_to_bytes().unwrap(), b"{}".to_vec()] {
            assert!(Bootstrap::decode(&input, "a", "k8s.io").is_err());
        }
    }

    proptest! {
        /// Promise: input_never_panics.
        #[test]
        fn any_input_is_decoded_or_refused(
            input in prop::collection::vec(any::<u8>(), 0..200),
            cut in 0usize..200,
        ) {
            let _ = Bootstrap::decode(&input, "a", "k8s.io");
            let mut message = params("a").write_to_bytes().unwrap();
            let at = cut.min(message.len());
            message.truncate(at);
            message.extend(input);
            let _ = Bootstrap::decode(&message, "a", "k8s.io");
        }
    }
}
