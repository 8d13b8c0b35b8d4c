//! The OCI runtime spec that describes a sandbox.
//!
//! It has the form of the spec that containerd's built-in controller gives its pause container, so
//! that its readers (NRI, through containerd's sandbox store) find each field in its usual
//! place. Where our pause process differs, the spec has what is true of ours:
//!
//! - `process.user`: always 65535:65535 without further groups, as the pause process needs no
//!   privileges; the built-in has the image's user, or the pod's `run_as_user` and `run_as_group`
//!   with their groups.
//! - `process.capabilities`: none in any set; the built-in has the 14 of containerd's default.
//! - `process.env`: none; the built-in has the image's.
//! - `linux.seccomp`: none, as the pause process's own allow-list is part of it and not of the pod;
//!   the built-in has the pod's profile.
//! - path of the user namespace: none, as the pause process joins the namespace that owns the
//!   network namespace, which has no path; the built-in has a pin below containerd's state.
//! - `linux.cgroupsPath` without a parent: none, as the pause process stays in the daemon's cgroup;
//!   the built-in has `/<namespace>/<id>`.
//! - `ociVersion`: 1.2.0, as all of it is known to containerd 2.0; the built-in has containerd's.
//! - mounts of `/etc/hostname` and `/etc/hosts`: those of the pod's containers; the built-in's
//!   pause has neither.
//! - annotation `podsandbox.image-name`: empty, as there is no image; the built-in has the pause
//!   image.
//!
//! The mounts are listed as the built-in has them, for NRI plugins and other readers of the spec;
//! the pause process itself sees an empty root.

mod annotations;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use oci_spec::OciSpecError;
use oci_spec::runtime::{
    Linux, LinuxCapabilities, LinuxCpu, LinuxDeviceCgroup, LinuxIdMapping, LinuxIdMappingBuilder,
    LinuxNamespace, LinuxNamespaceType, LinuxResources, Mount, Process, Root, Spec, User,
};

use super::files::SandboxFiles;
use super::layout::Layout;
use super::record::Record;
use crate::cgroup::slice::is_slice;
use crate::config::Config;
use crate::pause::{IdMapping, Namespace, Plan};
use crate::protos::cri::PodSandboxConfig;

/// The version that containerd 2.0 writes; nothing newer is used.
const OCI_VERSION: &str = "1.2.0";

/// User and group of the pause process; also those of the usual pause image.
const USER: u32 = 65535;

/// CPU shares of a sandbox (containerd `DefaultSandboxCPUshares`): the least there is.
const CPU_SHARES: u64 = 2;

/// Label of a container of CRI's that says what it is (containerd `ContainerKindLabel`).
const KIND: &str = "io.cri-containerd.kind";

const SHM: &str = "/dev/shm";

/// As in containerd's default spec (`populateDefaultUnixSpec`), whose releases before September
/// 2026 have no `/proc/interrupts`. Later ones also mask the CPUs' `thermal_throttle`, by the node
/// that they run on: it is nothing to a pause process.
const MASKED: [&str; 12] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
    "/proc/scsi",
];

/// As in containerd's default spec (`populateDefaultUnixSpec`).
const READONLY: [&str; 5] =
    ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// The part of Start's answer that does not change in a sandbox's life.
#[derive(Clone, Debug, Default)]
pub struct Description {
    /// The spec as JSON (`opencontainers/runtime-spec` `Spec`).
    pub spec: Box<[u8]>,
    /// The labels of the built-in controller's pause container: the pod's, and
    /// the kind of the container.
    pub labels: BTreeMap<String, String>,
}

/// Describes the sandbox. `pod` is the recorded config.
///
/// # Errors
/// The spec cannot be built or encoded.
pub fn describe(
    record: &Record,
    pod: &PodSandboxConfig,
    layout: &Arc<Layout>,
    config: &Config,
) -> Result<Description, OciSpecError> {
    let spec = serde_json::to_vec(&spec(record, pod, layout, config)?)?.into();
    let own = (KIND.to_owned(), "sandbox".to_owned());
    let labels = pod.labels.iter().map(|(key, value)| (key.clone(), value.clone()));
    Ok(Description { spec, labels: labels.chain([own]).collect() })
}

fn spec(
    record: &Record,
    pod: &PodSandboxConfig,
    layout: &Arc<Layout>,
    config: &Config,
) -> Result<Spec, OciSpecError> {
    let plan = &record.plan;
    let mut root = Root::default();
    root.set_path("rootfs".into()).set_readonly(Some(true));

    // The crate's defaults are those of a container with a shell: every field is set here.
    let mut spec = Spec::default();
    spec.set_version(OCI_VERSION.to_owned())
        .set_root(Some(root))
        .set_process(Some(process(plan)))
        .set_hostname(
            Some(plan.hostname.clone())
                .filter(|name| plan.uts == Namespace::Private && !name.is_empty()),
        )
        .set_mounts(Some(mounts(record, pod, layout)))
        .set_annotations(Some(annotations::for_sandbox(&record.id, pod, &config.pod_annotations)))
        .set_linux(Some(linux(record)?));
    Ok(spec)
}

fn privileged(pod: &PodSandboxConfig) -> bool {
    pod.linux.security_context.privileged
}

/// Describes the pause process.
fn process(plan: &Plan) -> Process {
    let mut user = User::default();
    user.set_uid(USER).set_gid(USER);
    let mut capabilities = LinuxCapabilities::default();
    capabilities
        .set_bounding(None)
        .set_effective(None)
        .set_inheritable(None)
        .set_permitted(None)
        .set_ambient(None);
    let label = Some(plan.selinux_label.clone()).filter(|label| !label.is_empty());

    let mut process = Process::default();
    process
        .set_terminal(None)
        .set_user(user)
        .set_args(Some(vec!["/pause".to_owned()]))
        .set_env(None)
        .set_cwd("/".into())
        .set_capabilities(Some(capabilities))
        .set_rlimits(None)
        .set_no_new_privileges(Some(true))
        .set_oom_score_adj(Some(plan.oom_score_adj))
        .set_selinux_label(label);
    process
}

fn mounts(record: &Record, pod: &PodSandboxConfig, layout: &Arc<Layout>) -> Vec<Mount> {
    let plan = &record.plan;
    let files = SandboxFiles::new(layout, &record.id);
    let bind = ["rbind", "ro", "nosuid", "nodev", "noexec"];
    let shm = if record.files.shm { files.shm() } else { SHM.into() };
    let sys_mode = if privileged(pod) { "rw" } else { "ro" };
    // A user namespace that does not own the network namespace may not mount sysfs.
    let sys_bound = plan.userns.is_some() && plan.netns.is_none();

    let mut mounts = vec![
        mount("/proc", "proc", "proc", &["nosuid", "noexec", "nodev"]),
        mount("/dev", "tmpfs", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
        mount(
            "/dev/pts",
            "devpts",
            "devpts",
            &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"],
        ),
        mount("/dev/mqueue", "mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
    ];
    if !sys_bound {
        mounts.push(mount("/sys", "sysfs", "sysfs", &["nosuid", "noexec", "nodev", sys_mode]));
    }
    mounts.push(mount(SHM, "bind", shm, &bind));
    for name in ["resolv.conf", "hostname", "hosts"] {
        mounts.push(mount(&format!("/etc/{name}"), "bind", files.etc(name), &bind));
    }
    if sys_bound {
        mounts.push(mount("/sys", "bind", "/sys", &["rbind", "rro", "nosuid", "nodev", "noexec"]));
    }
    mounts
}

fn mount(destination: &str, kind: &str, source: impl AsRef<Path>, options: &[&str]) -> Mount {
    let mut mount = Mount::default();
    mount
        .set_destination(destination.into())
        .set_typ(Some(kind.to_owned()))
        .set_source(Some(source.as_ref().to_owned()))
        .set_options(Some(strings(options)));
    mount
}

fn linux(record: &Record) -> Result<Linux, OciSpecError> {
    let plan = &record.plan;
    let mut everything = LinuxDeviceCgroup::default();
    everything.set_allow(false).set_access(Some("rwm".to_owned()));
    let mut cpu = LinuxCpu::default();
    cpu.set_shares(Some(CPU_SHARES));
    let mut resources = LinuxResources::default();
    resources.set_devices(Some(vec![everything])).set_cpu(Some(cpu));
    let sysctl: HashMap<String, String> = plan.sysctls.iter().cloned().collect();

    let mut linux = Linux::default();
    linux
        .set_uid_mappings(plan.userns.map(|userns| id_mappings(userns.uid)).transpose()?)
        .set_gid_mappings(plan.userns.map(|userns| id_mappings(userns.gid)).transpose()?)
        .set_sysctl(Some(sysctl).filter(|sysctl| !sysctl.is_empty()))
        .set_resources(Some(resources))
        .set_cgroups_path(cgroups_path(plan).map(Into::into))
        .set_namespaces(Some(namespaces(plan)))
        .set_masked_paths(Some(strings(&MASKED)))
        .set_readonly_paths(Some(strings(&READONLY)))
        .set_mount_label(Some(record.labels.mount.clone()).filter(|label| !label.is_empty()));
    Ok(linux)
}

fn id_mappings(mapping: IdMapping) -> Result<Vec<LinuxIdMapping>, OciSpecError> {
    let IdMapping { container_id, host_id, length } = mapping;
    let described = LinuxIdMappingBuilder::default()
        .container_id(container_id)
        .host_id(host_id)
        .size(length)
        .build()?;
    Ok(vec![described])
}

/// The pod's own namespaces, in containerd's order.
fn namespaces(plan: &Plan) -> Vec<LinuxNamespace> {
    let private = |kind, namespace| (namespace == Namespace::Private).then_some((kind, None));
    let all = [
        private(LinuxNamespaceType::Pid, plan.pid),
        private(LinuxNamespaceType::Ipc, plan.ipc),
        private(LinuxNamespaceType::Uts, plan.uts),
        Some((LinuxNamespaceType::Mount, None)),
        plan.netns.as_ref().map(|path| (LinuxNamespaceType::Network, Some(path.clone()))),
        plan.userns.map(|_| (LinuxNamespaceType::User, None)),
    ];
    let described = |(kind, path)| {
        let mut namespace = LinuxNamespace::default();
        namespace.set_typ(kind).set_path(path);
        namespace
    };
    all.into_iter().flatten().map(described).collect()
}

/// The pause process's cgroup: a path below the root of every hierarchy, or `slice:prefix:name`,
/// the form in which runc and NRI write a systemd scope.
fn cgroups_path(plan: &Plan) -> Option<String> {
    let parent = plan.cgroup_parent.as_str();
    if parent.is_empty() {
        return None;
    }
    if is_slice(parent) {
        return Some(format!("{parent}:cri-containerd:{}", plan.id));
    }
    let parts = parent.split('/').filter(|part| !part.is_empty()).chain([plan.id.as_str()]);
    let path = parts.collect::<Vec<_>>().join("/");
    Some(if parent.starts_with('/') { format!("/{path}") } else { path })
}

fn strings(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

#[cfg(test)]
mod tests;
