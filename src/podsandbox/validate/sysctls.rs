//! Sysctls: only those of the pod's own namespaces.

use std::collections::BTreeSet;

use base::sysctl::{self, Namespace as Of};

use crate::config::Config;
use crate::pause::Namespace;
use crate::podsandbox::Error;
use crate::podsandbox::error::shorten;
use crate::protos::cri::{LinuxSandboxSecurityContext, NamespaceMode, PodSandboxConfig};

/// The sysctls that the pod asks for, by name, and then those that the settings add: a pod's own
/// win.
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
        if !sysctl::is_name(name) || value.contains('\0') {
            return refuse("is not a sysctl name, or its value has a zero byte");
        }
        match sysctl::namespace_of(name) {
            Some(Of::Network) if host_network => {
                return refuse("the pod uses the node's network");
            }
            Some(Of::Ipc) if ipc == Namespace::Node => {
                return refuse("the pod uses the node's IPC");
            }
            Some(Of::Uts) if host_network => {
                return refuse("the pod uses the node's network and so its UTS namespace");
            }
            Some(_) => {}
            None => return refuse("is not namespaced, it would change the node"),
        }
    }
    let own: BTreeSet<String> = wanted.iter().map(|(name, _)| name.clone()).collect();
    let is_pods = |name: &str| match sysctl::namespace_of(name) {
        Some(Of::Ipc) => ipc == Namespace::Private,
        of => of.is_some() && !host_network,
    };
    let defaults = config.sysctls.iter().filter(|s| !own.contains(&s.name) && is_pods(&s.name));
    wanted.extend(defaults.map(|sysctl| (sysctl.name.clone(), sysctl.value.clone())));
    if !host_network {
        let set = config.sysctls.iter().map(|sysctl| sysctl.name.as_str());
        let given: BTreeSet<&str> =
            pod.linux.sysctls.keys().map(String::as_str).chain(set).collect();
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
