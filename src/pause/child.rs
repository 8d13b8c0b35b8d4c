//! The steps of the child between the clone and the pause program.
//!
//! The child shares the daemon's memory and its thread's stack (see [`sys::clone_child`]): it makes
//! system calls on what was prepared for it, allocates nothing, and reports through [`PauseReport`]
//! which step it is in and how it failed.
//!
//! In the node's user namespace one child does all. In the pod's, the namespaces must be made by a
//! process that is in it already, while cgroup, OOM score and mount namespace take the node's
//! privileges: a first child does those, joins the user namespace and clones the second, a child of
//! the daemon too, which does the rest.

use std::ffi::{CString, c_int, c_uint};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use rustix::process::{
    DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit,
};
use rustix::system::sethostname;
use rustix::thread::{
    CapabilitySet, CapabilitySets, Gid, LinkNameSpaceType, Uid, capabilities,
    move_into_link_name_space, remove_capability_from_bounding_set, set_capabilities,
    set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};

use super::seccomp;
use crate::process;
use crate::sys::{self, Errno};

/// A step of the child; the names are those of its error messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum ChildStep {
    Begin,
    JoinNetwork,
    JoinRoot,
    UnshareDescriptors,
    MountSysfs,
    JoinCgroup,
    OomScore,
    ClearGroups,
    Processes,
    JoinUser,
    BecomeRoot,
    Clone,
    Hostname,
    Sysctl,
    Session,
    Label,
    NoNewPrivs,
    Bounding,
    Capabilities,
    Ids,
    Undumpable,
    CloseDescriptors,
    Filter,
    Execute,
}

/// All steps, by number.
const STEPS: [(ChildStep, &str); 24] = [
    (ChildStep::Begin, "begin the pause process"),
    (ChildStep::JoinNetwork, "join network namespace"),
    (ChildStep::JoinRoot, "join the empty mount namespace"),
    (ChildStep::UnshareDescriptors, "unshare the descriptor table"),
    (ChildStep::MountSysfs, "mount the sysfs of the network"),
    (ChildStep::JoinCgroup, "join cgroup"),
    (ChildStep::OomScore, "write oom score"),
    (ChildStep::ClearGroups, "drop supplementary groups"),
    (ChildStep::Processes, "lift the limit of processes"),
    (ChildStep::JoinUser, "join user namespace"),
    (ChildStep::BecomeRoot, "become root of the user namespace"),
    (ChildStep::Clone, "clone the pause process in its user namespace"),
    (ChildStep::Hostname, "set hostname"),
    (ChildStep::Sysctl, "write sysctl"),
    (ChildStep::Session, "make a session"),
    (ChildStep::Label, "set the SELinux label"),
    (ChildStep::NoNewPrivs, "set no_new_privs"),
    (ChildStep::Bounding, "drop the capability bounding set"),
    (ChildStep::Capabilities, "drop capabilities"),
    (ChildStep::Ids, "set uid and gid"),
    (ChildStep::Undumpable, "keep the daemon undumpable"),
    (ChildStep::CloseDescriptors, "close descriptors"),
    (ChildStep::Filter, "install the seccomp filter"),
    (ChildStep::Execute, "execute the pause program"),
];

/// How far the child came; written by the child, read by the parent when it resumes.
#[derive(Debug, Default)]
pub(super) struct PauseReport {
    report: process::report::ChildReport,
    /// Which cgroup hierarchy, sysctl or capability.
    index: AtomicU32,
    /// The second child.
    second: sys::ClonedChildSlot,
}

impl PauseReport {
    /// Forgets an earlier child.
    pub(super) fn begin(&self) {
        self.report.reset();
        self.item(0);
        self.second.forget();
    }

    fn enter(&self, step: ChildStep) {
        self.report.enter(step as usize);
    }

    fn item(&self, index: usize) {
        self.index.store(index as u32, Relaxed);
    }

    /// The last step that was begun, its name, and which of several things it worked on.
    pub(super) fn step(&self) -> (ChildStep, &'static str, usize) {
        let (at, name) = STEPS.get(self.report.step()).copied().unwrap_or(STEPS[0]);
        (at, name, self.index.load(Relaxed) as usize)
    }

    /// The error of the last step.
    pub(super) fn errno(&self) -> Option<Errno> {
        self.report.errno()
    }

    /// Pid of the second child.
    pub(super) fn second(&self) -> Option<c_int> {
        self.second.pid()
    }
}

/// How the pod's user namespace is entered.
pub(super) struct User<'a> {
    pub(super) namespace: BorrowedFd<'a>,
    /// Root inside, as the namespace numbers it.
    pub(super) root: (u32, u32),
    /// Stack of the second child.
    pub(super) stack: sys::Stack,
}

/// All that the child works on; prepared by the parent.
pub(super) struct PauseWork<'a> {
    pub(super) report: PauseReport,
    /// `CLONE_NEW…` of the namespaces that the pod has for itself.
    pub(super) namespaces: u64,
    pub(super) network: Option<BorrowedFd<'a>>,
    /// The empty mount namespace.
    pub(super) root: BorrowedFd<'a>,
    pub(super) user: Option<User<'a>>,
    /// Keeps the network's sysfs writable; see [`mount_sysfs`].
    pub(super) sysfs: bool,
    /// The node's `/proc`.
    pub(super) proc: BorrowedFd<'a>,
    /// The pause program.
    pub(super) image: BorrowedFd<'a>,
    /// Highest number of a descriptor that is needed after the namespaces are joined.
    pub(super) highest: c_uint,
    /// cgroup v1: the hierarchies to join, and in each the path of the cgroup's `tasks`.
    pub(super) hierarchies: Vec<BorrowedFd<'a>>,
    pub(super) tasks: CString,
    pub(super) oom_score: String,
    pub(super) hostname: &'a [u8],
    /// Path below `/proc` and value.
    pub(super) sysctls: Vec<(CString, &'a [u8])>,
    pub(super) label: &'a [u8],
    /// Number of the kernel's last capability.
    pub(super) last_capability: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    /// Second argument of the program: tells `ps` whose pause process it is.
    pub(super) id: CString,
}

/// The first child.
pub(super) extern "C" fn first(work: &PauseWork<'_>) -> ! {
    let done = enter(work).and_then(|sysfs| match &work.user {
        None => become_pause(work, sysfs.as_ref()),
        Some(user) => clone_second(work, user),
    });
    finish(work, done)
}

/// The second child: is in the pod's user namespace and made the others.
extern "C" fn second(work: &PauseWork<'_>) -> ! {
    finish(work, become_pause(work, None))
}

fn finish(work: &PauseWork<'_>, done: Result<(), Errno>) -> ! {
    work.report.report.exit(done)
}

/// Drops the node's privileges. Returns the mount that the pause process is to keep.
fn enter(work: &PauseWork<'_>) -> Result<Option<OwnedFd>, Errno> {
    let report = &work.report;
    if let Some(network) = work.network {
        report.enter(ChildStep::JoinNetwork);
        move_into_link_name_space(network, Some(LinkNameSpaceType::Network))?;
    }
    report.enter(ChildStep::JoinRoot);
    move_into_link_name_space(work.root, Some(LinkNameSpaceType::Mount))?;
    // The child shares the daemon's table until here: a copy costs time with thousands of pods.
    report.enter(ChildStep::UnshareDescriptors);
    sys::unshare_descriptors(work.highest)?;
    report.enter(ChildStep::MountSysfs);
    let sysfs = work.sysfs.then(mount_sysfs).transpose()?;
    report.enter(ChildStep::JoinCgroup);
    for (index, hierarchy) in work.hierarchies.iter().enumerate() {
        report.item(index);
        // A thread that moves itself by `tasks` does not wait for the kernel's lock around all
        // forks and exits, as one does that is moved by `cgroup.procs`; and this process has no
        // other thread.
        sys::write_file(*hierarchy, &work.tasks, b"0")?;
    }
    report.enter(ChildStep::OomScore);
    // The kernel spreads it to all processes that share the memory, but not from a vfork child.
    sys::write_file(work.proc, c"self/oom_score_adj", work.oom_score.as_bytes())?;
    report.enter(ChildStep::ClearGroups);
    set_thread_groups(&[])?;
    // It counts all processes of a user, and the pause process's user has more on most nodes: those
    // of containers with the same id.
    report.enter(ChildStep::Processes);
    lift_process_limit()?;
    Ok(sysfs)
}

/// Mounts the network's sysfs, writable, at no place. A network has one, and its first mount
/// decides whether any mount of it can be written: that of an unprivileged container cannot.
fn mount_sysfs() -> Result<OwnedFd, Errno> {
    let sysfs = fsopen(c"sysfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(sysfs.as_fd())?;
    fsmount(sysfs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
}

/// No limit of the user's processes, or the highest that this process may set.
fn lift_process_limit() -> Result<(), Errno> {
    match setrlimit(Resource::Nproc, Rlimit { current: None, maximum: None }) {
        Err(Errno::PERM) => {
            let maximum = getrlimit(Resource::Nproc).maximum;
            setrlimit(Resource::Nproc, Rlimit { current: maximum, maximum })
        }
        done => done,
    }
}

/// Sets real, effective and saved ids, of this thread alone.
fn set_ids(uid: u32, gid: u32) -> Result<(), Errno> {
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)
}

/// Empties the inheritable set, and with it the ambient one.
fn clear_inheritable() -> Result<(), Errno> {
    let sets = capabilities(None)?;
    if sets.inheritable.is_empty() {
        return Ok(());
    }
    set_capabilities(None, CapabilitySets { inheritable: CapabilitySet::empty(), ..sets })
}

/// Joins the user namespace and clones the pause process in it.
fn clone_second(work: &PauseWork<'_>, user: &User<'_>) -> Result<(), Errno> {
    let report = &work.report;
    report.enter(ChildStep::JoinUser);
    move_into_link_name_space(user.namespace, Some(LinkNameSpaceType::User))?;
    report.enter(ChildStep::BecomeRoot);
    set_ids(user.root.0, user.root.1)?;
    report.enter(ChildStep::Undumpable);
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    report.enter(ChildStep::Clone);
    let clone = sys::Clone {
        flags: work.namespaces | libc::CLONE_PARENT as u64,
        cgroup: None,
        born: Some(&report.second),
        // This child's stack is the daemon's, which would continue if this child were killed
        // now.
        stack: Some(&user.stack),
    };
    sys::clone_child(&clone, work, second).map(|(_, pidfd)| sys::close(pidfd))
}

/// The rest, up to the program, which keeps `kept` open.
fn become_pause(work: &PauseWork<'_>, kept: Option<&OwnedFd>) -> Result<(), Errno> {
    let report = &work.report;
    if !work.hostname.is_empty() {
        report.enter(ChildStep::Hostname);
        sethostname(work.hostname)?;
    }
    report.enter(ChildStep::Sysctl);
    for (index, (path, value)) in work.sysctls.iter().enumerate() {
        report.item(index);
        sys::write_file(work.proc, path, value)?;
    }
    report.enter(ChildStep::Session);
    rustix::process::setsid().map(drop)?;
    if !work.label.is_empty() {
        report.enter(ChildStep::Label);
        sys::write_file(work.proc, c"self/attr/exec", work.label)?;
    }
    report.enter(ChildStep::NoNewPrivs);
    rustix::thread::set_no_new_privs(true)?;
    report.enter(ChildStep::Bounding);
    for capability in 0..=work.last_capability {
        report.item(capability as usize);
        remove_capability_from_bounding_set(CapabilitySet::from_bits_retain(1 << capability))?;
    }
    // The permitted set is kept up to the exec, which empties it, as the uid is not 0: a process
    // without capabilities and with the uid of some container may be traced by that container, and
    // this one still shares the daemon's memory.
    report.enter(ChildStep::Capabilities);
    rustix::thread::set_keep_capabilities(true)?;
    clear_inheritable()?;
    report.enter(ChildStep::Ids);
    set_ids(work.uid, work.gid)?;
    // Other ids make the memory, which is the daemon's still, as dumpable as fs.suid_dumpable says.
    report.enter(ChildStep::Undumpable);
    set_dumpable_behavior(DumpableBehavior::NotDumpable)?;
    report.enter(ChildStep::CloseDescriptors);
    // They close at the exec, not before: the lock of the state directory is among them, and until
    // the exec no daemon would identify this process as a pause process. So the next process that
    // takes the lock finds it.
    sys::close_at_execute(0, Some(work.image))?;
    if let Some(kept) = kept {
        fcntl_setfd(kept, FdFlags::empty())?;
    }
    report.enter(ChildStep::Filter);
    sys::filter::install(&seccomp::FILTER)?;
    report.enter(ChildStep::Execute);
    Err(sys::execute(work.image, [c"/pause", &work.id]))
}

/// A descriptor's number, as close_range(2) takes it.
pub(super) fn descriptor(fd: BorrowedFd<'_>) -> c_uint {
    use std::os::fd::AsRawFd;
    fd.as_raw_fd().unsigned_abs()
}

/// Path below `/proc` of a sysctl by its dotted name.
pub(super) fn sysctl_path(name: &str) -> String {
    format!("sys/{}", name.replace('.', "/"))
}
