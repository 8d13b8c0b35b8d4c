//! Runs every pod by both and hands what was observed to the table.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use kit::cri::api;
use kit::machine::cgroup;
use kit::nri::Plugin;
use kit::proto::nri::Event;
use kit::{Container, ContainerSpec, Handler, Node, Options, Pod, PodSpec, Thing, grpc};

use crate::cases::{self, Case, Settings};
use crate::fact::Facts;
use crate::table::Table;
use crate::{Wanted, coverage, metrics, nri, observe};

/// Time limit of one pod.
const LIMIT: Duration = Duration::from_secs(60);
/// How long is waited for cgroups that do not go, as both leave parents of some.
const LEFT: Duration = Duration::from_secs(2);
/// How long is waited for anything else: a busy machine takes its time.
const OTHERS_LEFT: Duration = Duration::from_secs(10);
/// containerd's table of CRI's runtime service.
const RUNTIME_TABLE: &str = "[plugins.\"io.containerd.cri.v1.runtime\"]\n";

/// Runs the plain pod and the cases that are wanted. True: nothing differs without a reason.
///
/// # Errors
/// There is no node to run them on.
pub(crate) async fn all(wanted: &Wanted) -> Result<bool> {
    let sandboxer = Some(PathBuf::from(env!("CARGO_BIN_EXE_pause-sandboxer")));
    let node = Node::start(Options { sandboxer, ..Options::default() }).await?;
    with_new_runc(&node).await.context("give the node a newer runc")?;
    node.start_sandboxer_as(with_other_attributes(&node)?).await?;
    let cases = cases::all(&node.layout().cgroup());
    wanted.check(&cases)?;
    let mut table = Table::new()?;
    observe::skip_what_the_kernel_lacks();
    let mut settings = Settings::Usual;
    let mut left_out = 0;
    warm_up(&node).await?;
    for (index, case) in cases.iter().enumerate() {
        if index > 0 && !wanted.has(&case.name) {
            left_out += 1;
            continue;
        }
        if case.settings != settings {
            change(&node).await.context("change the settings")?;
            settings = case.settings;
        }
        match both(&node, case).await {
            Ok((builtin, ours)) => table.compare(&case.name, &builtin, &ours),
            Err(e) => table.fail(&case.name, &e.context(node.log_tails(20))),
        }
    }
    // The built-in's pods without a cgroup parent have made it. Another node's may be in it.
    drop(cgroup::remove(cgroup::WITHOUT_PARENT));
    let missing = coverage::missing(cases.iter().map(|case| case.pod.config()));
    for field in &missing {
        println!("no case gives the field {field}");
    }
    if left_out > 0 {
        println!("\n{left_out} cases were not asked for");
    }
    Ok(table.end(left_out == 0) && missing.is_empty())
}

/// Makes the objects that all pods share, such as the bridge.
async fn warm_up(node: &Arc<Node>) -> Result<()> {
    for handler in Handler::ALL {
        let pod = node.run(handler, PodSpec::new("warm-up")).await?;
        pod.run(ContainerSpec::sleeping("main")).await?;
        pod.remove().await?;
    }
    Ok(())
}

/// The machine's own runc may know no idmapped mounts, which a container in a user namespace needs.
/// The newer one is where only containerd's own `PATH` has it.
async fn with_new_runc(node: &Arc<Node>) -> Result<()> {
    const NAME: &str = "runc-of-containerd";
    node.stop_containerd().await?;
    symlink(node.parts().runc().canonicalize()?, node.layout().programs().join(NAME))?;
    let path = node.layout().containerd_config();
    let text = fs::read_to_string(&path)?;
    let root = format!("Root = \"{}/runc\"\n", node.layout().top.display());
    let runc = format!("{root}BinaryName = \"{NAME}\"\n");
    fs::write(&path, text.replace(&root, &runc))?;
    node.start_containerd().await
}

/// Gives containerd and the sandboxer the other settings.
async fn change(node: &Arc<Node>) -> Result<()> {
    node.stop_containerd().await?;
    node.stop_sandboxer().await?;
    let layout = node.layout();
    let base = layout.top.join("base.json");
    fs::write(&base, base_spec(node)?.to_string())?;
    let (of_runtime, of_handler) = cases::CONTAINERD;
    let of_handler = format!("{of_handler}base_runtime_spec = \"{}\"\n", base.display());
    let mut text = fs::read_to_string(layout.containerd_config())?;
    text = text.replace(RUNTIME_TABLE, &format!("{RUNTIME_TABLE}{of_runtime}"));
    for handler in Handler::ALL {
        let sandboxer = format!("sandboxer = \"{}\"\n", handler.sandboxer());
        text = text.replace(&sandboxer, &format!("{sandboxer}{of_handler}"));
    }
    fs::write(layout.containerd_config(), text)?;
    let ours = fs::read_to_string(layout.sandboxer_config())?;
    fs::write(layout.sandboxer_config(), ours + cases::SANDBOXER)?;
    node.start_containerd().await?;
    node.start_sandboxer_as(with_other_attributes(node)?).await
}

/// The sandboxer with another umask and other limits than containerd: soft ones, because a machine
/// of tests may not permit to raise hard ones.
fn with_other_attributes(node: &Node) -> Result<Command> {
    const OTHER: &str = r#"umask 077; exec prlimit --as=60000000000: --core=0: --cpu=90000: \
        --data=60000000000: --fsize=70000000000: --locks=900: --memlock=65536: \
        --msgqueue=1000: --nofile=512: --nproc=9000: --rss=60000000000: --rttime=900000000: \
        --sigpending=900: --stack=4194304: "$0" "$@""#;
    let sandboxer = node.sandboxer_command()?;
    let mut command = Command::new("sh");
    command.args(["-c", OTHER]).arg(sandboxer.get_program()).args(sandboxer.get_args());
    for (name, value) in sandboxer.get_envs() {
        command.env(name, value.unwrap_or_default());
    }
    Ok(command)
}

/// The spec that containerd begins with, with another limit.
fn base_spec(node: &Node) -> Result<serde_json::Value> {
    let printed = Command::new(node.parts().program("ctr"))
        .args(["oci", "spec"])
        .output()
        .context("run ctr oci spec")?;
    let mut spec: serde_json::Value =
        serde_json::from_slice(&printed.stdout).context("decode the spec")?;
    spec["process"]["rlimits"] = serde_json::json!([
        { "type": "RLIMIT_NOFILE", "hard": cases::BASE_LIMIT, "soft": cases::BASE_LIMIT },
    ]);
    Ok(spec)
}

async fn both(node: &Arc<Node>, case: &Case) -> Result<(Facts, Facts)> {
    let mut observed = Vec::new();
    for handler in Handler::ALL {
        let facts = tokio::time::timeout(kit::patient(LIMIT), one(node, handler, case)).await;
        let facts =
            facts.with_context(|| format!("not done after {LIMIT:?}")).and_then(|facts| facts);
        let swept = sweep(node).await;
        observed.push(facts.with_context(|| format!("by {handler:?}"))?);
        swept?;
    }
    let [builtin, ours] = <[Facts; 2]>::try_from(observed).ok().context("two were run")?;
    Ok((builtin, ours))
}

/// Runs the pod, looks at it, stops and removes it, and looks at what is left.
async fn one(node: &Arc<Node>, handler: Handler, case: &Case) -> Result<Facts> {
    let mut facts = Facts::default();
    let before = node.snapshot()?;
    let of_node: BTreeMap<&String, String> =
        case.sysctls.iter().map(|name| (name, sysctl(name))).collect();
    let events = node.events().await?;
    let plugin = nri::attach(node).await?;

    match node.run(handler, case.pod.clone()).await {
        Err(e) => {
            let status = e.downcast_ref::<grpc::Status>().context("not an answer of CRI's")?;
            facts.add("RunPodSandbox", "refused");
            facts.add("RunPodSandbox: code", code(status.code));
        }
        Ok(pod) => {
            facts.add("RunPodSandbox", "runs");
            living(&pod, case, plugin.as_ref(), &mut facts).await?;
            for name in &case.sysctls {
                let kept =
                    if of_node.get(name) == Some(&sysctl(name)) { "unchanged" } else { "CHANGED" };
                facts.add(format!("on the node: {name}"), kept);
            }
            stopped(&pod, &mut facts).await?;
            use api::ContainerEventType::{CONTAINER_DELETED_EVENT, CONTAINER_STOPPED_EVENT};
            // containerd publishes it on its own, at some time after the stop.
            events.until(pod.id(), CONTAINER_STOPPED_EVENT, LIMIT).await?;
            node.cri().remove_pod_sandbox(pod.id()).await.context("RemovePodSandbox")?;
            events.until(pod.id(), CONTAINER_DELETED_EVENT, LIMIT).await?;
            let published: Vec<String> =
                events.of(pod.id())?.iter().map(|kind| format!("{kind:?}")).collect();
            facts.add("events", published.join(" "));
            pod.clear().await.context("after the removal")?;
            let levels = cgroup::below(cgroup::WITHOUT_PARENT)?;
            facts.add(
                "left behind in k8s.io",
                levels.iter().filter(|path| path.ends_with(pod.id())).count(),
            );
        }
    }
    for name in &case.sysctls {
        let kept = if of_node.get(name) == Some(&sysctl(name)) { "unchanged" } else { "CHANGED" };
        facts.add(format!("on the node, afterwards: {name}"), kept);
    }
    left(node, &before, &mut facts).await?;
    Ok(facts)
}

async fn living(pod: &Pod, case: &Case, plugin: Option<&Plugin>, facts: &mut Facts) -> Result<()> {
    let pid = observe::name(pod, facts).await?;
    observe::pause(pid, facts).await?;
    match pod.run(case.container.clone()).await {
        Err(e) => {
            facts.add("container", refusal(&e)?);
            let filter =
                api::ContainerFilter { pod_sandbox_id: pod.id().to_owned(), ..Default::default() };
            for container in pod.node().cri().list_containers(filter).await? {
                pod.node().cri().remove_container(&container.id).await?;
            }
        }
        Ok(container) => {
            facts.add("container", "runs");
            observe::container(&container, pid, facts).await?;
            for name in &case.sysctls {
                let path = format!("/proc/sys/{}", name.replace('.', "/"));
                let value = container.sh(&format!("cat {path}")).await?;
                facts.add(
                    format!("in the pod: {name}"),
                    value.split_whitespace().collect::<Vec<_>>().join(" "),
                );
            }
            end(&container).await?;
        }
    }
    observe::reported(pod, facts).await?;
    if let Some(plugin) = plugin {
        let created = facts.get("container") == Some("runs");
        let events =
            &[Event::RUN_POD_SANDBOX, Event::CREATE_CONTAINER][..if created { 2 } else { 1 }];
        nri::observe(plugin, events, pod, pid, facts).await?;
    }
    metrics::observe(pod, facts).await?;
    observe::resized(pod, facts).await
}

/// Some facts are of the pod alone: its container goes before they are looked at.
async fn end(container: &Container) -> Result<()> {
    container.stop().await?;
    container.remove().await
}

async fn stopped(pod: &Pod, facts: &mut Facts) -> Result<()> {
    pod.stop().await?;
    pod.stop().await.context("again")?;
    facts.add("stopped: ready", pod.is_ready().await?);
    facts.add("stopped: address", pod.ip().await?);
    let info = pod.info().await?;
    for key in ["pid", "processStatus", "netNamespaceClosed"] {
        facts.add(format!("stopped: info.{key}"), &info[key]);
    }
    Ok(())
}

async fn left(node: &Arc<Node>, before: &kit::Snapshot, facts: &mut Facts) -> Result<()> {
    let mut left = node.left_since(before, LEFT).await?;
    if left.iter().any(|thing| !matches!(thing, Thing::Cgroup(_) | Thing::Unit(_))) {
        left = node.left_since(before, OTHERS_LEFT).await?;
    }
    let mut named = left.iter().map(name).collect::<Result<Vec<_>>>()?;
    named.sort();
    named.dedup();
    facts
        .add("left behind", if named.is_empty() { "nothing".to_owned() } else { named.join(", ") });
    node.remove_left(&left).await?;
    Ok(())
}

/// A cgroup by its path below the hierarchies, anything else by its kind.
fn name(thing: &Thing) -> Result<String> {
    let Thing::Cgroup(path) = thing else { return Ok(thing.kind().to_owned()) };
    let below = cgroup::hierarchies()?.into_iter();
    let below = below.filter_map(|h| Some(path.strip_prefix(h).ok()?.display().to_string())).min();
    Ok(format!("cgroup /{}", below.context("a cgroup outside of all hierarchies")?))
}

/// Removes the pods that a failed case has left.
async fn sweep(node: &Arc<Node>) -> Result<()> {
    for pod in node.cri().list_pod_sandbox(api::PodSandboxFilter::new()).await? {
        node.cri().stop_pod_sandbox(&pod.id).await?;
        node.cri().remove_pod_sandbox(&pod.id).await?;
    }
    Ok(())
}

/// A sysctl of the node's.
fn sysctl(name: &str) -> String {
    let path = Path::new("/proc/sys").join(name.replace('.', "/"));
    fs::read_to_string(path).unwrap_or_else(|e| format!("cannot be read: {:?}", e.kind()))
}

fn refusal(e: &anyhow::Error) -> Result<String> {
    let status = e
        .downcast_ref::<grpc::Status>()
        .with_context(|| format!("not an answer of CRI's: {e:#}"))?;
    Ok(format!("refused with {}", code(status.code)))
}

fn code(code: grpc::Code) -> String {
    match code {
        grpc::INVALID_ARGUMENT | grpc::UNKNOWN => format!("{code:?}"),
        other => (other as i32).to_string(),
    }
}
