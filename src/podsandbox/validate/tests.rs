use super::*;

#[test]
fn the_error_of_an_id_is_one_short_line() {
    assert_eq!(check_id("a-1").unwrap(), "a-1");
    for bad in ["", "a\n", &"f".repeat(4096)] {
        let error = check_id(bad).unwrap_err().to_string();
        assert!(error.contains("sandbox_id"), "{error}");
        assert!(error.len() < 250 && !error.contains('\n'), "{error}");
    }
}

#[test]
fn a_slice_is_a_parent_of_scopes_where_systemd_runs() {
    let checked =
        |parent: &str, systemd| cgroup_parent("id", parent, systemd).map_err(|e| e.to_string());
    let kubelet = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podX.slice";
    let bare = "kubepods-burstable-podX.slice";
    for parent in [kubelet, bare, "/kubepods-burstable-podX.slice/"] {
        assert_eq!(checked(parent, true).unwrap(), bare);
    }
    for bad in ["/kubepods-.slice", "..slice/../a.slice", "/a.slice/x@1.slice"] {
        assert!(checked(bad, true).unwrap_err().contains("linux.cgroup_parent"), "{bad}");
    }
    assert_eq!(checked(kubelet, false).unwrap(), kubelet);
    assert_eq!(checked("a.slice", false).unwrap(), "/a.slice");
    for path in ["", "/kubepods/podX", "kubepods", "/a.slice/b"] {
        assert_eq!(checked(path, true).unwrap(), path);
    }
}

#[test]
fn users_that_no_container_could_have_are_refused() {
    let mapping = |container_id, length| IDMapping {
        container_id,
        host_id: 100_000,
        length,
        ..Default::default()
    };
    let checked = |uids: IDMapping, gids: IDMapping, pid: NamespaceMode, ipc: NamespaceMode| {
        let users = crate::protos::cri::UserNamespace {
            mode: NamespaceMode::POD.into(),
            uids: vec![uids],
            gids: vec![gids],
            ..Default::default()
        };
        let options = NamespaceOption {
            pid: pid.into(),
            ipc: ipc.into(),
            userns_options: Some(users).into(),
            ..Default::default()
        };
        userns("id", &options).map(drop).map_err(|e| e.to_string())
    };
    let (whole, pod, node) = (|| mapping(0, 65536), NamespaceMode::POD, NamespaceMode::NODE);
    let from = |host_id| IDMapping { host_id, ..whole() };
    assert_eq!(checked(whole(), whole(), pod, pod), Ok(()));
    assert_eq!(checked(from(u32::MAX - 65536), whole(), pod, pod), Ok(()));
    for (refused, word) in [
        (
            checked(mapping(1, 65536), whole(), pod, pod),
            "uids: begins at id 1: no mapping found for id 0",
        ),
        (
            checked(whole(), mapping(1, 65536), pod, pod),
            "gids: begins at id 1: no mapping found for id 0",
        ),
        (checked(from(u32::MAX - 65535), whole(), pod, pod), "uids: is empty or goes beyond"),
        (checked(whole(), from(u32::MAX), pod, pod), "gids: is empty or goes beyond"),
        (checked(mapping(0, 1), whole(), pod, pod), "uids: maps only id 0"),
        (checked(whole(), mapping(0, 1), pod, pod), "gids: maps only id 0"),
        (checked(whole(), whole(), node, pod), "namespace_options.pid: mode NODE"),
        (checked(whole(), whole(), pod, node), "namespace_options.ipc: mode NODE"),
    ] {
        assert!(
            refused.as_ref().is_err_and(|e| e.contains(word)),
            "{word:?} is not in {refused:?}"
        );
    }
}

/// Promise: pods_equal_the_builtins.
#[test]
fn labels_are_as_long_as_containerd_takes_them() {
    let checked = |length: usize| {
        let mut pod = PodSandboxConfig::new();
        pod.labels.insert("k".repeat(96), "v".repeat(length));
        check_labels("id", &pod).map_err(|e| e.to_string())
    };
    assert_eq!(checked(4000), Ok(()));
    let error = checked(4001).unwrap_err();
    assert!(error.contains("has 4097 bytes, key and value together, more than 4096"), "{error}");
}

/// Promise: invalid_request_names_the_field.
#[test]
fn a_pod_chooses_the_size_of_its_shared_memory_up_to_the_maximum() {
    let setting = |text: &str| text.parse::<Size>().unwrap();
    let checked = |annotation: Option<&str>, most: &str, ipc| {
        let mut pod = PodSandboxConfig::new();
        pod.annotations.extend(annotation.map(|size| (SHM_SIZE.to_owned(), size.to_owned())));
        let config =
            Config { shm_size: setting("128Mi"), shm_size_max: setting(most), ..Config::default() };
        shm_size("id", &pod, &config, ipc).map(|size| size.to_string()).map_err(|e| e.to_string())
    };
    let private = Namespace::Private;
    assert_eq!(checked(None, "1Gi", private).unwrap(), "128Mi");
    assert_eq!(checked(None, "1Gi", Namespace::Node).unwrap(), "128Mi");
    assert_eq!(checked(Some("1"), "1Gi", private).unwrap(), "1");
    assert_eq!(checked(Some("1Gi"), "1Gi", private).unwrap(), "1Gi");
    // A maximum below the setting for all pods is no other maximum.
    assert_eq!(checked(Some("128Mi"), "64Mi", private).unwrap(), "128Mi");
    let long = "9".repeat(1 << 20);
    for (size, most, ipc, reason) in [
        ("1073741825", "1Gi", private, "1073741825 is more than the node's maximum, 1Gi"),
        ("129Mi", "64Mi", private, "129Mi is more than the node's maximum, 128Mi"),
        ("0", "1Gi", private, "\"0\" must be a number of bytes from 1 to "),
        (&long, "1Gi", private, "9\u{2026}\" must be a number of bytes from 1 to "),
        ("1Mi", "1Gi", Namespace::Node, "the pod uses the node's /dev/shm"),
    ] {
        let error = checked(Some(size), most, ipc).unwrap_err();
        let field = "sandbox \"id\": annotations[\"pause-sandboxer/shm-size\"]: ";
        assert!(error.starts_with(field) && error.contains(reason), "{error}");
        assert!(error.len() < 400, "{error}");
    }
}

#[test]
fn sysctls_of_the_settings_go_to_pods_that_own_the_namespace_and_do_not_set_them() {
    let (network, ipc, ports) =
        ("net.core.somaxconn", "kernel.msgmax", "net.ipv4.ip_unprivileged_port_start");
    let set = |name: &str| format!("{name}=7").parse().unwrap();
    let config = Config {
        sysctls: vec![set(network), set(ipc), set("kernel.domainname"), set(ports)],
        enable_unprivileged_icmp: false,
        ..Config::default()
    };
    let checked = |own: &[&str], host_network, ipc| {
        let mut pod = PodSandboxConfig::new();
        let linux = pod.linux.mut_or_insert_default();
        linux.sysctls = own.iter().map(|name| ((*name).to_owned(), "1".to_owned())).collect();
        let security = Default::default();
        let found = sysctls::check("id", &pod, &config, host_network, ipc, &security).unwrap();
        found.into_iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>()
    };
    let (private, node) = (Namespace::Private, Namespace::Node);
    let all = ["net.core.somaxconn=7", "kernel.msgmax=7", "kernel.domainname=7"];
    let port = "net.ipv4.ip_unprivileged_port_start=7";
    assert_eq!(checked(&[], false, private), [&all[..], &[port]].concat());
    assert_eq!(checked(&[], true, private), ["kernel.msgmax=7"]);
    assert_eq!(checked(&[], false, node), [all[0], all[2], port]);
    assert!(checked(&[], true, node).is_empty());
    // However the pod writes it.
    for own in [network, "net/core/somaxconn"] {
        let expected = ["net.core.somaxconn=1", all[1], all[2], port];
        assert_eq!(checked(&[own], false, private), expected);
    }
    assert_eq!(checked(&[ports], false, private)[0], "net.ipv4.ip_unprivileged_port_start=1");
    assert_eq!(checked(&[ports], false, private).len(), 4);
}

#[test]
fn the_mode_of_a_namespace_is_the_pods_or_the_nodes() {
    let checked = |value| mode("id", "ipc", protobuf::EnumOrUnknown::from_i32(value));
    let modes = [NamespaceMode::POD, NamespaceMode::CONTAINER, NamespaceMode::TARGET];
    for value in modes {
        assert_eq!(checked(value as i32).unwrap(), Namespace::Private, "{value:?}");
    }
    assert_eq!(checked(NamespaceMode::NODE as i32).unwrap(), Namespace::Node);
    let error = checked(9).unwrap_err().to_string();
    assert!(error.contains("namespace_options.ipc: mode 9 is not valid"), "{error}");
}

#[test]
fn a_network_namespace_is_named_by_an_absolute_path() {
    let checked = |path: &str| netns("id", false, path).map_err(|e| e.to_string());
    let own = "/proc/self/ns/net";
    assert_eq!(checked(own).unwrap(), Some(own.into()));
    assert_eq!(netns("id", true, "").unwrap(), None);
    // The longest path that the kernel takes, and one byte more.
    let (longest, too_long) = (format!("{}/", "/a".repeat(2047)), "/a".repeat(2048));
    for (bad, reason) in [
        ("", "is empty"),
        ("proc/self/ns/net", "is not an absolute path"),
        ("/a\0", "is not an absolute path"),
        (&longest, "No such file"),
        (&too_long, "\u{2026}\" is not an absolute path"),
        ("/dev/null", "is not a network namespace"),
    ] {
        let error = checked(bad).unwrap_err();
        assert!(error.contains("netns_path") && error.contains(reason), "{error}");
    }
}

#[test]
fn a_hostname_is_one_that_the_kernel_takes() {
    let checked = |name: &str, node| hostname("id", name, node).map_err(|e| e.to_string());
    let longest = "x".repeat(64);
    assert_eq!(checked(&longest, false).unwrap(), longest);
    assert_eq!(checked("", true).unwrap(), "");
    for (bad, node, reason) in [
        ("x", true, "is given, and the pod uses the node's network"),
        (&"x".repeat(65), false, "has 65 bytes, more than 64"),
        ("a\0", false, "has a zero byte"),
    ] {
        let error = checked(bad, node).unwrap_err();
        assert!(error.contains("hostname: ") && error.contains(reason), "{error}");
    }
}

#[test]
fn a_user_namespace_has_one_mapping_of_each_kind() {
    let checked = |mode, uids: &[u32]| {
        let mapping = |length: &u32| IDMapping { length: *length, ..Default::default() };
        let users = crate::protos::cri::UserNamespace {
            mode: protobuf::EnumOrUnknown::from_i32(mode),
            uids: uids.iter().map(mapping).collect(),
            gids: vec![mapping(&65536)],
            ..Default::default()
        };
        let options = NamespaceOption { userns_options: Some(users).into(), ..Default::default() };
        userns("id", &options).map_err(|e| e.to_string())
    };
    let (pod, node) = (NamespaceMode::POD as i32, NamespaceMode::NODE as i32);
    let found = checked(pod, &[3]).unwrap().unwrap();
    assert_eq!((found.uid.length, found.gid.length), (3, 65536));
    assert_eq!(userns("id", &NamespaceOption::default()).unwrap(), None);
    // As kubelet sends it for a pod with `hostUsers: true`.
    let users = crate::protos::cri::UserNamespace {
        mode: NamespaceMode::NODE.into(),
        ..Default::default()
    };
    let options = NamespaceOption { userns_options: Some(users).into(), ..Default::default() };
    assert_eq!(userns("id", &options).unwrap(), None);
    for (mode, uids, reason) in [
        (pod, &[1, 1][..], "uids: has 2 mappings, not one"),
        (pod, &[0], "uids: is empty or goes beyond"),
        (node, &[], "mode NODE goes with no mappings"),
        (9, &[3], "mode 9 is not valid for a sandbox"),
    ] {
        let error = checked(mode, uids).unwrap_err();
        assert!(error.contains("userns_options") && error.contains(reason), "{error}");
    }
}

#[test]
fn a_pod_sets_no_sysctl_of_the_node() {
    let checked = |name: &str, value: &str, host_network, ipc| {
        let mut pod = PodSandboxConfig::new();
        let linux = pod.linux.mut_or_insert_default();
        linux.sysctls.insert(name.to_owned(), value.to_owned());
        let (config, security) = Default::default();
        sysctls::check("id", &pod, &config, host_network, ipc, &security)
            .map(drop)
            .map_err(|e| e.to_string())
    };
    let (private, node) = (Namespace::Private, Namespace::Node);
    let (network, ipc, uts) = ("net.core.somaxconn", "kernel.msgmax", "kernel.domainname");
    let malformed = "is not a sysctl name, or its value has a zero byte";
    for (name, value, host_network, of_ipc, reason) in [
        (network, "1", false, node, ""),
        (ipc, "1", true, private, ""),
        (uts, "x", false, node, ""),
        (network, "1", true, private, "the pod uses the node's network"),
        (ipc, "1", false, node, "the pod uses the node's IPC"),
        (uts, "x", true, private, "the pod uses the node's network and so its UTS namespace"),
        ("vm.swappiness", "1", false, private, "is not namespaced, it would change the node"),
        ("net..x", "1", false, private, malformed),
        (network, "1\0", false, private, malformed),
    ] {
        let found = checked(name, value, host_network, of_ipc).err().unwrap_or_default();
        assert_eq!(found.is_empty(), reason.is_empty(), "{name}: {found}");
        assert!(found.ends_with(reason), "{found}");
    }
}

#[test]
fn low_ports_and_ping_are_for_every_user_unless_the_pod_decides() {
    let (ports, ping) = ("net.ipv4.ip_unprivileged_port_start", "net.ipv4.ping_group_range");
    let checked = |own: &[&str], config: &Config, host_network, users: Option<NamespaceMode>| {
        let mut pod = PodSandboxConfig::new();
        let linux = pod.linux.mut_or_insert_default();
        linux.sysctls = own.iter().map(|name| ((*name).to_owned(), "7".to_owned())).collect();
        let mut security = crate::protos::cri::LinuxSandboxSecurityContext::new();
        let users = users.map(|mode| crate::protos::cri::UserNamespace {
            mode: mode.into(),
            ..Default::default()
        });
        security.namespace_options.mut_or_insert_default().userns_options = users.into();
        sysctls::check("id", &pod, config, host_network, Namespace::Private, &security).unwrap()
    };
    let config = |enable_unprivileged_ports, enable_unprivileged_icmp| Config {
        enable_unprivileged_ports,
        enable_unprivileged_icmp,
        ..Config::default()
    };
    let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let (low, all) = (pair(ports, "0"), pair(ping, "0 2147483647"));
    let both = [low.clone(), all.clone()];
    let (on, node) = (config(true, true), Some(NamespaceMode::NODE));
    assert_eq!(checked(&[], &on, false, None), both);
    assert_eq!(checked(&[], &on, false, node), both);
    // The group of the range is not one of the pod's.
    assert_eq!(checked(&[], &on, false, Some(NamespaceMode::POD)), both[..1]);
    assert_eq!(checked(&[], &on, true, None), []);
    assert_eq!(checked(&[], &config(true, false), false, None), both[..1]);
    assert_eq!(checked(&[], &config(false, true), false, None), both[1..]);
    assert_eq!(checked(&[ports], &on, false, None), [pair(ports, "7"), all]);
    assert_eq!(checked(&[ping], &on, false, None), [pair(ping, "7"), low]);
}
