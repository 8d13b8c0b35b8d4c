//! The root file system of a container: makes and undoes the mounts that containerd requests.

use std::fs::{self, File};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use containerd_shim_protos::api::Mount;
use rustix::fs::{CWD, Mode, OFlags, RenameFlags, ResolveFlags, renameat_with};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use crate::error::{Code, Context as _, Error};
use crate::root::fuse_program::FuseProgram;
use crate::root::idmap;
use crate::root::loop_device::LoopDevice;
use crate::root::mount_copy::{PrivatePlace, mount_copy};
use crate::root::overlay;

/// The kernel takes less than one page of mount data.
const PAGE_SIZE: usize = 4096;

/// Length of an overlay's mount data from which its lower directories are made relative.
const MAX_OVERLAY_DATA: usize = PAGE_SIZE - 512;

/// Number of retries to unmount a busy mount point, and the delay before each.
const BUSY_TRIES: u32 = 50;
const BUSY_WAIT: Duration = Duration::from_millis(20);

/// Mode of the mount point in a bundle (containerd `core/runtime/v2/bundle.go`).
const ROOTFS_MODE: u32 = 0o711;

/// Number of attempts to detach a place on which another process mounts meanwhile.
const DETACH_TRIES: u32 = 8;

/// The parsed options of a mount.
#[derive(Debug, PartialEq, Eq)]
pub struct Options {
    /// Flags of the mount.
    pub flags: MountFlags,
    is_remount: bool,
    /// Options of the file system.
    pub data: Vec<String>,
    /// The source is a file, which gets a loop device.
    has_loop: bool,
    users: Option<String>,
    groups: Option<String>,
}

/// Options that set a flag, or clear it.
const FLAGS: [(&str, bool, MountFlags); 24] = [
    ("async", false, MountFlags::SYNCHRONOUS),
    ("atime", false, MountFlags::NOATIME),
    ("bind", true, MountFlags::BIND),
    ("dev", false, MountFlags::NODEV),
    ("diratime", false, MountFlags::NODIRATIME),
    ("dirsync", true, MountFlags::DIRSYNC),
    ("exec", false, MountFlags::NOEXEC),
    ("mand", true, MountFlags::PERMIT_MANDATORY_FILE_LOCKING),
    ("noatime", true, MountFlags::NOATIME),
    ("nodev", true, MountFlags::NODEV),
    ("nodiratime", true, MountFlags::NODIRATIME),
    ("noexec", true, MountFlags::NOEXEC),
    ("nomand", false, MountFlags::PERMIT_MANDATORY_FILE_LOCKING),
    ("norelatime", false, MountFlags::RELATIME),
    ("nostrictatime", false, MountFlags::STRICTATIME),
    ("nosuid", true, MountFlags::NOSUID),
    ("rbind", true, MountFlags::BIND.union(MountFlags::REC)),
    ("relatime", true, MountFlags::RELATIME),
    ("ro", true, MountFlags::RDONLY),
    ("rw", false, MountFlags::RDONLY),
    ("strictatime", true, MountFlags::STRICTATIME),
    ("suid", false, MountFlags::NOSUID),
    ("sync", true, MountFlags::SYNCHRONOUS),
    ("silent", true, MountFlags::SILENT),
];

impl Options {
    /// Parses options; a later option overrides an earlier one.
    pub fn parse(options: &[String]) -> Result<Self, Error> {
        let mut parsed = Self {
            flags: MountFlags::empty(),
            is_remount: false,
            data: Vec::new(),
            has_loop: false,
            users: None,
            groups: None,
        };
        for option in options {
            if option.starts_with("X-containerd.") {
                let message = format!(
                    "internal mount option {option:?} was not consumed by the mount manager"
                );
                return Err(Error::new(Code::INVALID_ARGUMENT, message));
            }
            if let Some((_, set, flag)) = FLAGS.iter().find(|(name, ..)| name == option) {
                parsed.flags.set(*flag, *set);
                continue;
            }
            match option.split_once('=') {
                None if option == "defaults" => {}
                None if option == "remount" => parsed.is_remount = true,
                None if option == "loop" => parsed.has_loop = true,
                Some(("uidmap", map)) => parsed.users = Some(map.to_owned()),
                Some(("gidmap", map)) => parsed.groups = Some(map.to_owned()),
                _ => parsed.data.push(option.clone()),
            }
        }
        Ok(parsed)
    }
}

/// Makes the mounts in their order, each at its target below `root`. If one fails, those before
/// are undone.
pub fn mount_all(mounts: &[Mount], root: &Path) -> Result<(), Error> {
    match fs::DirBuilder::new().mode(0o711).create(root) {
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
        other => other.context(format_args!("make directory {}", root.display()))?,
    }
    let beside = root.parent().unwrap_or(root);
    let made = mounts.iter().try_for_each(|mount| {
        mount_one(mount, root, beside).context(format_args!(
            "mount source {:?} at {:?} in {:?}, fstype {}",
            mount.source,
            mount.target,
            root.display(),
            mount.type_
        ))
    });
    if made.is_err() {
        // Mounts that remain are undone with the bundle.
        let _ = unmount_all(&[root.to_owned()]);
    }
    made
}

/// A mount target at a root or below it.
#[derive(Debug)]
struct Target {
    path: PathBuf,
    /// Keeps the descriptor open that `path` names.
    _opened: Option<OwnedFd>,
}

impl Target {
    /// Resolves `name` inside `root`: no symbolic link of the image leads out of it.
    fn find(root: &Path, name: &str) -> Result<Self, Error> {
        if name.is_empty() {
            return Ok(Self { path: root.to_owned(), _opened: None });
        }
        let root = File::open(root).context("open root")?;
        let (flags, resolve) = (OFlags::PATH | OFlags::CLOEXEC, ResolveFlags::IN_ROOT);
        let opened = rustix::fs::openat2(&root, name, flags, Mode::empty(), resolve)
            .context(format_args!("open {name:?}"))?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", opened.as_raw_fd()));
        Ok(Self { path, _opened: Some(opened) })
    }
}

/// The directory in the bundle on which a FUSE program mounts what is copied to its target then.
const PRIVATE: &str = "fuse";

fn mount_one(mount: &Mount, root: &Path, beside: &Path) -> Result<(), Error> {
    // Resolved anew for each step, so that a step finds the mount of the step before.
    let target = || Target::find(root, &mount.target);
    let mut options = Options::parse(&mount.options)?;
    if let Some(program) = FuseProgram::of_type(&mount.type_) {
        if mount.target.is_empty() {
            return program.mount(mount, root);
        }
        // The program would resolve a path in the image anew, which may lead out of the root.
        let place = PrivatePlace::make(beside, PRIVATE)?;
        program.mount(mount, &place.path)?;
        return mount_copy(&place.path, &target()?.path, |_| Ok(()));
    }
    let users = match (&options.users, &options.groups) {
        (Some(users), Some(groups)) => Some(idmap::user_namespace(users, groups)?),
        _ => None,
    };
    let is_overlay = mount.type_ == "overlay";
    let lower = match &users {
        // An overlay cannot be idmapped: its lower directories are.
        Some(users) if is_overlay => {
            Some(idmap::IdmappedLowerDirs::map(&mut options.data, beside, users.as_fd())?)
        }
        _ => None,
    };
    let mut directory = None;
    if is_overlay && options.data.join(",").len() >= MAX_OVERLAY_DATA {
        directory = overlay::shorten(&mut options.data);
    }
    // Open until the mount is made, which then keeps it.
    let device = loop_device(mount, &mut options)?;
    let source = device.as_ref().map_or(&mount.source, |device| &device.path);
    let data = options.data.join(",");
    if data.len() >= PAGE_SIZE {
        // The kernel would truncate the data.
        return Err(Error::new(Code::INVALID_ARGUMENT, "mount options is too long"));
    }
    let in_directory = directory.map(Directory::enter).transpose()?;
    let mounted = target().and_then(|at| call_mount(mount, source, &options, &at.path, &data));
    drop((in_directory, lower));
    mounted?;
    if options.flags.contains(MountFlags::BIND | MountFlags::RDONLY) {
        let flags = options.flags;
        let at = target()?;
        rustix::mount::mount_remount(&at.path, flags, c"").context("remount read-only")?;
    }
    if let (Some(users), false) = (&users, is_overlay) {
        let at = target()?;
        idmap::mount(&at.path, &at.path, users.as_fd(), false)?;
    }
    Ok(())
}

/// Attaches the source of a mount to a loop device, if an option says so. `direct-io` is an option
/// of the device then.
fn loop_device(mount: &Mount, options: &mut Options) -> Result<Option<LoopDevice>, Error> {
    if !options.has_loop || options.is_remount {
        return Ok(None);
    }
    let direct = options.data.iter().position(|option| option == "direct-io");
    let direct_io = direct.map(|at| options.data.remove(at)).is_some();
    let read_only = options.flags.contains(MountFlags::RDONLY);
    LoopDevice::attach(&mount.source, read_only, direct_io).map(Some)
}

fn call_mount(
    mount: &Mount,
    source: &str,
    options: &Options,
    target: &Path,
    data: &str,
) -> Result<(), Error> {
    if options.is_remount {
        return Ok(rustix::mount::mount_remount(target, options.flags, data)?);
    }
    let data = std::ffi::CString::new(data)
        .map_err(|_| Error::new(Code::INVALID_ARGUMENT, "a zero byte in mount options"))?;
    let made =
        rustix::mount::mount(source, target, &*mount.type_, options.flags, Some(data.as_c_str()));
    if made == Err(Errno::INVAL) && options.data.iter().any(|option| option == overlay::VOLATILE) {
        return made.context(
            "option volatile needs Linux 5.10, and directories that have not been mounted with it",
        );
    }
    Ok(made?)
}

/// Changes the working directory until it is dropped. The process must have only one thread.
#[derive(Debug)]
struct Directory(File);

impl Directory {
    fn enter(path: PathBuf) -> Result<Self, Error> {
        let before = File::open(".").context("open working directory")?;
        rustix::process::chdir(&path).context(format_args!("enter {}", path.display()))?;
        Ok(Self(before))
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        if let Err(e) = rustix::process::fchdir(&self.0) {
            crate::log::error(format_args!("return to working directory: {e}"));
        }
    }
}

/// The mount point of the root file system of a bundle.
pub fn rootfs(bundle: &Path) -> PathBuf {
    bundle.join("rootfs")
}

/// All places in a bundle on which the shim mounts.
fn mount_points(bundle: &Path) -> [PathBuf; 3] {
    [rootfs(bundle), bundle.join(idmap::IDMAPPED), bundle.join(PRIVATE)]
}

/// Undoes all mounts of a bundle, if there are any.
pub fn unmount_bundle(bundle: &Path) -> Result<(), Error> {
    unmount_all(&mount_points(bundle))
}

/// Detaches all mounts of a bundle (`MNT_DETACH`), also if their file systems do not answer, and
/// replaces the mount points, so that a mount in progress fails. The kernel unmounts each file
/// system when nothing uses it any more.
pub fn detach_bundle(bundle: &Path) -> Result<(), Error> {
    for place in mount_points(bundle) {
        let spare = place.with_extension("detached");
        for _ in 0..DETACH_TRIES {
            detach_all(&place)?;
            if replace_directory(&place, &spare)? {
                break;
            }
        }
    }
    // Places of the shim alone.
    for name in [idmap::IDMAPPED, PRIVATE] {
        let _ = rustix::fs::rmdir(bundle.join(name));
    }
    Ok(())
}

/// Replaces an empty directory by a new one in one step; false: something was mounted on it
/// meanwhile. The path exists at every moment: containerd, which may undo the same mounts at this
/// time, keeps its bundle for good when the path is missing between two of its calls.
fn replace_directory(place: &Path, spare: &Path) -> Result<bool, Error> {
    match fs::DirBuilder::new().mode(ROOTFS_MODE).create(spare) {
        Ok(()) => {}
        // A deletion that was killed has left it.
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => detach_all(spare)?,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(true),
        // Such as on a full disk.
        Err(_) => return Ok(remake_directory(place)),
    }
    let exchange = || renameat_with(CWD, place, CWD, spare, RenameFlags::EXCHANGE);
    if let Err(e) = exchange() {
        let _ = rustix::fs::rmdir(spare);
        return Ok(match e {
            Errno::BUSY => false,
            Errno::NOENT => true,
            // The file system cannot exchange names.
            _ => remake_directory(place),
        });
    }
    // A mount in progress may have reached it under its new name.
    detach_all(spare)?;
    match rustix::fs::rmdir(spare) {
        // A directory with content is not empty without the mounts, and stays.
        Err(Errno::NOTEMPTY | Errno::EXIST) => {
            exchange().context(format_args!("restore {}", place.display()))?;
            let _ = rustix::fs::rmdir(spare);
            Ok(true)
        }
        removed => Ok(removed != Err(Errno::BUSY)),
    }
}

/// The same operation in two steps.
fn remake_directory(place: &Path) -> bool {
    let removed = rustix::fs::rmdir(place);
    if removed.is_ok() {
        // It takes what the old one has freed.
        let _ = fs::DirBuilder::new().mode(ROOTFS_MODE).create(place);
    }
    removed != Err(Errno::BUSY)
}

/// Detaches all mounts at a place: they may be stacked.
fn detach_all(place: &Path) -> Result<(), Error> {
    while detach(place).context(format_args!("detach {}", place.display()))? {}
    Ok(())
}

/// Detaches the top mount at a place; false: nothing is mounted there.
fn detach(place: &Path) -> rustix::io::Result<bool> {
    match rustix::mount::unmount(place, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
        Ok(()) => Ok(true),
        Err(Errno::INVAL | Errno::NOENT) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Undoes all mounts at these roots and below.
fn unmount_all(roots: &[PathBuf]) -> Result<(), Error> {
    let mut found = Vec::new();
    for root in roots {
        // The mount table has canonical paths.
        match fs::canonicalize(root) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            other => found.push(other.context(format_args!("find {}", root.display()))?),
        }
    }
    if found.is_empty() {
        return Ok(());
    }
    let table = fs::read("/proc/self/mountinfo").context("read mounts")?;
    let mut points: Vec<PathBuf> =
        found.iter().flat_map(|root| points_below(&table, root)).collect();
    points.sort_by_key(|point| std::cmp::Reverse(point.as_os_str().len()));
    for point in points {
        unmount(&point).context(format_args!("unmount {}", point.display()))?;
    }
    Ok(())
}

fn unmount(point: &Path) -> Result<(), Error> {
    let mut tries = 0;
    loop {
        match rustix::mount::unmount(point, UnmountFlags::NOFOLLOW) {
            Ok(()) | Err(Errno::INVAL | Errno::NOENT) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::BUSY) if tries < BUSY_TRIES => {
                tries += 1;
                std::thread::sleep(BUSY_WAIT);
            }
            Err(e) => return Err(e.into()),
        }
    }
}

/// The mount points at `root` and below it in a mount table (proc_pid_mountinfo(5)).
pub fn points_below(table: &[u8], root: &Path) -> Vec<PathBuf> {
    let lines = table.split(|byte| *byte == b'\n');
    let points = lines.filter_map(|line| line.split(|byte| *byte == b' ').nth(4)).map(unescaped);
    points
        .map(|point| PathBuf::from(std::ffi::OsStr::from_bytes(&point)))
        .filter(|point| point.starts_with(root))
        .collect()
}

/// Decodes a field in which white space and backslashes are octal escapes.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, tail @ ..] = rest {
        let octal = match (first, tail) {
            (b'\\', [a, b, c, ..]) => std::str::from_utf8(&[*a, *b, *c])
                .ok()
                .and_then(|digits| u8::from_str_radix(digits, 8).ok()),
            _ => None,
        };
        bytes.push(octal.unwrap_or(*first));
        rest = if octal.is_some() { tail.get(3..).unwrap_or_default() } else { tail };
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(words: &[&str]) -> Vec<String> {
        words.iter().map(|word| (*word).to_owned()).collect()
    }

    #[test]
    fn options_are_flags_or_data() {
        let options = strings(&["rbind", "ro", "rw", "nosuid", "lowerdir=/a:/b", "index=off"]);
        let parsed = Options::parse(&options).unwrap();
        assert_eq!(parsed.flags, MountFlags::BIND | MountFlags::REC | MountFlags::NOSUID);
        assert_eq!(parsed.data, ["lowerdir=/a:/b", "index=off"]);
        let mapped = Options::parse(&strings(&["uidmap=0:1:2", "gidmap=0:3:4"])).unwrap();
        assert_eq!(mapped.users.as_deref(), Some("0:1:2"));
        assert_eq!(mapped.groups.as_deref(), Some("0:3:4"));
        let refused = Options::parse(&strings(&["X-containerd.mkdir.path=/a"])).unwrap_err();
        assert_eq!(refused.code, Code::INVALID_ARGUMENT);
    }

    #[test]
    fn mount_points_below_are_found() {
        let table =
            b"1 2 0:1 / / rw\n2 1 0:2 / /a\\040b rw\n3 1 0:3 / /a\\040b/c rw\n4 1 0:4 / /a rw\n";
        let found = points_below(table, Path::new("/a b"));
        assert_eq!(found, [Path::new("/a b"), Path::new("/a b/c")]);
    }

    #[test]
    fn a_target_stays_below_the_root() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap().join("root");
        fs::create_dir_all(root.join("etc")).unwrap();
        std::os::unix::fs::symlink("/etc", root.join("absolute")).unwrap();
        std::os::unix::fs::symlink("../../../etc", root.join("relative")).unwrap();
        let found = |name: &str| {
            Target::find(&root, name).map(|target| fs::canonicalize(&target.path).unwrap())
        };
        assert_eq!(found("").unwrap(), root);
        for name in ["etc", "/etc", "../../etc", "absolute", "relative"] {
            assert_eq!(found(name).unwrap(), root.join("etc"), "{name}");
        }
        assert!(found("none").is_err());
    }
}
