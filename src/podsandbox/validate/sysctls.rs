//! Sysctls: only those of the pod's own namespaces.

use std::collections::BTreeSet;

use crate::config::Config;
use crate::pause::Namespace;
use crate::podsandbox::Error;
use crate::podsandbox::error::shorten;
use crate::protos::cri::{LinuxSandboxSecurityContext, NamespaceMode, PodSandboxConfig};

/// The sysctls that the pod asks for, by name, and then those that the settings add.
///
/// # Errors
/// [`Error::Invalid`]: one is malformed, or would change the node.
pub(super) fn check(
    id: &str,
    pod: &PodSandboxConfig,
    config: &Config,
    host_network: bool,
    ipc: Namespace,
    security: &LinuxSandboxSecurityContext,
) -> Result<Vec<(String, String)>, Error> {
    let mut wanted: Vec<(String, String)> =
        pod.linux.sysctls.iter().map(|(k, v)| (k.replace('/', "."), v.clone())).collect();
    wanted.sort();
    for (name, value) in &wanted {
        let refuse = |reason: &str| {
            Err(Error::invalid(
                id,
                &format!("linux.sysctls[{:?}]", shorten(name)),
                reason.to_owned(),
            ))
        };
        let plain = name.split('.').all(|part| !part.is_empty() && !part.contains(['/', '\0']));
        if !plain || value.contains('\0') {
            return refuse("is not a sysctl name, or its value has a zero byte");
        }
        match namespace_of(name) {
            Some(Sysctl::Network) if host_network => {
                return refuse("the pod uses the node's network");
            }
            Some(Sysctl::Ipc) if ipc == Namespace::Node => {
                return refuse("the pod uses the node's IPC");
            }
            Some(Sysctl::Uts) if host_network => {
                return refuse("the pod uses the node's network and so its UTS namespace");
            }
            Some(_) => {}
            None => return refuse("is not namespaced, it would change the node"),
        }
    }
    if !host_network {
        let given: BTreeSet<&str> = pod.linux.sysctls.keys().map(String::as_str).collect();
        let userns = security.namespace_options.userns_options.as_ref();
        let userns = userns.is_some_and(|u| u.mode.enum_value() == Ok(NamespaceMode::POD));
        let (ports, ping) = ("net.ipv4.ip_unprivileged_port_start", "net.ipv4.ping_group_range");
        let mut defaults = Vec::new();
        if config.enable_unprivileged_ports && !given.contains(ports) {
            defaults.push((ports.to_owned(), "0".to_owned()));
        }
        if config.enable_unprivileged_icmp && !given.contains(ping) && !userns {
            defaults.push((ping.to_owned(), "0 2147483647".to_owned()));
        }
        wanted.extend(defaults);
    }
    Ok(wanted)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sysctl {
    Network,
    Ipc,
    Uts,
}

/// The namespace that a sysctl belongs to, as runc knows it; `None`: it is the node's.
fn namespace_of(name: &str) -> Option<Sysctl> {
    const IPC: [&str; 8] = [
        "kernel.msgmax",
        "kernel.msgmnb",
        "kernel.msgmni",
        "kernel.sem",
        "kernel.shmall",
        "kernel.shmmax",
        "kernel.shmmni",
        "kernel.shm_rmid_forced",
    ];
    if IPC.contains(&name) || name.starts_with("fs.mqueue.") {
        Some(Sysctl::Ipc)
    } else if name.starts_with("net.") {
        Some(Sysctl::Network)
    } else if name == "kernel.domainname" {
        Some(Sysctl::Uts)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Promise: invalid_request_names_the_field.
    #[test]
    fn sysctls_have_the_namespaces_that_runc_gives_them() {
        assert_eq!(namespace_of("net.core.somaxconn"), Some(Sysctl::Network));
        assert_eq!(namespace_of("kernel.shmmax"), Some(Sysctl::Ipc));
        assert_eq!(namespace_of("fs.mqueue.msg_max"), Some(Sysctl::Ipc));
        assert_eq!(namespace_of("kernel.domainname"), Some(Sysctl::Uts));
        for node in [
            "vm.swappiness",
            "kernel.pid_max",
            "kernel.shmmaxx",
            "fs.file-max",
            "kernel.hostname",
            "netx.a",
        ] {
            assert_eq!(namespace_of(node), None, "{node}");
        }
    }
}
