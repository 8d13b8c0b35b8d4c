//! A containerd shim for OCI runtimes: serves `containerd.task.v3.Task` for the containers of one
//! pod on a socket that it is handed as descriptor 3, by the daemon or by its own command `start`,
//! which containerd runs. It runs runc or crun. One thread serves; each container with streams has
//! a thread that copies them.

mod arguments;
mod cgroup;
mod children;
mod cleanup;
mod container;
mod error;
mod exec;
mod exits;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod io;
mod log;
mod process;
mod process_key;
mod reactor;
mod root;
mod runtime;
mod sandbox;
mod services;
mod shim;
mod signals;
mod start;
mod sys;
#[cfg(test)]
mod testing;
mod ttrpc;

use std::env;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use rustix::process::DumpableBehavior;

use crate::arguments::Arguments;
use crate::error::{Context as _, Error};
use crate::root::helper;
use crate::signals::Signals;
use crate::ttrpc::server::Listener;

/// The name of the process; the program may be run by a descriptor.
const NAME: &std::ffi::CStr = c"runc-shim";

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
    if let Some(text) = given.peek().and_then(|first| arguments::information(first)) {
        writeln!(std::io::stdout(), "{text}").context("write to standard output")?;
        return Ok(ExitCode::SUCCESS);
    }
    if given.peek().is_some_and(|first| first.trim_start_matches('-') == "info") {
        start::info::print()?;
        return Ok(ExitCode::SUCCESS);
    }
    let arguments = Arguments::parse(given)?;
    match arguments.action.as_str() {
        "" => serve(arguments)?,
        "start" => start::start(&arguments)?,
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
    let socket = sys::inherited(start::SOCKET).ok_or_else(|| {
        Error::unknown(
            "descriptor 3 is not open: only pause-sandboxer and the command `start` can launch a \
             server",
        )
    })?;
    let has_start = !arguments.socket.is_empty();
    let lock = has_start.then(|| sys::inherited(start::LOCK)).flatten();
    if has_start {
        // Not the one of `start`, which its caller may end.
        rustix::process::setpgid(None, None).context("make process group")?;
    }
    #[cfg(target_env = "gnu")]
    sys::save_memory();
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
    // The daemon keeps its socket for the next shim, and names the pause process of its sandbox.
    // With `start`, the sandbox is a container as the others.
    let (file, sandbox) = match arguments.socket {
        file if file.is_empty() => (None, Some(arguments.id)),
        file => (Some(PathBuf::from(file)), None),
    };
    if file.as_ref().is_some_and(|file| !start::is_known(file, lock)) {
        return Ok(());
    }
    let listener = Listener { socket, file };
    shim::Shim::new(listener, signals, arguments.namespace, sandbox, address)?.run()
}
