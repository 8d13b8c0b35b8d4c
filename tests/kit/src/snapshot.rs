//! Everything of a node that is on the machine, read from the machine.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::config::Layout;
use crate::machine::cgroup_driver::{self, CgroupDriver};
use crate::machine::{cgroup, mounts, processes};
use crate::teardown;

/// Parts of a node's directory that are not compared: containerd's stores of content, snapshots and
/// metadata, which its garbage collector clears in its own time, and logs; and what is also mounted
/// in another place of the directory.
const IGNORED: [&str; 10] = [
    "logs",
    "root/io.containerd.content.v1.content",
    "root/io.containerd.metadata.v1.bolt",
    "root/io.containerd.snapshotter.v1.fuse-overlayfs",
    "root/io.containerd.snapshotter.v1.native",
    "root/io.containerd.snapshotter.v1.overlayfs",
    "root/tmpmounts",
    "state/io.containerd.mount-manager.v1.bolt",
    "state/runc",
    "state/sandboxer",
];
/// Directories of a node that may be mounts of its own, whose files are its files.
const MOUNTED: [&str; 3] = ["runc", "sandboxer", "state"];
/// Where libcni keeps its results.
const CNI_RESULTS: &str = "/var/lib/cni/results";
/// Length of the ids that containerd makes up for pods and containers.
const ID: usize = 64;

/// Something of a node on the machine.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Thing {
    /// A process: its id, and its name and command line.
    Process(u32, String),
    /// A mount point, what is mounted there, and by whom it is seen if not by this process.
    Mount(PathBuf, String),
    /// A file, directory, socket or fifo, and which of them.
    File(PathBuf, &'static str),
    /// The socket of a pod's shim, which lies outside of the node's directory.
    ShimSocket(PathBuf),
    /// A cgroup's directory.
    Cgroup(PathBuf),
    /// A slice or scope of systemd, where it keeps the cgroups.
    Unit(String),
    /// An interface on the node's bridge.
    Interface(String),
    /// libcni's cache of a pod's network.
    CniResult(PathBuf),
    /// A System V shared memory segment of the machine's own IPC namespace: its id and key.
    Segment(String, String),
    /// A pod that containerd lists.
    Pod(String, String),
    /// A record in containerd's own store: its id, and what of.
    Record(String, &'static str),
}

impl Thing {
    /// The kind of the object, in a word.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Process(..) => "process",
            Self::Mount(..) => "mount",
            Self::File(_, kind) => kind,
            Self::ShimSocket(_) => "shim socket",
            Self::Cgroup(_) => "cgroup",
            Self::Unit(_) => "unit",
            Self::Interface(_) => "interface",
            Self::CniResult(_) => "CNI result",
            Self::Segment(..) => "segment",
            Self::Pod(..) => "pod",
            Self::Record(_, kind) => kind,
        }
    }
}

impl fmt::Display for Thing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", self.kind())?;
        match self {
            Self::Process(pid, about) => write!(f, "{pid} {about}"),
            Self::Mount(point, about) => write!(f, "{} of {about}", point.display()),
            Self::File(path, _)
            | Self::ShimSocket(path)
            | Self::Cgroup(path)
            | Self::CniResult(path) => {
                write!(f, "{}", path.display())
            }
            Self::Unit(name) | Self::Interface(name) => f.write_str(name),
            Self::Segment(id, key) => write!(f, "{id} with key {key}"),
            Self::Pod(id, state) => write!(f, "{id}, which is {state}"),
            Self::Record(id, _) => write!(f, "{id} in containerd"),
        }
    }
}

/// The processes, mounts, files, sockets, cgroups, interfaces and segments of a node at one moment.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    things: BTreeSet<Thing>,
    log_length: u64,
    layout: Option<Layout>,
}

impl Snapshot {
    pub(crate) fn take(layout: &Layout, daemons: &[u32]) -> Result<Self> {
        let mut things = BTreeSet::new();
        processes(layout, daemons, &mut things)?;
        mount_points(layout, daemons, &mut things)?;
        files(layout, &layout.top, &mut things)?;
        things.extend(cgroup::below(&layout.cgroup())?.into_iter().map(Thing::Cgroup));
        if CgroupDriver::chosen() == CgroupDriver::Systemd {
            let mut units = cgroup_driver::scopes(&layout.name)?;
            units.extend(cgroup_driver::units(&[&format!("{}*.slice", layout.name)])?);
            things.extend(units.into_iter().map(Thing::Unit));
        }
        let ports = names(&Path::new("/sys/class/net").join(&layout.name).join("brif"));
        things.extend(ports.into_iter().map(Thing::Interface));
        things.extend(cni_results(layout).into_iter().map(Thing::CniResult));
        segments(&mut things)?;
        let log_length = fs::metadata(layout.containerd_log()).map(|m| m.len()).unwrap_or_default();
        Ok(Self { things, log_length, layout: Some(layout.clone()) })
    }

    /// Objects that are not in `before`, and objects outside of the node's directory for the
    /// ids that containerd's log has named since `before`.
    pub fn beyond(&self, before: &Self) -> Vec<Thing> {
        let mut left: Vec<Thing> = self.things.difference(&before.things).cloned().collect();
        if let Some(layout) = &self.layout {
            for id in ids_in_log(layout, before.log_length) {
                let things = [
                    Thing::ShimSocket(layout.shim_socket(&id)),
                    Thing::CniResult(loopback_result(&id)),
                ];
                left.extend(things.into_iter().filter(|thing| match thing {
                    Thing::ShimSocket(path) | Thing::CniResult(path) => {
                        path.symlink_metadata().is_ok()
                    }
                    _ => false,
                }));
            }
        }
        left
    }
}

fn processes(layout: &Layout, daemons: &[u32], things: &mut BTreeSet<Thing>) -> Result<()> {
    for process in teardown::members(layout)? {
        if daemons.contains(&process.pid) {
            continue;
        }
        let zombie = if process.state == 'Z' { " (zombie)" } else { "" };
        things.insert(Thing::Process(
            process.pid,
            format!("{} {}{zombie}", process.comm, process.command),
        ));
    }
    Ok(())
}

/// Mounts of the node as this process and each daemon sees them: a daemon may have a mount
/// namespace of its own.
fn mount_points(layout: &Layout, daemons: &[u32], things: &mut BTreeSet<Thing>) -> Result<()> {
    let ours = processes::namespace("self", "mnt")?;
    let mut seen = vec![("self".to_owned(), String::new())];
    for daemon in daemons.iter().map(ToString::to_string) {
        if processes::namespace(&daemon, "mnt").is_ok_and(|theirs| theirs != ours) {
            seen.push((daemon.clone(), format!(" as process {daemon} sees it")));
        }
    }
    for (pid, seen_by) in seen {
        // A daemon that has just ended has no mounts.
        for mount in mounts::of(&pid).unwrap_or_default() {
            if mount.point.starts_with(&layout.top) || mount.root.contains(&layout.name) {
                things.insert(Thing::Mount(
                    mount.point,
                    format!("{} {}{seen_by}", mount.kind, mount.root),
                ));
            }
        }
    }
    Ok(())
}

/// Every file of the node's directory; what else is mounted there is a mount, not files.
fn files(layout: &Layout, directory: &Path, things: &mut BTreeSet<Thing>) -> Result<()> {
    let Ok(device) = directory.metadata().map(|m| m.dev()) else { return Ok(()) };
    // Files that are removed meanwhile are skipped.
    let Ok(entries) = fs::read_dir(directory) else { return Ok(()) };
    for entry in entries.flatten() {
        let path = entry.path();
        let below =
            path.strip_prefix(&layout.top).context("a file outside of the node's directory")?;
        let Ok(about) = path.symlink_metadata() else { continue };
        if IGNORED.iter().any(|ignored| below == Path::new(ignored)) {
            continue;
        }
        let kind = match about.file_type() {
            t if t.is_dir() => "directory",
            t if t.is_socket() => "socket",
            t if t.is_fifo() => "fifo",
            _ => "file",
        };
        let mounted = || MOUNTED.iter().any(|mounted| below == Path::new(mounted));
        if about.is_dir() && (about.dev() == device || mounted()) {
            files(layout, &path, things)?;
        }
        things.insert(Thing::File(path, kind));
    }
    Ok(())
}

fn segments(things: &mut BTreeSet<Thing>) -> Result<()> {
    let text = fs::read_to_string("/proc/sysvipc/shm").context("read /proc/sysvipc/shm")?;
    for line in text.lines().skip(1) {
        let mut words = line.split_whitespace();
        if let (Some(key), Some(id)) = (words.next(), words.next()) {
            things.insert(Thing::Segment(id.to_owned(), key.to_owned()));
        }
    }
    Ok(())
}

/// libcni's cache of a node's network.
pub(crate) fn cni_results(layout: &Layout) -> Vec<PathBuf> {
    let prefix = format!("{}-", layout.name);
    let mine = |name: &String| name.starts_with(&prefix);
    names(Path::new(CNI_RESULTS))
        .into_iter()
        .filter(mine)
        .map(|name| Path::new(CNI_RESULTS).join(name))
        .collect()
}

/// libcni's cache of a pod's loopback, whose network has the same name on all nodes.
pub(crate) fn loopback_result(id: &str) -> PathBuf {
    Path::new(CNI_RESULTS).join(format!("cni-loopback-{id}-lo"))
}

/// The ids of pods and containers that containerd's log names from `offset` on, those included that
/// failed to start.
pub(crate) fn ids_in_log(layout: &Layout, offset: u64) -> BTreeSet<String> {
    let read = || -> std::io::Result<Vec<u8>> {
        let mut log = fs::File::open(layout.containerd_log())?;
        log.seek(SeekFrom::Start(offset))?;
        let mut bytes = Vec::new();
        log.read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let hexadecimal = |byte: &u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(byte);
    read()
        .unwrap_or_default()
        .split(|byte| !hexadecimal(byte))
        .filter(|word| word.len() == ID)
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect()
}

fn names(directory: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::os::unix::net::UnixListener;
    use std::process::{Command, Stdio};

    use nix::mount::{MsFlags, mount};

    use super::*;

    /// One of each kind of thing that a pod may leave is seen, and can be removed.
    #[test]
    fn sees_what_is_left() {
        let top = tempfile::Builder::new().prefix("look-").tempdir().unwrap();
        let layout = Layout {
            top: top.path().to_owned(),
            name: top.path().file_name().unwrap().to_str().unwrap().into(),
        };
        fs::create_dir_all(layout.top.join("logs")).unwrap();
        fs::write(layout.containerd_log(), "nothing yet\n").unwrap();
        cgroup::make(&layout.cgroup()).unwrap();
        let before = Snapshot::take(&layout, &[]).unwrap();
        assert_eq!(before.beyond(&before), []);

        let id = "0123456789abcdef".repeat(4);
        fs::write(layout.containerd_log(), format!("nothing yet\nRunPodSandbox returns {id}\n"))
            .unwrap();
        let (file, point) = (layout.top.join("file"), layout.top.join("point"));
        fs::write(&file, "").unwrap();
        fs::create_dir(&point).unwrap();
        mount(Some("tmpfs"), &point, Some("tmpfs"), MsFlags::empty(), Some("size=4k")).unwrap();
        let leaf = format!("{}/pod", layout.cgroup());
        cgroup::make(&leaf).unwrap();
        let mut process = Command::new("sh")
            .args(["-c", "echo begun; read never"])
            .arg(&file)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // Its command line can be read only a moment after `spawn` returns: the kernel lets go of
        // the parent before it has written it.
        let mut begun = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut begun).unwrap();
        fs::create_dir_all(layout.shim_socket(&id).parent().unwrap()).unwrap();
        let _socket = UnixListener::bind(layout.shim_socket(&id)).unwrap();
        fs::create_dir_all(CNI_RESULTS).unwrap();
        fs::write(loopback_result(&id), "").unwrap();
        let bridged = Path::new(CNI_RESULTS).join(format!("{}-{id}-eth0", layout.name));
        fs::write(&bridged, "").unwrap();

        let left = Snapshot::take(&layout, &[]).unwrap().beyond(&before);
        let expected = [
            Thing::File(file.clone(), "file"),
            Thing::File(point.clone(), "directory"),
            Thing::ShimSocket(layout.shim_socket(&id)),
            Thing::CniResult(loopback_result(&id)),
            Thing::CniResult(bridged),
        ];
        let expected = expected
            .into_iter()
            .chain(cgroup::below(&leaf).unwrap().into_iter().map(Thing::Cgroup));
        let missing: Vec<Thing> = expected.filter(|thing| !left.contains(thing)).collect();
        let mounted = left.iter().any(|thing| matches!(thing, Thing::Mount(at, _) if *at == point));
        let running = left
            .iter()
            .any(|thing| matches!(thing, Thing::Process(pid, _) if *pid == process.id()));

        // Before anything is asserted: a test that fails leaves nothing either.
        teardown::remove(&left).unwrap();
        process.wait().unwrap();
        let after = Snapshot::take(&layout, &[]).unwrap().beyond(&before);
        cgroup::remove(&layout.cgroup()).unwrap();
        assert_eq!(missing, [], "not among {left:#?}");
        assert!(mounted && running, "mount: {mounted}, process: {running}, of {left:#?}");
        assert_eq!(after, [], "after the removal");
    }
}
