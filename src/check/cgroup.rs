//! The node's cgroups and whether this version fits them.

use std::path::Path;

use base::platform::systemd_runs;
use node::check::Finding;

use crate::cgroup::mounts::{Mounted, ROOT};

const SUBJECT: &str = "cgroup";

/// Socket of D-Bus.
const BUS: &str = "/run/dbus/system_bus_socket";

/// The init system, as far as it manages cgroups.
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
        if systemd_runs() { Self::Systemd { bus: Path::new(BUS).exists() } } else { Self::Other }
    }
}

/// Examines the cgroup mounts and the init system.
pub(super) fn examine() -> Vec<Finding> {
    match Mounted::find() {
        Ok(mounted) => cgroup_findings(&mounted, &Init::find()),
        Err(step) => {
            vec![Finding::fail(SUBJECT, step.to_string(), "mount /proc and /sys as usual")]
        }
    }
}

fn cgroup_findings(mounted: &Mounted, init: &Init) -> Vec<Finding> {
    let found = match mounted {
        Mounted::V2(_) => Finding::ok(SUBJECT, "version 2"),
        Mounted::V1(hierarchies) if hierarchies.is_empty() => Finding::fail(
            SUBJECT,
            "no cgroup file system is mounted",
            format!("mount cgroup2 on {ROOT}"),
        ),
        Mounted::V1(hierarchies) => {
            let mut controllers: Vec<&str> = hierarchies
                .iter()
                .flat_map(|hierarchy| &hierarchy.controllers)
                .map(String::as_str)
                .collect();
            controllers.sort_unstable();
            let names = controllers.join(", ");
            if controllers.contains(&"memory") {
                Finding::ok(SUBJECT, format!("version 1: {names}"))
            } else {
                Finding::fail(
                    SUBJECT,
                    format!("version 1 without the memory controller: {names}"),
                    "boot with cgroup_enable=memory, or with cgroup version 2",
                )
            }
        }
    };
    vec![found, fits(init)]
}

/// Whether the pods' cgroup parents will be ones that can be made here.
fn fits(init: &Init) -> Finding {
    match init {
        Init::Other => Finding::ok(
            SUBJECT,
            "systemd is not the init system; pods get directories of the cgroup file system",
        ),
        Init::Systemd { bus: true } => Finding::ok(
            SUBJECT,
            "systemd is the init system; pods below a slice get scopes, others directories of the \
             cgroup file system",
        ),
        Init::Systemd { bus: false } => Finding::warn(
            SUBJECT,
            format!(
                "systemd is the init system, but D-Bus is not running ({BUS} is missing): pods \
                 whose cgroup parent is a slice cannot start"
            ),
            "install and start dbus, or set kubelet's cgroupDriver to cgroupfs",
        ),
    }
}

#[cfg(test)]
mod tests {
    use node::check::Level;

    use super::*;
    use crate::cgroup::mounts::Hierarchy;

    fn version_1(controllers: &[&str]) -> Mounted {
        let one = |name: &&str| Hierarchy {
            point: Path::new(ROOT).join(name),
            controllers: vec![(*name).to_owned()],
        };
        Mounted::V1(controllers.iter().map(one).collect())
    }

    #[test]
    fn what_is_mounted_and_who_manages_it() {
        let v2 = Mounted::V2(ROOT.into());
        let (systemd, deaf) = (Init::Systemd { bus: true }, Init::Systemd { bus: false });
        let levels = |mounted: &Mounted, init| {
            cgroup_findings(mounted, &init).iter().map(|f| f.level).collect::<Vec<_>>()
        };
        assert_eq!(levels(&v2, systemd), [Level::Ok, Level::Ok]);
        assert_eq!(levels(&v2, Init::Other), [Level::Ok, Level::Ok]);
        assert_eq!(levels(&version_1(&["memory"]), Init::Other), [Level::Ok, Level::Ok]);
        assert_eq!(levels(&version_1(&["cpu"]), deaf), [Level::Fail, Level::Warn]);
        assert_eq!(levels(&version_1(&[]), Init::Other), [Level::Fail, Level::Ok]);
        assert_eq!(
            cgroup_findings(&version_1(&["pids", "memory"]), &systemd)[0].fact,
            "version 1: memory, pids"
        );
    }
}
