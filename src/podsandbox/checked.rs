//! A Create request, checked: everything that can be refused is refused here, before anything is made.

mod security;

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};
use std::time::SystemTime;

use protobuf::Message as _;

use super::files::{Dns, Files};
use super::record::{self, Blob, Record};
use super::selinux::{Level, Selinux};
use super::{CreateRequest, Error, Payload};
use crate::config::{CgroupDriver, Config, DriverName, ShimOwner};
use crate::pause::{IdMapping, Namespace, Plan, UserNamespace, cgroup, native};
use crate::protos::cri::{
    IDMapping, LinuxSandboxSecurityContext, NamespaceMode, NamespaceOption, PodSandboxConfig,
    UserNamespace as CriUserns,
};
use crate::shim;

/// Type of the CRI config in Create's options.
const CONFIG_TYPE: &str = "runtime.v1.PodSandboxConfig";

/// Longest identifier of containerd (`pkg/identifiers`), bytes.
const LONGEST_ID: usize = 76;

/// Longest host name of Linux (sethostname(2)), bytes.
const LONGEST_HOSTNAME: usize = 64;

/// Longest path that is taken from a caller, bytes (`PATH_MAX`).
const LONGEST_PATH: usize = 4095;

/// What the built-in controller asks for (`defaultSandboxOOMAdj`).
const OOM_SCORE_ADJ: i32 = -998;

/// Checks an id that becomes part of paths and names.
///
/// # Errors
/// [`Error::Invalid`], unless the id is a valid containerd identifier.
pub fn check_id(id: &str) -> Result<(), Error> {
    let refuse = |reason: String| Err(invalid(id, "sandbox_id", reason));
    if id.is_empty() {
        return refuse("is empty".to_owned());
    }
    if id.len() > LONGEST_ID {
        return refuse(format!("has {} bytes, more than {LONGEST_ID}", id.len()));
    }
    let separated = id.split(['.', '_', '-']).all(|part| !part.is_empty());
    if !separated || !id.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b)) {
        return refuse("is not letters and digits, separated by single '.', '_' or '-'".to_owned());
    }
    Ok(())
}

/// Checks a request and makes the first record of it, with the SELinux level that it holds.
///
/// # Errors
/// [`Error::Invalid`] names the field of the request; [`Error::Step`] where no SELinux label could be had. Blocks: the netns path is looked at.
pub fn check(
    request: &CreateRequest,
    config: &Config,
    native: &str,
    selinux: &Selinux,
) -> Result<(Record, Option<Level>), Error> {
    let id = request.id.as_str();
    check_id(id)?;
    let options = request.options.as_ref().ok_or_else(|| invalid(id, "options", "is missing".to_owned()))?;
    let pod = decode_config(id, options)?;
    let info = request.sandbox.clone().unwrap_or_default();
    let driver = if is_native(&info.runtime_name, config) { native } else { shim::driver::NAME };

    let security = pod.linux.security_context.get_or_default();
    let namespaces = security.namespace_options.get_or_default();
    security::check(id, security)?;
    let host_network = mode(id, "network", namespaces.network)? == Namespace::Node;
    let ipc = mode(id, "ipc", namespaces.ipc)?;
    let (labels, level) = selinux.label(config, security.selinux_options.as_ref()).map_err(|step| Error::Step {
        id: id.to_owned(),
        verb: "create",
        step,
    })?;
    let plan = Plan {
        id: request.id.clone(),
        netns: netns(id, host_network, &request.netns_path)?,
        pid: pid_mode(id, namespaces)?,
        ipc,
        uts: if host_network { Namespace::Node } else { Namespace::Private },
        hostname: hostname(id, &pod.hostname, host_network)?,
        userns: userns(id, &namespaces.userns_options)?,
        sysctls: sysctls(id, &pod, config, host_network, ipc, security)?,
        cgroup_parent: cgroup_parent(id, &pod.linux.cgroup_parent, config)?,
        oom_score_adj: oom_score_adj(config),
        // As the built-in controller: the containers of a privileged pod have a label, its pause has none of its own.
        selinux_label: if security.privileged { String::new() } else { labels.process.clone() },
    };
    let dns = pod.dns_config.as_ref().map(|dns| Dns {
        servers: dns.servers.clone(),
        searches: dns.searches.clone(),
        options: dns.options.clone(),
    });
    check_dns(id, dns.as_ref())?;
    let record = Record {
        version: record::VERSION,
        id: plan.id.clone(),
        created_at: SystemTime::now(),
        driver: driver.to_owned(),
        files: Files { hostname: plan.hostname.clone(), dns, shm: ipc == Namespace::Private },
        plan,
        config: Blob::from(options),
        netns_path: request.netns_path.clone(),
        info: (&info).into(),
        shim: match config.shim {
            _ if driver == shim::driver::NAME => shim::Owner::Driver,
            ShimOwner::Sandboxer => shim::Owner::Sandboxer,
            ShimOwner::Started => shim::Owner::Started,
            ShimOwner::Containerd => shim::Owner::Containerd,
        },
        labels,
        containerd_namespace: config.containerd_namespace.clone(),
    };
    Ok((record, level))
}

/// Whether this program runs the pause of a pod of that runtime.
fn is_native(runtime: &str, config: &Config) -> bool {
    match config.drivers.0.get(runtime) {
        Some(driver) => *driver == DriverName::Native,
        // Without a name there is nothing to run it.
        None => runtime.is_empty() || shim::driver::is_of_host_processes(runtime),
    }
}

/// Decodes the CRI config of a request or a record.
///
/// # Errors
/// [`Error::Invalid`] where it is of another type or malformed.
pub fn decode_config(id: &str, options: &Payload) -> Result<PodSandboxConfig, Error> {
    // Any's own convention puts a host before the name; containerd does not.
    let name = options.type_url.rsplit('/').next().unwrap_or_default();
    if name != CONFIG_TYPE {
        return Err(invalid(id, "options", format!("is of type {:?}, not {CONFIG_TYPE}", shorten(&options.type_url))));
    }
    PodSandboxConfig::parse_from_bytes(&options.value)
        .map_err(|e| invalid(id, "options", format!("is no {CONFIG_TYPE}: {e}")))
}

fn invalid(id: &str, field: &str, reason: String) -> Error {
    Error::Invalid { id: shorten(id), field: field.to_owned(), reason }
}

/// What a caller sent, fit for one line of a message.
fn shorten(text: &str) -> String {
    const MOST: usize = 80;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

fn mode(id: &str, kind: &str, mode: protobuf::EnumOrUnknown<NamespaceMode>) -> Result<Namespace, Error> {
    match mode.enum_value() {
        // CONTAINER differs from POD for containers only; their sandbox has a namespace of its own in both.
        Ok(NamespaceMode::POD | NamespaceMode::CONTAINER) => Ok(Namespace::Private),
        Ok(NamespaceMode::NODE) => Ok(Namespace::Node),
        _ => Err(invalid(
            id,
            &format!("linux.security_context.namespace_options.{kind}"),
            format!("mode {} is none of a sandbox", mode.value()),
        )),
    }
}

fn pid_mode(id: &str, namespaces: &NamespaceOption) -> Result<Namespace, Error> {
    // TARGET concerns a container alone: the sandbox keeps a namespace of its own, as with the built-in controller.
    match namespaces.pid.enum_value() {
        Ok(NamespaceMode::TARGET) => Ok(Namespace::Private),
        _ => mode(id, "pid", namespaces.pid),
    }
}

fn netns(id: &str, host_network: bool, path: &str) -> Result<Option<PathBuf>, Error> {
    let refuse = |reason: String| Err(invalid(id, "netns_path", reason));
    if host_network {
        return Ok(None);
    }
    if path.is_empty() {
        return refuse("is empty, and the pod does not use the node's network".to_owned());
    }
    if path.len() > LONGEST_PATH || !path.starts_with('/') || path.contains('\0') {
        return refuse(format!("{:?} is no absolute path", shorten(path)));
    }
    match native::is_network_namespace(Path::new(path)) {
        Ok(true) => Ok(Some(path.into())),
        Ok(false) => refuse(format!("{path} is no network namespace")),
        Err(e) => refuse(format!("{}: {e}", shorten(path))),
    }
}

/// What the built-in controller asks for, or the daemon's own where a lower one may not be asked for
/// (containerd `WithPodOOMScoreAdj`).
fn oom_score_adj(config: &Config) -> i32 {
    if !config.restrict_oom_score_adj {
        return OOM_SCORE_ADJ;
    }
    let own = std::fs::read_to_string("/proc/self/oom_score_adj").ok().and_then(|text| text.trim().parse().ok());
    own.unwrap_or(0).max(OOM_SCORE_ADJ)
}

fn hostname(id: &str, name: &str, host_network: bool) -> Result<String, Error> {
    // As runc has it: the pod has no UTS namespace whose hostname could be set.
    if host_network && !name.is_empty() {
        return Err(invalid(
            id,
            "hostname",
            "is given, and the pod uses the node's network and so its hostname".to_owned(),
        ));
    }
    if name.len() > LONGEST_HOSTNAME {
        return Err(invalid(id, "hostname", format!("has {} bytes, more than {LONGEST_HOSTNAME}", name.len())));
    }
    if name.contains(['\0', '\n']) {
        return Err(invalid(id, "hostname", "has a line break or a zero byte".to_owned()));
    }
    Ok(name.to_owned())
}

/// The parent in the form of [`Plan::cgroup_parent`].
fn cgroup_parent(id: &str, parent: &str, config: &Config) -> Result<String, Error> {
    let field = "linux.cgroup_parent";
    let plain = |c| matches!(c, Component::RootDir | Component::Normal(_));
    if parent.len() > LONGEST_PATH || parent.contains('\0') || !Path::new(parent).components().all(plain) {
        return Err(invalid(id, field, format!("{:?} is no plain path", shorten(parent))));
    }
    let parent = match slice(parent, config) {
        Some(slice) => slice.to_owned(),
        None if config.cgroup_driver == CgroupDriver::Systemd && !parent.is_empty() => {
            let reason = format!("{:?} is no systemd slice, as cgroup_driver \"systemd\" needs it", shorten(parent));
            return Err(invalid(id, field, reason));
        }
        // So that it cannot be taken for the bare name of a slice.
        None if parent.ends_with(".slice") && !parent.contains('/') => format!("/{parent}"),
        None => parent.to_owned(),
    };
    cgroup::check_parent(&parent).map_err(|reason| invalid(id, field, reason))?;
    Ok(parent)
}

/// The systemd slice that a `cgroup_parent` names; `None` where it is a path of the cgroup file system.
pub(super) fn slice<'a>(parent: &'a str, config: &Config) -> Option<&'a str> {
    let last = parent.rsplit('/').find(|part| !part.is_empty())?;
    (last.ends_with(".slice") && config.cgroup_driver != CgroupDriver::Cgroupfs).then_some(last)
}

fn userns(id: &str, options: &protobuf::MessageField<CriUserns>) -> Result<Option<UserNamespace>, Error> {
    let field = "linux.security_context.namespace_options.userns_options";
    let Some(options) = options.as_ref() else { return Ok(None) };
    match options.mode.enum_value() {
        Ok(NamespaceMode::NODE) if options.uids.is_empty() && options.gids.is_empty() => Ok(None),
        Ok(NamespaceMode::NODE) => Err(invalid(id, field, "mode NODE goes with no mappings".to_owned())),
        Ok(NamespaceMode::POD) => Ok(Some(UserNamespace {
            uid: one_mapping(id, &format!("{field}.uids"), &options.uids)?,
            gid: one_mapping(id, &format!("{field}.gids"), &options.gids)?,
        })),
        _ => Err(invalid(id, field, format!("mode {} is none of a sandbox", options.mode.value()))),
    }
}

fn one_mapping(id: &str, field: &str, mappings: &[IDMapping]) -> Result<IdMapping, Error> {
    let [one] = mappings else {
        return Err(invalid(id, field, format!("has {} mappings, not one", mappings.len())));
    };
    let fits = |first: u32| first.checked_add(one.length).is_some();
    if one.length == 0 || !fits(one.host_id) || !fits(one.container_id) {
        return Err(invalid(id, field, "is empty or goes beyond the last id".to_owned()));
    }
    Ok(IdMapping { container_id: one.container_id, host_id: one.host_id, length: one.length })
}

fn sysctls(
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
        let refuse = |reason: &str| Err(invalid(id, &format!("linux.sysctls[{:?}]", shorten(name)), reason.to_owned()));
        let plain = name.split('.').all(|part| !part.is_empty() && !part.contains(['/', '\0']));
        if !plain || value.contains('\0') {
            return refuse("is no sysctl name, or its value has a zero byte");
        }
        match namespace_of(name) {
            Some(Sysctl::Network) if host_network => return refuse("the pod uses the node's network"),
            Some(Sysctl::Ipc) if ipc == Namespace::Node => return refuse("the pod uses the node's IPC"),
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

fn check_dns(id: &str, dns: Option<&Dns>) -> Result<(), Error> {
    let Some(dns) = dns else { return Ok(()) };
    for (field, values) in [("servers", &dns.servers), ("searches", &dns.searches), ("options", &dns.options)] {
        // One of them with a line break would write lines of its own into resolv.conf.
        if values.iter().any(|value| value.contains(['\n', '\0'])) {
            return Err(invalid(id, &format!("dns_config.{field}"), "has a line break or a zero byte".to_owned()));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_containerd_identifiers() {
        for good in ["a", "abc-1.2_3", &"f".repeat(64), &"f".repeat(76)] {
            assert!(check_id(good).is_ok(), "{good}");
        }
        for bad in [
            "",
            "a/b",
            "..",
            ".",
            "../a",
            "a..b",
            "-a",
            "a-",
            "a b",
            "ä",
            "a\0",
            "a\n",
            &"f".repeat(77),
            &"f".repeat(4096),
        ] {
            let error = check_id(bad).unwrap_err().to_string();
            assert!(error.contains("sandbox_id"), "{error}");
            assert!(error.len() < 250, "{error}");
        }
    }

    #[test]
    fn cgroup_parents_by_driver() {
        let checked = |parent: &str, cgroup_driver| {
            cgroup_parent("id", parent, &Config { cgroup_driver, ..Config::default() }).map_err(|e| e.to_string())
        };
        let kubelet = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podX.slice";
        let bare = "kubepods-burstable-podX.slice";
        for driver in [CgroupDriver::Auto, CgroupDriver::Systemd] {
            for parent in [kubelet, bare, "/kubepods-burstable-podX.slice/"] {
                assert_eq!(checked(parent, driver).unwrap(), bare);
            }
            for bad in ["/kubepods-.slice", "..slice/../a.slice", "/a.slice/x@1.slice"] {
                assert!(checked(bad, driver).unwrap_err().contains("linux.cgroup_parent"), "{bad}");
            }
            assert_eq!(checked("", driver).unwrap(), "");
        }
        assert_eq!(checked(kubelet, CgroupDriver::Cgroupfs).unwrap(), kubelet);
        assert_eq!(checked("a.slice", CgroupDriver::Cgroupfs).unwrap(), "/a.slice");
        for path in ["/kubepods/podX", "kubepods", "/a.slice/b"] {
            assert_eq!(checked(path, CgroupDriver::Auto).unwrap(), path);
            assert!(checked(path, CgroupDriver::Systemd).unwrap_err().contains("is no systemd slice"), "{path}");
        }
    }

    #[test]
    fn sysctls_have_the_namespaces_that_runc_gives_them() {
        assert_eq!(namespace_of("net.core.somaxconn"), Some(Sysctl::Network));
        assert_eq!(namespace_of("kernel.shmmax"), Some(Sysctl::Ipc));
        assert_eq!(namespace_of("fs.mqueue.msg_max"), Some(Sysctl::Ipc));
        assert_eq!(namespace_of("kernel.domainname"), Some(Sysctl::Uts));
        for node in ["vm.swappiness", "kernel.pid_max", "kernel.shmmaxx", "fs.file-max", "kernel.hostname", "netx.a"] {
            assert_eq!(namespace_of(node), None, "{node}");
        }
    }
}
