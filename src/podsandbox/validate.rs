//! A Create request, checked: everything that can be refused is refused here, before anything is
//! made.

mod limits;
mod security;
mod shim_choice;
mod sysctls;

use std::path::{Component, Path, PathBuf};
use std::time::SystemTime;

use base::platform::systemd_runs;

use super::error::shorten;
use super::files::{Dns, Files};
use super::record::{self, Record, decode_config};
use super::selinux::{HeldLevel, Selinux};
use super::{CreateRequest, Error};
use crate::cgroup;
use crate::config::{Config, Size};
use crate::error::StepError;
use crate::id::SandboxId;
use crate::pause::{self, IdMapping, Namespace, Plan, UserNamespace, native};
use crate::protos::cri::{IDMapping, NamespaceMode, NamespaceOption, PodSandboxConfig};

/// Longest host name of Linux (sethostname(2)), bytes.
const LONGEST_HOSTNAME: usize = 64;

/// Longest label of containerd, key and value together (`pkg/labels`), bytes.
const LONGEST_LABEL: usize = 4096;

/// Longest path that is taken from a caller, bytes (`PATH_MAX`).
const LONGEST_PATH: usize = 4095;

/// Annotation with the size of the pod's shared memory.
const SHM_SIZE: &str = "pause-sandboxer/shm-size";

/// Checks the id of a call.
///
/// # Errors
/// [`Error::Invalid`], unless it is a valid containerd identifier.
pub fn check_id(id: &str) -> Result<SandboxId, Error> {
    SandboxId::try_from(id).map_err(|e| Error::invalid(id, "sandbox_id", e.to_string()))
}

/// A Create request that is accepted.
#[derive(Debug)]
pub struct Validated {
    /// The first record of the sandbox.
    pub record: Record,
    /// The CRI config, decoded.
    pub pod: PodSandboxConfig,
    /// The SELinux level that it holds.
    pub level: Option<HeldLevel>,
}

/// Checks a request and makes the first record of it. `has_own_shim`: this project's own shim can
/// be used.
///
/// # Errors
/// [`Error::Invalid`] names the field of the request; [`Error::Failed`] where no SELinux label is
/// available. Blocks: the netns path is looked at.
pub fn check(
    request: &CreateRequest,
    config: &Config,
    selinux: &Selinux,
    has_own_shim: bool,
) -> Result<Validated, Error> {
    let id = request.id.as_str();
    let checked = check_id(id)?;
    let options = request
        .options
        .as_ref()
        .ok_or_else(|| Error::invalid(id, "options", "is missing".to_owned()))?;
    let pod = decode_config(id, &options.type_url, &options.value)?;
    let info = request.sandbox.clone().unwrap_or_default();
    base::runtime::check_served(&info.runtime_name)
        .map_err(|e| Error::invalid(id, "sandbox.runtime.name", e.to_string()))?;
    let security = pod.linux.security_context.get_or_default();
    security::check(id, security)?;
    check_labels(id, &pod)?;
    let dns = dns(id, &pod)?;
    let failed =
        |step: StepError| Error::Failed { id: id.to_owned(), rpc: "create", steps: step.into() };
    let (labels, level) =
        selinux.label(config, security.selinux_options.as_ref()).map_err(failed)?;
    // As the built-in controller: the containers of a privileged pod have a label, its pause
    // process has none of its own.
    let label = if security.privileged { String::new() } else { labels.process.clone() };
    let plan = plan(checked, request, &pod, config, label)?;
    let own_shim = shim_choice::is_own(&info, config, has_own_shim);
    let record = Record {
        version: record::VERSION,
        id: plan.id.clone(),
        created_at: SystemTime::now(),
        files: Files {
            hostname: plan.hostname.clone(),
            dns,
            shm: plan.ipc == Namespace::Private,
            shm_size: shm_size(id, &pod, config, plan.ipc)?,
        },
        plan,
        config: options.clone(),
        netns_path: request.netns_path.clone(),
        info,
        own_shim,
        limits: limits::check(id, &pod, config)?,
        labels,
    };
    Ok(Validated { record, pod, level })
}

/// Checks a pod's config and makes the driver's plan of it.
fn plan(
    id: SandboxId,
    request: &CreateRequest,
    pod: &PodSandboxConfig,
    config: &Config,
    selinux_label: String,
) -> Result<Plan, Error> {
    let (sandbox, id) = (id.clone(), id.as_str());
    let security = pod.linux.security_context.get_or_default();
    let namespaces = security.namespace_options.get_or_default();
    let host_network = mode(id, "network", namespaces.network)? == Namespace::Node;
    let ipc = mode(id, "ipc", namespaces.ipc)?;
    let parent = &pod.linux.cgroup_parent;
    Ok(Plan {
        id: sandbox,
        netns: netns(id, host_network, &request.netns_path)?,
        pid: mode(id, "pid", namespaces.pid)?,
        ipc,
        uts: if host_network { Namespace::Node } else { Namespace::Private },
        hostname: hostname(id, &pod.hostname, host_network)?,
        userns: userns(id, namespaces)?,
        sysctls: sysctls::check(id, pod, config, host_network, ipc, security)?,
        cgroup_parent: cgroup_parent(id, parent, systemd_runs())?,
        oom_score_adj: pause::oom_score_adj(config.restrict_oom_score_adj),
        selinux_label,
        privileged: security.privileged,
    })
}

fn mode(
    id: &str,
    kind: &str,
    mode: protobuf::EnumOrUnknown<NamespaceMode>,
) -> Result<Namespace, Error> {
    match mode.enum_value() {
        // CONTAINER and TARGET differ from POD for containers only; their sandbox has a namespace
        // of its own in all three, as with the built-in controller.
        Ok(NamespaceMode::POD | NamespaceMode::CONTAINER | NamespaceMode::TARGET) => {
            Ok(Namespace::Private)
        }
        Ok(NamespaceMode::NODE) => Ok(Namespace::Node),
        _ => Err(Error::invalid(
            id,
            &format!("linux.security_context.namespace_options.{kind}"),
            format!("mode {} is not valid for a sandbox", mode.value()),
        )),
    }
}

fn netns(id: &str, host_network: bool, path: &str) -> Result<Option<PathBuf>, Error> {
    let refuse = |reason: String| Err(Error::invalid(id, "netns_path", reason));
    if host_network {
        return Ok(None);
    }
    if path.is_empty() {
        return refuse("is empty, and the pod does not use the node's network".to_owned());
    }
    if path.len() > LONGEST_PATH || !path.starts_with('/') || path.contains('\0') {
        return refuse(format!("{:?} is not an absolute path", shorten(path)));
    }
    match native::is_network_namespace(Path::new(path)) {
        Ok(true) => Ok(Some(path.into())),
        Ok(false) => refuse(format!("{path} is not a network namespace")),
        Err(e) => Err(Error::unreadable(id, "netns_path", path, e)),
    }
}

fn hostname(id: &str, name: &str, host_network: bool) -> Result<String, Error> {
    // runc has the same rule: the pod has no UTS namespace whose hostname could be set.
    if host_network && !name.is_empty() {
        return Err(Error::invalid(
            id,
            "hostname",
            "is given, and the pod uses the node's network and so its hostname".to_owned(),
        ));
    }
    if name.len() > LONGEST_HOSTNAME {
        return Err(Error::invalid(
            id,
            "hostname",
            format!("has {} bytes, more than {LONGEST_HOSTNAME}", name.len()),
        ));
    }
    if name.contains('\0') {
        return Err(Error::invalid(id, "hostname", "has a zero byte".to_owned()));
    }
    Ok(name.to_owned())
}

/// The parent in the form of [`Plan::cgroup_parent`]. `systemd`: it runs.
fn cgroup_parent(id: &str, parent: &str, systemd: bool) -> Result<String, Error> {
    let field = "linux.cgroup_parent";
    let plain = |c| matches!(c, Component::RootDir | Component::Normal(_));
    if !Path::new(parent).components().all(plain) {
        return Err(Error::invalid(
            id,
            field,
            format!("{:?} is not a valid cgroup path", shorten(parent)),
        ));
    }
    let last = parent.rsplit('/').find(|part| !part.is_empty()).unwrap_or_default();
    let parent = match Some(last).filter(|last| systemd && last.ends_with(".slice")) {
        Some(slice) => slice.to_owned(),
        // The slash distinguishes it from the bare name of a slice.
        None if parent.ends_with(".slice") && !parent.contains('/') => format!("/{parent}"),
        None => parent.to_owned(),
    };
    cgroup::check_parent(&parent).map_err(|reason| Error::invalid(id, field, reason))?;
    Ok(parent)
}

fn userns(id: &str, namespaces: &NamespaceOption) -> Result<Option<UserNamespace>, Error> {
    let field = "linux.security_context.namespace_options.userns_options";
    let Some(options) = namespaces.userns_options.as_ref() else { return Ok(None) };
    let users = options.mode.enum_value() == Ok(NamespaceMode::POD);
    for (kind, of_node) in [("pid", namespaces.pid), ("ipc", namespaces.ipc)] {
        // The kernel refuses mounts of /proc or mqueue of a namespace that another user namespace
        // owns.
        if users && of_node.enum_value() == Ok(NamespaceMode::NODE) {
            let reason = "mode NODE does not go with a user namespace of the pod's own".to_owned();
            return Err(Error::invalid(
                id,
                &format!("linux.security_context.namespace_options.{kind}"),
                reason,
            ));
        }
    }
    match options.mode.enum_value() {
        Ok(NamespaceMode::NODE) if options.uids.is_empty() && options.gids.is_empty() => Ok(None),
        Ok(NamespaceMode::NODE) => {
            Err(Error::invalid(id, field, "mode NODE goes with no mappings".to_owned()))
        }
        Ok(NamespaceMode::POD) => Ok(Some(UserNamespace {
            uid: one_mapping(id, &format!("{field}.uids"), &options.uids)?,
            gid: one_mapping(id, &format!("{field}.gids"), &options.gids)?,
        })),
        _ => Err(Error::invalid(
            id,
            field,
            format!("mode {} is not valid for a sandbox", options.mode.value()),
        )),
    }
}

fn one_mapping(id: &str, field: &str, mappings: &[IDMapping]) -> Result<IdMapping, Error> {
    let [one] = mappings else {
        return Err(Error::invalid(id, field, format!("has {} mappings, not one", mappings.len())));
    };
    if one.length == 0 || one.host_id.checked_add(one.length).is_none() {
        return Err(Error::invalid(id, field, "is empty or goes beyond the last id".to_owned()));
    }
    if one.container_id != 0 {
        let reason = format!(
            "begins at id {}: no mapping found for id 0, which containers have",
            one.container_id
        );
        return Err(Error::invalid(id, field, reason));
    }
    if one.length == 1 {
        return Err(Error::invalid(
            id,
            field,
            "maps only id 0; the pause process needs another id".to_owned(),
        ));
    }
    Ok(IdMapping { container_id: one.container_id, host_id: one.host_id, length: one.length })
}

fn dns(id: &str, pod: &PodSandboxConfig) -> Result<Option<Dns>, Error> {
    let Some(dns) = pod.dns_config.as_ref() else { return Ok(None) };
    for (field, values) in
        [("servers", &dns.servers), ("searches", &dns.searches), ("options", &dns.options)]
    {
        // A line break is a line of its own in resolv.conf, as with the built-in controller: the
        // caller may give any line.
        if values.iter().any(|value| value.contains('\0')) {
            return Err(Error::invalid(
                id,
                &format!("dns_config.{field}"),
                "has a zero byte".to_owned(),
            ));
        }
    }
    Ok(Some(Dns {
        servers: dns.servers.clone(),
        searches: dns.searches.clone(),
        options: dns.options.clone(),
    }))
}

/// The size of the pod's shared memory: its own, or that of the settings.
fn shm_size(
    id: &str,
    pod: &PodSandboxConfig,
    config: &Config,
    ipc: Namespace,
) -> Result<Size, Error> {
    let Some(text) = pod.annotations.get(SHM_SIZE) else { return Ok(config.shm_size) };
    let most = config.shm_size_max.max(config.shm_size);
    let reason = match text.parse::<Size>() {
        Err(fault) => format!("{:?} {fault}", shorten(text)),
        Ok(_) if ipc == Namespace::Node => "the pod uses the node's /dev/shm".to_owned(),
        Ok(size) if size > most => format!("{size} is more than the node's maximum, {most}"),
        Ok(size) => return Ok(size),
    };
    Err(Error::invalid(id, &format!("annotations[{SHM_SIZE:?}]"), reason))
}

/// As containerd takes labels (`pkg/labels`): the built-in controller has them on its pause
/// container, ours answers them to Start.
fn check_labels(id: &str, pod: &PodSandboxConfig) -> Result<(), Error> {
    let mut lengths = pod.labels.iter().map(|(key, value)| (key, key.len() + value.len()));
    let too_long = lengths.find(|(_, length)| *length > LONGEST_LABEL);
    let Some((key, length)) = too_long else { return Ok(()) };
    let reason = format!("has {length} bytes, key and value together, more than {LONGEST_LABEL}");
    Err(Error::invalid(id, &format!("labels[{:?}]", shorten(key)), reason))
}

#[cfg(test)]
mod tests;
