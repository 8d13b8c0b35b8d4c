//! The facts of a pod that can be seen from outside: its pause on the node, its containers from
//! inside, and what CRI reports.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use kit::controller::{any, api as controller};
use kit::machine::cgroup;
use kit::{Container, Handler, Pod};
use serde_json::Value;

use crate::container;
use crate::fact::{Facts, json};

/// Namespaces of a process.
const NAMESPACES: [&str; 8] = ["cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"];

/// Whether the kernel has this kind of namespace: one without those of time can run pods.
fn has_namespace(kind: &str) -> bool {
    Path::new("/proc/self/ns").join(kind).exists()
}

/// Lists as skipped what the kernel does not show.
pub(crate) fn skip_what_the_kernel_lacks() {
    for kind in NAMESPACES.into_iter().filter(|kind| !has_namespace(kind)) {
        kit::skip(&format!("the kernel has no {kind} namespaces to compare"));
    }
}

/// Names what is another in every pod.
pub(crate) async fn name(pod: &Pod, facts: &mut Facts) -> Result<u32> {
    let layout = pod.node().layout();
    let pid = pod.pause_pid().await?;
    facts.call(pod.id(), "<id>");
    facts.call(pod.config().metadata.uid.clone(), "<uid>");
    // Some callers name their handler, which is what the two differ in.
    facts.call(pod.ip().await?, "<ip>");
    facts.call(layout.top.to_string_lossy(), "<node>");
    facts.call(layout.name.clone(), "<node>");
    Ok(pid)
}

/// The pause process.
pub(crate) async fn pause(pid: u32, facts: &mut Facts) -> Result<()> {
    /// A Start may return a little before the process has taken the pause's name, and its
    /// environment after that: the built-in's is runc until then. What starts it then, such as
    /// the runtime of its language, may have files open until it sleeps.
    const SOON: Duration = Duration::from_secs(20);
    /// The field after the name in `/proc/PID/stat` with the end of the environment in the
    /// process's memory, 0 until it has one (proc(5)).
    const ENV_END: usize = 48;
    let proc = Path::new("/proc").join(pid.to_string());
    kit::until("the pause runs", SOON, async || {
        let name = fs::read_to_string(proc.join("comm"))?;
        anyhow::ensure!(name == "pause\n", "it is {name}");
        let stat = fs::read_to_string(proc.join("stat"))?;
        let rest = stat.rsplit_once(") ").context("no name in stat")?.1;
        let env_end = rest.split(' ').nth(ENV_END).context("no end of the environment in stat")?;
        anyhow::ensure!(env_end != "0", "it has no environment yet");
        anyhow::ensure!(rest.starts_with("S "), "it does not sleep yet: {rest}");
        Ok(())
    })
    .await?;
    let read = |file: &str| -> Result<String> {
        let path = proc.join(file);
        let bytes = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
        Ok(String::from_utf8_lossy(&bytes).replace('\0', " ").trim_end().to_owned())
    };
    let status = read("status")?;
    let line = |name: &str| {
        let found = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        found.unwrap_or(crate::fact::ABSENT).split_whitespace().collect::<Vec<_>>().join(" ")
    };
    facts.add("pause: name", read("comm")?);
    for field in [
        "Uid",
        "Gid",
        "Groups",
        "CapInh",
        "CapPrm",
        "CapEff",
        "CapBnd",
        "CapAmb",
        "NoNewPrivs",
        "Seccomp",
    ] {
        facts.add(format!("pause: {field}"), line(field));
    }
    let inside = line("NSpid");
    facts.add(
        "pause: pid in its own namespace",
        inside.rsplit(' ').next().unwrap_or_default().replace(&pid.to_string(), "<pid>"),
    );
    facts.add("pause: leads its session", line("NSsid") == inside);
    facts.add("pause: oom_score_adj", read("oom_score_adj")?);
    let files = read("limits")?;
    let files =
        files.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap_or_default();
    facts.add("pause: limit of open files", files.split_whitespace().next().unwrap_or_default());
    facts.add("pause: environment", read("environ")?);
    facts.add("pause: uid_map", read("uid_map")?.split_whitespace().collect::<Vec<_>>().join(" "));
    facts.add("pause: gid_map", read("gid_map")?.split_whitespace().collect::<Vec<_>>().join(" "));
    facts.add("pause: open files", fs::read_dir(proc.join("fd"))?.count());
    for kind in NAMESPACES.into_iter().filter(|kind| has_namespace(kind)) {
        let (of_pause, of_node) = (
            fs::metadata(proc.join("ns").join(kind))?,
            fs::metadata(format!("/proc/self/ns/{kind}"))?,
        );
        let whose = if of_pause.ino() == of_node.ino() { "the node's" } else { "its own" };
        facts.add(format!("pause: {kind} namespace"), whose);
    }
    // The view of a container that shares the PID namespace.
    let entries = fs::read_dir(proc.join("root"))?.count();
    facts.add("pause: its root", if entries == 0 { "empty" } else { "has files" });
    let label = fs::read(proc.join("attr/current")).unwrap_or_default();
    facts.add(
        "pause: security label",
        String::from_utf8_lossy(&label).trim_end_matches(['\0', '\n']),
    );
    pause_cgroups(&read("cgroup")?, facts)
}

/// The cgroups of the pause process, as `/proc/PID/cgroup` lists them, and its share of CPU time.
fn pause_cgroups(cgroups: &str, facts: &mut Facts) -> Result<()> {
    for line in cgroups.lines() {
        if let [_, controllers, path] = line.splitn(3, ':').collect::<Vec<_>>()[..] {
            facts.add(
                format!(
                    "pause: cgroup of {}",
                    if controllers.is_empty() { "version 2" } else { controllers }
                ),
                path,
            );
        }
    }
    let of_cpu = cgroups
        .lines()
        .find(|line| line.split(':').nth(1).is_some_and(|c| c.split(',').any(|c| c == "cpu")));
    if let Some(path) = of_cpu.and_then(|line| line.splitn(3, ':').nth(2)) {
        let shares = cgroup::hierarchies()?
            .into_iter()
            .map(|h| h.join(path.trim_start_matches('/')).join("cpu.shares"));
        let shares = shares.filter_map(|file| fs::read_to_string(file).ok()).next();
        facts.add("pause: cpu.shares of its cgroup", shares.unwrap_or_default().trim());
    }
    if cgroup::unified()?
        && let [hierarchy] = &cgroup::hierarchies()?[..]
    {
        let path = cgroups.trim_start_matches("0::/");
        let weight =
            fs::read_to_string(hierarchy.join(path).join("cpu.weight")).unwrap_or_default();
        facts.add("pause: cpu.weight of its cgroup", weight.trim());
    }
    Ok(())
}

/// A container of the pod.
pub(crate) async fn container(container: &Container, pause: u32, facts: &mut Facts) -> Result<()> {
    const SCRIPT: &str = r"
        echo hostname=$(hostname)
        echo /etc/hostname=$(cat /etc/hostname)
        echo /etc/hosts=$(md5sum < /etc/hosts)
        echo /etc/resolv.conf=$(cat /etc/resolv.conf | tr '\n' '|')
        for f in /etc/hostname /etc/hosts /etc/resolv.conf /dev/shm; do
            echo mode of $f=$(stat -c '%a %u:%g' $f)
        done
        echo /dev/shm=$(grep ' /dev/shm ' /proc/mounts | cut -d ' ' -f 1,3,4)
        echo uid_map=$(cat /proc/self/uid_map)
        echo open files=$(ulimit -n)
        echo ip_unprivileged_port_start=$(cat /proc/sys/net/ipv4/ip_unprivileged_port_start)
        echo ping_group_range=$(cat /proc/sys/net/ipv4/ping_group_range)
        for kind in cgroup ipc mnt net pid time user uts; do
            echo ns:$kind=$(readlink /proc/self/ns/$kind)
        done
    ";
    for line in container.sh(SCRIPT).await?.lines() {
        let Some((field, value)) = line.split_once('=') else { continue };
        let Some(kind) = field.strip_prefix("ns:") else {
            facts.add(format!("container: {field}"), value);
            continue;
        };
        if !has_namespace(kind) {
            continue;
        }
        let link = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{kind}"));
        let (of_pause, of_node) = (link(&pause.to_string())?, link("self")?);
        let whose = match Path::new(value) {
            found if found == of_node => "the node's",
            found if found == of_pause => "the pause's",
            _ => "its own",
        };
        facts.add(format!("container: {kind} namespace"), whose);
    }
    container::first_process(container, pause, facts).await
}

/// CRI's report of the pod: status, verbose info, statistics, and the OCI spec of its sandbox.
pub(crate) async fn reported(pod: &Pod, facts: &mut Facts) -> Result<()> {
    let cri = pod.node().cri();
    let answer = cri.pod_sandbox_status(pod.id(), true).await?;
    let mut status = json(answer.status.as_ref().unwrap_or_default());
    // The one is another in every pod, the other is what the two differ in.
    for given in ["created_at", "runtime_handler"] {
        let found = status.as_object_mut().and_then(|object| object.remove(given));
        facts.add(
            format!("status.{given}"),
            if found.is_some() { "reported" } else { "not reported" },
        );
    }
    facts.add_json("status", &status);
    let mut keys: Vec<&str> = answer.info.keys().map(String::as_str).collect();
    keys.sort_unstable();
    facts.add("verbose status: keys", keys.join(" "));

    let mut info: Value =
        serde_json::from_str(answer.info.get("info").context("the verbose status has no info")?)?;
    let object = info.as_object_mut().context("the info is not an object")?;
    let mut take = |key: &str| object.remove(key).unwrap_or(Value::Null);
    let (spec, config, pid) = (take("runtimeSpec"), take("config"), take("pid"));
    let (cni, metadata) = (take("cniResult"), take("sandboxMetadata"));
    if let Some(netns) = metadata.pointer("/Metadata/NetNSPath").and_then(Value::as_str) {
        facts.call(netns, "<netns>");
    }
    facts.add(
        "info.pid",
        if pid.as_u64() == Some(pod.pause_pid().await?.into()) {
            "of the pause"
        } else {
            "another"
        },
    );
    facts.add_json("info", &info);
    facts.add_json("info.config", &config);
    facts.add_types("info.sandboxMetadata", &without_devices(metadata));
    facts.add_types("info.cniResult", &without_devices(cni));
    facts.add_json("spec", &spec);

    let stats = match cri.pod_sandbox_stats(pod.id()).await {
        Ok(stats) => json(&stats),
        Err(e) => Value::String(format!("refused with code {}", e.code as i32)),
    };
    match stats {
        Value::String(refused) => facts.add("stats", refused),
        mut stats => {
            // CRI's own, from two samples: it is there once containerd has taken the second.
            if let Some(cpu) = stats.pointer_mut("/linux/cpu").and_then(Value::as_object_mut) {
                cpu.remove("usage_nano_cores");
            }
            facts.add_types("stats", &stats);
        }
    }
    let listed = cri.list_pod_sandbox_stats(pod.id()).await.map_or_else(
        |e| format!("refused with code {}", e.code as i32),
        |all| {
            all.iter()
                .map(|stats| {
                    json(stats)["attributes"]["id"].as_str().unwrap_or_default().to_owned()
                })
                .collect()
        },
    );
    facts.add("list of stats", listed);
    for label in ["\"io.cri-containerd.kind\"==sandbox".to_owned(), "\"app\"==web".to_owned()] {
        let found = in_store(pod, &format!("labels.{label}"))?;
        facts.add(format!("found in containerd's store by {label}"), found);
    }
    Ok(())
}

/// Whether containerd's store of sandboxes has the pod, given a filter.
fn in_store(pod: &Pod, filter: &str) -> Result<bool> {
    let mut ctr = Command::new(pod.node().parts().program("ctr"));
    ctr.arg("--address").arg(pod.node().layout().containerd_socket());
    let output =
        ctr.args(["--namespace", "k8s.io", "sandboxes", "list", "--filters", filter]).output()?;
    anyhow::ensure!(output.status.success(), "ctr: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).contains(pod.id()))
}

/// The verbose status of a pod that was given other resources. Only CRI of containerd
/// 2.3 and later tells its controller, so only this sandboxer is asked, in CRI's place.
pub(crate) async fn resized(pod: &Pod, facts: &mut Facts) -> Result<()> {
    const RESOURCES: &str =
        r#"{"Version":"v1","Resources":{"cpu_shares":512},"Overhead":{"cpu_shares":2}}"#;
    if pod.handler() == Handler::Builtin {
        return Ok(());
    }
    let mut sandbox = controller::Sandbox { sandbox_id: pod.id().to_owned(), ..Default::default() };
    let before = pod.info().await?["sandboxMetadata"].clone();
    let metadata = before.to_string();
    for (name, value) in [("metadata", metadata.as_str()), ("updated-resources", RESOURCES)] {
        sandbox.extensions.insert(name.to_owned(), any("", value.as_bytes().to_vec()));
    }
    pod.node().sandboxer().update(pod.id(), sandbox, &["extensions"]).await.context("Update")?;
    let info = pod.info().await?;
    for key in ["resources", "overhead"] {
        facts.add_json(&format!("after Update: info.{key}"), &info[key]);
    }
    let kept = info["sandboxMetadata"] == before;
    facts.add("after Update: info.sandboxMetadata", if kept { "as before" } else { "another" });
    Ok(())
}

/// The host's end of a pod's link has a name of its own in every pod.
fn without_devices(value: Value) -> Value {
    match value {
        Value::Object(object) => {
            let name =
                |key: String| if key.starts_with("veth") { "<veth>".to_owned() } else { key };
            object.into_iter().map(|(key, value)| (name(key), without_devices(value))).collect()
        }
        Value::Array(array) => array.into_iter().map(without_devices).collect(),
        other => other,
    }
}
