//! The children of the shim that are not reaped yet, and what each of them is for.

use std::collections::BTreeMap;

use crate::error::Error;
use crate::exits::{self, Exit, Exits};
use crate::process_key::ProcessKey;
use crate::sys;

/// The kind of a child.
#[derive(Debug)]
pub enum Child {
    /// A command of the runtime or a helper, for this container or exec.
    Command(ProcessKey),
    /// A process of a container.
    Process(ProcessKey),
    /// The logging program of a process.
    Logger(ProcessKey),
}

/// The known children by their pids, and the exits of unknown ones.
#[derive(Debug, Default)]
pub struct Children {
    known: BTreeMap<i32, Child>,
    exits: Exits,
}

impl Children {
    /// Adds a child that was not reaped.
    pub fn add(&mut self, pid: i32, child: Child) {
        self.known.insert(pid, child);
    }

    /// The child with this pid.
    pub fn find(&self, pid: i32) -> Option<&Child> {
        self.known.get(&pid)
    }

    /// Removes a child that has exited. Keeps the exit of an unknown child: a process that is being
    /// started may have this pid.
    pub fn ended(&mut self, pid: i32, exit: Exit) -> Option<Child> {
        let child = self.known.remove(&pid);
        if child.is_none() {
            self.exits.keep(pid, exit);
        }
        child
    }

    /// Announces the start of a process whose pid is not known yet.
    pub fn begin_start(&mut self, key: &ProcessKey) {
        self.exits.begin_start(key);
    }

    /// Ends a start that has failed.
    pub fn start_failed(&mut self, key: &ProcessKey) {
        self.exits.resolve_start(key, None);
    }

    /// Ends the start of a process, to which the runtime gave `pid`. Returns its exit if it has
    /// exited and was reaped; else it is known from now on.
    ///
    /// # Errors
    /// The pid is that of another live child, whose exit would be attributed to this process.
    pub fn started(&mut self, key: &ProcessKey, pid: i32) -> Result<Option<Exit>, Error> {
        let exit = self.exits.resolve_start(key, Some(pid));
        if exit.is_none() {
            if self.known.contains_key(&pid) {
                return Err(Error::unknown(format!("pid {pid} is that of another process")));
            }
            self.add(pid, Child::Process(key.clone()));
        }
        Ok(exit)
    }

    /// Sends SIGKILL to a child of this process that is not known: a process that the runtime has
    /// just created, and whose start has failed.
    pub fn kill_unknown(&self, pid: i32) {
        if !self.known.contains_key(&pid) && exits::is_child(pid) {
            // The child is not reaped yet, so its pid cannot have been reused.
            let _ = sys::kill(pid, libc::SIGKILL);
        }
    }

    /// Forgets the processes of a deleted container.
    pub fn forget(&mut self, id: &str) {
        self.known.retain(|_, child| !matches!(child, Child::Process(key) if key.id == id));
    }

    /// Whether a command of the runtime or a helper runs.
    pub fn has_commands(&self) -> bool {
        self.known.values().any(|child| matches!(child, Child::Command(_)))
    }

    /// Sends SIGTERM to a logging program that runs. It should exit when its input ends; this is
    /// for one that does not.
    pub fn end_logger(&self, pid: i32) {
        if matches!(self.known.get(&pid), Some(Child::Logger(_))) {
            let _ = sys::kill(pid, libc::SIGTERM);
        }
    }
}
