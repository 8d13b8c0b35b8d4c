//! hostname, hosts, resolv.conf and shared memory of a sandbox, where CRI looks for them.
//!
//! CRI bind-mounts them into containers and never makes them. When containerd restarts it deletes
//! them, unmounting the shared memory first, because it knows no pause container of that id. So the
//! tmpfs is held by a mount of our own, and [`SandboxFiles::restore`] puts all of it back, the same
//! tmpfs included.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::layout::Layout;
use crate::config::Size;
use crate::error::{IoContext as _, StepError, StepErrors, gone};
use crate::id::SandboxId;
use crate::replace_file::replace_file;

/// Mounts stacked on one place beyond this are not ours to loop over.
const MOST_STACKED: usize = 16;

/// The files by CRI's names.
const NAMES: [&str; 3] = ["hostname", "hosts", "resolv.conf"];

/// An empty file whose mtime is later than its creation time by more than this was emptied by a
/// container, and was not left empty by the daemon.
const MADE_WITHIN: Duration = Duration::from_secs(1);

/// The contents of a sandbox's files, from the CRI config.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Files {
    /// Content of `hostname`; empty: the node's.
    pub hostname: String,
    /// CRI `dns_config`; `None`: a copy of the node's resolv.conf.
    pub dns: Option<Dns>,
    /// The pod has shared memory of its own; otherwise it uses the node's /dev/shm.
    pub shm: bool,
    /// The size of that.
    #[serde(default = "default_shm_size")]
    pub shm_size: Size,
}

/// The size in records without one.
fn default_shm_size() -> Size {
    Size::SHM
}

/// CRI `DNSConfig`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dns {
    /// Name servers, one line each.
    pub servers: Vec<String>,
    /// Search domains, one line in all.
    pub searches: Vec<String>,
    /// Resolver options, one line in all.
    pub options: Vec<String>,
}

impl Dns {
    /// The content of resolv.conf (resolv.conf(5)); empty where nothing is given.
    pub fn resolv_conf(&self) -> String {
        let mut text = String::new();
        let mut line = |keyword: &str, values: &str| {
            text.push_str(keyword);
            text.push(' ');
            text.push_str(values);
            text.push('\n');
        };
        if !self.searches.is_empty() {
            line("search", &self.searches.join(" "));
        }
        for server in &self.servers {
            line("nameserver", server);
        }
        if !self.options.is_empty() {
            line("options", &self.options.join(" "));
        }
        text
    }
}

/// Where the files of one sandbox are. A lock serializes their changes. The paths are made when
/// they are needed: thousands of sandboxes would keep them for nothing.
#[derive(Debug)]
pub struct SandboxFiles {
    layout: Arc<Layout>,
    id: SandboxId,
    /// Set once the shared memory was released: nothing is restored any more.
    released: Mutex<bool>,
}

impl SandboxFiles {
    /// The places of `id`.
    pub fn new(layout: &Arc<Layout>, id: &SandboxId) -> Self {
        Self { layout: Arc::clone(layout), id: id.clone(), released: Mutex::new(false) }
    }

    /// hostname, hosts, resolv.conf.
    fn root(&self) -> PathBuf {
        self.layout.root.join(self.id.as_str())
    }

    /// Parent of the shared memory that CRI mounts.
    fn volatile(&self) -> PathBuf {
        self.layout.volatile.join(self.id.as_str())
    }

    /// The mount that holds the tmpfs, in the sandbox's record directory.
    fn held_shm(&self) -> PathBuf {
        self.layout.sandbox(&self.id).join("shm")
    }

    /// Where CRI takes /dev/shm of the pod's containers from.
    pub fn shm(&self) -> PathBuf {
        self.volatile().join("shm")
    }

    /// Where CRI takes a file of /etc from: hostname, hosts or resolv.conf.
    pub fn etc(&self, name: &str) -> PathBuf {
        self.root().join(name)
    }

    /// A start job has been here: see [`SandboxFiles::begin`].
    pub fn begun(&self) -> bool {
        self.held_shm().exists()
    }

    /// Leaves a sign, first of all, that a start job has been here: recovery looks for it.
    ///
    /// # Errors
    /// The failed step.
    pub fn begin(&self) -> Result<(), StepError> {
        *self.released.lock() = false;
        make_dir(&self.held_shm(), 0o700)
    }

    /// Makes everything, after [`SandboxFiles::begin`]; the shared memory gets that SELinux label,
    /// unless it is empty.
    ///
    /// # Errors
    /// The failed step; call [`SandboxFiles::remove`] then.
    pub fn make_all(&self, files: &Files, label: &str) -> Result<(), StepError> {
        let _guard = self.released.lock();
        self.make_shm(files, label)?;
        self.write_all(files)
    }

    /// Restores files that were deleted while the sandbox lives; true if there were some. Asks the
    /// system only a few questions if all exist, and calls `files` only to write one. `shm`: the
    /// pod has shared memory of its own.
    ///
    /// # Errors
    /// Every step that failed; the other files are restored.
    pub fn restore(
        &self,
        shm: bool,
        files: impl FnOnce() -> Result<Files, StepError>,
    ) -> Result<bool, StepErrors> {
        let released = self.released.lock();
        if *released {
            return Ok(false);
        }
        let mut errors = StepErrors::default();
        let mut restored = self.restore_files(files, &mut errors);
        if shm {
            match self.shm_in_place() {
                Ok(true) => {}
                Ok(false) => match self.bind_shm() {
                    Ok(()) => restored = true,
                    Err(step) => errors.check(Err(step)),
                },
                Err(step) => errors.check(Err(step)),
            }
        }
        errors.into_result().map(|()| restored)
    }

    /// Containers have the files mounted and may change them: only one that is missing, or was
    /// never written to its end, gets another inode.
    fn restore_files(
        &self,
        files: impl FnOnce() -> Result<Files, StepError>,
        errors: &mut StepErrors,
    ) -> bool {
        let root = self.root();
        let gone: Vec<&str> =
            NAMES.into_iter().filter(|name| !is_written(&root.join(name))).collect();
        if gone.is_empty() {
            return false;
        }
        let files = match make_dirs(&root, 0o755).and_then(|()| files()) {
            Ok(files) => files,
            Err(step) => {
                errors.check(Err(step));
                return false;
            }
        };
        let mut restored = false;
        for name in gone {
            let path = root.join(name);
            match content(&files, name) {
                // The file is empty, as wanted.
                Ok(content) if content.is_empty() && path.exists() => {}
                Ok(content) => match replace_file(&path, 0o666, &content) {
                    Ok(()) => restored = true,
                    Err(step) => errors.check(Err(step)),
                },
                Err(step) => errors.check(Err(step)),
            }
        }
        restored
    }

    /// Unmounts the shared memory. Gone already is success.
    ///
    /// # Errors
    /// Every step that failed.
    pub fn release_shm(&self) -> Result<(), StepErrors> {
        let mut released = self.released.lock();
        *released = true;
        let mounts = [self.shm(), self.held_shm()];
        mounts.iter().filter_map(|path| unmount(path).err()).collect::<StepErrors>().into_result()
    }

    /// Removes everything. Gone already is success.
    ///
    /// # Errors
    /// Every step that failed.
    pub fn remove(&self) -> Result<(), StepErrors> {
        // Nothing below may be a mount when directories are removed with their contents.
        self.release_shm()?;
        let mut errors = StepErrors::default();
        for dir in [self.volatile(), self.root()] {
            errors.check(gone(fs::remove_dir_all(&dir)).step_at("remove directory", dir));
        }
        let held = self.held_shm();
        errors.check(gone(fs::remove_dir(&held)).step_at("remove directory", held));
        errors.into_result()
    }

    fn make_shm(&self, files: &Files, label: &str) -> Result<(), StepError> {
        if !files.shm {
            return fs::metadata("/dev/shm")
                .map(drop)
                .step_at("find the node's shared memory", "/dev/shm");
        }
        let (held, flags) =
            (self.held_shm(), MsFlags::MS_NOEXEC | MsFlags::MS_NOSUID | MsFlags::MS_NODEV);
        mount(
            Some("shm"),
            &held,
            Some("tmpfs"),
            flags,
            Some(shm_options(files.shm_size, label).as_str()),
        )
        .step_at("mount shared memory", &held)?;
        self.bind_shm()
    }

    fn bind_shm(&self) -> Result<(), StepError> {
        let shm = self.shm();
        make_dirs(&self.volatile(), 0o755)?;
        make_dir(&shm, 0o700)?;
        mount(Some(&self.held_shm()), &shm, None::<&str>, MsFlags::MS_BIND, None::<&str>)
            .step_at("bind shared memory", &shm)
    }

    fn shm_in_place(&self) -> Result<bool, StepError> {
        let held = self.held_shm();
        let held = fs::metadata(&held).step_at("find shared memory", held)?;
        match fs::metadata(self.shm()) {
            Ok(seen) => Ok(seen.dev() == held.dev()),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(StepError::at("find shared memory", self.shm(), e)),
        }
    }

    /// Writes in place: an interrupted start is removed altogether.
    fn write_all(&self, files: &Files) -> Result<(), StepError> {
        make_dirs(&self.root(), 0o755)?;
        for name in NAMES {
            let path = self.root().join(name);
            fs::write(&path, content(files, name)?).step_at("write file", path)?;
        }
        Ok(())
    }
}

/// The content of the file of that name.
fn content(files: &Files, name: &str) -> Result<Vec<u8>, StepError> {
    match name {
        "hostname" => {
            let hostname =
                if files.hostname.is_empty() { node_hostname()? } else { files.hostname.clone() };
            Ok(format!("{hostname}\n").into())
        }
        "hosts" => fs::read("/etc/hosts").step_at("read the node's hosts", "/etc/hosts"),
        _ => match &files.dns {
            Some(dns) => Ok(dns.resolv_conf().into()),
            None => fs::read("/etc/resolv.conf")
                .step_at("read the node's resolv.conf", "/etc/resolv.conf"),
        },
    }
}

/// Whether a file is there and was written to its end. A daemon that wrote in place may have left
/// an empty one, on a full disk or because it was killed; one that is empty because a container
/// emptied it was changed later than it was made.
fn is_written(path: &Path) -> bool {
    let Ok(file) = fs::metadata(path) else { return false };
    let changed =
        || Some(file.modified().ok()?.duration_since(file.created().ok()?).ok()? > MADE_WITHIN);
    file.len() > 0 || changed().unwrap_or(false)
}

/// `rootcontext`, not `context`: containerd sets the label of what it mounts into each container
/// once more, which the latter would refuse.
fn shm_options(size: Size, label: &str) -> String {
    let options = format!("mode=1777,size={}", size.bytes());
    match label {
        "" => options,
        // Quoted, for a level has commas.
        label => format!("{options},rootcontext=\"{label}\""),
    }
}

fn make_dirs(dir: &Path, mode: u32) -> Result<(), StepError> {
    fs::DirBuilder::new().recursive(true).mode(mode).create(dir).step_at("make directory", dir)
}

/// Makes one directory, unless it is there.
fn make_dir(dir: &Path, mode: u32) -> Result<(), StepError> {
    match fs::DirBuilder::new().mode(mode).create(dir) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other.step_at("make directory", dir),
    }
}

fn node_hostname() -> Result<String, StepError> {
    let name = nix::unistd::gethostname().step("ask for the node's hostname")?;
    Ok(name.to_string_lossy().into_owned())
}

/// Unmounts all that is mounted on `path`, lazily, so that a user of it cannot hold it up.
fn unmount(path: &Path) -> Result<(), StepError> {
    for _ in 0..MOST_STACKED {
        match umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) => {}
            // It is no mount point any more, or does not exist.
            Err(nix::Error::EINVAL | nix::Error::ENOENT | nix::Error::ENOTDIR) => return Ok(()),
            Err(e) => return Err(StepError::at("unmount shared memory", path, e.into())),
        }
    }
    Err(StepError::at(
        "unmount shared memory",
        path,
        io::Error::other(format!("gave up after {MOST_STACKED} unmounts")),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resolv_conf_has_the_lines_of_the_config() {
        let strings = |v: &[&str]| v.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>();
        let dns = Dns {
            servers: strings(&["10.0.0.10", "fd00::10"]),
            searches: strings(&["ns.svc.cluster.local", "cluster.local"]),
            options: strings(&["ndots:5", "edns0"]),
        };
        let text = "search ns.svc.cluster.local cluster.local\nnameserver 10.0.0.10\n\
            nameserver fd00::10\noptions ndots:5 edns0\n";
        assert_eq!(dns.resolv_conf(), text);
        assert_eq!(Dns::default().resolv_conf(), "");
        assert_eq!(
            Dns { options: strings(&["ndots:1"]), ..Dns::default() }.resolv_conf(),
            "options ndots:1\n"
        );
    }
}
