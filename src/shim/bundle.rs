//! The directory of a shim that the daemon starts: the files that the shim reads, and the daemon's
//! record of the shim.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, symlink};
use std::path::{Path, PathBuf};

use containerd_shim_protos::shim::oci::Options;
use serde::{Deserialize, Serialize};

use super::log as shim_log;
use crate::error::{IoContext as _, StepError, gone};
use crate::process::Identity;
use crate::replace_file::replace_file;

/// Suffix of the name of a file that is not complete yet.
pub const NEW: &str = ".new";

const RECORD: &str = "shim.json";
const DEATH: &str = "death";
const CONFIG: &str = "config.json";
const OPTIONS: &str = "options.json";

/// See [`Bundle::make_deletion_bundle`]; `runc-shim/src/cleanup.rs` has the same name.
const CONTAINERDS: &str = "containerd";

/// Suffix of a shim's note that it is creating a container; `runc-shim/src/container/create.rs` has
/// the same one.
const CREATING: &str = ".creating";

/// The record of the shim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recorded {
    /// It is about to be launched, or has been just now.
    Launching,
    /// It runs, as far as the record knows.
    Running {
        /// Its identity.
        identity: Identity,
        /// The cookie of the socket that it was handed; `None`: it could not be read.
        socket: Option<u64>,
    },
}

/// The directory; made with the first shim.
#[derive(Debug)]
pub struct Bundle {
    dir: PathBuf,
}

impl Bundle {
    /// The bundle in `dir`, which need not exist.
    pub fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The fifo that the shim writes its log to.
    pub fn log(&self) -> PathBuf {
        self.dir.join("log")
    }

    /// Makes the directory with all that a shim of sandbox `id` looks for.
    ///
    /// # Errors
    /// The failed step.
    pub fn make_bundle(&self, id: &str) -> Result<(), StepError> {
        match fs::DirBuilder::new().mode(0o700).create(&self.dir) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            other => other.step_at("make directory", &self.dir)?,
        }
        // Shims look for the group that they serve; the containers' own bundles tell the rest.
        let spec = serde_json::json!({
            "ociVersion": "1.2.0",
            "annotations": {
                "io.kubernetes.cri.container-type": "sandbox",
                "io.kubernetes.cri.sandbox-id": id,
            },
        });
        self.replace(CONFIG, spec.to_string().as_bytes())?;
        shim_log::make_fifo(&self.log())
    }

    /// The record of the shim; `None`: there is no shim. A record that makes no sense says no more
    /// than that of an interrupted launch.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn recorded(&self) -> Result<Option<Recorded>, StepError> {
        let path = self.dir.join(RECORD);
        match fs::read(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(StepError::at("read record of shim", path, e)),
            Ok(text) => Ok(Some(serde_json::from_slice(&text).unwrap_or_else(|e| {
                log::warn!("invalid record {} of shim; searching for it: {e}", path.display());
                Recorded::Launching
            }))),
        }
    }

    /// Records the shim; `None`: there is none any more.
    ///
    /// # Errors
    /// The failed step.
    pub fn record(&self, recorded: Option<&Recorded>) -> Result<(), StepError> {
        match recorded {
            Some(recorded) => {
                let text = serde_json::to_vec(recorded)
                    .map_err(io::Error::other)
                    .step("encode record of shim")?;
                self.replace(RECORD, &text)
            }
            None => {
                let path = self.dir.join(RECORD);
                gone(fs::remove_file(&path)).step_at("remove record of shim", path)
            }
        }
    }

    /// Records why the shim died with containers in it.
    ///
    /// # Errors
    /// The failed step.
    pub fn record_death(&self, reason: &str) -> Result<(), StepError> {
        self.replace(DEATH, reason.as_bytes())
    }

    /// Why the shim died with containers in it, if it did.
    pub fn death(&self) -> Option<String> {
        fs::read_to_string(self.dir.join(DEATH)).ok()
    }

    /// The ids of the containers that an own shim was creating when it died.
    ///
    /// # Errors
    /// The directory cannot be read; there is none: no containers.
    pub fn creating(&self) -> Result<Vec<String>, StepError> {
        let entries = match fs::read_dir(&self.dir) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.step_at("read directory", &self.dir)?,
        };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        Ok(names.filter_map(|name| name.strip_suffix(CREATING).map(str::to_owned)).collect())
    }

    /// Removes the note of a creation, if there is one: nothing is left of the container.
    ///
    /// # Errors
    /// The failed step.
    pub fn clear_creating(&self, id: &str) -> Result<(), StepError> {
        let note = self.note(id);
        gone(fs::remove_file(&note)).step_at("remove note of creation", note)
    }

    fn note(&self, id: &str) -> PathBuf {
        self.dir.join(format!("{id}{CREATING}"))
    }

    /// Makes a bundle in which the shim's `delete` finds what it needs to end container `id`: the
    /// container's own is containerd's, which removes it at any moment. runc's shim looks for
    /// runc's options in two files (`runc.ReadOptions`, `runc.ReadRuntime`). Our own looks for the
    /// cgroup in the container's config, which is copied from `containerds` bundle, or else from
    /// the note of the container's creation, and follows a link to that bundle for commands of the
    /// runtime and mounts that the dead shim has left.
    ///
    /// The deletion may be what frees space: a file for which there is none is a link to that of
    /// containerd's bundle, because a short link takes no space of a tmpfs. Without space for the
    /// directory or a link, it is containerd's bundle itself, which containerd's own deletion uses.
    ///
    /// # Errors
    /// The failed step.
    pub fn make_deletion_bundle(
        &self,
        id: &str,
        options: Option<&Options>,
        containerds: &Path,
    ) -> Result<PathBuf, StepError> {
        let made = self.try_make_deletion_bundle(id, options, containerds);
        made.or_else(|step| match Self::has_options(containerds) {
            true => {
                log::warn!("deleting container {id} in containerd's bundle: {step}");
                Ok(containerds.to_owned())
            }
            false => Err(step),
        })
    }

    /// Whether a shim has begun to create the container of containerd's bundle.
    pub fn has_options(containerds: &Path) -> bool {
        containerds.join(OPTIONS).exists()
    }

    fn try_make_deletion_bundle(
        &self,
        id: &str,
        options: Option<&Options>,
        containerds: &Path,
    ) -> Result<PathBuf, StepError> {
        let dir = self.dir.join("dead").join(id);
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&dir)
            .step_at("make directory", &dir)?;
        let link = dir.join(CONTAINERDS);
        match symlink(containerds, &link) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            made => made.step_at("make link", &link)?,
        }
        Self::write_runtime(&dir, options)?;
        // It names the cgroup. containerd may have removed it.
        if let Ok(config) = fs::read(containerds.join(CONFIG)).or_else(|_| fs::read(self.note(id)))
            && let Err(step) = write_new(&dir.join(CONFIG), &config)
            && !link_to_containerds(&dir, CONFIG)
        {
            log::warn!("deleting container {id} without its config: {step}");
        }
        Ok(dir)
    }

    /// Writes the files by which runc's shim finds its runtime into a bundle. Where that fails, a
    /// file is a link to that of containerd's bundle, see [`Bundle::make_deletion_bundle`]; without
    /// such a file it is left out if the options are the default ones, which a shim then takes.
    ///
    /// # Errors
    /// The failed step.
    fn write_runtime(dir: &Path, options: Option<&Options>) -> Result<(), StepError> {
        if let Some(options) = options {
            let json = serde_json::json!({
                "binary_name": options.binary_name,
                "root": options.root,
                "systemd_cgroup": options.systemd_cgroup,
            });
            for (name, content) in
                [(OPTIONS, json.to_string()), ("runtime", options.binary_name.clone())]
            {
                let Err(step) = write_new(&dir.join(name), content.as_bytes()) else { continue };
                let is_default = options.binary_name.is_empty() && options.root.is_empty();
                if !link_to_containerds(dir, name) && !is_default {
                    return Err(step);
                }
                log::warn!(
                    "using the runtime options of containerd's bundle, or the default ones: {step}"
                );
            }
        }
        Ok(())
    }

    /// Removes the directory. Gone already is success.
    ///
    /// # Errors
    /// The failed step.
    pub fn remove(&self) -> Result<(), StepError> {
        gone(fs::remove_dir_all(&self.dir)).step_at("remove directory", &self.dir)
    }

    fn replace(&self, name: &str, content: &[u8]) -> Result<(), StepError> {
        replace_file(&self.dir.join(name), 0o666, content)
    }
}

/// Writes a file anew, unless it has this content, and leaves none if that fails. Does not follow a
/// link that is there.
fn write_new(path: &Path, content: &[u8]) -> Result<(), StepError> {
    if !path.is_symlink() && fs::read(path).is_ok_and(|there| there == content) {
        return Ok(());
    }
    gone(fs::remove_file(path)).step_at("remove file", path)?;
    let opened = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let written = opened.and_then(|mut file| file.write_all(content));
    if written.is_err() {
        let _ = fs::remove_file(path);
    }
    written.step_at("write file", path)
}

/// Makes a link in `dir` to a file of containerd's bundle. The path by [`CONTAINERDS`] is short.
/// False: there is no such file, or the link cannot be made.
fn link_to_containerds(dir: &Path, name: &str) -> bool {
    let file = Path::new(CONTAINERDS).join(name);
    dir.join(&file).exists() && symlink(file, dir.join(name)).is_ok()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A tmpfs of 256 KiB, until it is dropped.
    pub struct Tmpfs(PathBuf);

    impl Tmpfs {
        pub fn mount(path: PathBuf) -> Self {
            fs::create_dir(&path).unwrap();
            let flags = rustix::mount::MountFlags::empty();
            rustix::mount::mount("tmpfs", &path, "tmpfs", flags, Some(c"size=256k")).unwrap();
            Self(path)
        }

        pub fn path(&self) -> &Path {
            &self.0
        }

        pub fn fill(&self) {
            let mut file = fs::File::create(self.0.join("ballast")).unwrap();
            while file.write_all(&[0; 4096]).is_ok() {}
        }

        /// Not by a removal: a child of another test may hold the file for a moment.
        fn free(&self) {
            fs::write(self.0.join("ballast"), "").unwrap();
        }
    }

    impl Drop for Tmpfs {
        fn drop(&mut self) {
            let detach = rustix::mount::UnmountFlags::DETACH;
            rustix::mount::unmount(&self.0, detach).unwrap();
        }
    }

    /// The path of containerd's bundle is as long as a usual one below `/run`.
    #[test]
    fn a_last_bundle_on_a_full_file_system_has_the_files_of_containerds() {
        if kit::skip_without_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let full = Tmpfs::mount(dir.path().join("run"));
        let tasks = "t".repeat(117 - full.path().as_os_str().len() - 1 - 65);
        let containerds = full.path().join(tasks).join("a".repeat(64));
        fs::create_dir_all(&containerds).unwrap();
        let options = Options { root: "/r".to_owned(), ..Default::default() };
        Bundle::write_runtime(&containerds, Some(&options)).unwrap();
        fs::write(containerds.join(CONFIG), "config").unwrap();
        let written = fs::read_to_string(containerds.join(OPTIONS)).unwrap();
        let bundle = Bundle::new(full.path().join("b"));
        bundle.make_bundle("pod").unwrap();
        full.fill();
        // Also another time.
        for _ in 0..2 {
            let last = bundle.make_deletion_bundle("a", Some(&options), &containerds).unwrap();
            for bundle in [&last, &containerds] {
                assert_eq!(fs::read_to_string(bundle.join(OPTIONS)).unwrap(), written);
                assert_eq!(fs::read_to_string(bundle.join("runtime")).unwrap(), "");
                assert_eq!(fs::read_to_string(bundle.join(CONFIG)).unwrap(), "config");
            }
            assert!(last.join(OPTIONS).is_symlink() && last.join(CONFIG).is_symlink());
        }
        // Without containerd's bundle only the default options are known.
        fs::rename(&containerds, full.path().join("aside")).unwrap();
        bundle.make_deletion_bundle("b", Some(&options), &containerds).unwrap_err();
        let options = Options { systemd_cgroup: true, ..Default::default() };
        let last = bundle.make_deletion_bundle("b", Some(&options), &containerds).unwrap();
        assert!(fs::symlink_metadata(last.join(OPTIONS)).is_err(), "an empty file");
        // The path of containerd's bundle is too long for a link without space.
        let long = full.path().join("l".repeat(64)).join("a".repeat(64));
        fs::create_dir_all(&long).unwrap();
        bundle.make_deletion_bundle("c", Some(&options), &long).unwrap_err();
        fs::write(long.join(OPTIONS), "").unwrap();
        let last = bundle.make_deletion_bundle("c", Some(&options), &long).unwrap();
        assert_eq!(last, long);
        // With space, files take the place of the links.
        full.free();
        fs::create_dir(&containerds).unwrap();
        fs::write(containerds.join(CONFIG), "config").unwrap();
        let last = bundle.make_deletion_bundle("a", Some(&options), &containerds).unwrap();
        for name in [OPTIONS, CONFIG] {
            assert!(fs::symlink_metadata(last.join(name)).unwrap().is_file(), "{name}");
        }
    }

    #[test]
    fn records_are_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let bundle = Bundle::new(dir.path().join("b"));
        assert_eq!(bundle.recorded().unwrap(), None);
        bundle.make_bundle("pod").unwrap();
        bundle.record(Some(&Recorded::Launching)).unwrap();
        assert_eq!(bundle.recorded().unwrap(), Some(Recorded::Launching));
        // A file is there as a whole or not at all.
        let names = fs::read_dir(bundle.dir())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let unfinished: Vec<String> = names.filter(|name| name.ends_with(NEW)).collect();
        assert!(unfinished.is_empty(), "{unfinished:?}");
        fs::write(bundle.dir().join(RECORD), "").unwrap();
        assert_eq!(bundle.recorded().unwrap(), Some(Recorded::Launching), "a record without sense");
    }

    #[test]
    fn a_last_bundle_leads_to_containerds_even_if_that_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let containerds = dir.path().join("tasks/a");
        let bundle = Bundle::new(dir.path().join("b"));
        for _ in 0..2 {
            let last =
                bundle.make_deletion_bundle("a", Some(&Options::default()), &containerds).unwrap();
            assert_eq!(fs::read_link(last.join(CONTAINERDS)).unwrap(), containerds);
            assert!(last.join(OPTIONS).exists());
        }
    }
}
