//! The SELinux labels of a pod, where SELinux is on.
//!
//! A pod gets the policy's labels for containers (`lxc_contexts(5)`) with an MCS level of two
//! categories that no other pod of this daemon has, and what the pod's `selinux_options` say
//! instead. That is what containerd does with the library go-selinux (`label.InitLabels`); the
//! pod's containers take over the process label that Start answers.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::sys::statfs::{FsType, statfs};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::error::{IoContext as _, StepError};
use crate::protos::cri::SELinuxOption;

/// Where the kernel has it (selinuxfs).
const FILE_SYSTEM: &str = "/sys/fs/selinux";

/// `SELINUX_MAGIC` of statfs(2).
const MAGIC: FsType = FsType(0xf97c_ff8c);

/// The policy's own file of labels for containers, and where an administrator's would be.
const POLICY_CONTEXTS: &str = "contexts/lxc_contexts";
const SHARED_CONTEXTS: &str = "/usr/share/containers/selinux/contexts";

/// Names the policy (`SELINUXTYPE`).
const CONFIG_FILE: &str = "/etc/selinux/config";
const POLICIES: &str = "/etc/selinux";

/// The labels of one pod; empty where there are none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Labels {
    /// Label of its containers, and of its pause process unless the pod is privileged.
    pub process: String,
    /// Label of the pod's mounts.
    pub mount: String,
}

impl Labels {
    /// There are none.
    pub fn is_empty(&self) -> bool {
        self.process.is_empty() && self.mount.is_empty()
    }
}

/// A security context, `USER:ROLE:TYPE[:LEVEL]`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Context {
    user: String,
    role: String,
    kind: String,
    level: Option<String>,
}

impl Context {
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.splitn(4, ':').map(str::to_owned);
        let (user, role, kind) = (parts.next()?, parts.next()?, parts.next()?);
        Some(Self { user, role, kind, level: parts.next() })
    }

    fn text(&self) -> String {
        let Self { user, role, kind, level } = self;
        match level {
            Some(level) => format!("{user}:{role}:{kind}:{level}"),
            None => format!("{user}:{role}:{kind}"),
        }
    }
}

/// The labels that the policy has for containers.
#[derive(Debug)]
struct Contexts {
    process: Context,
    file: Context,
}

impl Contexts {
    /// Reads them; `None`: the policy has none.
    fn from_policy() -> Result<Option<Self>, StepError> {
        for path in [PathBuf::from(SHARED_CONTEXTS), policy().join(POLICY_CONTEXTS)] {
            match fs::read_to_string(&path) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(StepError::at("read SELinux contexts", path, e)),
                Ok(text) => return Self::parse(&text).step_at("read SELinux contexts", path),
            }
        }
        Ok(None)
    }

    fn parse(text: &str) -> io::Result<Option<Self>> {
        let context = |key: &str| {
            let Some(text) = assigned(text, key).filter(|text| !text.is_empty()) else {
                return Ok(None);
            };
            let malformed = || {
                io::Error::other(format!(
                    "{key} = {text:?} is not a context USER:ROLE:TYPE[:LEVEL]"
                ))
            };
            Context::parse(&text).map(Some).ok_or_else(malformed)
        };
        let contexts = context("process")?.zip(context("file")?);
        Ok(contexts.map(|(process, file)| Self { process, file }))
    }
}

/// The last value that `key = value` lines give a key; comments begin with `#` or `;`, values may
/// be quoted.
fn assigned(text: &str, key: &str) -> Option<String> {
    let lines = text.lines().map(str::trim).filter(|line| !line.starts_with(['#', ';']));
    let mut values =
        lines.filter_map(|line| line.split_once('=')).filter(|(name, _)| name.trim() == key);
    values.next_back().map(|(_, value)| value.trim().trim_matches('"').to_owned())
}

/// The directory of the policy that the node uses.
fn policy() -> PathBuf {
    let text = fs::read_to_string(CONFIG_FILE).unwrap_or_default();
    Path::new(POLICIES).join(assigned(&text, "SELINUXTYPE").unwrap_or_default())
}

/// SELinux is on: the kernel has a policy.
fn is_on() -> bool {
    let mounted = statfs(FILE_SYSTEM).is_ok_and(|fs| fs.filesystem_type() == MAGIC);
    // Before a policy is loaded everything is "kernel".
    mounted
        && fs::read("/proc/self/attr/current")
            .is_ok_and(|label| !label.starts_with(b"kernel\0") && label != b"kernel")
}

/// The label under which a pod's process may execute a file of ours; `None` where SELinux is off or
/// the policy has no labels for containers.
///
/// # Errors
/// The policy's file cannot be read.
pub fn executable(config: &Config) -> Result<Option<String>, StepError> {
    if !config.enable_selinux || !is_on() {
        return Ok(None);
    }
    Ok(Contexts::from_policy()?.map(|contexts| contexts.file.text()))
}

/// A level that is taken as long as this lives.
#[derive(Debug)]
pub struct HeldLevel {
    level: String,
    taken: Taken,
}

impl Drop for HeldLevel {
    fn drop(&mut self) {
        let mut taken = self.taken.lock();
        if let Some(pods) = taken.get_mut(&self.level) {
            *pods -= 1;
            if *pods == 0 {
                taken.remove(&self.level);
            }
        }
    }
}

/// Levels and how many pods have each: those that a pod asks for need not be its alone.
type Taken = Arc<Mutex<HashMap<String, usize>>>;

/// Gives labels to pods.
#[derive(Debug, Default)]
pub struct Selinux {
    taken: Taken,
}

impl Selinux {
    /// Labels for a new pod, with a level that is its own unless it asks for one. Blocks.
    ///
    /// # Errors
    /// The policy's file cannot be read, or no level is free.
    pub fn label(
        &self,
        config: &Config,
        wanted: Option<&SELinuxOption>,
    ) -> Result<(Labels, Option<HeldLevel>), StepError> {
        if !config.enable_selinux || !is_on() {
            return Ok(Default::default());
        }
        match Contexts::from_policy()? {
            Some(contexts) => self.labels(&contexts, config.selinux_category_range, wanted),
            None => Ok(Default::default()),
        }
    }

    fn labels(
        &self,
        contexts: &Contexts,
        categories: u32,
        wanted: Option<&SELinuxOption>,
    ) -> Result<(Labels, Option<HeldLevel>), StepError> {
        let (mut process, mut file) = (contexts.process.clone(), contexts.file.clone());
        let given = |field: fn(&SELinuxOption) -> &str| {
            wanted.map(field).filter(|text| !text.is_empty()).map(str::to_owned)
        };
        let level = match given(|wanted| &wanted.level) {
            Some(level) => Some(self.hold_level(level)),
            // A policy without levels has none to give.
            None if process.level.is_none() => None,
            None => Some(self.take_free(categories)?),
        };
        if let Some(held) = &level {
            process.level = Some(held.level.clone());
            file.level = Some(held.level.clone());
        }
        if let Some(user) = given(|wanted| &wanted.user) {
            process.user.clone_from(&user);
            file.user = user;
        }
        process.role = given(|wanted| &wanted.role).unwrap_or(process.role);
        process.kind = given(|wanted| &wanted.type_).unwrap_or(process.kind);
        Ok((Labels { process: process.text(), mount: file.text() }, level))
    }

    /// Takes the level of a pod that an earlier daemon has made.
    pub fn hold(&self, labels: &Labels) -> Option<HeldLevel> {
        Context::parse(&labels.process)?.level.map(|level| self.hold_level(level))
    }

    fn hold_level(&self, level: String) -> HeldLevel {
        let mut taken = self.taken.lock();
        *taken.entry(level.clone()).or_default() += 1;
        drop(taken);
        HeldLevel { level, taken: self.taken.clone() }
    }

    /// Takes a level of two of so many categories: the first free one after a random one, so that
    /// who shares the node with us and chooses by himself, as containerd does for its own pods,
    /// hardly ever chooses the same.
    fn take_free(&self, categories: u32) -> Result<HeldLevel, StepError> {
        let pairs = u64::from(categories) * u64::from(categories - 1) / 2;
        let first = random()? % pairs;
        let mut taken = self.taken.lock();
        for number in (first..pairs).chain(0..first) {
            let (low, high) = pair(number);
            let level = format!("s0:c{low},c{high}");
            if !taken.contains_key(&level) {
                taken.insert(level.clone(), 1);
                drop(taken);
                return Ok(HeldLevel { level, taken: self.taken.clone() });
            }
        }
        let all =
            io::Error::other(format!("all {pairs} levels of {categories} categories are taken"));
        Err(StepError::new("find a free SELinux level", all))
    }
}

/// The pair of that number, of all pairs in the order (0,1) (0,2) (1,2) (0,3) …
fn pair(number: u64) -> (u64, u64) {
    // The largest `high` with high * (high - 1) / 2 <= number.
    let mut high = (number * 2).isqrt();
    while high * (high + 1) / 2 <= number {
        high += 1;
    }
    (number - high * (high - 1) / 2, high)
}

fn random() -> Result<u64, StepError> {
    let (source, mut bytes) = ("/dev/urandom", [0; 8]);
    fs::File::open(source)
        .and_then(|mut file| file.read_exact(&mut bytes))
        .step_at("read", source)?;
    Ok(u64::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const FILE: &str = "# of the policy\nprocess = \"system_u:system_r:container_t:s0\"\n\
        content = \"x\"\n\
         file = \"system_u:object_r:container_file_t:s0\"\n; end\n";

    fn contexts() -> Contexts {
        Contexts::parse(FILE).unwrap().unwrap()
    }

    #[test]
    fn contexts_are_read_as_the_policy_writes_them() {
        let contexts = contexts();
        assert_eq!(contexts.process.text(), "system_u:system_r:container_t:s0");
        assert_eq!(contexts.file.text(), "system_u:object_r:container_file_t:s0");
        assert!(Contexts::parse("process = \"a:b:c\"").unwrap().is_none(), "no file label");
        let error = Contexts::parse("process = \"a:b\"\nfile = \"a:b:c\"").unwrap_err().to_string();
        assert!(error.contains("process = \"a:b\" is not a context"), "{error}");
        assert_eq!(assigned("SELINUXTYPE=targeted\n", "SELINUXTYPE").as_deref(), Some("targeted"));
    }

    #[test]
    fn every_pod_has_a_level_of_its_own() {
        let selinux = Selinux::default();
        let mut held = Vec::new();
        for _ in 0..6 {
            let (labels, level) = selinux.labels(&contexts(), 4, None).unwrap();
            assert_eq!(
                Context::parse(&labels.process).unwrap().level,
                Context::parse(&labels.mount).unwrap().level
            );
            held.push((labels.process, level.unwrap()));
        }
        let levels: HashSet<&str> = held.iter().map(|(label, _)| label.as_str()).collect();
        assert_eq!(levels.len(), 6, "{levels:?}");
        let error = selinux.labels(&contexts(), 4, None).unwrap_err().to_string();
        assert_eq!(error, "find a free SELinux level: all 6 levels of 4 categories are taken");
        let (freed, _) = held.swap_remove(3);
        let (labels, _level) = selinux.labels(&contexts(), 4, None).unwrap();
        assert_eq!(labels.process, freed, "the one that became free");
    }

    #[test]
    fn each_pair_of_categories_occurs_once() {
        let all: Vec<_> = (0..1024 * 1023 / 2).map(pair).collect();
        assert_eq!(&all[..4], [(0, 1), (0, 2), (1, 2), (0, 3)]);
        assert_eq!(all.last(), Some(&(1022, 1023)));
        assert!(all.iter().all(|(low, high)| low < high));
        assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len());
    }

    #[test]
    fn a_pod_gets_the_label_that_it_requests() {
        let selinux = Selinux::default();
        let options = |user: &str, role: &str, kind: &str, level: &str| SELinuxOption {
            user: user.to_owned(),
            role: role.to_owned(),
            type_: kind.to_owned(),
            level: level.to_owned(),
            ..Default::default()
        };
        let (labels, first) =
            selinux.labels(&contexts(), 1024, Some(&options("u", "r", "t", "s0:c1,c2"))).unwrap();
        assert_eq!(labels.process, "u:r:t:s0:c1,c2");
        // Process roles and types are not valid for files.
        assert_eq!(labels.mount, "u:object_r:container_file_t:s0:c1,c2");
        // Two may ask for the same; it is free when both are gone.
        let held = selinux.hold(&labels).unwrap();
        drop(first);
        assert_eq!(selinux.taken.lock().get("s0:c1,c2"), Some(&1));
        drop(held);
        assert!(selinux.taken.lock().is_empty());
        let (labels, _level) =
            selinux.labels(&contexts(), 1024, Some(&options("", "", "spc_t", ""))).unwrap();
        assert!(labels.process.starts_with("system_u:system_r:spc_t:s0:c"), "{labels:?}");
    }

    #[test]
    fn a_policy_without_levels() {
        let text = FILE.replace(":s0", "");
        let contexts = Contexts::parse(&text).unwrap().unwrap();
        let (labels, level) = Selinux::default().labels(&contexts, 1024, None).unwrap();
        assert_eq!(labels.process, "system_u:system_r:container_t");
        assert!(level.is_none());
    }

    #[test]
    fn no_labels_where_selinux_is_disabled() {
        let (labels, level) = Selinux::default().label(&Config::default(), None).unwrap();
        assert!(labels.is_empty() && level.is_none());
        assert_eq!(executable(&Config::default()).unwrap(), None);
    }
}
