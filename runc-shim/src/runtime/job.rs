//! A running command of the runtime, or a running helper.

use std::path::PathBuf;
use std::time::Instant;

use crate::error::Error;
use crate::io::console::ConsoleSocket;
use crate::process_key::ProcessKey;
use crate::runtime::command::Command;
use crate::ttrpc::server::Reply;

/// A running command or helper, and the caller that waits for it.
#[derive(Debug)]
pub struct Job {
    /// The command.
    pub command: Command,
    /// The purpose of the command.
    pub purpose: Purpose,
    /// The container or exec that the command works on.
    pub key: ProcessKey,
    /// The caller that waits for the result, if any.
    pub reply: Option<Reply>,
    /// When the command is killed at the latest, whatever the deadline of the call.
    pub limit: Option<Instant>,
    /// A Delete has cancelled the creation of the container.
    pub is_cancelled: bool,
    /// The command was killed at its deadline.
    pub was_killed: bool,
}

impl Job {
    /// A command that was just started.
    pub fn new(command: Command, purpose: Purpose, key: ProcessKey, reply: Option<Reply>) -> Self {
        Self { command, purpose, key, reply, limit: None, is_cancelled: false, was_killed: false }
    }

    /// When the command is killed; `None`: it has no limit, or was killed.
    pub fn deadline(&self) -> Option<Instant> {
        if self.was_killed {
            return None;
        }
        let reply = self.reply.filter(|_| self.purpose.is_limited());
        let of_call = reply.and_then(|reply| reply.deadline());
        [of_call, self.limit].into_iter().flatten().min()
    }
}

/// The purpose of a command or helper.
#[derive(Debug)]
pub enum Purpose {
    /// Creates a container. The runtime sends its terminal through the socket.
    Create(Option<ConsoleSocket>),
    /// Mounts a container's root file system; or has a program mount a part of it.
    Mount { by_program: bool },
    /// Lets the runtime delete the leftovers of a container whose creation failed with this error.
    /// `None`: a later attempt or a Delete, so that no Create waits for the error.
    Discard(Option<Error>),
    /// Removes the cgroup that a killed command has left of such a container.
    DiscardCgroup(Option<Error>),
    /// Unmounts the root file system of such a container.
    DiscardMounts(Option<Error>),
    /// Starts a container.
    Start,
    /// Restores a container from a checkpoint.
    Restore(Option<ConsoleSocket>),
    /// Starts an exec.
    Exec(Option<ConsoleSocket>),
    /// Deletes a container.
    Delete(Attempt),
    /// Removes the cgroup of a container that the runtime failed to delete with this error, or does
    /// not know because it was killed.
    RemoveCgroup(Error),
    /// Unmounts the root file system of a deleted container.
    Unmount,
    /// Sends this signal to a container.
    Kill(i32),
    /// Kills the processes that remain after a container's first process has exited.
    KillRemaining,
    /// Pauses a container.
    Pause,
    /// Resumes a container.
    Resume,
    /// Changes the resources of a container.
    Update,
    /// Writes a checkpoint into the first directory; the second one is CRIU's work directory, which
    /// is removed afterwards.
    Checkpoint(String, Option<PathBuf>),
}

impl Purpose {
    /// Whether the deadline of the call limits the command. A removal continues after it, because
    /// an interrupted one leaves more than it has found.
    pub fn is_limited(&self) -> bool {
        match self {
            Self::Create(_) | Self::Mount { .. } | Self::Start | Self::Restore(_) => true,
            Self::Exec(_) => true,
            Self::Kill(_) | Self::Pause | Self::Resume | Self::Update => true,
            Self::Checkpoint(..) => true,
            Self::Discard(_) | Self::DiscardCgroup(_) | Self::DiscardMounts(_) => false,
            Self::Delete(_) | Self::RemoveCgroup(_) | Self::Unmount | Self::KillRemaining => false,
        }
    }

    /// Whether the exit of the container is announced only after the end of the command.
    pub fn delays_exit(&self) -> bool {
        matches!(self, Self::Exec(_) | Self::KillRemaining)
    }

    /// Whether the death of the command may leave a cgroup that the runtime does not know.
    pub fn makes_cgroup(&self) -> bool {
        matches!(self, Self::Create(_) | Self::Restore(_))
    }

    /// Whether the death of the command may leave the container frozen: runc freezes the cgroup
    /// for a while in these commands.
    pub fn may_freeze(&self) -> bool {
        matches!(self, Self::Pause | Self::Update | Self::Kill(_) | Self::KillRemaining)
    }
}

/// Which attempt of the runtime to delete a container a command is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attempt {
    /// The first attempt. If it fails, the shim removes the cgroup.
    First,
    /// The attempt after the removal of the cgroup.
    Last,
}
