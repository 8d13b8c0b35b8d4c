//! The node's cgroups and whether this version fits them.

use std::path::Path;

use super::{Finding, read};

const SUBJECT: &str = "cgroup";

/// Socket of D-Bus.
const BUS: &str = "/run/dbus/system_bus_socket";

/// What is mounted.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Mode {
    /// One hierarchy per controller; the names of the mounted ones.
    V1(Vec<String>),
    /// The unified hierarchy alone.
    V2,
    /// Nothing.
    None,
}

/// Who else manages cgroups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Init {
    Other,
    Systemd {
        /// Whether it can be asked for something.
        bus: bool,
    },
}

impl Init {
    fn find() -> Self {
        if Path::new("/run/systemd/system").exists() {
            Self::Systemd { bus: Path::new(BUS).exists() }
        } else {
            Self::Other
        }
    }
}

/// Looks at the mounts and at the init system.
pub(super) fn look() -> Vec<Finding> {
    match read(SUBJECT, "/proc/self/mountinfo") {
        Ok(mounts) => judge(&mode(&mounts), &Init::find()),
        Err(finding) => vec![finding],
    }
}

/// `mountinfo` as in proc_pid_mountinfo(5): … mount point (5th) … `-` type source super-options.
fn mode(mountinfo: &str) -> Mode {
    let (mut controllers, mut unified) = (Vec::new(), false);
    for line in mountinfo.lines() {
        let Some((front, back)) = line.split_once(" - ") else { continue };
        let mut back = back.split(' ');
        let (kind, options) = (back.next().unwrap_or_default(), back.nth(1).unwrap_or_default());
        let point = front.split(' ').nth(4).unwrap_or_default();
        match kind {
            // The mount options come first, then the controllers; named hierarchies have no controller.
            "cgroup" => {
                let known = |option: &&str| {
                    !matches!(*option, "rw" | "ro" | "xattr" | "clone_children" | "noprefix") && !option.contains('=')
                };
                controllers.extend(options.split(',').filter(known).map(str::to_owned));
            }
            "cgroup2" if point == "/sys/fs/cgroup" => unified = true,
            _ => {}
        }
    }
    controllers.sort();
    controllers.dedup();
    match (controllers.is_empty(), unified) {
        (false, _) => Mode::V1(controllers),
        (true, true) => Mode::V2,
        (true, false) => Mode::None,
    }
}

fn judge(mode: &Mode, init: &Init) -> Vec<Finding> {
    let mounted = match mode {
        Mode::V2 => Finding::ok(SUBJECT, "version 2"),
        Mode::V1(controllers) if controllers.iter().any(|c| c == "memory") => {
            Finding::ok(SUBJECT, format!("version 1: {}", controllers.join(", ")))
        }
        Mode::V1(controllers) => Finding::fail(
            SUBJECT,
            format!("version 1 without the memory controller: {}", controllers.join(", ")),
            "boot with cgroup_enable=memory, or with cgroup version 2",
        ),
        Mode::None => Finding::fail(SUBJECT, "no cgroup file system is mounted", "mount cgroup2 on /sys/fs/cgroup"),
    };
    vec![mounted, fits(init)]
}

/// Whether the pods' cgroup parents will be ones that can be made here.
fn fits(init: &Init) -> Finding {
    match init {
        Init::Other => Finding::ok(SUBJECT, "no systemd here; pods get directories of the cgroup file system"),
        Init::Systemd { bus: true } => Finding::ok(
            SUBJECT,
            "systemd runs here; pods below a slice get scopes, others directories of the cgroup file system",
        ),
        Init::Systemd { bus: false } => Finding::warn(
            SUBJECT,
            format!(
                "systemd runs here but D-Bus does not ({BUS} is missing): pods whose cgroup parent is a slice will not start"
            ),
            "install and start dbus, or set kubelet's cgroupDriver to cgroupfs",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    const V2: &str =
        "29 24 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";
    const HYBRID: &str = "\
25 20 0:22 / /sys/fs/cgroup ro,nosuid - tmpfs tmpfs ro,mode=755
26 25 0:23 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
27 25 0:24 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd
28 25 0:25 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
29 25 0:26 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
";

    fn names(names: &[&str]) -> Mode {
        Mode::V1(names.iter().map(|name| (*name).to_owned()).collect())
    }

    #[test]
    fn modes() {
        assert_eq!(mode(V2), Mode::V2);
        assert_eq!(mode(HYBRID), names(&["cpu", "cpuacct", "memory"]));
        assert_eq!(mode("1 0 8:1 / / rw - ext4 /dev/sda rw\n"), Mode::None);
        assert_eq!(mode("27 25 0:24 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n"), Mode::None);
        assert_eq!(mode(""), Mode::None);
    }

    #[test]
    fn what_is_mounted_and_who_manages_it() {
        let (systemd, deaf) = (Init::Systemd { bus: true }, Init::Systemd { bus: false });
        let levels = |mode: &Mode, init| judge(mode, &init).iter().map(|f| f.level).collect::<Vec<_>>();
        assert_eq!(levels(&Mode::V2, systemd), [Level::Ok, Level::Ok]);
        assert_eq!(levels(&Mode::V2, Init::Other), [Level::Ok, Level::Ok]);
        assert_eq!(levels(&names(&["memory"]), Init::Other), [Level::Ok, Level::Ok]);
        assert_eq!(levels(&names(&["cpu"]), deaf), [Level::Fail, Level::Warn]);
        assert_eq!(levels(&Mode::None, Init::Other), [Level::Fail, Level::Ok]);
    }
}
