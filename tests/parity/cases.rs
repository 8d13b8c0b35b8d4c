//! The pods: each gives some fields of CRI's config, and is named after them.

use kit::cri::api::{
    self, HugepageLimit, IDMapping, LinuxContainerResources, LinuxPodSandboxConfig,
    LinuxSandboxSecurityContext, NamespaceMode, PodSandboxConfig, PortMapping, UserNamespace,
};
use kit::machine::cgroup_driver::CgroupDriver;
use kit::{ContainerSpec, PodSpec};

use crate::known::systemd_runs;

mod security;

use security::security;

/// How the node is configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Settings {
    /// As most nodes are.
    Usual,
    /// Every setting that concerns a sandbox is another.
    Other,
}

/// One pod.
pub(crate) struct Case {
    /// The name, from the given field.
    pub(crate) name: String,
    /// On which node.
    pub(crate) settings: Settings,
    /// The requested pod.
    pub(crate) pod: PodSpec,
    /// The container that is run in it.
    pub(crate) container: ContainerSpec,
    /// Sysctls that are read in the pod and on the node.
    pub(crate) sysctls: Vec<String>,
}

impl Case {
    fn new(name: impl Into<String>, pod: PodSpec) -> Self {
        let container = ContainerSpec::sleeping("main");
        Self { name: name.into(), settings: Settings::Usual, pod, container, sysctls: Vec::new() }
    }

    fn reading(mut self, sysctls: &[&str]) -> Self {
        self.sysctls.extend(sysctls.iter().map(|name| (*name).to_owned()));
        self
    }

    fn on(mut self, settings: Settings) -> Self {
        self.settings = settings;
        self
    }
}

/// All pods; the first is the plain one. `cgroup` is the node's, which is the parent of all.
pub(crate) fn all(cgroup: &str) -> Vec<Case> {
    let mut cases = vec![Case::new("a plain pod", pod())];
    cases.extend(namespaces());
    cases.extend(users());
    cases.extend(names());
    cases.extend(resolver());
    cases.extend(cgroups(cgroup));
    cases.extend(sysctls());
    cases.extend(security());
    cases.extend(others());
    cases.extend(settings());
    cases
}

fn pod() -> PodSpec {
    PodSpec::new("pod")
}

fn linux(change: impl FnOnce(&mut LinuxPodSandboxConfig)) -> PodSpec {
    pod().with(|config| change(config.linux.mut_or_insert_default()))
}

fn secure(change: impl FnOnce(&mut LinuxSandboxSecurityContext)) -> PodSpec {
    linux(|linux| change(linux.security_context.mut_or_insert_default()))
}

fn namespaces() -> Vec<Case> {
    vec![
        Case::new("network NODE", pod().host_network()),
        Case::new("network NODE with a hostname", pod().host_network().hostname("ignored")),
        Case::new("pid POD", pod().pid(NamespaceMode::POD)),
        Case::new("pid NODE", pod().pid(NamespaceMode::NODE)),
        Case::new(
            "pid TARGET, as only a container may",
            secure(|security| {
                let options = security.namespace_options.mut_or_insert_default();
                options.pid = NamespaceMode::TARGET.into();
                options.target_id = "unknown".to_owned();
            }),
        ),
        Case::new("ipc NODE", pod().ipc(NamespaceMode::NODE)),
        Case::new("ipc TARGET, as only a container may", pod().ipc(NamespaceMode::TARGET)),
        Case::new(
            "network TARGET, as only a container may",
            secure(|security| {
                security.namespace_options.mut_or_insert_default().network =
                    NamespaceMode::TARGET.into();
            }),
        ),
        Case::new("ipc CONTAINER", pod().ipc(NamespaceMode::CONTAINER)),
        Case::new(
            "network, pid and ipc NODE",
            pod().host_network().pid(NamespaceMode::NODE).ipc(NamespaceMode::NODE),
        ),
        Case::new("without a linux section", pod().without_linux()),
    ]
}

fn mapping(host_id: u32, length: u32) -> IDMapping {
    IDMapping { host_id, length, ..Default::default() }
}

fn user(
    mode: NamespaceMode,
    uids: &[IDMapping],
    gids: &[IDMapping],
) -> impl FnOnce(&mut PodSandboxConfig) + use<> {
    let (uids, gids) = (uids.to_vec(), gids.to_vec());
    let options = UserNamespace { mode: mode.into(), uids, gids, ..Default::default() };
    move |config| {
        let security =
            config.linux.mut_or_insert_default().security_context.mut_or_insert_default();
        security.namespace_options.mut_or_insert_default().userns_options = Some(options).into();
    }
}

fn users() -> Vec<Case> {
    use NamespaceMode::{CONTAINER, NODE, POD};

    let (uids, gids) = ([mapping(1_000_000, 65_536)], [mapping(2_000_000, 65_536)]);
    let two = |first: &[IDMapping; 1]| [first[0].clone(), mapping(3_000_000, 1)];
    let one = || user(POD, &uids, &gids);
    let from_one = || IDMapping { container_id: 1, ..mapping(1_000_000, 65_536) };
    vec![
        Case::new("userns POD", pod().with(one())),
        Case::new("userns POD, pid POD", pod().pid(POD).with(one())),
        Case::new("userns POD, network NODE", pod().host_network().with(one())),
        Case::new(
            "userns POD, a sysctl of each kind",
            pod().sysctl("net.core.somaxconn", "1234").sysctl("kernel.msgmax", "8193").with(one()),
        )
        .reading(&["net.core.somaxconn", "kernel.msgmax"]),
        Case::new(
            "userns POD of few ids",
            pod().with(user(POD, &[mapping(1_000_000, 1000)], &[mapping(2_000_000, 1000)])),
        ),
        Case::new("userns POD of two mappings", pod().with(user(POD, &two(&uids), &gids))),
        Case::new(
            "userns POD, network NODE, of two mappings",
            pod().host_network().with(user(POD, &uids, &two(&gids))),
        ),
        Case::new("userns POD without uid 0", pod().with(user(POD, &[from_one()], &gids))),
        Case::new("userns POD without gid 0", pod().with(user(POD, &uids, &[from_one()]))),
        Case::new("userns POD without id 0", pod().with(user(POD, &[from_one()], &[from_one()]))),
        Case::new(
            "userns POD of one id",
            pod().with(user(POD, &[mapping(1_000_000, 1)], &[mapping(2_000_000, 1)])),
        ),
        Case::new("userns POD, pid NODE", pod().pid(NODE).with(one())),
        Case::new("userns POD, ipc NODE", pod().ipc(NODE).with(one())),
        Case::new("userns POD without mappings", pod().with(user(POD, &[], &[]))),
        Case::new(
            "userns POD, network NODE, of an empty mapping",
            pod().host_network().with(user(POD, &[mapping(1_000_000, 0)], &gids)),
        ),
        Case::new("userns NODE", pod().with(user(NODE, &[], &[]))),
        Case::new("userns NODE with mappings", pod().with(user(NODE, &uids, &gids))),
        Case::new("userns CONTAINER", pod().with(user(CONTAINER, &uids, &gids))),
    ]
}

fn names() -> Vec<Case> {
    let name = |length: usize| "h".repeat(length);
    vec![
        Case::new("no hostname", pod().hostname("")),
        Case::new("hostname of 64 bytes", pod().hostname(&name(64))),
        Case::new("hostname of 65 bytes", pod().hostname(&name(65))),
        Case::new("hostname with a domain", pod().hostname("pod.example.org")),
        Case::new("hostname with a line break", pod().hostname("one\ntwo")),
    ]
}

fn resolver() -> Vec<Case> {
    vec![
        Case::new("dns_config empty", pod().dns(&[], &[], &[])),
        Case::new("dns_config with options alone", pod().dns(&[], &[], &["ndots:5", "rotate"])),
        Case::new(
            "dns_config with searches alone",
            pod().dns(&[], &["one.example", "two.example"], &[]),
        ),
        Case::new(
            "dns_config with all",
            pod().dns(&["10.0.0.10", "fd00::10"], &["one.example"], &["ndots:5"]),
        ),
        Case::new(
            "dns_config with line breaks",
            pod().dns(&["10.0.0.10\n10.0.0.11"], &["one\ntwo"], &["a\nb"]),
        ),
        Case::new("dns_config, network NODE", pod().host_network().dns(&["10.0.0.10"], &[], &[])),
    ]
}

fn cgroups(node: &str) -> Vec<Case> {
    match CgroupDriver::chosen() {
        CgroupDriver::Cgroupfs => directories(node),
        CgroupDriver::Systemd => slices(node),
    }
}

/// `node` is a slice.
fn slices(node: &str) -> Vec<Case> {
    let name = node.rsplit('/').next().unwrap_or_default().trim_end_matches(".slice");
    let case = |what: &str, parent: String| Case::new(what, pod().cgroup_parent(&parent));
    vec![
        case("cgroup_parent, a slice that does not exist", format!("{node}/{name}-new.slice")),
        case(
            "cgroup_parent, nested new slices",
            format!("{node}/{name}-burstable.slice/{name}-burstable-pod1.slice"),
        ),
        case("cgroup_parent, a slice by its bare name", format!("{name}-bare.slice")),
        case("cgroup_parent, a slice at another path", format!("/elsewhere/{name}-other.slice")),
        case("cgroup_parent, the node's own slice", node.to_owned()),
        case("cgroup_parent, what no slice is named", format!("{node}/{name}--pod.slice")),
        case("cgroup_parent, no slice", format!("{node}/plain")),
        case("cgroup_parent with ..", format!("{node}/../{name}-up.slice")),
        case("without a cgroup_parent", String::new()),
    ]
}

fn directories(node: &str) -> Vec<Case> {
    let under = |parent: &str| pod().cgroup_parent(&format!("{node}{parent}"));
    let mut cases = vec![
        Case::new("cgroup_parent that does not exist", under("/new")),
        Case::new("cgroup_parent nested and new", under("/burstable/pod-1/below")),
        Case::new("cgroup_parent with slashes too many", under("//doubled//parent/")),
        Case::new(
            "cgroup_parent without a slash in front",
            pod().cgroup_parent(&format!("{}/relative", node.trim_start_matches('/'))),
        ),
        Case::new("without a cgroup_parent", pod().cgroup_parent("")),
        Case::new("cgroup_parent with ..", under("/a/../b")),
    ];
    if !systemd_runs() {
        cases.push(Case::new("cgroup_parent, a slice without systemd", under("/new.slice")));
    }
    cases
}

fn sysctls() -> Vec<Case> {
    let with = |given: &[(&str, &str)]| {
        given.iter().fold(pod(), |pod, (name, value)| pod.sysctl(name, value))
    };
    let case = |given: &[(&str, &str)]| {
        let names: Vec<&str> = given.iter().map(|(name, _)| *name).collect();
        let text: Vec<String> =
            given.iter().map(|(name, value)| format!("{name}={value}")).collect();
        Case::new(format!("sysctls {}", text.join(", ")), with(given)).reading(&names)
    };
    let mut cases = vec![
        case(&[
            ("net.core.somaxconn", "1234"),
            ("net.ipv4.ip_local_port_range", "20000 30000"),
            ("net.ipv4.tcp_syncookies", "0"),
        ]),
        case(&[
            ("kernel.shm_rmid_forced", "1"),
            ("kernel.shmmax", "67108864"),
            ("kernel.shmall", "4096"),
            ("kernel.shmmni", "128"),
        ]),
        case(&[
            ("kernel.msgmax", "8193"),
            ("kernel.msgmnb", "16385"),
            ("kernel.msgmni", "77"),
            ("kernel.sem", "100 3200 50 64"),
        ]),
        case(&[("fs.mqueue.msg_max", "11"), ("fs.mqueue.queues_max", "77")]),
        case(&[
            ("net.ipv4.ip_unprivileged_port_start", "1000"),
            ("net.ipv4.ping_group_range", "7 8"),
        ]),
        case(&[("kernel.domainname", "example.org")]),
        Case::new("sysctls net/core/somaxconn=1235", with(&[("net/core/somaxconn", "1235")]))
            .reading(&["net.core.somaxconn"]),
    ];
    // Sysctls that would change the node.
    for (name, value) in [
        ("kernel.pid_max", "4000000"),
        ("vm.swappiness", "61"),
        ("kernel.hostname", "other"),
        ("fs.file-max", "1000000"),
        ("kernel.shm_next_id", "7"),
        ("net.core.somaxconn", "no number"),
        ("net.core.no_such_thing", "1"),
    ] {
        cases.push(case(&[(name, value)]));
    }
    cases.push(
        Case::new(
            "sysctls net.core.somaxconn, network NODE",
            pod().host_network().sysctl("net.core.somaxconn", "1234"),
        )
        .reading(&["net.core.somaxconn"]),
    );
    cases.push(
        Case::new(
            "sysctls kernel.msgmax, ipc NODE",
            pod().ipc(NamespaceMode::NODE).sysctl("kernel.msgmax", "8193"),
        )
        .reading(&["kernel.msgmax"]),
    );
    cases.push(
        Case::new(
            "sysctls kernel.domainname, network NODE",
            pod().host_network().sysctl("kernel.domainname", "example.org"),
        )
        .reading(&["kernel.domainname"]),
    );
    cases
}

fn resources(scale: i64) -> LinuxContainerResources {
    LinuxContainerResources {
        cpu_period: 100_000 * scale,
        cpu_quota: 50_000 * scale,
        cpu_shares: 102 * scale,
        memory_limit_in_bytes: scale << 27,
        oom_score_adj: 900,
        cpuset_cpus: "0".to_owned(),
        cpuset_mems: "0".to_owned(),
        hugepage_limits: vec![HugepageLimit {
            page_size: "2MB".to_owned(),
            limit: 2 << 20,
            ..Default::default()
        }],
        unified: [("memory.high".to_owned(), "1000000".to_owned())].into(),
        memory_swap_limit_in_bytes: scale << 28,
        ..Default::default()
    }
}

fn others() -> Vec<Case> {
    vec![
        Case::new("resources", linux(|linux| linux.resources = Some(resources(1)).into())),
        Case::new("overhead", linux(|linux| linux.overhead = Some(resources(2)).into())),
        Case::new(
            "metadata.attempt",
            pod().with(|config| config.metadata.mut_or_insert_default().attempt = 3),
        ),
        Case::new("labels", pod().label("app", "web").label("io.kubernetes.pod.name", "web-0")),
        Case::new("a label of 4096 bytes", pod().label("app", &"v".repeat(4093))),
        Case::new("a label of 4097 bytes", pod().label("app", &"v".repeat(4094))),
        Case::new("annotations", pod().with(annotations)),
        Case::new(
            "an annotation with the size of /dev/shm",
            pod().with(|config| {
                let (name, size) = ("pause-sandboxer/shm-size", "32Mi");
                config.annotations.insert(name.to_owned(), size.to_owned());
            }),
        ),
        Case::new(
            "an annotation with limits",
            pod().with(|config| {
                let (name, limits) = ("pause-sandboxer/limits", "nofile=4096");
                config.annotations.insert(name.to_owned(), limits.to_owned());
            }),
        ),
        Case::new(
            "port_mappings",
            pod().with(|config| {
                config.port_mappings = vec![PortMapping {
                    protocol: api::Protocol::UDP.into(),
                    container_port: 53,
                    host_port: 5353,
                    host_ip: "127.0.0.1".to_owned(),
                    ..Default::default()
                }];
            }),
        ),
    ]
}

fn annotations(config: &mut PodSandboxConfig) {
    for (name, value) in [
        ("kit.example/one", "1"),
        ("kit.example/two", "2"),
        ("kit.example/below/three", "3"),
        ("exact.example", "4"),
        ("exact.example.not", "5"),
        ("class-a.example", "6"),
        ("class-z.example", "7"),
        ("io.kubernetes.cri.sandbox-name", "a name that is not the pod's"),
    ] {
        config.annotations.insert(name.to_owned(), value.to_owned());
    }
}

fn settings() -> Vec<Case> {
    vec![
        Case::new("pod_annotations", pod().with(annotations)).on(Settings::Other),
        Case::new("base_runtime_spec", pod()).on(Settings::Other),
        Case::new("enable_unprivileged_ports and _icmp false", pod()).on(Settings::Other),
        Case::new("enable_unprivileged_ports and _icmp false, network NODE", pod().host_network())
            .on(Settings::Other),
    ]
}

/// containerd's settings for [`Settings::Other`]: what is put into the table of CRI's runtime
/// service, and into those of its handlers, together with the [`BASE_LIMIT`] of a
/// `base_runtime_spec`.
pub(crate) const CONTAINERD: (&str, &str) = (
    "enable_unprivileged_ports = false\nenable_unprivileged_icmp = false\n",
    "pod_annotations = [\"kit.example/*\", \"exact.example\", \"class-[a-c].*\", \
     \"io.kubernetes.cri.*\"]\n",
);

/// How many files the `base_runtime_spec` lets a process open. It is the base of the containers'
/// specs; that of a sandbox has none.
pub(crate) const BASE_LIMIT: u32 = 777;

/// The sandboxer's, the same.
pub(crate) const SANDBOXER: &str = r#"
enable_unprivileged_ports = false
enable_unprivileged_icmp = false
pod_annotations = ["kit.example/*", "exact.example", "class-[a-c].*", "io.kubernetes.cri.*"]
"#;
