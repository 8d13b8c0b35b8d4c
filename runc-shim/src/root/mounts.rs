//! The root file system of a container: makes and undoes the mounts that containerd requests.

use std::fs;
use std::os::fd::AsFd as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use containerd_shim_protos::api::Mount;
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::process::chdir;

use crate::error::{Code, Context as _, Error};
use crate::root::fuse_program::FuseProgram;
use crate::root::idmap;
use crate::root::loop_device::LoopDevice;
use crate::root::overlay;

/// The kernel takes less than one page of mount data.
const PAGE_SIZE: usize = 4096;

/// Length of an overlay's mount data from which its lower directories are made relative.
const MAX_OVERLAY_DATA: usize = PAGE_SIZE - 512;

/// The mount point of the root file system in a bundle.
const ROOTFS: &str = "rootfs";

/// The parsed options of a mount.
#[derive(Debug, PartialEq, Eq)]
pub struct Options {
    /// Flags of the mount.
    pub flags: MountFlags,
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
                None if option == "loop" => parsed.has_loop = true,
                Some(("uidmap", map)) => parsed.users = Some(map.to_owned()),
                Some(("gidmap", map)) => parsed.groups = Some(map.to_owned()),
                _ => parsed.data.push(option.clone()),
            }
        }
        Ok(parsed)
    }
}

/// Checks that a mount is one that [`mount_all`] makes.
///
/// # Errors
/// The refusal.
pub fn check(mount: &Mount) -> Result<(), Error> {
    if !mount.target.is_empty() {
        // No snapshotter of containerd has one. A link of the image could lead it out of the root.
        return Err(Error::new(Code::UNIMPLEMENTED, "a mount target below the root"));
    }
    Options::parse(&mount.options).map(drop)
}

/// Makes the mounts in their order, at the root file system of a bundle. If one fails, those before
/// are undone.
pub fn mount_all(mounts: &[Mount], bundle: &Path) -> Result<(), Error> {
    let root = bundle.join(ROOTFS);
    match fs::DirBuilder::new().mode(0o711).create(&root) {
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
        other => other.context(format_args!("make directory {}", root.display()))?,
    }
    let made = mounts.iter().try_for_each(|mount| {
        mount_one(mount, &root, bundle).context(format_args!(
            "mount source {:?} at {:?}, fstype {}",
            mount.source,
            root.display(),
            mount.type_
        ))
    });
    if made.is_err() {
        // Mounts that remain are undone with the bundle.
        let _ = detach_all(&root);
    }
    made
}

fn mount_one(mount: &Mount, root: &Path, bundle: &Path) -> Result<(), Error> {
    if let Some(program) = FuseProgram::of_type(&mount.type_) {
        return program.mount(mount, root);
    }
    let mut options = Options::parse(&mount.options)?;
    let users = match (&options.users, &options.groups) {
        (Some(users), Some(groups)) => Some(idmap::user_namespace(users, groups)?),
        _ => None,
    };
    let is_overlay = mount.type_ == "overlay";
    let lower = match &users {
        // An overlay cannot be idmapped: its lower directories are.
        Some(users) if is_overlay => {
            Some(idmap::IdmappedLowerDirs::map(&mut options.data, bundle, users.as_fd())?)
        }
        _ => None,
    };
    let is_long = is_overlay && options.data.join(",").len() >= MAX_OVERLAY_DATA;
    let directory = is_long.then(|| overlay::shorten(&mut options.data)).flatten();
    // Open until the mount is made, which then keeps it.
    let device = loop_device(mount, &mut options)?;
    let source = device.as_ref().map_or(&mount.source, |device| &device.path);
    let data = options.data.join(",");
    if data.len() >= PAGE_SIZE {
        // The kernel would truncate the data.
        return Err(Error::new(Code::INVALID_ARGUMENT, "mount options is too long"));
    }
    if let Some(directory) = &directory {
        chdir(directory).context(format_args!("enter {}", directory.display()))?;
    }
    let mounted = call_mount(mount, source, &options, root, &data);
    if directory.is_some() {
        // It identifies this process to `cleanup::delete`.
        chdir(bundle).context("return to the bundle")?;
    }
    drop(lower);
    mounted?;
    if options.flags.contains(MountFlags::BIND | MountFlags::RDONLY) {
        rustix::mount::mount_remount(root, options.flags, c"").context("remount read-only")?;
    }
    if let (Some(users), false) = (&users, is_overlay) {
        idmap::mount(root, root, users.as_fd(), false)?;
    }
    Ok(())
}

/// Attaches the source of a mount to a loop device, if an option says so. `direct-io` is an option
/// of the device then.
fn loop_device(mount: &Mount, options: &mut Options) -> Result<Option<LoopDevice>, Error> {
    if !options.has_loop {
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

/// Detaches all mounts of a bundle (`MNT_DETACH`), if there are any. The kernel unmounts each file
/// system when nothing uses it any more: at once, unless a process of the node does. So neither
/// such a process nor a file system that does not answer can keep a container from being deleted.
pub fn unmount_bundle(bundle: &Path) -> Result<(), Error> {
    for name in [ROOTFS, idmap::IDMAPPED] {
        detach_all(&bundle.join(name))?;
    }
    // A place of the shim alone.
    let _ = rustix::fs::rmdir(bundle.join(idmap::IDMAPPED));
    Ok(())
}

/// Detaches all mounts at a place: they may be stacked.
fn detach_all(place: &Path) -> Result<(), Error> {
    loop {
        match rustix::mount::unmount(place, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            // Nothing is mounted there.
            Err(Errno::INVAL | Errno::NOENT) => return Ok(()),
            e => return e.context(format_args!("detach {}", place.display())),
        }
    }
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
}
