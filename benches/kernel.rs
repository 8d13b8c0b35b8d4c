//! The kernel's time for a native Start and Stop: the same steps as straight-line code in one
//! thread, without a daemon, a call, or anything that is kept for later.
//!
//! The steps: shared memory mounted, three files, the pod's cgroup in every hierarchy, a clone with
//! the namespaces that joins the pod's network, the empty root and the cgroups, sets what a pause
//! is confined by and executes the pause program, and a record replaced by rename.

// A bench needs what the daemon has in `src/sys/mod.rs`; each block says why it is sound.
#![allow(unsafe_code)]

use std::ffi::{CString, c_int, c_void};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kit::machine::cgroup::hierarchies;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use pause_sandboxer::pause::binary;

use crate::setup::Setup;

/// The parts of a Start, in their order.
pub(crate) const PARTS: [&str; 6] =
    ["shm", "files", "cgroup", "network_open", "clone_to_exec", "record"];

/// How long each part took, and Stop.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Straight {
    pub(crate) parts: [Duration; PARTS.len()],
    pub(crate) stop: Duration,
}

impl Straight {
    pub(crate) fn start(&self) -> Duration {
        self.parts.iter().sum()
    }
}

/// The objects that all runs share.
#[derive(Clone, Debug)]
pub(crate) struct Steps(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    base: PathBuf,
    /// Where the pods' files go: on the file system of containerd's root, as CRI wants them.
    files: PathBuf,
    /// The pod's cgroup in every hierarchy, and whether that takes CPUs before it takes a process,
    /// or a weight.
    cgroups: Vec<Hierarchy>,
    image: OwnedFd,
    root: OwnedFd,
    oom_score: String,
    next: AtomicU64,
    last_capability: usize,
}

#[derive(Debug)]
struct Hierarchy {
    parent: PathBuf,
    cpuset: Option<[Vec<u8>; 2]>,
    shares: bool,
    /// `tasks` of version 1, `cgroup.procs` of version 2.
    members: &'static str,
}

/// The child's input.
struct Work<'a> {
    network: RawFd,
    root: RawFd,
    image: RawFd,
    members: &'a [CString],
    oom_score: &'a [u8],
    last_capability: usize,
    failed: AtomicI32,
}

impl Steps {
    /// A directory and a pod's cgroup for them.
    pub(crate) fn prepare(setup: &Setup, name: &str) -> Result<Self> {
        let home = setup.home(&format!("kernel-{name}"))?;
        let pod = home.cgroup().context("the pod has a cgroup")?.trim_start_matches('/').to_owned();
        let base = setup.node.layout().state().join(format!("bench-kernel-{name}"));
        fs::create_dir_all(&base)?;
        let files = setup.node.layout().root().join(format!("bench-kernel-{name}"));
        fs::create_dir_all(&files)?;
        let mut roots = hierarchies()?;
        let version_1 = |root: &PathBuf| root.join("tasks").exists();
        if roots.iter().any(version_1) {
            roots.retain(version_1);
        }
        let cgroups =
            roots.into_iter().map(|root| Hierarchy::of(root.join(&pod))).collect::<Result<_>>()?;
        let own = fs::read_to_string("/proc/self/oom_score_adj")?;
        let last = fs::read_to_string("/proc/sys/kernel/cap_last_cap")?;
        Ok(Self(Arc::new(Shared {
            cgroups,
            image: program()?,
            root: empty_root(&base)?,
            base,
            files,
            oom_score: own.trim().to_owned(),
            next: AtomicU64::new(0),
            last_capability: last.trim().parse()?,
        })))
    }

    /// One pause from its start to its end.
    pub(crate) fn cycle(&self, network: &str) -> Result<Straight> {
        self.0.cycle(Path::new(network))
    }
}

impl Hierarchy {
    fn of(parent: PathBuf) -> Result<Self> {
        let cpuset = parent.join("cpuset.cpus").exists() && parent.join("tasks").exists();
        let read = |file: &str| {
            fs::read(parent.join(file))
                .with_context(|| format!("read {file} of {}", parent.display()))
        };
        Ok(Self {
            cpuset: if cpuset { Some([read("cpuset.cpus")?, read("cpuset.mems")?]) } else { None },
            shares: parent.join("cpu.shares").exists(),
            members: if parent.join("tasks").exists() { "tasks" } else { "cgroup.procs" },
            parent,
        })
    }

    fn make(&self, name: &str) -> Result<()> {
        let leaf = self.parent.join(name);
        fs::create_dir(&leaf).with_context(|| format!("make {}", leaf.display()))?;
        if self.shares {
            put(&leaf.join("cpu.shares"), b"2")?;
        }
        if let Some([cpus, mems]) = &self.cpuset {
            put(&leaf.join("cpuset.cpus"), cpus)?;
            put(&leaf.join("cpuset.mems"), mems)?;
        }
        Ok(())
    }
}

fn put(path: &Path, value: &[u8]) -> Result<()> {
    let written = File::options().write(true).open(path).and_then(|mut file| file.write_all(value));
    written.with_context(|| format!("write {}", path.display()))
}

impl Shared {
    fn cycle(&self, network: &Path) -> Result<Straight> {
        let name = format!("{:064x}", self.next.fetch_add(1, Relaxed));
        let dir = self.base.join(&name);
        let mut parts = [Duration::ZERO; PARTS.len()];
        let mut now = Instant::now();
        let mut lap = |part: usize| {
            parts[part] = now.elapsed();
            now = Instant::now();
        };
        fs::create_dir(&dir)?;
        let shm = dir.join("shm");
        fs::create_dir(&shm)?;
        let flags = MsFlags::MS_NOEXEC | MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        mount(Some("shm"), &shm, Some("tmpfs"), flags, Some("mode=1777,size=67108864"))?;
        lap(0);
        let root = self.files.join(&name);
        fs::create_dir(&root)?;
        fs::write(root.join("hostname"), "bench\n")?;
        fs::write(root.join("hosts"), "127.0.0.1 localhost\n::1 localhost\n")?;
        fs::write(root.join("resolv.conf"), "nameserver 10.0.0.10\nsearch svc.cluster.local\n")?;
        lap(1);
        for hierarchy in &self.cgroups {
            hierarchy.make(&name)?;
        }
        lap(2);
        let network = File::open(network)?;
        lap(3);
        let members: Vec<CString> = self
            .cgroups
            .iter()
            .map(|h| {
                CString::new(
                    h.parent.join(&name).join(h.members).into_os_string().into_encoded_bytes(),
                )
            })
            .collect::<Result<_, _>>()?;
        let work = Work {
            network: network.as_raw_fd(),
            root: self.root.as_raw_fd(),
            image: self.image.as_raw_fd(),
            members: &members,
            oom_score: self.oom_score.as_bytes(),
            last_capability: self.last_capability,
            failed: AtomicI32::new(0),
        };
        let (pid, pidfd) = clone(&work)?;
        let failed = work.failed.load(Relaxed);
        ensure!(
            failed == 0,
            "step {} of the child: {}",
            failed >> 16,
            io::Error::from_raw_os_error(failed & 0xffff)
        );
        lap(4);
        let record = format!(
            "{{\"id\":\"{name}\",\"pid\":{pid},\"start_time\":123456,\"boot_id\":\"{:036}\"}}",
            0
        );
        fs::write(dir.join("stage.json.new"), record)?;
        fs::rename(dir.join("stage.json.new"), dir.join("stage.json"))?;
        lap(5);
        let begun = Instant::now();
        self.end(&dir, &pidfd)?;
        for hierarchy in &self.cgroups {
            fs::remove_dir(hierarchy.parent.join(&name))?;
        }
        let stop = begun.elapsed();
        fs::remove_dir_all(&dir)?;
        fs::remove_dir_all(&root)?;
        Ok(Straight { parts, stop })
    }

    /// Kills and reaps the pause and unmounts the shared memory.
    fn end(&self, dir: &Path, pidfd: &OwnedFd) -> Result<()> {
        let mut info = [0_u64; 16];
        // SAFETY: a null siginfo is allowed; waitid(2) writes a siginfo_t of 128 bytes, as `info`
        // has.
        let (killed, reaped) = unsafe {
            let null = std::ptr::null::<c_void>();
            (
                libc::syscall(
                    libc::SYS_pidfd_send_signal,
                    pidfd.as_raw_fd(),
                    libc::SIGKILL,
                    null,
                    0,
                ),
                libc::syscall(
                    libc::SYS_waitid,
                    libc::P_PIDFD,
                    pidfd.as_raw_fd(),
                    info.as_mut_ptr(),
                    libc::WEXITED,
                    null,
                ),
            )
        };
        ensure!(
            killed == 0 && reaped == 0,
            "kill and reap a pause: {}",
            io::Error::last_os_error()
        );
        Ok(umount2(&dir.join("shm"), MntFlags::MNT_DETACH)?)
    }
}

/// The pause program in a memfd that is open for reading alone: what is open for writing cannot be
/// executed.
fn program() -> Result<OwnedFd> {
    // SAFETY: the name ends in NUL; the descriptor is new.
    let mut file =
        unsafe { File::from_raw_fd(libc::memfd_create(c"pause".as_ptr(), libc::MFD_CLOEXEC)) };
    file.write_all(binary::PROGRAM)?;
    file.set_permissions(fs::Permissions::from_mode(0o511))?;
    Ok(File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))?.into())
}

/// A mount namespace with an empty read-only root, made by a thread that is thrown away.
fn empty_root(base: &Path) -> Result<OwnedFd> {
    let place = base.join("empty");
    fs::create_dir(&place)?;
    let made = std::thread::spawn(move || -> Result<OwnedFd> {
        let none = None::<&str>;
        unshare(CloneFlags::CLONE_FS | CloneFlags::CLONE_NEWNS)?;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
        mount(Some("empty"), &place, Some("tmpfs"), MsFlags::MS_RDONLY, Some("size=4k,mode=555"))?;
        let namespace = File::open("/proc/thread-self/ns/mnt")?;
        std::env::set_current_dir(&place)?;
        nix::unistd::pivot_root(".", ".")?;
        umount2(".", MntFlags::MNT_DETACH)?;
        Ok(namespace.into())
    });
    made.join().map_err(|_| anyhow::anyhow!("the thread panicked"))?
}

/// clone(2), as vfork(2): returns when the child has executed its program or has failed.
fn clone(work: &Work<'_>) -> Result<(c_int, OwnedFd)> {
    const STACK: usize = 64 << 10;
    let mut stack = Vec::<u128>::with_capacity(STACK / size_of::<u128>());
    let flags = libc::CLONE_VM
        | libc::CLONE_VFORK
        | libc::CLONE_PIDFD
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWUTS
        | libc::SIGCHLD;
    let mut pidfd: RawFd = -1;
    // SAFETY: the stack grows down from its end and lives, as `work` does, until the child has left
    // this memory (CLONE_VFORK). The child makes system calls only.
    let pid = unsafe {
        let top = stack.as_mut_ptr().add(STACK / size_of::<u128>());
        libc::clone(
            child,
            top.cast(),
            flags,
            std::ptr::from_ref(work).cast_mut().cast(),
            &raw mut pidfd,
        )
    };
    ensure!(pid > 0, "clone: {}", io::Error::last_os_error());
    // SAFETY: the kernel has just made it.
    Ok((pid, unsafe { OwnedFd::from_raw_fd(pidfd) }))
}

extern "C" fn child(work: *mut c_void) -> c_int {
    // SAFETY: `clone` passes a `Work` that stands still until this process has ended or executed.
    let work = unsafe { &*work.cast::<Work<'_>>() };
    // SAFETY: as each step says.
    let failed = unsafe { steps(work) };
    // SAFETY: the C library's own error number is this thread's of the parent, which waits.
    work.failed.store(failed << 16 | unsafe { *libc::__errno_location() }, Relaxed);
    // SAFETY: no pointers.
    unsafe { libc::_exit(1) }
}

/// The system calls of a pause process.
const CALLS: [libc::c_long; 6] = [
    libc::SYS_execveat,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_wait4,
    libc::SYS_prctl,
    libc::SYS_exit_group,
];

/// A classic BPF filter that allows the calls of a pause process; any other call kills it. It does
/// not allocate.
fn filter() -> [libc::sock_filter; 2 + CALLS.len() + 1] {
    let instruction =
        |code: u32, jt: u8, jf: u8, k: u32| libc::sock_filter { code: code as u16, jt, jf, k };
    let mut filter = [instruction(0, 0, 0, 0); 2 + CALLS.len() + 1];
    filter[0] = instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0);
    for (index, call) in CALLS.iter().enumerate() {
        let jump = (CALLS.len() - index) as u8;
        filter[1 + index] =
            instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, jump, 0, *call as u32);
    }
    filter[1 + CALLS.len()] =
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_KILL_PROCESS);
    filter[2 + CALLS.len()] =
        instruction(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW);
    filter
}

/// Confines itself and executes the program; the number of the step that failed.
///
/// # Safety
/// For a child of [`clone`] alone, which shares the parent's memory: nothing here allocates, and
/// ids are set by bare system calls, as the C library's would set them for all of the parent's
/// threads.
unsafe fn steps(work: &Work<'_>) -> c_int {
    let write = |path: *const libc::c_char, value: &[u8]| {
        // SAFETY: the path ends in NUL; pointer and length are a slice's.
        unsafe {
            let file = libc::open(path, libc::O_WRONLY | libc::O_CLOEXEC);
            file >= 0 && libc::write(file, value.as_ptr().cast(), value.len()) >= 0
        }
    };
    let mut filter = filter();
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    let arguments = [c"/pause".as_ptr(), std::ptr::null()];
    let environment = [std::ptr::null::<libc::c_char>()];
    // SAFETY: strings end in NUL, lists in null, and all outlive the calls; descriptors are open.
    unsafe {
        if libc::setns(work.network, libc::CLONE_NEWNET) != 0 {
            return 1;
        }
        let oom =
            libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if libc::write(oom, work.oom_score.as_ptr().cast(), work.oom_score.len()) < 0 {
            return 2;
        }
        for path in work.members {
            if !write(path.as_ptr(), b"0") {
                return 3;
            }
        }
        for (path, value) in [
            (c"/proc/sys/net/ipv4/ip_unprivileged_port_start", b"0".as_slice()),
            (c"/proc/sys/net/ipv4/ping_group_range", b"0 2147483647"),
        ] {
            if !write(path.as_ptr(), value) {
                return 4;
            }
        }
        if libc::setns(work.root, libc::CLONE_NEWNS) != 0 {
            return 5;
        }
        if libc::sethostname(c"bench".as_ptr(), 5) != 0 || libc::setsid() < 0 {
            return 6;
        }
        if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 {
            return 7;
        }
        for capability in 0..=work.last_capability {
            if libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) != 0 {
                return 8;
            }
        }
        if libc::syscall(libc::SYS_setgroups, 0, 0) != 0
            || libc::syscall(libc::SYS_setresgid, 65535, 65535, 65535) != 0
            || libc::syscall(libc::SYS_setresuid, 65535, 65535, 65535) != 0
        {
            return 9;
        }
        if libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program)
            != 0
        {
            return 10;
        }
        let (arguments, environment) = (arguments.as_ptr(), environment.as_ptr());
        libc::syscall(
            libc::SYS_execveat,
            work.image,
            c"".as_ptr(),
            arguments,
            environment,
            libc::AT_EMPTY_PATH,
        );
        11
    }
}
