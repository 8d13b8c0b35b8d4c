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
