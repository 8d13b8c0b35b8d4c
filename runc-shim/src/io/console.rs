//! The socket by which the runtime hands over a terminal's master.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, BorrowedFd, OwnedFd};

use rustix::fs::AtFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};

use crate::error::{Context as _, Error};

/// A socket that waits for a terminal. Its file goes with it.
#[derive(Debug)]
pub struct ConsoleSocket {
    socket: OwnedFd,
    dir: OwnedFd,
    name: String,
}

impl ConsoleSocket {
    /// Makes a socket with a name of its own in a directory.
    pub fn new(dir: BorrowedFd<'_>, name: String) -> Result<Self, Error> {
        let what = || format!("make console socket {name}");
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .context(what())?;
        // The bundle's path is longer than a socket's may be.
        let path = format!("/proc/self/fd/{}/{name}", dir.as_raw_fd());
        let _ = rustix::fs::unlinkat(dir, &name, AtFlags::empty());
        let address = SocketAddrUnix::new(path).context(what())?;
        rustix::net::bind(&socket, &address).context(what())?;
        let dir = dir.try_clone_to_owned()?;
        let made = Self { socket, dir, name };
        rustix::net::listen(&made.socket, 1).context("listen for console")?;
        Ok(made)
    }

    /// Its name in its directory, in which the runtime works.
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
        sent.ok_or_else(|| Error::unknown("no descriptor came with it"))
    }
}

impl Drop for ConsoleSocket {
    fn drop(&mut self) {
        // Gone already is as good.
        let _ = rustix::fs::unlinkat(&self.dir, &self.name, AtFlags::empty());
    }
}
