//! The command `start`: containerd runs it in the bundle of a container and connects to the address
//! that it prints. All containers of a group, which is a pod, have one server: `start` launches it,
//! unless it answers already.

mod bootstrap;
pub mod info;
mod placement;
pub mod socket;

use std::fs::File;
use std::io::{Read, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::pipe::PipeFlags;

pub use self::bootstrap::Bootstrap;
use crate::arguments::Arguments;
use crate::container::config::Config;
use crate::error::{Context as _, Error};
use crate::process_key;
use crate::runtime;
use crate::sys;

/// The descriptor of the server's listening socket.
pub const SOCKET: i32 = 3;

/// The descriptor of the server with the lock of its socket, until it is known.
pub const LOCK: i32 = 4;

/// Maximum size of the input, bytes; the rest is not read.
const MAX_INPUT: u64 = 10 << 20;

/// Finds or launches the server of the container's group, and prints its address.
///
/// # Errors
/// The failed step; a server that this call has launched then ends.
pub fn start(arguments: &Arguments) -> Result<(), Error> {
    sys::close_rest_on_exec();
    process_key::check_id(&arguments.id)?;
    let asked = Bootstrap::decode(&input()?, &arguments.id, &arguments.namespace)?;
    let group = Config::read(Path::new("")).group.unwrap_or_else(|| arguments.id.clone());
    let path = socket::path(
        Path::new(&asked.socket_dir),
        &arguments.address,
        &arguments.namespace,
        &group,
    );
    let file = path.to_str().ok_or_else(|| Error::unknown("the socket's path is not UTF-8"))?;
    let address = format!("unix://{file}");
    // Before there is a socket, because `delete` finds it by this file. containerd 1.7 reads the
    // file when it restarts, and a later one reads it if it was killed during this call.
    std::fs::write(socket::ADDRESS_FILE, &address).context("write file address")?;
    let answer = asked.answer(address)?;
    // The server has the lock, too, until it is known: others do not print the address before.
    let lock = socket::lock(&path)?;
    let Some(listener) = socket::claim(&path)? else {
        drop(lock);
        return print(&answer);
    };
    let launched = placement::enter(&asked.options)
        .and_then(|()| launch(arguments, file, &asked.events, &listener, &lock));
    // Here and in the server it is removed before the listener is closed, so it is not that of
    // another call.
    let server = launched.inspect_err(|_| drop(std::fs::remove_file(&path)))?;
    print(&answer)?;
    let sent = rustix::io::write(server, b"1").map(drop).context("write to the server");
    // It has died.
    sent.inspect_err(|_| drop(std::fs::remove_file(&path)))
}

/// Waits, in the server, until `start` has printed the address. False: it was killed before, or
/// containerd has gone, so containerd does not know this server; its socket is removed.
pub fn is_known(socket: &Path, lock: Option<OwnedFd>) -> bool {
    let known = rustix::io::read(rustix::stdio::stdin(), &mut [0; 1]) == Ok(1);
    if !known {
        let _ = std::fs::remove_file(socket);
    }
    drop(lock);
    known
}

/// The input, of which containerd closes the end.
fn input() -> Result<Vec<u8>, Error> {
    let mut input = Vec::new();
    std::io::stdin().take(MAX_INPUT).read_to_end(&mut input).context("read standard input")?;
    Ok(input)
}

fn print(answer: &[u8]) -> Result<(), Error> {
    let mut out = std::io::stdout();
    out.write_all(answer).and_then(|()| out.flush()).context("write to standard output")
}

/// Launches the server and returns its standard input; see [`is_known`]. It inherits the cgroup and
/// OOM score of this process.
fn launch(
    arguments: &Arguments,
    file: &str,
    events: &str,
    listener: &OwnedFd,
    lock: &OwnedFd,
) -> Result<OwnedFd, Error> {
    let words = [
        env!("CARGO_PKG_NAME"),
        "-namespace",
        &arguments.namespace,
        "-id",
        &arguments.id,
        "-address",
        &arguments.address,
        "-socket",
        file,
    ];
    let words = words.into_iter().map(runtime::string).collect::<Result<Vec<_>, _>>()?;
    let mut environment = runtime::environment();
    let given = std::env::var("TTRPC_ADDRESS").unwrap_or_default();
    let containerd = if events.is_empty() { &given } else { events };
    environment.push(runtime::string(&format!("TTRPC_ADDRESS={containerd}"))?);
    let null = runtime::null()?;
    let (input, known) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).context("make pipe")?;
    let log = log()?;
    let log = log.as_ref().unwrap_or(&null);
    // Not the bundle, which containerd removes while the group has other containers.
    let root = File::open("/").context("open /")?;
    let spawned = sys::spawn(&sys::Spawn {
        program: c"/proc/self/exe",
        arguments: &words,
        environment: &environment,
        directory: Some(root.as_fd()),
        descriptors: &[
            (input.as_fd(), 0),
            (null.as_fd(), 1),
            (log.as_fd(), 2),
            (listener.as_fd(), SOCKET),
            (lock.as_fd(), LOCK),
        ],
        dies_with_parent: false,
    });
    spawned.map(|_| known).context("start server")
}

/// The FIFO in the bundle from which containerd reads the server's log; `None`: there is none.
/// Open for reading, too, so that lines written during a restart of containerd stay in it.
fn log() -> Result<Option<OwnedFd>, Error> {
    let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    match rustix::fs::open("log", flags, Mode::empty()) {
        Err(Errno::NOENT) => Ok(None),
        opened => opened.map(Some).context("open file log"),
    }
}
