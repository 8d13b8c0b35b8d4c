//! The kernel's version and settings.

use node::check::Finding;

use super::read_file;
use crate::config::{Config, ShimOwner};

const SUBJECT: &str = "kernel";

/// close_range, the newest call that a Start cannot do without (close_range(2)); clone3 with
/// CLONE_INTO_CGROUP is of 5.7.
const LEAST: (u32, u32) = (5, 9);

/// The overlay's option `volatile` (Documentation/filesystems/overlayfs.rst).
const VOLATILE: (u32, u32) = (5, 10);

/// PIDFD_GET_INFO with PIDFD_INFO_EXIT: the exit status of a process that is not our child
/// (linux/pidfd.h).
const EXIT_INFO: (u32, u32) = (6, 15);

/// Examines the running kernel.
pub(super) fn examine(config: &Config) -> Vec<Finding> {
    let release = read_file(SUBJECT, "/proc/sys/kernel/osrelease");
    let release = release.map(|text| version(text.trim(), config));
    let mut findings = vec![release.unwrap_or_else(|finding| finding)];
    // Since 6.3; older kernels let every memfd be executed.
    if let Ok(text) = std::fs::read_to_string("/proc/sys/vm/memfd_noexec") {
        findings.push(memfd(text.trim()));
    }
    findings
}

fn version(release: &str, config: &Config) -> Finding {
    let number = |text: &str| {
        text.chars().take_while(char::is_ascii_digit).collect::<String>().parse::<u32>().ok()
    };
    let mut parts = release.split('.').map(number);
    let (Some(Some(major)), Some(Some(minor))) = (parts.next(), parts.next()) else {
        return Finding::warn(
            SUBJECT,
            format!("{release:?} is not a version"),
            format!("make sure that it is {}.{} or newer", LEAST.0, LEAST.1),
        );
    };
    let fact = format!("Linux {release}");
    if (major, minor) < LEAST {
        let advice = format!(
            "boot a kernel of {}.{} or newer: a pause process cannot be started safely \
             without close_range",
            LEAST.0, LEAST.1
        );
        return Finding::fail(SUBJECT, fact, advice);
    }
    // Only the own shim mounts as the setting says.
    let is_volatile = config.volatile_rootfs && config.shim == ShimOwner::Own;
    if is_volatile && (major, minor) < VOLATILE {
        let needed = format!("{}.{}", VOLATILE.0, VOLATILE.1);
        return Finding::fail(
            SUBJECT,
            format!("{fact}: volatile_rootfs needs {needed}, so no container can start"),
            format!("set volatile_rootfs = false, or boot a kernel of {needed} or newer"),
        );
    }
    if (major, minor) < EXIT_INFO {
        let known = format!(
            "before {}.{}, so a pause process that exits while the daemon is down has exit \
             status 255",
            EXIT_INFO.0, EXIT_INFO.1
        );
        return Finding::ok(SUBJECT, format!("{fact}; {known}"));
    }
    Finding::ok(SUBJECT, fact)
}

fn memfd(setting: &str) -> Finding {
    let place = if setting == "2" {
        "so the pause program is stored in a dedicated tmpfs"
    } else {
        "a memfd can be executed"
    };
    Finding::ok(SUBJECT, format!("vm.memfd_noexec is {setting}, {place}"))
}

#[cfg(test)]
mod tests {
    use node::check::Level;

    use super::*;

    #[test]
    fn kernel_versions_are_rated() {
        let version = |release| version(release, &Config::default());
        for (release, level) in [
            ("6.18.0-1-cloud-amd64", Level::Ok),
            ("5.9.0", Level::Ok),
            ("5.10", Level::Ok),
            ("5.8.18", Level::Fail),
            ("4.19.0-27-amd64", Level::Fail),
            ("odd", Level::Warn),
        ] {
            assert_eq!(version(release).level, level, "{release}");
        }
        assert!(version("6.14.9").fact.contains("exit status 255"));
        assert!(!version("6.15-rc1").fact.contains("255"));
    }

    #[test]
    fn volatile_root_file_systems_need_a_newer_kernel() {
        let level = |release, shim| {
            version(release, &Config { volatile_rootfs: true, shim, ..Config::default() }).level
        };
        assert_eq!(level("5.9.16", ShimOwner::Own), Level::Fail);
        assert_eq!(level("5.10.0-8-amd64", ShimOwner::Own), Level::Ok);
        assert_eq!(level("5.9.16", ShimOwner::Runtime), Level::Ok);
    }

    #[test]
    fn memfd_setting() {
        assert!(memfd("1").fact.contains("can be executed"));
        assert!(memfd("2").fact.contains("tmpfs"));
    }
}
