//! A containerd shim for OCI runtimes: serves `containerd.task.v3.Task` for the containers of one
//! pod on a socket that it is handed as descriptor 3, and runs runc or crun. One thread.

mod cgroup;
mod commands;
mod container;
mod create;
mod delete;
mod error;
mod events;
mod exec;
mod exits;
mod frame;
mod io;
mod log;
mod memory;
mod mounts;
mod options;
mod processes;
mod reactor;
mod runtime;
mod server;
mod shim;
mod start;
mod sys;
mod task;

use std::env;
use std::process::ExitCode;

use rustix::process::DumpableBehavior;

use crate::error::{Context as _, Error};

/// Where the socket is.
const SOCKET: i32 = 3;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            log::error(format_args!("{e}"));
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Error> {
    let namespace = namespace(env::args().skip(1))?;
    let listener = sys::inherited(SOCKET)
        .ok_or_else(|| Error::unknown("descriptor 3 is no socket: not started by the daemon"))?;
    // Who can trace this process is root in the node; a core would hold what containers have said.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .context("forbid core dumps")?;
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .context("become subreaper")?;
    let children = sys::child_signals().context("watch children")?;
    let address = env::var("TTRPC_ADDRESS").ok().filter(|address| !address.is_empty());
    shim::Shim::new(listener, children, namespace, address)?.run()
}

/// The namespace in the arguments of containerd's shims, of which no other is needed.
fn namespace(mut arguments: impl Iterator<Item = String>) -> Result<String, Error> {
    let mut namespace = String::new();
    while let Some(argument) = arguments.next() {
        let name = argument.trim_start_matches('-');
        match name.split_once('=') {
            Some(("namespace", value)) => namespace = value.to_owned(),
            Some(_) => {}
            None if name == "namespace" => namespace = arguments.next().unwrap_or_default(),
            None if ["id", "address", "publish-binary", "bundle", "socket"].contains(&name) => {
                arguments.next();
            }
            None => {}
        }
    }
    if namespace.is_empty() || namespace.contains('/') {
        return Err(Error::unknown("-namespace names no namespace"));
    }
    Ok(namespace)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_namespace_is_found_among_the_arguments() {
        let of = |line: &str| namespace(line.split_whitespace().map(str::to_owned)).ok();
        let found = Some("k8s.io".to_owned());
        assert_eq!(of("-namespace k8s.io -id a -address /run/c.sock"), found);
        assert_eq!(of("-id -namespace --namespace=k8s.io"), found);
        assert_eq!(of("-id a"), None);
        assert_eq!(of("-namespace ../a"), None);
    }
}
