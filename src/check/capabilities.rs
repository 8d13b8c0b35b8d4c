//! The capabilities of the check's process, which should be those of the daemon.

use node::check::Finding;

use super::read_file;
use crate::config::Config;

const SUBJECT: &str = "privileges";

/// The capabilities that the daemon requires: number (linux/capability.h), name and reason.
const NEEDED: &[(u32, &str, &str)] = &[
    (0, "CAP_CHOWN", "to give the pod's files to a user namespace"),
    (1, "CAP_DAC_OVERRIDE", "to write containerd's directories and cgroups"),
    (5, "CAP_KILL", "to kill a pause process, which runs as another user"),
    (6, "CAP_SETGID", "to run a pause process as group 65535"),
    (7, "CAP_SETUID", "to run a pause process as user 65535"),
    (8, "CAP_SETPCAP", "to drop the capabilities of a pause process"),
    (12, "CAP_NET_ADMIN", "to set the sysctls of a pod's network"),
    (18, "CAP_SYS_CHROOT", "to set the root directory of a pause process"),
    (21, "CAP_SYS_ADMIN", "to create namespaces and mounts"),
];

/// CAP_SYS_RESOURCE: lowers `oom_score_adj` (proc_pid_oom_score_adj(5)). It also raises hard
/// limits, see [`super::shims::inheritance`].
const SYS_RESOURCE: u32 = 24;

/// Examines its own process.
pub(super) fn examine(config: &Config) -> Vec<Finding> {
    let mut findings = vec![user(nix::unistd::geteuid().as_raw())];
    match read_file(SUBJECT, "/proc/self/status") {
        Ok(status) => findings.extend(capabilities(&status, config.restrict_oom_score_adj)),
        Err(finding) => findings.push(finding),
    }
    findings
}

fn user(euid: u32) -> Finding {
    if euid == 0 {
        return Finding::ok(SUBJECT, "root");
    }
    Finding::fail(
        SUBJECT,
        format!("user {euid} is not root"),
        "run the check and the daemon as root",
    )
}

/// `status` is the text of `/proc/PID/status`.
fn capabilities(status: &str, restricted: bool) -> Vec<Finding> {
    let field = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let Some(held) = field.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok()) else {
        return vec![Finding::fail(
            SUBJECT,
            "/proc/self/status shows no CapEff",
            "mount /proc as usual",
        )];
    };
    let holds = |number: u32| held & (1 << number) != 0;
    let mut findings: Vec<_> = NEEDED
        .iter()
        .filter(|(number, _, _)| !holds(*number))
        .map(|(_, name, reason)| {
            Finding::fail(
                SUBJECT,
                format!("{name} is missing, needed {reason}"),
                format!("grant {name} to the daemon"),
            )
        })
        .collect();
    if findings.is_empty() {
        findings.push(Finding::ok(SUBJECT, "has all required capabilities"));
    }
    findings.push(match (holds(SYS_RESOURCE), restricted) {
        (true, false) => Finding::ok(SUBJECT, "CAP_SYS_RESOURCE, so oom_score_adj can be lowered"),
        (true, true) => Finding::ok(
            SUBJECT,
            "restrict_oom_score_adj is set, but not needed with CAP_SYS_RESOURCE",
        ),
        (false, true) => Finding::ok(
            SUBJECT,
            "CAP_SYS_RESOURCE is missing, and restrict_oom_score_adj is set as required then",
        ),
        (false, false) => Finding::fail(
            SUBJECT,
            "CAP_SYS_RESOURCE is missing, so oom_score_adj cannot be lowered",
            "grant CAP_SYS_RESOURCE, or set restrict_oom_score_adj = true here and in \
             containerd's CRI runtime settings",
        ),
    });
    findings
}

#[cfg(test)]
mod tests {
    use node::check::Level;

    use super::*;

    fn levels(mask: u64, restricted: bool) -> Vec<Level> {
        let status = format!("Name:\tx\nCapPrm:\t0000000000000000\nCapEff:\t{mask:016x}\n");
        capabilities(&status, restricted).iter().map(|f| f.level).collect()
    }

    #[test]
    fn a_user_other_than_root_is_reported() {
        assert_eq!(user(0).level, Level::Ok);
        assert_eq!(user(1000).level, Level::Fail);
    }

    #[test]
    fn capabilities_of_a_node_and_of_a_container() {
        let all = (1 << 41) - 1;
        assert_eq!(levels(all, false), [Level::Ok, Level::Ok]);
        assert_eq!(levels(all, true), [Level::Ok, Level::Ok]);
        let without_resource = all & !(1 << SYS_RESOURCE);
        assert_eq!(levels(without_resource, false), [Level::Ok, Level::Fail]);
        assert_eq!(levels(without_resource, true), [Level::Ok, Level::Ok]);
        // Docker's default set lacks SYS_ADMIN and NET_ADMIN.
        assert_eq!(levels(0xa804_25fb, true), [Level::Fail, Level::Fail, Level::Ok]);
        assert_eq!(capabilities("Name:\tx\n", true)[0].level, Level::Fail);
    }

    #[test]
    fn a_missing_capability_is_named() {
        let finding = &capabilities("CapEff:\t000001ffffdfffff\n", false)[0];
        assert!(finding.fact.starts_with("CAP_SYS_ADMIN is missing"), "{finding}");
    }
}
