//! A containerd shim for OCI runtimes: serves `containerd.task.v3.Task` for the containers of one
//! pod on a socket that it is handed as descriptor 3, and runs runc or crun. One thread serves;
//! each container with streams has a thread that copies them.

mod cgroup;
mod cleanup;
mod commands;
mod container;
mod create;
mod deadlines;
mod delete;
mod descendants;
mod discard;
mod error;
mod events;
mod exec;
mod exits;
mod frame;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod helper;
mod idmap;
mod io;
mod log;
mod memory;
mod mounts;
mod options;
mod processes;
mod reactor;
mod runtime;
mod sandbox;
mod server;
mod shim;
mod signals;
mod start;
mod sys;
mod task;

use std::env;
use std::io::Write as _;
use std::process::ExitCode;

use rustix::process::DumpableBehavior;

use crate::error::{Context as _, Error};
use crate::signals::Signals;

/// The name of the process; the program may be run by a descriptor.
const NAME: &std::ffi::CStr = c"runc-shim";

/// The descriptor of the listening socket, which the daemon passes.
const SOCKET: i32 = 3;

/// The main function of the program.
pub fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(e) => {
            log::error(format_args!("{e}"));
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<ExitCode, Error> {
    let mut given = env::args().skip(1).peekable();
    if given.peek().is_some_and(|first| ["-v", "--version"].contains(&first.as_str())) {
        let version = concat!(env!("CARGO_PKG_NAME"), " ", env!("CARGO_PKG_VERSION"));
        writeln!(std::io::stdout(), "{version}").context("write version")?;
        return Ok(ExitCode::SUCCESS);
    }
    let arguments = Arguments::parse(given)?;
    match arguments.action.as_str() {
        "" => serve(arguments)?,
        "delete" => {
            // SIGTERM and SIGINT must not interrupt the deletion, as in containerd's shim.
            let _blocked = Signals::new().context("block signals")?;
            cleanup::delete(&arguments)?;
        }
        other => {
            let unsupported = || Error::unknown(format!("unsupported shim command {other:?}"));
            let action = helper::Action::of_word(other).ok_or_else(unsupported)?;
            // The error is on standard output: the process that started the helper reports it.
            return Ok(match helper::run(action, &arguments) {
                Ok(()) => ExitCode::SUCCESS,
                Err(_) => ExitCode::FAILURE,
            });
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn serve(arguments: Arguments) -> Result<(), Error> {
    let listener = sys::inherited(SOCKET)
        .ok_or_else(|| Error::unknown("descriptor 3 is not open: not started by the daemon"))?;
    sys::close_rest_on_exec();
    rustix::thread::set_name(NAME).context("set name of process")?;
    // A process that can trace the shim has root's rights on the node, and a core dump would
    // contain output of containers.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .context("forbid core dumps")?;
    if let Err(e) = sys::raise_open_files() {
        log::warn(format_args!("failed to raise open file limit: {e}"));
    }
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .context("become subreaper")?;
    let signals = Signals::new().context("watch signals")?;
    let address = env::var("TTRPC_ADDRESS").ok().filter(|address| !address.is_empty());
    shim::Shim::new(listener, signals, arguments.namespace, arguments.id, address)?.run()
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
    /// The command: `delete` or the word of a helper's action; empty: serve.
    pub action: String,
}

impl Arguments {
    fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, Error> {
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
                _ => {}
            }
        }
        if parsed.namespace.is_empty() || parsed.namespace.contains('/') {
            return Err(Error::unknown("-namespace is missing or malformed"));
        }
        Ok(parsed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_of_a_shim_are_parsed() {
        let of = |line: &str| Arguments::parse(line.split_whitespace().map(str::to_owned)).ok();
        let serve =
            Arguments { namespace: "k8s.io".to_owned(), id: "a".to_owned(), ..Default::default() };
        assert_eq!(of("-namespace k8s.io -id a -address /run/c.sock"), Some(serve));
        let delete = Arguments {
            namespace: "k8s.io".to_owned(),
            id: "-namespace".to_owned(),
            bundle: "/b".to_owned(),
            action: "delete".to_owned(),
        };
        let line = "-debug -id -namespace --namespace=k8s.io -publish-binary c -bundle /b delete";
        assert_eq!(of(line), Some(delete));
        assert_eq!(of("-id a"), None);
        assert_eq!(of("-namespace ../a"), None);
    }
}
