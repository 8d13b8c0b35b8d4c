//! The blocking work of one sandbox: what its jobs do to the system, step by step.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use super::beside::Beside;
use super::files::{Files, Places};
use super::record::{Stage, Store};
use super::selinux::{Labels, Level};
use crate::error::Step;
use crate::pause::{Adoption, Driver, Exit, Pause, Plan};
use crate::shim;
use crate::telemetry::Telemetry;
use crate::trace::Subject;

/// What the jobs of one sandbox work on. Its methods block.
#[derive(Debug)]
pub struct Work {
    /// Makes and cleans up the pause.
    pub driver: Arc<dyn Driver>,
    /// What the driver makes.
    pub plan: Plan,
    /// What the files say.
    pub files: Files,
    /// The pod's SELinux labels.
    pub labels: Labels,
    /// Keeps other pods from the level of these.
    pub _level: Option<Level>,
    /// Where the files are.
    pub places: Places,
    /// Where the record is.
    pub store: Store,
    /// The Task endpoint of the pod's containers.
    pub shim: shim::Endpoint,
    /// When Create was called.
    pub created_at: SystemTime,
    /// Runtime name, such as `io.containerd.runc.v2`.
    pub runtime_name: String,
    /// What lines of the log say of the sandbox.
    pub subject: Subject,
    /// Counts what happens.
    pub telemetry: Arc<Telemetry>,
    /// Held while something is prepared; whether that may still be done.
    pub preparing: Mutex<bool>,
}

/// A start that failed.
#[derive(Debug)]
pub struct StartFailure {
    /// The step that failed.
    pub step: Step,
    /// What could not be undone; empty when nothing is left of the sandbox.
    pub left: Vec<Step>,
}

impl Work {
    /// Makes ready what a start will need and nobody sees. What cannot be made now is made then.
    pub fn prepare(&self) {
        let open = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        if *open {
            self.driver.prepare(&self.plan);
        }
    }

    /// Takes back what was prepared while nothing was started: an empty cgroup keeps its parent, the pod's, from being removed.
    pub fn unprepare(&self) {
        let open = self.preparing.lock().unwrap_or_else(PoisonError::into_inner);
        if *open && let Err(left) = self.driver.cleanup(&self.plan) {
            left.iter().for_each(|step| log::warn!(sandbox = self.plan.id.as_str(); "not started for long: {step}"));
        }
    }

    /// From now on nothing is prepared any more.
    fn end_preparing(&self) {
        *self.preparing.lock().unwrap_or_else(PoisonError::into_inner) = false;
    }

    /// Makes files and pause and records them.
    ///
    /// # Errors
    /// The failed step. All is undone then, the record included.
    pub fn start(self: &Arc<Self>) -> Result<Arc<dyn Pause>, StartFailure> {
        self.end_preparing();
        self.try_start().map_err(|step| StartFailure { step, left: self.remove().err().unwrap_or_default() })
    }

    fn try_start(self: &Arc<Self>) -> Result<Arc<dyn Pause>, Step> {
        self.places.begin()?;
        let work = Arc::clone(self);
        let make = move || {
            work.places.make(&work.files, &work.labels.mount)?;
            work.shim.listen()
        };
        let (started, made) = if self.driver.stands_alone() {
            // On a disk the files take about as long as the pause.
            let files = Beside::offer(make);
            (self.driver.start(&self.plan), files.finish())
        } else {
            make()?;
            (self.driver.start(&self.plan), Ok(()))
        };
        let pause: Arc<dyn Pause> = Arc::from(started?);
        let stage = Stage::Started { identity: pause.identity().clone() };
        if let Err(step) = made.and_then(|()| self.store.set_stage(&stage)) {
            // A pause without a record would outlive everybody who knows of it.
            match pause.kill() {
                Ok(()) => drop(tokio::runtime::Handle::current().block_on(pause.exited())),
                Err(kill) => log::error!(sandbox = self.plan.id.as_str(); "start: undo: {kill}"),
            }
            return Err(step);
        }
        Ok(pause)
    }

    /// Asks the driver for the process that the record names.
    pub fn adopt(&self) -> Adoption {
        match self.store.stage() {
            Ok(Stage::Started { identity }) => self.driver.adopt(&self.plan, &identity),
            Ok(Stage::Exited { exit, .. }) => Adoption::Dead(exit),
            Ok(Stage::Created) => Adoption::Dead(Exit { status: crate::pause::UNKNOWN_EXIT, at: SystemTime::now() }),
            Err(e) => Adoption::Unknown(e.into()),
        }
    }

    /// After the exit: records it, removes the cgroup, unmounts the shared memory.
    ///
    /// # Errors
    /// Every step that failed.
    pub fn cleanup(&self, pid: u32, exit: Option<Exit>) -> Result<(), Vec<Step>> {
        let mut errors = Vec::new();
        if let Some(exit) = exit {
            errors.extend(self.store.set_stage(&Stage::Exited { pid, exit }).err());
        }
        errors.extend(self.driver.cleanup(&self.plan).err().unwrap_or_default());
        errors.extend(self.places.release_shm().err().unwrap_or_default());
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }

    /// Removes all that is left: the pod's shim, cgroup, files and, when nothing else is left, the record.
    ///
    /// # Errors
    /// Every step that failed.
    pub fn remove(&self) -> Result<(), Vec<Step>> {
        self.end_preparing();
        let mut errors = Vec::new();
        // A shim that runs the pause as well must be rid of it before it ends.
        errors.extend(self.driver.cleanup(&self.plan).err().unwrap_or_default());
        errors.extend(self.shim.end().err().unwrap_or_default());
        errors.extend(self.places.remove().err().unwrap_or_default());
        if errors.is_empty() {
            errors.extend(self.store.remove().err());
        }
        if errors.is_empty() { Ok(()) } else { Err(errors) }
    }
}
