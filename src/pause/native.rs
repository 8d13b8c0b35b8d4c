//! The native driver: clones the pause program into the pod's namespaces itself.

use std::ffi::{CString, c_int};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use rustix::fs::{XattrFlags, fsetxattr, fstatfs};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};

use super::child::{self, ChildStep, PauseWork, User};
use super::orphans::Mark;
use super::{Driver, IdMapping, Namespace, Plan, binary, orphans, rootfs, userns};
use crate::cgroup::{self, CgroupRef, Cgroups};
use crate::error::{IoContext, StepError, StepErrors};
use crate::process::deadline::{self, Cloned, Deadline};
use crate::process::pidfd::{self, PidfdProcess, Reaper};
use crate::process::{Adoption, Identity, Process, identity};
use crate::sys::{self, Errno};

/// uid and gid of a pause process.
const PAUSE_ID: u32 = 65535;
/// Magic number of namespace files (`<linux/magic.h>` NSFS_MAGIC).
const NSFS: i64 = 0x6e73_6673;

/// The native driver, with all that its pause processes share.
#[derive(Debug)]
pub struct Native {
    proc: OwnedFd,
    image: OwnedFd,
    root: OwnedFd,
    cgroups: Cgroups,
    boot_id: Arc<str>,
    last_capability: u32,
    common: Arc<Reaper>,
    deadline: Deadline,
    /// The mark of the pause processes of one state directory.
    mark: Option<Mark>,
}

/// Why there is no pause process.
struct Failed {
    step: StepError,
    /// Why its child could not join its cgroup, if it was that.
    join_error: Option<Errno>,
}

impl From<StepError> for Failed {
    fn from(step: StepError) -> Self {
        Self { step, join_error: None }
    }
}

impl Native {
    /// Prepares the program, the empty root and the cgroup file systems. To be called early in the
    /// daemon's life: the descriptors that are opened here should have low numbers, as every child
    /// copies the table up to them.
    ///
    /// Makes the process undumpable: its children share its memory for an instant, and none of them
    /// may be traced.
    ///
    /// # Errors
    /// The failed step; the node lacks something that the driver needs.
    pub fn new() -> Result<Self, StepError> {
        Self::with(Cgroups::find()?, binary::open()?)
    }

    fn with(cgroups: Cgroups, image: OwnedFd) -> Result<Self, StepError> {
        const LAST_CAPABILITY: &str = "/proc/sys/kernel/cap_last_cap";
        set_dumpable_behavior(DumpableBehavior::NotDumpable).step("make the daemon undumpable")?;
        let last = std::fs::read_to_string(LAST_CAPABILITY).step_at("read", LAST_CAPABILITY)?;
        let invalid = |e| io::Error::new(io::ErrorKind::InvalidData, e);
        Ok(Self {
            proc: sys::open(None, c"/proc", libc::O_PATH | libc::O_DIRECTORY, 0)
                .step_at("open", "/proc")?,
            image,
            root: rootfs::make_empty_root()?,
            common: Reaper::new(cgroups.freezer()),
            deadline: Deadline::new(cgroups.freezer()),
            cgroups,
            boot_id: identity::boot_id()?,
            last_capability: last
                .trim()
                .parse()
                .map_err(invalid)
                .step_at("read", LAST_CAPABILITY)?,
            mark: None,
        })
    }

    /// Adds a mark for this state directory to the pause processes, so that those without a record
    /// are found.
    pub fn for_state_dir(mut self, state_dir: &Path) -> Self {
        match Mark::set(self.image.as_fd(), state_dir) {
            Ok(mark) => self.mark = Some(mark),
            Err(step) => log::error!(
                "failed to mark the pause program; orphaned pause processes will not be \
                 found: {step}"
            ),
        }
        self
    }

    /// Gives the pause program an SELinux label, so that the policy can let a pod's process execute
    /// it.
    ///
    /// # Errors
    /// The policy does not have the label, or it may not be set.
    pub fn label(&self, label: &str) -> Result<(), StepError> {
        let text = CString::new(label).step("label the pause program")?;
        fsetxattr(&self.image, c"security.selinux", text.as_bytes_with_nul(), XattrFlags::empty())
            .step("label the pause program")
    }

    /// Clones the child and checks what it reports.
    fn spawn(
        &self,
        work: &PauseWork<'_>,
        plan: &Plan,
        cgroup: Option<&cgroup::NewCgroup<'_>>,
    ) -> Result<(c_int, OwnedFd), Failed> {
        let namespaces = if work.user.is_some() { 0 } else { work.namespaces };
        let how = sys::Clone {
            // The child unshares the descriptor table when it has closed what it does not need:
            // that is cheaper than a copy.
            flags: namespaces | (libc::CLONE_FILES as u64) | sys::CLONE_CLEAR_SIGHAND,
            cgroup: cgroup.and_then(cgroup::NewCgroup::v2),
            born: None,
            stack: None,
        };
        work.report.begin();
        let first =
            self.deadline.clone_child(how, work, child::first).step("clone the pause process")?;
        let Cloned { pid, pidfd, late } = first;
        let pause = if work.user.is_some() { self.second(pidfd, work) } else { Ok((pid, pidfd)) };
        let (at, name, index) = work.report.step();
        let failed = match (&pause, work.report.errno()) {
            (_, Some(errno)) => Some(io::Error::from(errno)),
            _ if late => Some(self.deadline.error()),
            (Err(e), None) => Some(io::Error::new(e.kind(), e.to_string())),
            (Ok(_), None) if at != ChildStep::Execute => Some(io::ErrorKind::Interrupted.into()),
            (Ok(_), None) => None,
        };
        let Some(e) = failed else { return Ok(pause.step(name)?) };
        if let Ok((pid, pidfd)) = pause {
            // It ended itself, or was killed on its way.
            self.kill_and_reap(pid, &pidfd)?;
        }
        let join_error = work.report.errno().filter(|_| at == ChildStep::JoinCgroup);
        let step = match self.subject(plan, work, at, index) {
            Some(path) => StepError::at(name, path, e),
            None => StepError::new(name, e),
        };
        Err(Failed { step, join_error })
    }

    /// The second child, which is the pause process, when the first has ended.
    fn second(&self, first: OwnedFd, work: &PauseWork<'_>) -> io::Result<(c_int, OwnedFd)> {
        let end = sys::reap(first.as_fd(), true)?;
        // At the limit of descriptors the next one needs its place.
        drop(first);
        let Some(pid) = work.report.second() else { return Err(io::ErrorKind::Interrupted.into()) };
        // A child of this process, so the pid is its own until it is reaped.
        let pidfd = match sys::pidfd_open(pid) {
            Ok(pidfd) => pidfd,
            Err(e) => {
                let child = Pid::from_raw(pid);
                kill(child, Signal::SIGKILL)?;
                waitpid(child, Some(WaitPidFlag::__WALL))?;
                return Err(e.into());
            }
        };
        if end != Some(sys::End::Code(0)) {
            // The first was killed: the second may still be running on the stack that is about to
            // be freed.
            self.kill_and_reap(pid, &pidfd)
                .map_err(|e| io::Error::new(e.io().kind(), e.to_string()))?;
            return Err(io::ErrorKind::Interrupted.into());
        }
        Ok((pid, pidfd))
    }

    /// Kills and reaps a child, which no other thread reaps.
    fn kill_and_reap(&self, pid: c_int, pidfd: &OwnedFd) -> Result<(), StepError> {
        sys::kill(pidfd.as_fd()).step("kill the pause process")?;
        // Its cgroup may have been frozen since it was found not to be.
        if let Some(freezer) = self.cgroups.freezer()
            && let Err(e) = deadline::thaw(&freezer, pid)
        {
            log::debug!(pid = pid; "failed to thaw child: {}", io::Error::from(e));
        }
        sys::reap(pidfd.as_fd(), true).map(drop).step("reap the pause process")
    }

    /// The path that a step of the child worked on.
    fn subject(
        &self,
        plan: &Plan,
        work: &PauseWork<'_>,
        at: ChildStep,
        index: usize,
    ) -> Option<PathBuf> {
        match at {
            ChildStep::JoinNetwork | ChildStep::JoinUser => plan.netns.clone(),
            ChildStep::JoinCgroup => Some(self.cgroups.path(index, &work.tasks)),
            ChildStep::Sysctl => work
                .sysctls
                .get(index)
                .map(|(path, _)| Path::new("/proc").join(path.to_string_lossy().as_ref())),
            ChildStep::OomScore => Some("/proc/self/oom_score_adj".into()),
            ChildStep::Label => Some("/proc/self/attr/exec".into()),
            ChildStep::Hostname => Some(plan.hostname.clone().into()),
            _ => None,
        }
    }
}

impl Driver for Native {
    fn start(&self, plan: &Plan) -> Result<Box<dyn Process>, StepError> {
        self.common.sweep();
        let placement = cgroup::placement(&plan.cgroup_parent, &plan.id)?;
        let network = plan.netns.as_deref().map(open_network_namespace).transpose()?;
        let user = plan.userns.as_ref().map(|user| match &network {
            Some(network) => sys::namespace_owner(network.as_fd())
                .step_at("find the user namespace of", plan.netns.clone().unwrap_or_default()),
            None => userns::make_user_namespace(user),
        });
        let user = user.transpose()?;
        let leaf = placement.path();
        let needed =
            [&self.proc, &self.image, &self.root].into_iter().chain(&user).map(AsFd::as_fd);
        let highest = needed.chain(self.cgroups.roots()).map(child::descriptor).max().unwrap_or(0);
        let ids = plan.userns.map(|user| (user.uid, user.gid));
        let work = PauseWork {
            report: child::PauseReport::default(),
            namespaces: namespaces(plan),
            network: network.as_ref().map(AsFd::as_fd),
            root: self.root.as_fd(),
            user: user.as_ref().zip(ids).map(|(namespace, (uid, gid))| User {
                namespace: namespace.as_fd(),
                root: (uid.container_id, gid.container_id),
                stack: sys::Stack::new(),
            }),
            sysfs: plan.privileged && network.is_some() && user.is_none(),
            proc: self.proc.as_fd(),
            image: self.image.as_fd(),
            highest,
            hierarchies: if leaf.is_some() { self.cgroups.v1_roots() } else { Vec::new() },
            tasks: leaf.map(cgroup::tasks).unwrap_or_default(),
            oom_score: plan.oom_score_adj.to_string(),
            hostname: if plan.uts == Namespace::Private { plan.hostname.as_bytes() } else { &[] },
            sysctls: sysctls(plan)?,
            label: plan.selinux_label.as_bytes(),
            last_capability: self.last_capability,
            uid: ids.map_or(PAUSE_ID, |(uid, _)| pause_id(uid)),
            gid: ids.map_or(PAUSE_ID, |(_, gid)| pause_id(gid)),
            id: CString::new(plan.id.as_bytes()).step("name the pause process")?,
        };
        let mut tries = cgroup::TRIES;
        let (made, (pid, pidfd)) = loop {
            let made = self.cgroups.make_cgroup(&placement)?;
            match self.spawn(&work, plan, made.as_ref()) {
                Ok(spawned) => break (made, spawned),
                Err(Failed { join_error: Some(e), .. })
                    if tries > 1 && self.cgroups.removed_by_systemd(&placement, e) =>
                {
                    tries -= 1;
                }
                Err(e) => return Err(e.step),
            }
        };
        let settled = self.cgroups.register(&placement, pid.unsigned_abs());
        let identity = match settled
            .and_then(|()| identity::read_identity(pid.unsigned_abs(), &self.boot_id))
        {
            Ok(identity) => identity,
            Err(e) => {
                self.kill_and_reap(pid, &pidfd)?;
                for left in self.cgroups.remove(&placement) {
                    log::warn!(
                        sandbox = plan.id.as_str();
                        "failed to undo start of pause process: {left}"
                    );
                }
                return Err(e);
            }
        };
        if let Some(made) = made {
            made.keep();
        }
        Ok(Box::new(PidfdProcess::new(pidfd, identity, Arc::clone(&self.common))))
    }

    fn adopt(&self, _cgroup: &CgroupRef, identity: &Identity) -> Adoption {
        self.common.sweep();
        pidfd::adopt(identity, &self.boot_id, &self.common)
    }

    fn cleanup(&self, cgroup: &CgroupRef) -> Result<(), StepErrors> {
        self.common.sweep();
        let placement = cgroup::placement(&cgroup.cgroup_parent, &cgroup.id)?;
        self.cgroups.remove(&placement).into_result()
    }

    fn oom_killed(&self, cgroup: &CgroupRef) -> bool {
        cgroup::placement(&cgroup.cgroup_parent, &cgroup.id)
            .is_ok_and(|placement| self.cgroups.oom_killed(&placement))
    }

    fn kill_orphans(&self, recorded: &dyn Fn(&str) -> bool) -> Result<(), StepErrors> {
        let Some(mark) = &self.mark else { return Ok(()) };
        let decided = Instant::now() + orphans::DECISION_TIMEOUT;
        let (found, unfinished) = orphans::find_orphans(mark);
        let mut failed = StepErrors::from_iter(unfinished);
        let orphans: Vec<_> = found.into_iter().filter(|orphan| !recorded(&orphan.id)).collect();
        if Instant::now() > decided {
            // By now new sandboxes may have what these had.
            failed.extend([StepError::new(
                "read the records of orphaned pause processes",
                io::ErrorKind::TimedOut.into(),
            )]);
            return Err(failed);
        }
        let cgroups: Vec<CString> =
            orphans.iter().flat_map(orphans::MarkedProcess::cgroups).collect();
        for orphan in &orphans {
            log::warn!(sandbox = orphan.id.as_str(); "killing pause process without a record");
            failed.extend(orphan.kill().err());
        }
        let ends = Instant::now() + orphans::EXIT_TIMEOUT;
        failed.extend(orphans.iter().filter_map(|orphan| orphan.ended(ends).err()));
        // The kernel removes it only if it is empty: another process in there is no pause
        // process.
        let free = Instant::now() + orphans::CGROUP_TIMEOUT;
        failed.extend(cgroups.iter().flat_map(|path| self.cgroups.remove_empty(path, free)));
        failed.into_result()
    }
}

/// Whether `path` is a network namespace. Opens nothing but namespaces.
///
/// # Errors
/// There is no such file, or it cannot be looked at.
pub fn is_network_namespace(path: &Path) -> io::Result<bool> {
    let look = CString::new(path.as_os_str().as_bytes())?;
    let file = sys::open(None, &look, libc::O_PATH, 0)?;
    if fstatfs(&file)?.f_type != NSFS {
        return Ok(false);
    }
    let namespace = sys::open(None, &look, libc::O_RDONLY | libc::O_NONBLOCK, 0)?;
    Ok(fstatfs(&namespace)?.f_type == NSFS
        && sys::namespace_kind(namespace.as_fd())? == libc::CLONE_NEWNET)
}

/// Opens the pod's network namespace; that it is one is found by setns(2). Does not wait should it
/// be a fifo.
fn open_network_namespace(path: &Path) -> Result<OwnedFd, StepError> {
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    file.map(Into::into).step_at("open network namespace", path)
}

/// `CLONE_NEW…` of the namespaces that the pod has for itself.
fn namespaces(plan: &Plan) -> u64 {
    let kinds = [
        (plan.pid, libc::CLONE_NEWPID),
        (plan.ipc, libc::CLONE_NEWIPC),
        (plan.uts, libc::CLONE_NEWUTS),
    ];
    kinds
        .iter()
        .filter(|(kind, _)| *kind == Namespace::Private)
        .fold(0, |flags, (_, flag)| flags | *flag as u64)
}

/// The pause process's id as its user namespace numbers it: the usual one, or the last that is
/// mapped.
fn pause_id(mapping: IdMapping) -> u32 {
    let last = mapping.container_id.saturating_add(mapping.length.saturating_sub(1));
    if mapping.container_id <= PAUSE_ID { PAUSE_ID.min(last) } else { last }
}

fn sysctls(plan: &Plan) -> Result<Vec<(CString, &[u8])>, StepError> {
    let mut sysctls = Vec::with_capacity(plan.sysctls.len());
    for (name, value) in &plan.sysctls {
        let path = child::sysctl_path(name);
        sysctls
            .push((CString::new(path.as_bytes()).step_at("write sysctl", path)?, value.as_bytes()));
    }
    Ok(sysctls)
}

#[cfg(test)]
mod tests;
