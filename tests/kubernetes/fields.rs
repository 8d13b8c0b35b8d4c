//! Fields of a pod that shape its sandbox: namespaces, sysctls, names, volumes, users.

use std::fs;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::Run;
use crate::cluster::NODE;
use crate::side::{Facts, Side, at, sleeping, with};

pub(crate) const CASES: &[(&str, Run)] = &[
    ("host_namespaces", Run::Each(host_namespaces)),
    ("shared_pid_namespace", Run::Each(shared_pid)),
    ("user_namespace", Run::Each(user_namespace)),
    ("sysctls", Run::Each(sysctls)),
    ("hostnames", Run::Each(hostnames)),
    ("dns", Run::Each(dns)),
    ("volumes", Run::Each(volumes)),
    ("security_context", Run::Each(security_context)),
];

const NAMESPACES: [&str; 7] = ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"];

/// Which namespaces of a container are the node's.
fn of_the_node(side: &Side, pod: &str) -> Result<String> {
    let mut shared = Vec::new();
    for namespace in NAMESPACES {
        let link = format!("/proc/self/ns/{namespace}");
        let node = fs::read_link(&link)?;
        if side.sh(pod, &format!("readlink {link}"))?.trim() == node.to_string_lossy() {
            shared.push(namespace);
        }
    }
    Ok(shared.join(" "))
}

fn host_namespaces(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    let kinds: [(&str, Value); 5] = [
        ("none", json!({})),
        ("network", json!({ "hostNetwork": true })),
        ("pid", json!({ "hostPID": true })),
        ("ipc", json!({ "hostIPC": true })),
        ("all", json!({ "hostNetwork": true, "hostPID": true, "hostIPC": true })),
    ];
    let names: Vec<String> = kinds.iter().map(|(kind, _)| format!("host-{kind}")).collect();
    for ((_, spec), name) in kinds.into_iter().zip(&names) {
        side.create(name, with(json!({ "containers": [sleeping("main")] }), spec))?;
    }
    for name in &names {
        side.wait(&format!("pod/{name}"), "condition=Ready")?;
        facts.add(format!("{name}: the node's"), of_the_node(side, name)?);
        facts.add(format!("{name}: hostname"), side.sh(name, "hostname")?);
        let pid = side.sh(name, "cat /proc/1/comm")?;
        facts.add(format!("{name}: process 1"), pid);
        let pod = side.get(&format!("pod/{name}"))?;
        let same = at(&pod, "status.podIP") == at(&pod, "status.hostIP");
        facts.add(format!("{name}: the node's address"), same);
        facts.add(format!("{name}: shm"), side.sh(name, "grep -c ' /dev/shm ' /proc/mounts")?);
    }
    let all: Vec<String> = names.iter().map(|name| format!("pod/{name}")).collect();
    side.delete(&all.iter().map(String::as_str).collect::<Vec<_>>())?;
    Ok(facts)
}

fn shared_pid(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    side.run(
        "together",
        json!({
            "shareProcessNamespace": true,
            "containers": [sleeping("one"), sleeping("two")],
        }),
    )?;
    facts.add("process 1", side.sh("together", "cat /proc/1/comm")?);
    facts.add("its arguments", side.sh("together", "tr '\\0' ' ' </proc/1/cmdline")?);
    facts.add("sleeping", side.sh("together", "ps -o args | grep -c '^sleep 100000'")?);
    // An orphan becomes a child of process 1, which reaps it.
    side.sh("together", "(sleep 0.2 & sleep 0) ; exit 0")?;
    let zombies = "for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.3; \
                   n=$(grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l); \
                   [ $n = 0 ] && break; done; echo $n";
    facts.expect("zombies", side.sh("together", zombies)?, "0")?;
    facts.add("root of process 1", side.sh("together", "ls /proc/1/root 2>&1 | wc -l")?);
    facts.add("user of process 1", side.sh("together", "stat -c %u:%g /proc/1")?);
    side.delete(&["pod/together"])?;
    Ok(facts)
}

/// kubelet's report of the handler in the node's status.
fn features(side: &Side) -> Result<String> {
    let node = side.get(&format!("node/{NODE}"))?;
    let handlers = node["status"]["runtimeHandlers"].as_array().context("no handlers")?;
    let ours = handlers.iter().find(|handler| handler["name"] == side.handler.name());
    Ok(ours.with_context(|| format!("no {}", side.handler.name()))?["features"].to_string())
}

fn user_namespace(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    side.run(
        "users",
        json!({
            "hostUsers": false,
            "containers": [with(sleeping("main"), json!({
                "volumeMounts": [{ "name": "files", "mountPath": "/files" }],
            }))],
            "volumes": [{ "name": "files", "emptyDir": {} }],
        }),
    )?;
    facts.add("the node's", of_the_node(side, "users")?);
    let map = side.sh("users", "cat /proc/self/uid_map")?;
    let numbers: Vec<&str> = map.split_whitespace().collect();
    facts.expect("first id", numbers.first().context("no uid_map")?, "0")?;
    facts.expect("mapped to root", numbers.get(1) == Some(&"0"), "false")?;
    facts.add("length", numbers.last().context("no uid_map")?);
    facts.expect(
        "file of root",
        side.sh("users", "touch /files/a; stat -c %u:%g /files/a")?,
        "0:0",
    )?;
    facts.add("hostname", side.sh("users", "hostname")?);
    facts.add("set the hostname", side.sh("users", "hostname other 2>&1; true")?);
    facts.add("capabilities", side.sh("users", "grep CapEff /proc/self/status")?);
    facts.add("owner of sysctls", side.sh("users", "stat -c %u /proc/sys/net/ipv4/ip_forward")?);
    facts.add("features of the handler", features(side)?);
    side.delete(&["pod/users"])?;
    Ok(facts)
}

fn sysctls(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    let set = [
        ("kernel.shm_rmid_forced", "1"),
        ("net.ipv4.ip_local_port_range", "2000 3000"),
        ("net.ipv4.tcp_syncookies", "0"),
        ("net.ipv4.ping_group_range", "10 20"),
        ("net.ipv4.ip_unprivileged_port_start", "80"),
        ("kernel.msgmax", "4096"),
        ("net.core.somaxconn", "99"),
    ];
    let list: Vec<Value> =
        set.iter().map(|(name, value)| json!({ "name": name, "value": value })).collect();
    side.run(
        "tuned",
        json!({
            "securityContext": { "sysctls": list },
            "containers": [sleeping("main")],
        }),
    )?;
    side.run("untuned", json!({ "containers": [sleeping("main")] }))?;
    for (name, _) in set {
        let read = format!("cat /proc/sys/{} | tr '\\t' ' '", name.replace('.', "/"));
        facts.add(name, side.sh("tuned", &read)?);
        facts.add(format!("{name} by default"), side.sh("untuned", &read)?);
    }
    side.create(
        "forbidden",
        json!({
            "securityContext": { "sysctls": [{ "name": "kernel.sem", "value": "1 2 3 4" }] },
            "containers": [sleeping("main")],
        }),
    )?;
    side.wait("pod/forbidden", "jsonpath={.status.phase}=Failed")?;
    facts.expect(
        "forbidden",
        at(&side.get("pod/forbidden")?, "status.reason"),
        "SysctlForbidden",
    )?;
    side.delete(&["pod/tuned", "pod/untuned", "pod/forbidden"])?;
    Ok(facts)
}

fn hostnames(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    let long = "a-name-of-a-pod-that-is-longer-than-the-sixty-four-bytes-of-a-hostname-of-linux";
    let kinds: [(&str, Value); 5] = [
        ("plain-name", json!({})),
        ("named", json!({ "hostname": "other", "subdomain": "below" })),
        (
            "qualified",
            json!({
                "hostname": "other", "subdomain": "below", "setHostnameAsFQDN": true,
            }),
        ),
        (
            "aliases",
            json!({
                "hostAliases": [{ "ip": "192.0.2.1", "hostnames": ["one.example", "two.example"] }],
            }),
        ),
        (long, json!({})),
    ];
    for (name, spec) in &kinds {
        side.create(name, with(json!({ "containers": [sleeping("main")] }), spec.clone()))?;
    }
    for (name, _) in &kinds {
        side.wait(&format!("pod/{name}"), "condition=Ready")?;
        let ip = at(&side.get(&format!("pod/{name}"))?, "status.podIP");
        for (what, script) in [
            ("hostname", "hostname"),
            ("/etc/hostname", "cat /etc/hostname"),
            ("/etc/hosts", "cat /etc/hosts"),
            ("HOSTNAME", "echo $HOSTNAME"),
            ("domain", "cat /proc/sys/kernel/domainname"),
        ] {
            // The namespace is part of a qualified name.
            let seen = side.sh(name, script)?.replace(&ip, "IP").replace(side.namespace(), "NS");
            facts.add(format!("{name}: {what}"), seen);
        }
    }
    let all: Vec<String> = kinds.iter().map(|(name, _)| format!("pod/{name}")).collect();
    side.delete(&all.iter().map(String::as_str).collect::<Vec<_>>())?;
    Ok(facts)
}

fn dns(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    let own = json!({
        "nameservers": ["192.0.2.1", "192.0.2.2"],
        "searches": ["one.example", "two.example"],
        "options": [{ "name": "ndots", "value": "2" }, { "name": "edns0" }],
    });
    let kinds: [(&str, Value); 6] = [
        ("dns-first", json!({})),
        ("dns-default", json!({ "dnsPolicy": "Default" })),
        ("dns-none", json!({ "dnsPolicy": "None", "dnsConfig": own })),
        ("dns-more", json!({ "dnsConfig": own })),
        ("dns-host", json!({ "hostNetwork": true, "dnsPolicy": "ClusterFirst" })),
        (
            "dns-host-cluster",
            json!({ "hostNetwork": true, "dnsPolicy": "ClusterFirstWithHostNet" }),
        ),
    ];
    for (name, spec) in &kinds {
        side.create(name, with(json!({ "containers": [sleeping("main")] }), spec.clone()))?;
    }
    for (name, _) in &kinds {
        side.wait(&format!("pod/{name}"), "condition=Ready")?;
        let read = side.sh(name, "cat /etc/resolv.conf")?.replace(side.namespace(), "NS");
        // kubelet keeps options in a map: they have any order.
        let (options, rest): (Vec<&str>, Vec<&str>) =
            read.lines().partition(|line| line.starts_with("options"));
        let mut options: Vec<&str> = options.iter().flat_map(|line| line.split(' ')).collect();
        options.sort_unstable();
        facts.add(*name, rest.join("\n"));
        facts.add(format!("{name}: options"), options.join(" "));
        facts.add(format!("{name}: mode"), side.sh(name, "stat -c '%a %u:%g' /etc/resolv.conf")?);
    }
    let all: Vec<String> = kinds.iter().map(|(name, _)| format!("pod/{name}")).collect();
    side.delete(&all.iter().map(String::as_str).collect::<Vec<_>>())?;
    Ok(facts)
}

fn volumes(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    side.kubectl(&["create", "configmap", "settings", "--from-literal=key=value"])?;
    side.kubectl(&["create", "secret", "generic", "hidden", "--from-literal=key=secret"])?;
    let directory = side.cluster.file(&format!("host-{}", side.namespace()));
    fs::create_dir_all(&directory)?;
    fs::write(directory.join("file"), "of the node")?;
    let volumes = json!([
        { "name": "empty", "emptyDir": {} },
        { "name": "memory", "emptyDir": { "medium": "Memory", "sizeLimit": "1Mi" } },
        { "name": "host", "hostPath": { "path": directory, "type": "Directory" } },
        { "name": "settings", "configMap": { "name": "settings" } },
        { "name": "hidden", "secret": { "secretName": "hidden", "defaultMode": 0o400 } },
        { "name": "down", "downwardAPI": { "items": [
            { "path": "labels", "fieldRef": { "fieldPath": "metadata.labels" } }] } },
        { "name": "token", "projected": { "sources": [
            { "serviceAccountToken": { "path": "token", "audience": "tests" } }] } },
        { "name": "image", "image": { "reference": kit::TEST_IMAGE } },
    ]);
    let mounts = json!([
        { "name": "empty", "mountPath": "/empty" },
        { "name": "memory", "mountPath": "/memory" },
        { "name": "host", "mountPath": "/host", "mountPropagation": "HostToContainer" },
        { "name": "settings", "mountPath": "/settings" },
        { "name": "settings", "mountPath": "/sub/key", "subPath": "key" },
        { "name": "hidden", "mountPath": "/hidden", "readOnly": true },
        { "name": "down", "mountPath": "/down" },
        { "name": "token", "mountPath": "/token" },
        { "name": "image", "mountPath": "/image" },
    ]);
    side.run(
        "stored",
        json!({
            "containers": [with(sleeping("main"), json!({ "volumeMounts": mounts }))],
            "volumes": volumes,
        }),
    )?;
    for (what, script) in [
        ("empty", "touch /empty/a && stat -c '%a %u:%g' /empty"),
        (
            "memory",
            "grep ' /memory ' /proc/mounts | cut -d' ' -f3; \
             df -k /memory | tail -1 | awk '{print $2}'",
        ),
        ("host", "cat /host/file; echo from the pod >/host/other"),
        ("settings", "cat /settings/key /sub/key"),
        ("hidden", "cat /hidden/key; stat -L -c %a /hidden/key; touch /hidden/x 2>&1"),
        ("down", "cat /down/labels"),
        ("token", "cut -d. -f1 /token/token | wc -c"),
        ("image", "ls /image; touch /image/x 2>&1"),
        ("shm", "df -k /dev/shm | tail -1 | awk '{print $2}'; stat -c '%a %u:%g' /dev/shm"),
        ("mounts", "cut -d' ' -f2,3 /proc/mounts | sort"),
    ] {
        facts.add(what, side.sh("stored", &format!("{script}; true"))?);
    }
    facts.expect("on the node", fs::read_to_string(directory.join("other"))?, "from the pod")?;
    side.delete(&["pod/stored", "configmap/settings", "secret/hidden"])?;
    Ok(facts)
}

fn security_context(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    let main = with(
        sleeping("main"),
        json!({
            "securityContext": {
                "readOnlyRootFilesystem": true,
                "allowPrivilegeEscalation": false,
                "capabilities": { "drop": ["ALL"], "add": ["NET_BIND_SERVICE"] },
            },
            "volumeMounts": [{ "name": "files", "mountPath": "/files" }],
        }),
    );
    side.run(
        "confined",
        json!({
            "securityContext": {
                "runAsUser": 1000, "runAsGroup": 2000, "fsGroup": 3000,
                "supplementalGroups": [4000], "runAsNonRoot": true,
                "seccompProfile": { "type": "RuntimeDefault" },
            },
            "containers": [main],
            "volumes": [{ "name": "files", "emptyDir": {} }],
        }),
    )?;
    let privileged = json!({ "securityContext": { "privileged": true } });
    side.run("free", json!({ "containers": [with(sleeping("main"), privileged)] }))?;
    let status = "grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status";
    for (pod, what, script) in [
        ("confined", "ids", "id -u; id -g; id -G"),
        ("confined", "status", status),
        ("confined", "root", "touch /x 2>&1; true"),
        ("confined", "volume", "stat -c '%a %u:%g' /files"),
        ("confined", "oom_score_adj", "cat /proc/1/oom_score_adj"),
        ("free", "status", status),
        ("free", "devices", "ls /dev/null /dev/kmsg /dev/loop-control 2>&1; true"),
        ("free", "sys", "grep ' /sys ' /proc/mounts | cut -d' ' -f4 | cut -d, -f1"),
    ] {
        facts.add(format!("{pod}: {what}"), side.sh(pod, script)?);
    }
    side.delete(&["pod/confined", "pod/free"])?;
    Ok(facts)
}
