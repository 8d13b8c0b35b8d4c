//! The socket through which the runtime sends the master of a terminal.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};

use rustix::fs::AtFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};

use crate::error::{Context as _, Error};

/// A listening socket for a terminal. Its file is removed on drop.
#[derive(Debug)]
pub struct ConsoleSocket {
    socket: OwnedFd,
    dir: OwnedFd,
    name: String,
}

impl ConsoleSocket {
    /// Makes a socket with this name in a directory.
    pub fn new(dir: BorrowedFd<'_>, name: String) -> Result<Self, Error> {
        let what = || format!("make console socket {name}");
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .context(what())?;
        // The path of the bundle may be longer than a socket address allows.
        let path = format!("/proc/self/fd/{}/{name}", dir.as_raw_fd());
        let _ = rustix::fs::unlinkat(dir, &name, AtFlags::empty());
        let address = SocketAddrUnix::new(path).context(what())?;
        rustix::net::bind(&socket, &address).context(what())?;
        let dir = dir.try_clone_to_owned()?;
        let made = Self { socket, dir, name };
        rustix::net::listen(&made.socket, 1).context("listen for console")?;
        Ok(made)
    }

    /// The name of the socket in its directory, which is the runtime's working directory.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The terminal that the runtime has sent.
    pub fn receive(&self) -> Result<OwnedFd, Error> {
        self.try_receive().context("failed to retrieve console master")
    }

    fn try_receive(&self) -> Result<OwnedFd, Error> {
        let connection = rustix::net::accept_with(&self.socket, SocketFlags::CLOEXEC)?;
        let mut name = [0; 4096];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let mut parts = [io::IoSliceMut::new(&mut name)];
        rustix::net::recvmsg(&connection, &mut parts, &mut control, flags)?;
        let sent = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        sent.ok_or_else(|| Error::unknown("the message has no file descriptor"))
    }
}

impl Drop for ConsoleSocket {
    fn drop(&mut self) {
        // The file may have been removed already.
        let _ = rustix::fs::unlinkat(&self.dir, &self.name, AtFlags::empty());
    }
}
