//! The check of a Create: the first two bytes choose settings and the request around the config,
//! the rest is the CRI config.

use std::path::Path;
use std::sync::LazyLock;

use pause_sandboxer::cgroup;
use pause_sandboxer::config::Config;
use pause_sandboxer::pause::{Namespace, Plan};
use pause_sandboxer::podsandbox::fuzzing::{Record, check, describe, resolv_conf};
use pause_sandboxer::podsandbox::{CreateRequest, Error, SandboxInfo};
use pause_sandboxer::protos::cri;
use protobuf::{Message, MessageField};

use super::{Seeds, assert_told};
use crate::service::any;

const TYPE: &str = "runtime.v1.PodSandboxConfig";
const NETNS: &str = "/proc/self/ns/net";

/// The settings that the check depends on, by the bits of a byte.
static CONFIGS: LazyLock<Vec<Config>> = LazyLock::new(|| {
    (0..16u8)
        .map(|bits| Config {
            enable_unprivileged_ports: bits & 4 == 0,
            enable_unprivileged_icmp: bits & 4 == 0,
            restrict_oom_score_adj: bits & 8 != 0,
            pod_annotations: if bits & 8 == 0 {
                vec!["a*.b?/*".parse().expect("a pattern")]
            } else {
                Vec::new()
            },
            ..Config::default()
        })
        .collect()
});

pub fn run(input: &[u8]) {
    let [settings, around, message @ ..] = input else { return };
    let config = &CONFIGS[usize::from(*settings) % CONFIGS.len()];
    let request = CreateRequest {
        id: if around & 1 == 0 { "6f1c2a9be0d4" } else { "a.b-c" }.into(),
        options: Some(any(TYPE, message)),
        netns_path: if around & 2 == 0 { NETNS } else { "" }.into(),
        sandbox: Some(SandboxInfo {
            runtime_name: if around & 4 == 0 {
                "io.containerd.runc.v2"
            } else {
                "io.containerd.kata.v2"
            }
            .into(),
            ..SandboxInfo::default()
        }),
    };
    let pod = cri::PodSandboxConfig::parse_from_bytes(message);
    match check(&request, config) {
        Ok(record) => accepted(&record, &pod.expect("a malformed config was accepted"), config),
        Err(e) => {
            assert_told(&e.to_string());
            let Error::Invalid { field, reason, .. } = e else {
                panic!("{e:?} is no fault of the request")
            };
            assert!(!reason.is_empty() && !field.is_empty());
            assert!(pod.is_ok() || field == "options", "{field}: {reason}");
        }
    }
}

fn accepted(record: &Record, pod: &cri::PodSandboxConfig, config: &Config) {
    let plan = &record.plan;
    assert_eq!(plan.id, record.id);
    assert!(plan.hostname.len() <= 64 && !plan.hostname.contains('\0'), "{:?}", plan.hostname);
    assert!(plan.hostname.is_empty() || plan.uts == Namespace::Private);
    assert_eq!(plan.netns.is_none(), plan.uts == Namespace::Node);
    sysctls(plan);
    cgroup::check_parent(&plan.cgroup_parent).expect("a driver takes the parent that was accepted");
    assert!(Path::new(&plan.cgroup_parent).components().all(|part| part.as_os_str() != ".."));
    for mapping in plan.userns.iter().flat_map(|userns| [userns.uid, userns.gid]) {
        assert!(
            mapping.length > 0 && mapping.host_id.checked_add(mapping.length).is_some(),
            "{mapping:?}"
        );
    }
    if let Some(text) = resolv_conf(record) {
        let dns = pod.dns_config.get_or_default();
        let (searches, options) =
            (usize::from(!dns.searches.is_empty()), usize::from(!dns.options.is_empty()));
        assert!(!text.contains('\0'), "{text:?}");
        // A line break in a value is a line of its own, which the pod's config may give.
        let breaks = dns
            .servers
            .iter()
            .chain(&dns.searches)
            .chain(&dns.options)
            .any(|value| value.contains('\n'));
        let known = |line: &str| {
            ["search ", "nameserver ", "options "].iter().any(|word| line.starts_with(word))
        };
        assert!(
            breaks || text.matches('\n').count() == dns.servers.len() + searches + options,
            "{text:?}"
        );
        assert!(breaks || text.split_terminator('\n').all(known), "{text:?}");
    }
    // A later daemon reads the record that was accepted, and decodes the same values.
    let json = serde_json::to_vec(record).expect("it is recorded");
    let again: Record = serde_json::from_slice(&json).expect("the record is read");
    assert!(again == *record, "{record:?} became {again:?}");
    let spec = describe(&again, config).expect("there is a spec of what was accepted");
    let spec: serde_json::Value = serde_json::from_slice(&spec).expect("the spec is JSON");
    assert_eq!(spec["process"]["noNewPrivileges"], true);
}

/// Each is of a namespace that the pod has for itself.
fn sysctls(plan: &Plan) {
    for (name, value) in &plan.sysctls {
        assert!(!value.contains('\0') && !name.contains(['/', '\0']), "{name:?} = {value:?}");
        assert!(name.split('.').all(|part| !part.is_empty() && part != ".."), "{name:?}");
        let own = match name.as_str() {
            "kernel.domainname" => plan.uts == Namespace::Private,
            name if name.starts_with("net.") => plan.netns.is_some(),
            name => {
                let ipc = ["fs.mqueue.", "kernel.msg", "kernel.sem", "kernel.shm"];
                ipc.iter().any(|prefix| name.starts_with(prefix)) && plan.ipc == Namespace::Private
            }
        };
        assert!(own, "{name} is the node's");
    }
}

pub fn seeds() -> Seeds {
    use cri::NamespaceMode::{CONTAINER, NODE, POD, TARGET};

    let input = |settings: u8, around: u8, pod: &cri::PodSandboxConfig| {
        let mut bytes = vec![settings, around];
        pod.write_to_vec(&mut bytes).expect("it is encoded");
        bytes
    };
    let pod = |change: &dyn Fn(&mut cri::PodSandboxConfig)| {
        let mut pod = cri::PodSandboxConfig {
            hostname: "web-0".into(),
            log_directory: "/var/log/pods/x".into(),
            metadata: MessageField::some(cri::PodSandboxMetadata {
                name: "web-0".into(),
                uid: "0a1b".into(),
                namespace: "default".into(),
                ..Default::default()
            }),
            labels: [("app".into(), "web".into())].into(),
            annotations: [("ab.ex/x".into(), "1".into())].into(),
            ..Default::default()
        };
        change(&mut pod);
        pod
    };
    let linux = |pod: &mut cri::PodSandboxConfig,
                 change: &dyn Fn(&mut cri::LinuxPodSandboxConfig)| {
        let mut linux = cri::LinuxPodSandboxConfig {
            cgroup_parent: "/kubepods/pod1".into(),
            ..Default::default()
        };
        change(&mut linux);
        pod.linux = MessageField::some(linux);
    };
    let namespaces =
        |network: cri::NamespaceMode, pid: cri::NamespaceMode, ipc: cri::NamespaceMode| {
            cri::LinuxSandboxSecurityContext {
                namespace_options: MessageField::some(cri::NamespaceOption {
                    network: network.into(),
                    pid: pid.into(),
                    ipc: ipc.into(),
                    ..Default::default()
                }),
                ..Default::default()
            }
        };
    let sysctl = |name: &str| [(name.to_owned(), "1".to_owned())].into();
    let mapping = || {
        vec![cri::IDMapping {
            host_id: 100_000,
            container_id: 0,
            length: 65536,
            ..Default::default()
        }]
    };
    vec![
        ("empty".into(), vec![2, 0]),
        ("plain".into(), input(2, 0, &pod(&|_| {}))),
        // linux.security_context.supplemental_groups, packed, with a false length.
        ("packed".into(), vec![2, 0, 0x42, 8, 0x12, 6, 0x2a, 0xff, 0xff, 0xff, 0xff, 4]),
        (
            "dns".into(),
            input(
                2,
                0,
                &pod(&|pod| {
                    pod.dns_config = MessageField::some(cri::DNSConfig {
                        servers: vec!["10.0.0.10".into(), "::1".into()],
                        searches: vec!["default.svc.cluster.local".into(), "svc".into()],
                        options: vec!["ndots:5".into()],
                        ..Default::default()
                    });
                }),
            ),
        ),
        ("cgroup".into(), input(0, 0, &pod(&|pod| linux(pod, &|_| {})))),
        (
            "slice".into(),
            input(
                1,
                0,
                &pod(&|pod| {
                    linux(pod, &|linux| {
                        linux.cgroup_parent = "/kubepods.slice/kubepods-pod1.slice".into()
                    });
                }),
            ),
        ),
        (
            "host".into(),
            input(
                2,
                2,
                &pod(&|pod| {
                    pod.hostname.clear();
                    linux(pod, &|linux| {
                        linux.security_context = MessageField::some(namespaces(NODE, NODE, NODE))
                    });
                }),
            ),
        ),
        (
            "target".into(),
            input(
                2,
                0,
                &pod(&|pod| {
                    linux(pod, &|linux| {
                        linux.security_context =
                            MessageField::some(namespaces(POD, TARGET, CONTAINER))
                    });
                }),
            ),
        ),
        (
            "sysctl".into(),
            input(
                2,
                0,
                &pod(&|pod| linux(pod, &|linux| linux.sysctls = sysctl("net.core.somaxconn"))),
            ),
        ),
        (
            "sysctl-slash".into(),
            input(6, 0, &pod(&|pod| linux(pod, &|linux| linux.sysctls = sysctl("net/core/x")))),
        ),
        (
            "sysctl-ipc".into(),
            input(2, 0, &pod(&|pod| linux(pod, &|linux| linux.sysctls = sysctl("kernel.shmmax")))),
        ),
        (
            "sysctl-node".into(),
            input(2, 0, &pod(&|pod| linux(pod, &|linux| linux.sysctls = sysctl("vm.swappiness")))),
        ),
        (
            "userns".into(),
            input(
                2,
                0,
                &pod(&|pod| {
                    let mut security = namespaces(POD, POD, POD);
                    let options = security.namespace_options.mut_or_insert_default();
                    options.userns_options = MessageField::some(cri::UserNamespace {
                        mode: POD.into(),
                        uids: mapping(),
                        gids: mapping(),
                        ..Default::default()
                    });
                    linux(pod, &|linux| {
                        linux.security_context = MessageField::some(security.clone())
                    });
                }),
            ),
        ),
        (
            "security".into(),
            input(
                8,
                4,
                &pod(&|pod| {
                    let int =
                        |value| MessageField::some(cri::Int64Value { value, ..Default::default() });
                    let security = cri::LinuxSandboxSecurityContext {
                        run_as_user: int(1000),
                        run_as_group: int(1000),
                        privileged: true,
                        seccomp: MessageField::some(cri::SecurityProfile {
                            profile_type: cri::security_profile::ProfileType::Localhost.into(),
                            localhost_ref: "/profile.json".into(),
                            ..Default::default()
                        }),
                        selinux_options: MessageField::some(cri::SELinuxOption {
                            level: "s0:c1,c2".into(),
                            ..Default::default()
                        }),
                        ..Default::default()
                    };
                    linux(pod, &|linux| {
                        linux.security_context = MessageField::some(security.clone())
                    });
                }),
            ),
        ),
        ("malformed".into(), vec![2, 0, 0x0a, 0xff]),
    ]
}
