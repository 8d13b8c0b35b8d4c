//! What the cluster runs on: it starts the cluster's programs, watches them and ends them.
//!
//! In a lane (`tests/kit/lanes`), where cgroups are of version 1, they are children of the test. On
//! a node (`tests/vm`), where systemd and cgroup version 2 are, they are units of systemd as the
//! packages have them, so that all cgroups are as on any node.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::Process;
use kit::machine::cgroup_driver::CgroupDriver;
use nix::mount::{MsFlags, mount, umount};
use nix::sys::signal::Signal;

use crate::cluster::{run, until};

/// Units of the test, and its changes of those of packages, until the machine is off.
const UNITS: &str = "/run/systemd/system";
const PACKAGED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/systemd");
/// Of the machines of `tests/vm/run`.
const OWN_NODE: &str = "VM_BOOT";

pub(crate) enum Machine {
    Lane(Mutex<BTreeMap<&'static str, Process>>),
    Node,
}

/// The units of a program; its own is the last.
fn units(program: &str) -> Vec<String> {
    match program {
        "pause-sandboxer" => vec![format!("{program}.socket"), format!("{program}.service")],
        _ => vec![format!("{program}.service")],
    }
}

fn systemctl(words: &[&str], units: &[String]) -> Result<String> {
    let units = units.iter().map(String::as_str);
    run("systemctl", &words.iter().copied().chain(units).collect::<Vec<_>>())
}

impl Machine {
    /// What this process runs on, if that is a machine that may be changed.
    pub(crate) fn get() -> Result<Self> {
        let init = fs::read_to_string("/proc/1/cmdline")?.replace('\0', " ");
        if init.contains("lanes --inside ") {
            return Ok(Self::Lane(Mutex::default()));
        }
        ensure!(
            std::env::var_os(OWN_NODE).is_some() && Path::new("/run/systemd/system").exists(),
            "runs in a lane of tests/kit/lanes or on a node of tests/vm only, not beside process 1 \
             ({init}): it writes to /etc and /var"
        );
        Ok(Self::Node)
    }

    pub(crate) fn is_node(&self) -> bool {
        matches!(self, Self::Node)
    }

    /// Who keeps the pods' cgroups.
    pub(crate) fn cgroup_driver() -> CgroupDriver {
        if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() {
            CgroupDriver::Systemd
        } else {
            CgroupDriver::Cgroupfs
        }
    }

    /// Makes it a node for a cluster whose directory is `top`.
    pub(crate) fn prepare(&self, top: &Path) -> Result<()> {
        match self {
            Self::Lane(_) => cover(top),
            Self::Node => {
                systemctl(&["stop"], &units("containerd"))?;
                install_sandboxer()
            }
        }
    }

    /// Starts a program with its output in `log`. It need not be ready yet.
    pub(crate) fn start(&self, name: &'static str, command: Command, log: &Path) -> Result<()> {
        match self {
            Self::Lane(running) => {
                let mut running = running.lock().unwrap_or_else(PoisonError::into_inner);
                ensure!(!running.contains_key(name), "{name} is running");
                running.insert(name, Process::spawn(command, log)?);
                Ok(())
            }
            Self::Node => {
                write_unit(name, &command, log)?;
                if name == "kubelet" {
                    name_a_clock_speed()?;
                }
                systemctl(&["start"], &units(name)).map(drop)
            }
        }
    }

    /// Undoes what only a starting kubelet needs.
    pub(crate) fn kubelet_runs(&self) -> Result<()> {
        let mounts = fs::read_to_string("/proc/self/mounts")?;
        if self.is_node() && mounts.contains(&format!(" {CPUS} ")) {
            umount(CPUS).context(CPUS)?;
        }
        Ok(())
    }

    /// Ends a program with a signal, and waits for its end.
    pub(crate) fn end(&self, name: &'static str, signal: Signal) -> Result<()> {
        match self {
            Self::Lane(running) => {
                let mut running = running.lock().unwrap_or_else(PoisonError::into_inner);
                let mut process =
                    running.remove(name).with_context(|| format!("{name} does not run"))?;
                drop(running);
                process.signal(signal)?;
                until(&format!("the end of {name}"), Duration::from_secs(60), || {
                    process.ended()?.context("it runs").map(drop)
                })
            }
            Self::Node => {
                let units = units(name);
                if signal != Signal::SIGTERM {
                    let signal = format!("--signal={signal}");
                    let own = &units[units.len() - 1..];
                    systemctl(&["kill", "--kill-whom=main", &signal], own)?;
                }
                // Of the units of packages systemd starts a killed program again. If it does so
                // between the stops of socket and service, it cancels that of the socket.
                until(&format!("the end of {name}"), Duration::from_secs(60), || {
                    systemctl(&["stop"], &units).map(drop)
                })
            }
        }
    }

    /// Fails if one of the programs that were started has ended by itself.
    pub(crate) fn check(&self, started: &[&'static str]) -> Result<()> {
        match self {
            Self::Lane(running) => {
                let mut running = running.lock().unwrap_or_else(PoisonError::into_inner);
                running.values_mut().try_for_each(Process::check)
            }
            Self::Node => {
                let services: Vec<String> =
                    started.iter().filter_map(|name| units(name).pop()).collect();
                if services.is_empty() {
                    return Ok(());
                }
                let shown = systemctl(&["show", "--property=Id,ActiveState,NRestarts"], &services)?;
                for unit in shown.split("\n\n") {
                    let lives = !unit.contains("=failed") && !unit.contains("=inactive");
                    ensure!(lives && unit.contains("NRestarts=0"), "it has ended: {unit}");
                }
                Ok(())
            }
        }
    }

    /// Ends the programs in this order. A node is thrown away with all that runs there.
    pub(crate) fn end_all<'a>(&self, programs: impl Iterator<Item = &'a &'static str>) {
        if let Self::Lane(running) = self {
            let mut running = running.lock().unwrap_or_else(PoisonError::into_inner);
            for program in programs {
                drop(running.remove(program));
            }
        }
    }
}

/// Puts a scratch directory over what a cluster writes to.
fn cover(top: &Path) -> Result<()> {
    // As systemd has it: mounts of the node appear in containers that ask for them.
    let shared = MsFlags::MS_REC | MsFlags::MS_SHARED;
    mount(None::<&str>, "/", None::<&str>, shared, None::<&str>).context("share all mounts")?;
    for over in ["etc", "opt", "usr/local", "var"] {
        let at = |kind: &str| top.join("over").join(kind).join(over);
        fs::create_dir_all(at("upper"))?;
        fs::create_dir_all(at("work"))?;
        let options = format!(
            "lowerdir=/{over},upperdir={},workdir={}",
            at("upper").display(),
            at("work").display()
        );
        let none = MsFlags::empty();
        let target = Path::new("/").join(over);
        mount(Some("node"), &target, Some("overlay"), none, Some(options.as_str()))
            .with_context(|| format!("overlay over /{over}"))?;
    }
    // No overlays: containers' root directories are some, and volumes are mounted with other ids.
    for bound in ["/var/lib/containerd", "/var/lib/kubelet", "/var/log/pods"] {
        fs::create_dir_all(bound)?;
        mount(Some("node"), bound, Some("tmpfs"), MsFlags::empty(), Some("mode=0755"))?;
    }
    Ok(())
}

/// Daemon, shim and units, where the installer has them.
fn install_sandboxer() -> Result<()> {
    let built = Path::new(env!("CARGO_BIN_EXE_pause-sandboxer"));
    for program in ["pause-sandboxer", "pause-sandboxer-runc-shim"] {
        let from = built.with_file_name(program);
        fs::copy(&from, Path::new("/usr/local/bin").join(program))
            .with_context(|| from.display().to_string())?;
    }
    for unit in units("pause-sandboxer") {
        fs::copy(Path::new(PACKAGED).join(&unit), Path::new("/etc/systemd/system").join(&unit))?;
    }
    Ok(())
}

const CPUS: &str = "/proc/cpuinfo";

/// The kernel of User-mode Linux does not say how fast the CPU is, without which kubelet does not
/// start. Only until then: with a mount in it, the kernel lets no user namespace mount /proc.
fn name_a_clock_speed() -> Result<()> {
    let text = fs::read_to_string(CPUS)?;
    if text.contains("cpu MHz") {
        return Ok(());
    }
    let named = Path::new("/run/cluster/cpuinfo");
    fs::write(named, format!("{}\ncpu MHz\t\t: 1000.000\n\n", text.trim_end()))?;
    mount(Some(named), CPUS, None::<&str>, MsFlags::MS_BIND, None::<&str>).context(CPUS)
}

/// The unit of a program, or what is different in that of its package.
fn write_unit(name: &str, command: &Command, log: &Path) -> Result<()> {
    let service = format!("{name}.service");
    let mut lines = vec!["[Service]".to_owned()];
    for (key, value) in command.get_envs() {
        let value = value.unwrap_or_default().to_string_lossy();
        lines.push(format!("Environment=\"{}={value}\"", key.to_string_lossy()));
    }
    lines.push(format!("StandardOutput=append:{0}\nStandardError=append:{0}", log.display()));
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words = words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
    let path = match name {
        "pause-sandboxer" => format!("{UNITS}/{service}.d/cluster.conf"),
        "containerd" => {
            // The first line forgets that of the package.
            lines.push(format!("ExecStart=\nExecStart={words}"));
            format!("{UNITS}/{service}.d/cluster.conf")
        }
        _ => {
            lines.push(format!("Type=exec\nExecStart={words}"));
            format!("{UNITS}/{service}")
        }
    };
    fs::create_dir_all(Path::new(&path).parent().context("a path")?)?;
    fs::write(&path, lines.join("\n") + "\n").with_context(|| path)?;
    run("systemctl", &["daemon-reload"]).map(drop)
}
