//! The record of a sandbox on disk: what a later daemon must know to take the sandbox over.
//!
//! One directory per sandbox below `<state_dir>/sandboxes`, named by the id, holds `record.json`,
//! what the sandbox is, and `stage.json`, how far it came: the second is small, because Start and
//! exit write it. Both are replaced by rename, so a reader sees the old one or the new one. A
//! daemon refuses a record of a newer version and leaves it alone.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;
use protobuf::Message as _;
use protobuf::well_known_types::any::Any;
use serde::{Deserialize, Serialize};

use super::error::shorten;
use super::files::Files;
use super::layout::Layout;
use super::recorded_any::RecordedAny;
use super::selinux::Labels;
use super::{EndReason, Error, SandboxInfo};
use crate::config::ContainerLimit;
use crate::error::{IoContext as _, StepError, gone};
use crate::id::SandboxId;
use crate::pause::Plan;
use crate::process::{Exit, Identity};
use crate::protos::cri::PodSandboxConfig;
use crate::replace_file::{replace_file, temporary};
use crate::shim;

/// The version that this daemon writes.
pub const VERSION: u32 = 1;

/// Records above this size are not ours; bytes. CRI's config and what containerd's store holds of
/// it are bounded by the wire's message limit each, and are longer by a third here.
const LARGEST: u64 = 64 << 20;

/// Stages above this size are not ours; bytes.
const LARGEST_STAGE: u64 = 64 << 10;

/// Type of the CRI config in Create's options.
const CONFIG_TYPE: &str = "runtime.v1.PodSandboxConfig";

/// The data of a sandbox that outlives a restart of the daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Form of the record.
    pub version: u32,
    /// The sandbox id.
    pub id: SandboxId,
    /// When Create was called.
    pub created_at: SystemTime,
    /// The objects that the driver creates.
    pub plan: Plan,
    /// The files that CRI bind-mounts into containers.
    pub files: Files,
    /// The CRI `PodSandboxConfig`, as it came.
    #[serde(with = "RecordedAny")]
    pub config: Any,
    /// The netns path, as it came; empty with host network.
    pub netns_path: String,
    /// containerd's metadata of the sandbox; Update changes its extensions.
    pub info: SandboxInfo,
    /// The pod has this project's own shim instead of its runtime's.
    pub own_shim: bool,
    /// The limits that the pod has chosen for its containers.
    #[serde(default)]
    pub limits: Vec<ContainerLimit>,
    /// The pod's SELinux labels; empty where it has none.
    pub labels: Labels,
}

impl Record {
    /// The CRI config, decoded.
    ///
    /// # Errors
    /// The config is malformed.
    pub fn decode_config(&self) -> Result<PodSandboxConfig, Error> {
        decode_config(&self.id, &self.config.type_url, &self.config.value)
    }

    /// The runtime of its shim.
    pub fn runtime(&self) -> shim::Runtime {
        shim::Runtime {
            name: self.info.runtime_name.clone(),
            options: self.info.runtime_options.clone(),
            own_shim: self.own_shim,
            limits: self.limits.clone(),
        }
    }
}

/// Decodes the CRI config of a request or a record.
///
/// # Errors
/// [`Error::Invalid`] where it is of another type or malformed.
pub fn decode_config(id: &str, type_url: &str, value: &[u8]) -> Result<PodSandboxConfig, Error> {
    // Any's own convention puts a host before the name; containerd does not.
    if type_url.rsplit('/').next() != Some(CONFIG_TYPE) {
        let reason = format!("is of type {:?}, not {CONFIG_TYPE}", shorten(type_url));
        return Err(Error::invalid(id, "options", reason));
    }
    PodSandboxConfig::parse_from_bytes(value)
        .map_err(|e| Error::invalid(id, "options", format!("is not a {CONFIG_TYPE}: {e}")))
}

/// How far a sandbox came.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Created; a start job may have begun.
    Created,
    /// Its pause process runs, as far as the record knows.
    Started {
        /// The identity of the pause process.
        identity: Identity,
    },
    /// Its pause process has ended.
    Exited {
        /// The pause process that was, if there ever was one.
        pid: u32,
        /// How it ended.
        exit: Exit,
        /// Why it ended.
        #[serde(default)]
        reason: Option<EndReason>,
    },
}

#[cfg(test)]
use crate::config::Size;

#[cfg(test)]
impl Record {
    /// A record with this plan, and nothing else.
    pub fn of_plan(plan: Plan) -> Self {
        Self {
            version: VERSION,
            id: plan.id.clone(),
            created_at: SystemTime::UNIX_EPOCH,
            plan,
            files: Files { hostname: String::new(), dns: None, shm: true, shm_size: Size::SHM },
            config: Any::default(),
            netns_path: String::new(),
            info: SandboxInfo::default(),
            own_shim: false,
            limits: Vec::new(),
            labels: Default::default(),
        }
    }
}

impl SandboxInfo {
    /// Takes over a field as containerd's own store does (`core/metadata`): `extensions`, `labels`,
    /// or a single one of them as `extensions.KEY`.
    pub fn update(&mut self, given: &SandboxInfo, field: &str) {
        fn set_or_remove<V>(all: &mut BTreeMap<String, V>, key: &str, value: Option<V>) {
            match value {
                Some(value) => drop(all.insert(key.to_owned(), value)),
                None => drop(all.remove(key)),
            }
        }
        match field.split_once('.') {
            None if field == "extensions" => self.extensions.clone_from(&given.extensions),
            None if field == "labels" => self.labels.clone_from(&given.labels),
            Some(("extensions", key)) => {
                set_or_remove(&mut self.extensions, key, given.extensions.get(key).cloned())
            }
            Some(("labels", key)) => {
                set_or_remove(&mut self.labels, key, given.labels.get(key).cloned())
            }
            _ => {}
        }
    }
}

/// Why a record could not be read.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// There is none.
    #[error("{}: no record", .0.display())]
    Missing(PathBuf),
    /// The system refused.
    #[error(transparent)]
    Io(#[from] StepError),
    /// It is not a record.
    #[error("{}: not a record: {reason}", .path.display())]
    Malformed {
        /// The record's path.
        path: PathBuf,
        /// The parser's error.
        reason: String,
    },
    /// A newer daemon wrote it.
    #[error("{}: version {version} is newer than {VERSION}, the newest that this daemon \
        knows", .path.display())]
    Newer {
        /// The record's path.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
}

impl From<RecordError> for StepError {
    fn from(unreadable: RecordError) -> Self {
        match unreadable {
            RecordError::Io(step) => step,
            other => Self::new("read record", io::Error::other(other.to_string())),
        }
    }
}

const RECORD: &str = "record.json";
const STAGE: &str = "stage.json";

/// Mode of both: root's alone. The config may hold what others must not know.
const PRIVATE: u32 = 0o600;

/// The place of one sandbox's record. A lock serializes the writers. The paths are made when they
/// are needed.
#[derive(Debug)]
pub struct RecordStore {
    layout: Arc<Layout>,
    id: SandboxId,
    write_lock: Mutex<()>,
}

impl RecordStore {
    /// The place of the record of `id`.
    pub fn new(layout: &Arc<Layout>, id: &SandboxId) -> Self {
        Self { layout: Arc::clone(layout), id: id.clone(), write_lock: Mutex::new(()) }
    }

    /// The sandbox's own directory.
    pub fn dir(&self) -> PathBuf {
        self.layout.sandbox(&self.id)
    }

    /// Makes the directory and writes the first record.
    ///
    /// # Errors
    /// The failed step; what was made is gone again.
    pub fn create(&self, record: &Record) -> Result<(), StepError> {
        match fs::DirBuilder::new().mode(0o700).create(self.dir()) {
            // Left by a daemon that ended between making the directory and writing the record.
            Err(e)
                if e.kind() == io::ErrorKind::AlreadyExists
                    && !self.dir().join(RECORD).exists() => {}
            other => other.step_at("make record directory", self.dir())?,
        }
        let written = {
            let _guard = self.write_lock.lock();
            self.replace(RECORD, record)
        };
        written.inspect_err(|_| {
            let _ = self.remove();
        })
    }

    /// Reads how far the sandbox came; [`Stage::Created`] where that was never written.
    ///
    /// # Errors
    /// Why it could not be read.
    pub fn stage(&self) -> Result<Stage, RecordError> {
        let path = self.dir().join(STAGE);
        match read_limited(&path, LARGEST_STAGE) {
            Err(RecordError::Missing(_)) => Ok(Stage::Created),
            Err(e) => Err(e),
            Ok(text) => serde_json::from_slice(&text)
                .map_err(|e| RecordError::Malformed { path, reason: e.to_string() }),
        }
    }

    /// Records how far the sandbox came.
    ///
    /// # Errors
    /// The failed step; the old stage is still recorded then.
    pub fn set_stage(&self, stage: &Stage) -> Result<(), StepError> {
        let _guard = self.write_lock.lock();
        self.replace(STAGE, stage)
    }

    /// Reads the record.
    ///
    /// # Errors
    /// Why it could not be read.
    pub fn read_record(&self) -> Result<Record, RecordError> {
        let path = self.dir().join(RECORD);
        let text = read_limited(&path, LARGEST)?;
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let malformed = |e: serde_json::Error| RecordError::Malformed {
            path: path.clone(),
            reason: e.to_string(),
        };
        let Version { version } = serde_json::from_slice(&text).map_err(malformed)?;
        if version > VERSION {
            return Err(RecordError::Newer { path, version });
        }
        let record: Record = serde_json::from_slice(&text).map_err(malformed)?;
        if self.id != record.id {
            return Err(RecordError::Malformed {
                path,
                reason: format!("it is of sandbox {:?}", record.id),
            });
        }
        Ok(record)
    }

    /// Reads, changes and replaces the record under one lock.
    ///
    /// # Errors
    /// Why it could not be read or written; the old record still exists then.
    pub fn change(&self, change: impl FnOnce(&mut Record)) -> Result<(), StepError> {
        let _guard = self.write_lock.lock();
        let mut record = self.read_record().map_err(StepError::from)?;
        change(&mut record);
        self.replace(RECORD, &record)
    }

    /// Removes the record and its directory, which must hold nothing else. Gone already is success.
    ///
    /// # Errors
    /// The failed step.
    pub fn remove(&self) -> Result<(), StepError> {
        let _guard = self.write_lock.lock();
        // The stage goes last: a record without its stage would look like a sandbox that was never
        // started.
        let dir = self.dir();
        for path in self.files() {
            gone(fs::remove_file(&path)).step_at("remove record", path)?;
        }
        gone(fs::remove_dir(&dir)).step_at("remove record directory", dir)
    }

    /// All files of the record.
    fn files(&self) -> [PathBuf; 4] {
        let (record, stage) = (self.dir().join(RECORD), self.dir().join(STAGE));
        [temporary(&record), record, temporary(&stage), stage]
    }

    fn replace<T: Serialize>(&self, name: &str, value: &T) -> Result<(), StepError> {
        let path = self.dir().join(name);
        let text = serde_json::to_vec(value).map_err(io::Error::other).step("encode record")?;
        // A record that the next daemon refuses to read must not be written: the sandbox would be
        // quarantined.
        if text.len() as u64 > LARGEST {
            return Err(StepError::at(
                "write record",
                path,
                io::Error::from_raw_os_error(libc::EFBIG),
            ));
        }
        replace_file(&path, PRIVATE, &text)
    }
}

/// Reads a file of ours: a regular one of root's, of no more than `largest` bytes. A file of
/// another kind that has its place is neither waited for nor followed.
fn read_limited(path: &Path, largest: u64) -> Result<Vec<u8>, RecordError> {
    const READ: &str = "read record";
    let refuse = |reason| RecordError::Malformed { path: path.to_owned(), reason };
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = match fs::File::options().read(true).custom_flags(flags).open(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Err(RecordError::Missing(path.to_owned()));
        }
        other => other.step_at(READ, path)?,
    };
    let about = file.metadata().step_at(READ, path)?;
    if !about.is_file() {
        return Err(refuse("it is not a regular file".to_owned()));
    }
    if about.uid() != 0 {
        return Err(refuse(format!("it belongs to user {}, not to root", about.uid())));
    }
    let mut content = Vec::with_capacity(about.len().min(largest) as usize + 1);
    file.take(largest + 1).read_to_end(&mut content).step_at(READ, path)?;
    if content.len() as u64 > largest {
        return Err(StepError::at(READ, path, io::Error::from_raw_os_error(libc::EFBIG)).into());
    }
    Ok(content)
}

#[cfg(test)]
mod tests;
