//! Everything of a node that is on the machine, read from the machine.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::config::Layout;
use crate::machine::{cgroup, mounts, processes};
use crate::scrap;

/// What is not looked at in a node's directory: containerd's stores of content and metadata, which grow for their own reasons, and logs.
const IGNORED: [&str; 4] =
    ["logs", "root/io.containerd.content.v1.content", "root/io.containerd.metadata.v1.bolt", "root/tmpmounts"];
/// Where libcni keeps its results.
const CNI_RESULTS: &str = "/var/lib/cni/results";
/// Length of the ids that containerd makes up for pods and containers.
const ID: usize = 64;

/// The processes, mounts, files, sockets, cgroups, interfaces and segments of a node at one moment, each as a line of text.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    things: BTreeSet<String>,
    log_length: u64,
    layout: Option<Layout>,
}

impl Snapshot {
    pub(crate) fn take(layout: &Layout, daemons: &[u32]) -> Result<Self> {
        let mut things = BTreeSet::new();
        processes(layout, daemons, &mut things)?;
        mount_points(layout, daemons, &mut things)?;
        files(layout, &layout.top, &mut things)?;
        for directory in cgroup::below(&layout.cgroup())? {
            things.insert(format!("cgroup {}", directory.display()));
        }
        for port in names(&Path::new("/sys/class/net").join(&layout.name).join("brif")) {
            things.insert(format!("interface {port} on the bridge {}", layout.name));
        }
        for file in cni_results(layout) {
            things.insert(format!("CNI result {}", file.display()));
        }
        segments(&mut things)?;
        let log_length = fs::metadata(layout.containerd_log()).map(|m| m.len()).unwrap_or_default();
        Ok(Self { things, log_length, layout: Some(layout.clone()) })
    }

    /// What is here that is not in `before`, and the shims' sockets of all ids that containerd's log has named since `before`.
    pub fn beyond(&self, before: &Self) -> Vec<String> {
        let mut left: Vec<String> = self.things.difference(&before.things).cloned().collect();
        if let Some(layout) = &self.layout {
            left.extend(
                ids_in_log(layout, before.log_length)
                    .into_iter()
                    .map(|id| layout.shim_socket(&id))
                    .filter(|socket| socket.symlink_metadata().is_ok())
                    .map(|socket| format!("shim socket {}", socket.display())),
            );
        }
        left
    }

    /// All lines that contain `word`, such as a sandbox id.
    pub fn naming(&self, word: &str) -> Vec<&str> {
        self.things.iter().map(String::as_str).filter(|thing| thing.contains(word)).collect()
    }
}

fn processes(layout: &Layout, daemons: &[u32], things: &mut BTreeSet<String>) -> Result<()> {
    for process in scrap::members(layout)? {
        if daemons.contains(&process.pid) {
            continue;
        }
        let zombie = if process.state == 'Z' { " (zombie)" } else { "" };
        things.insert(format!("process {} {} {}{zombie}", process.pid, process.comm, process.command));
    }
    Ok(())
}

/// Mounts of the node as this process and each daemon sees them: a daemon may have a mount namespace of its own.
fn mount_points(layout: &Layout, daemons: &[u32], things: &mut BTreeSet<String>) -> Result<()> {
    let ours = processes::namespace("self", "mnt")?;
    let mut seen = vec![("self".to_owned(), String::new())];
    for daemon in daemons.iter().map(ToString::to_string) {
        if processes::namespace(&daemon, "mnt").is_ok_and(|theirs| theirs != ours) {
            seen.push((daemon.clone(), format!(" as process {daemon} sees it")));
        }
    }
    for (pid, where_) in seen {
        // A daemon that has just ended has no mounts.
        for mount in mounts::of(&pid).unwrap_or_default() {
            if mount.point.starts_with(&layout.top) || mount.root.contains(&layout.name) {
                things.insert(format!("mount {} {} on {}{where_}", mount.kind, mount.root, mount.point.display()));
            }
        }
    }
    Ok(())
}

/// Every file of the node's directory; what is mounted there is a mount, not files.
fn files(layout: &Layout, directory: &Path, things: &mut BTreeSet<String>) -> Result<()> {
    let Ok(device) = directory.metadata().map(|m| m.dev()) else { return Ok(()) };
    // What goes meanwhile is gone.
    let Ok(entries) = fs::read_dir(directory) else { return Ok(()) };
    for entry in entries.flatten() {
        let path = entry.path();
        let below = path.strip_prefix(&layout.top).context("a file outside of the node's directory")?;
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
        things.insert(format!("{kind} {}", path.display()));
        if about.is_dir() && about.dev() == device {
            files(layout, &path, things)?;
        }
    }
    Ok(())
}

/// System V shared memory of the machine's own IPC namespace.
fn segments(things: &mut BTreeSet<String>) -> Result<()> {
    let text = fs::read_to_string("/proc/sysvipc/shm").context("read /proc/sysvipc/shm")?;
    for line in text.lines().skip(1) {
        let mut words = line.split_whitespace();
        if let (Some(key), Some(id)) = (words.next(), words.next()) {
            things.insert(format!("shared memory segment {id} with key {key}"));
        }
    }
    Ok(())
}

/// What libcni remembers of a node's network.
pub(crate) fn cni_results(layout: &Layout) -> Vec<PathBuf> {
    let prefix = format!("{}-", layout.name);
    let mine = |name: &String| name.starts_with(&prefix);
    names(Path::new(CNI_RESULTS)).into_iter().filter(mine).map(|name| Path::new(CNI_RESULTS).join(name)).collect()
}

/// The ids of pods and containers that containerd's log names from `offset` on, those included that failed to start.
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
