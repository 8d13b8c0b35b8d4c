//! What pods have left on a node and in its containerd, counted by kind.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::config::Layout;
use crate::machine::cgroup;
use crate::node::Node;
use crate::patient;
use crate::shim;
use crate::snapshot::{Snapshot, Thing};

/// Where containerd keeps the bundles of tasks, below its state and its root.
const BUNDLES: &str = "io.containerd.runtime.v2.task";

/// What a leftover is.
#[allow(missing_docs, reason = "the names say it")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Shim,
    Process,
    Mount,
    NetworkNamespace,
    Interface,
    Cgroup,
    Bundle,
    Socket,
    /// A file or directory that no other kind has, with all that is below it.
    File,
    CniResult,
    /// Of containerd's metadata, as those that follow.
    Container,
    Task,
    Sandbox,
    Lease,
    Snapshot,
    /// A pod that CRI lists.
    Pod,
}

impl Kind {
    /// All, in the order of the pages.
    pub const ALL: [Self; 16] = [
        Self::Shim,
        Self::Process,
        Self::Mount,
        Self::NetworkNamespace,
        Self::Interface,
        Self::Cgroup,
        Self::Bundle,
        Self::Socket,
        Self::File,
        Self::CniResult,
        Self::Container,
        Self::Task,
        Self::Sandbox,
        Self::Lease,
        Self::Snapshot,
        Self::Pod,
    ];

    /// In words, for one.
    pub fn name(self) -> &'static str {
        match self {
            Self::Shim => "shim",
            Self::Process => "other process",
            Self::Mount => "mount",
            Self::NetworkNamespace => "network namespace",
            Self::Interface => "interface",
            Self::Cgroup => "cgroup",
            Self::Bundle => "bundle",
            Self::Socket => "socket",
            Self::File => "other file or directory",
            Self::CniResult => "CNI result",
            Self::Container => "container in containerd",
            Self::Task => "task in containerd",
            Self::Sandbox => "sandbox in containerd",
            Self::Lease => "lease in containerd",
            Self::Snapshot => "snapshot in containerd",
            Self::Pod => "pod in CRI's list",
        }
    }

    /// In words, for several.
    pub fn names(self) -> String {
        let one = self.name();
        match self {
            Self::Process => "other processes".to_owned(),
            Self::File => "other files or directories".to_owned(),
            _ => {
                let (first, rest) = one.split_once(" in ").unwrap_or((one, ""));
                let plural = if first.ends_with('x') { "es" } else { "s" };
                let rest = if rest.is_empty() { String::new() } else { format!(" in {rest}") };
                format!("{first}{plural}{rest}")
            }
        }
    }
}

/// The leftovers, each once, by kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Left(BTreeMap<Kind, BTreeSet<String>>);

impl Left {
    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether nothing is left but things of these kinds.
    pub fn is_empty_but_for(&self, excused: &[Kind]) -> bool {
        self.0.keys().all(|kind| excused.contains(kind))
    }

    /// How many of a kind are left.
    pub fn count(&self, kind: Kind) -> usize {
        self.0.get(&kind).map_or(0, BTreeSet::len)
    }

    /// Each, with its kind.
    pub fn lines(&self) -> Vec<String> {
        let each = |(kind, names): (&Kind, &BTreeSet<String>)| {
            names.iter().map(|name| format!("{}: {name}", kind.name())).collect::<Vec<_>>()
        };
        self.0.iter().flat_map(each).collect()
    }

    fn add(&mut self, kind: Kind, name: impl Into<String>) {
        self.0.entry(kind).or_default().insert(name.into());
    }

    /// Sorts the things that a snapshot has found. What lies in a directory that is left counts
    /// with it, and a cgroup counts once for all hierarchies.
    fn sort(&mut self, layout: &Layout, things: &[Thing]) -> Result<()> {
        let hierarchies = cgroup::hierarchies()?;
        let directories: BTreeSet<&Path> = things
            .iter()
            .filter_map(|thing| match thing {
                Thing::File(path, "directory") => Some(path.as_path()),
                _ => None,
            })
            .collect();
        for thing in things {
            match thing {
                Thing::Process(pid, about) => {
                    let is_shim = about.contains("containerd-shim") || about.contains(shim::NAME);
                    let kind = if is_shim { Kind::Shim } else { Kind::Process };
                    self.add(kind, format!("{pid} {about}"));
                }
                Thing::Mount(point, about) => {
                    let is_netns = point.starts_with(layout.netns());
                    let kind = if is_netns { Kind::NetworkNamespace } else { Kind::Mount };
                    let more = if is_netns { String::new() } else { format!(" {about}") };
                    self.add(kind, format!("{}{more}", point.display()));
                }
                Thing::File(path, _) if path.starts_with(layout.netns()) => {
                    self.add(Kind::NetworkNamespace, path.display().to_string());
                }
                // kubelet's.
                Thing::File(path, _) if path.starts_with(layout.pods()) => {}
                Thing::File(path, _)
                    if path.components().any(|part| part.as_os_str() == BUNDLES) =>
                {
                    let id = path.iter().skip_while(|part| *part != BUNDLES).nth(2);
                    if let Some(id) = id {
                        self.add(Kind::Bundle, id.to_string_lossy());
                    }
                }
                Thing::File(path, kind) => {
                    let inside = path.ancestors().skip(1).any(|dir| directories.contains(dir));
                    match *kind {
                        _ if inside => {}
                        "socket" => self.add(Kind::Socket, path.display().to_string()),
                        _ => self.add(Kind::File, path.display().to_string()),
                    }
                }
                Thing::ShimSocket(path) => self.add(Kind::Socket, path.display().to_string()),
                Thing::Cgroup(path) => {
                    let below = hierarchies.iter().find_map(|h| path.strip_prefix(h).ok());
                    self.add(Kind::Cgroup, below.unwrap_or(path).display().to_string());
                }
                Thing::Unit(name) => self.add(Kind::Cgroup, name),
                Thing::Interface(name) => self.add(Kind::Interface, name),
                Thing::CniResult(path) => self.add(Kind::CniResult, path.display().to_string()),
                Thing::Pod(id, state) => self.add(Kind::Pod, format!("{id} {state}")),
                Thing::Record(id, kind) => self.add(record(kind)?, id),
                // The machine's, whose other users also make them.
                Thing::Segment(..) => {}
            }
        }
        Ok(())
    }
}

/// The kind of a record in containerd.
fn record(kind: &str) -> Result<Kind> {
    Ok(match kind {
        "container" => Kind::Container,
        "task" => Kind::Task,
        "sandbox" => Kind::Sandbox,
        "lease" => Kind::Lease,
        "snapshot" => Kind::Snapshot,
        other => bail!("a record of the kind {other:?}"),
    })
}

impl fmt::Display for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            return f.write_str("nothing left");
        }
        let counted = |(kind, names): (&Kind, &BTreeSet<String>)| match names.len() {
            1 => format!("1 {}", kind.name()),
            many => format!("{many} {}", kind.names()),
        };
        let counts: Vec<String> = self.0.iter().map(counted).collect();
        write!(f, "left: {}", counts.join(", "))
    }
}

/// What is on a node, and in its containerd's metadata, at one moment.
#[derive(Clone, Debug)]
pub struct Inventory {
    snapshot: Snapshot,
    records: Vec<Thing>,
}

impl Node {
    /// Takes the inventory.
    ///
    /// # Errors
    /// The machine or containerd does not answer.
    pub async fn inventory(&self) -> Result<Inventory> {
        Ok(Inventory { snapshot: self.snapshot()?, records: self.records().await? })
    }

    /// What was not there `before` and does not go within `limit`, made [`patient`]. It does not
    /// wait for things of the `excused` kinds.
    ///
    /// # Errors
    /// The machine or containerd does not answer.
    pub async fn left_beside(
        &self,
        before: &Inventory,
        limit: Duration,
        excused: &[Kind],
    ) -> Result<Left> {
        /// Of one look at the machine and containerd.
        const LOOK: Duration = Duration::from_secs(2);
        let begun = Instant::now();
        loop {
            let mut left = Left::default();
            let rest = limit.saturating_sub(begun.elapsed());
            let mut things = self.left_since(&before.snapshot, rest.min(LOOK)).await?;
            things.retain(|thing| !before.records.contains(thing));
            left.sort(self.layout(), &things)?;
            if left.is_empty_but_for(excused) || begun.elapsed() >= patient(limit) {
                return Ok(left);
            }
            tokio::time::sleep(patient(Duration::from_millis(100))).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory counts once, a cgroup once for all hierarchies, and the words have a plural.
    #[test]
    fn counts_what_belongs_together_once() {
        let layout = Layout { top: "/tmp/psb-left".into(), name: "psb-left".into() };
        let bundle = layout.state().join(BUNDLES).join("k8s.io/abc");
        let files = layout.sandbox_files("abc");
        let mut things = vec![
            Thing::File(bundle.clone(), "directory"),
            Thing::File(bundle.join("config.json"), "file"),
            Thing::File(files.clone(), "directory"),
            Thing::File(files.join("hosts"), "file"),
            Thing::Mount(layout.netns().join("cni-1"), "nsfs net:[1]".into()),
            Thing::File(layout.netns().join("cni-1"), "file"),
            Thing::Process(7, "containerd-shim containerd-shim-runc-v2 -id abc".into()),
            Thing::Process(8, format!("{} -id abc", shim::NAME)),
            Thing::Process(9, "pause /pause".into()),
        ];
        let hierarchies = cgroup::hierarchies().unwrap();
        things.extend(hierarchies.iter().map(|h| Thing::Cgroup(h.join("psb-left/pod1"))));
        let mut left = Left::default();
        assert_eq!(left.to_string(), "nothing left");
        left.sort(&layout, &things).unwrap();
        let cgroups = if hierarchies.is_empty() { "" } else { "1 cgroup, " };
        assert_eq!(
            left.to_string(),
            format!(
                "left: 2 shims, 1 other process, 1 network namespace, {cgroups}1 bundle, \
                 1 other file or directory"
            )
        );
        assert_eq!(Kind::Sandbox.names(), "sandboxes in containerd");
    }
}
