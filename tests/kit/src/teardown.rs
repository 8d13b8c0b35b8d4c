//! Removing all of a node from the machine, whatever state it is in.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;
use std::sync::Once;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use crate::config::Layout;
use crate::machine::cgroup_driver::{self, CgroupDriver};
use crate::machine::{cgroup, mounts, processes};
use crate::snapshot::{self, Thing};

/// How the names of all nodes begin.
pub(crate) const PREFIX: &str = "psb-";
/// The file in a node's directory that tells whose node it is.
const OWNER: &str = "owner.json";

/// The process that a node belongs to.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Owner {
    pid: u32,
    start_time: u64,
}

impl Owner {
    pub(crate) fn ourselves() -> Self {
        let pid = std::process::id();
        Self { pid, start_time: processes::one(pid).map(|p| p.start_time).unwrap_or_default() }
    }

    pub(crate) fn write(&self, layout: &Layout) -> Result<()> {
        fs::write(layout.top.join(OWNER), serde_json::to_vec(self)?)
            .context("write the node's owner")
    }

    fn lives(&self) -> bool {
        processes::one(self.pid).is_ok_and(|process| process.start_time == self.start_time)
    }
}

/// All nodes of this machine whose directory is where nodes are made.
fn nodes() -> Vec<(Layout, Owner)> {
    let Ok(entries) = fs::read_dir(std::env::temp_dir()) else { return Vec::new() };
    entries
        .flatten()
        .filter_map(|entry| {
            let name =
                entry.file_name().to_str().filter(|name| name.starts_with(PREFIX))?.to_owned();
            let owner = serde_json::from_slice(&fs::read(entry.path().join(OWNER)).ok()?).ok()?;
            Some((Layout { top: entry.path(), name }, owner))
        })
        .collect()
}

/// Removes the nodes whose owner was killed.
pub(crate) fn orphans() {
    for (layout, owner) in nodes() {
        if !owner.lives() {
            eprintln!("kit: removing {}, whose owner is gone", layout.top.display());
            for failure in tear_down(&layout, false) {
                eprintln!("kit: {failure}");
            }
        }
    }
}

/// Makes SIGINT, SIGTERM and SIGHUP remove the nodes of this process before they end it.
pub(crate) fn on_signals() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        std::thread::spawn(|| {
            let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build()
            else {
                return;
            };
            runtime.block_on(async {
                use tokio::signal::unix::{SignalKind, signal};
                let (Ok(mut int), Ok(mut term), Ok(mut hup)) = (
                    signal(SignalKind::interrupt()),
                    signal(SignalKind::terminate()),
                    signal(SignalKind::hangup()),
                ) else {
                    return;
                };
                let number = tokio::select! {
                    _ = int.recv() => Signal::SIGINT,
                    _ = term.recv() => Signal::SIGTERM,
                    _ = hup.recv() => Signal::SIGHUP,
                } as i32;
                eprintln!("kit: ended by signal {number}, removing the nodes");
                let ourselves = Owner::ourselves();
                for (layout, owner) in nodes() {
                    if owner == ourselves {
                        tear_down(&layout, false);
                    }
                }
                std::process::exit(128 + number);
            });
        });
    });
}

/// Ends and removes everything of a node; what is gone already is success. Answers what failed.
/// With `keep` its files stay.
pub(crate) fn tear_down(layout: &Layout, keep: bool) -> Vec<String> {
    let mut failed = Vec::new();
    let mut note = |what: &str, done: Result<()>| {
        if let Err(e) = done {
            failed.push(format!("{what}: {e:#}"));
        }
    };
    note("end the processes", end_processes(layout));
    note("unmount", unmount(layout));
    note("remove the bridge", remove_bridge(layout));
    note("remove the cgroups", remove_cgroups(layout));
    note("remove the shims' sockets", remove_sockets(layout));
    note("remove what CNI remembers", remove_cni_results(layout));
    if !keep {
        note("remove the directory", ignore_gone(fs::remove_dir_all(&layout.top)));
    }
    failed
}

/// Every process of a node: those that name its directory, those in its cgroups, and the
/// descendants of both.
pub(crate) fn members(layout: &Layout) -> Result<Vec<processes::Proc>> {
    let all = processes::all()?;
    let top = layout.top.to_string_lossy().into_owned();
    let (inside, exactly) = (format!(":{}/", layout.cgroup()), format!(":{}\n", layout.cgroup()));
    let mut members: BTreeSet<u32> = all
        .iter()
        .filter(|p| {
            p.command.contains(&top) || p.cgroups.contains(&inside) || p.cgroups.contains(&exactly)
        })
        .map(|p| p.pid)
        .collect();
    loop {
        let before = members.len();
        let children =
            all.iter().filter(|p| members.contains(&p.parent)).map(|p| p.pid).collect::<Vec<_>>();
        members.extend(children);
        if members.len() == before {
            break;
        }
    }
    members.remove(&std::process::id());
    Ok(all.into_iter().filter(|p| members.contains(&p.pid)).collect())
}

fn end_processes(layout: &Layout) -> Result<()> {
    /// Tries, a tenth of a second apart: a killed process may take a while to go, and its children
    /// may come to light.
    const TRIES: u32 = 50;
    for _ in 0..TRIES {
        let living: Vec<_> = members(layout)?.into_iter().filter(|p| p.state != 'Z').collect();
        if living.is_empty() {
            return Ok(());
        }
        for process in &living {
            // A process that has ended meanwhile needs no signal.
            let _ = kill(Pid::from_raw(i32::try_from(process.pid)?), Signal::SIGKILL);
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    let left: Vec<_> =
        members(layout)?.into_iter().map(|p| format!("{} {}", p.pid, p.command)).collect();
    anyhow::bail!("still there: {}", left.join("; "))
}

fn unmount(layout: &Layout) -> Result<()> {
    // The newest first: it may lie on top of another.
    for mount in
        mounts::of("self")?.iter().rev().filter(|mount| mount.point.starts_with(&layout.top))
    {
        umount2(&mount.point, MntFlags::MNT_DETACH)
            .with_context(|| mount.point.display().to_string())?;
    }
    Ok(())
}

/// Removes things by force; pods and records are containerd's own affair. Gone already is success.
pub(crate) fn remove(things: &[Thing]) -> Result<()> {
    // Processes hold mounts and cgroups, mounts hold directories, and of directories and cgroups
    // children stand after their parents.
    let order = |thing: &&Thing| match thing {
        Thing::Process(..) => 0,
        Thing::Mount(..) => 1,
        _ => 2,
    };
    let mut ordered: Vec<&Thing> = things.iter().rev().collect();
    ordered.sort_by_key(order);
    for thing in ordered {
        remove_one(thing).with_context(|| thing.to_string())?;
    }
    Ok(())
}

fn remove_one(thing: &Thing) -> Result<()> {
    /// How long a cgroup may be busy after its last process was killed.
    const BUSY: Duration = Duration::from_secs(2);
    match thing {
        Thing::Process(pid, _) => {
            // A process that has ended meanwhile needs no signal.
            let _ = kill(Pid::from_raw(i32::try_from(*pid)?), Signal::SIGKILL);
            Ok(())
        }
        Thing::Mount(point, _) => match umount2(point, MntFlags::MNT_DETACH) {
            Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => Ok(()),
            Err(e) => Err(e.into()),
        },
        Thing::File(path, "directory") => ignore_gone(fs::remove_dir(path)),
        Thing::File(path, _) | Thing::ShimSocket(path) | Thing::CniResult(path) => {
            ignore_gone(fs::remove_file(path))
        }
        Thing::Cgroup(path) => {
            let begun = Instant::now();
            loop {
                match fs::remove_dir(path) {
                    Err(e) if e.kind() == ErrorKind::ResourceBusy && begun.elapsed() < BUSY => {
                        std::thread::sleep(Duration::from_millis(10));
                    }
                    done => return ignore_gone(done),
                }
            }
        }
        Thing::Unit(name) => cgroup_driver::stop(name),
        Thing::Interface(name) => ip_link_delete(name),
        Thing::Segment(id, _) => run(Command::new("ipcrm").args(["-m", id])),
        Thing::Pod(..) | Thing::Record(..) => Ok(()),
    }
}

fn remove_bridge(layout: &Layout) -> Result<()> {
    ip_link_delete(&layout.name)
}

fn ip_link_delete(name: &str) -> Result<()> {
    if !Path::new("/sys/class/net").join(name).exists() {
        return Ok(());
    }
    run(Command::new("ip").args(["link", "delete", name]))
}

fn run(command: &mut Command) -> Result<()> {
    let done = command.output().with_context(|| format!("run {command:?}"))?;
    anyhow::ensure!(
        done.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&done.stderr).trim()
    );
    Ok(())
}

fn remove_cgroups(layout: &Layout) -> Result<()> {
    if CgroupDriver::chosen() == CgroupDriver::Systemd {
        // With all slices and scopes in it.
        return cgroup_driver::slice(&layout.cgroup()).map_or(Ok(()), cgroup_driver::stop);
    }
    let mut directories = cgroup::below(&layout.cgroup())?;
    // Children before parents.
    directories.sort_by_key(|directory| std::cmp::Reverse(directory.components().count()));
    for directory in directories {
        ignore_gone(fs::remove_dir(&directory)).with_context(|| directory.display().to_string())?;
    }
    Ok(())
}

fn remove_sockets(layout: &Layout) -> Result<()> {
    for id in snapshot::ids_in_log(layout, 0) {
        let socket = layout.shim_socket(&id);
        ignore_gone(fs::remove_file(&socket)).with_context(|| socket.display().to_string())?;
    }
    Ok(())
}

/// libcni keeps its results in one place for all of a machine; the network's name tells whose they
/// are.
fn remove_cni_results(layout: &Layout) -> Result<()> {
    let loopback =
        snapshot::ids_in_log(layout, 0).into_iter().map(|id| snapshot::loopback_result(&id));
    for file in snapshot::cni_results(layout).into_iter().chain(loopback) {
        ignore_gone(fs::remove_file(&file)).with_context(|| file.display().to_string())?;
    }
    Ok(())
}

fn ignore_gone(done: std::io::Result<()>) -> Result<()> {
    match done {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(e.into()),
        _ => Ok(()),
    }
}
