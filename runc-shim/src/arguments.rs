//! The command line.

use crate::error::Error;

/// The text of `--help`.
const USAGE: &str = "\
The containerd shim of pause-sandboxer for runc and crun. It serves the containers of one pod.
pause-sandboxer or containerd starts it; do not run it by hand.

usage: pause-sandboxer-runc-shim -namespace NAMESPACE -id ID [-address SOCKET] [-bundle DIRECTORY]
                                 [start|delete]

Without a command it serves containerd.task.v3.Task on the socket that is passed as descriptor 3.
  start          start a server for container ID and its pod, and print its address
  delete         remove container ID, whose bundle is DIRECTORY, after its shim has exited
  -info          print a containerd.types.RuntimeInfo
  -v, --version  print the version
  -h, --help     print this text";

/// The text that a first argument asks for, if it is an option that prints one.
pub fn information(first: &str) -> Option<&'static str> {
    match first {
        "-h" | "-help" | "--help" => Some(USAGE),
        "-v" | "--version" => Some(concat!(env!("CARGO_PKG_NAME"), " ", env!("CARGO_PKG_VERSION"))),
        _ => None,
    }
}

/// The arguments of containerd's shims that are used.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Arguments {
    /// containerd's namespace.
    pub namespace: String,
    /// The id of the sandbox, or of the container that is deleted or that a helper works on.
    pub id: String,
    /// The bundle of the container.
    pub bundle: String,
    /// containerd's gRPC socket.
    pub address: String,
    /// The file of the server's socket, if `start` has made it; the daemon keeps its own.
    pub socket: String,
    /// The command: `start`, `delete` or the word of a helper's action; empty: serve.
    pub action: String,
}

impl Arguments {
    /// Parses the arguments without the program's name.
    ///
    /// # Errors
    /// The namespace is missing or malformed.
    pub fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, Error> {
        let mut parsed = Self::default();
        while let Some(argument) = arguments.next() {
            let Some(flag) = argument.strip_prefix('-') else {
                parsed.action = argument;
                continue;
            };
            let flag = flag.trim_start_matches('-');
            let (name, value) = match flag.split_once('=') {
                Some((name, value)) => (name, value.to_owned()),
                None if flag == "debug" => continue,
                None => (flag, arguments.next().unwrap_or_default()),
            };
            match name {
                "namespace" => parsed.namespace = value,
                "id" => parsed.id = value,
                "bundle" => parsed.bundle = value,
                "address" => parsed.address = value,
                "socket" => parsed.socket = value,
                _ => {}
            }
        }
        if parsed.namespace.is_empty() || parsed.namespace.contains('/') {
            return Err(Error::unknown(
                "-namespace is missing or malformed (--help prints the usage)",
            ));
        }
        Ok(parsed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_of_a_shim_are_parsed() {
        let parse = |line: &str| Arguments::parse(line.split_whitespace().map(str::to_owned)).ok();
        let serve = Arguments {
            namespace: "k8s.io".to_owned(),
            id: "a".to_owned(),
            address: "/run/c.sock".to_owned(),
            ..Default::default()
        };
        assert_eq!(parse("-namespace k8s.io -id a -address /run/c.sock"), Some(serve));
        let delete = Arguments {
            namespace: "k8s.io".to_owned(),
            id: "-namespace".to_owned(),
            bundle: "/b".to_owned(),
            address: String::new(),
            socket: String::new(),
            action: "delete".to_owned(),
        };
        let line = "-debug -id -namespace --namespace=k8s.io -publish-binary c -bundle /b delete";
        assert_eq!(parse(line), Some(delete));
        assert_eq!(parse("-id a"), None);
        assert_eq!(parse("-namespace ../a"), None);
    }
}
