//! The controller asked without CRI between, also with requests that containerd would never send.

use anyhow::{Context, Result, bail, ensure};
use kit::controller::{CONFIG_TYPE, Controller, any, api};
use kit::{Handler, PodSpec, grpc};
use protobuf::Message;

use crate::harness::{Bench, Case, cases};

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = cases![both: large_annotation];
    cases.extend(cases![
        ours, "it has no socket of its own for callers": malformed_requests_name_the_field,
        unknown_ids, repeated_calls, another_namespace_of_containerd
    ]);
    cases
}

/// Larger than gRPC's usual messages: containerd sends the pod's config twice in a Create.
async fn large_annotation(bench: Bench) -> Result<()> {
    const NAME: &str = "example.org/large";
    let value = "x".repeat(7 << 20);
    let spec = PodSpec::new("large").host_network().with(|config| {
        config.annotations.insert(NAME.to_owned(), value.clone());
    });
    let pod = bench.run(spec).await?;
    let status = bench.node.cri().pod_sandbox_status(pod.id(), false).await?;
    let kept = status.status.annotations.get(NAME).is_some_and(|kept| *kept == value);
    ensure!(kept, "the annotation is not what it was");
    if bench.handler == Handler::Ours {
        let status = bench.node.sandboxer().status(pod.id(), true).await?;
        ensure!(
            status.info.values().any(|info| info.contains(&value)),
            "the verbose status has it not"
        );
    }
    pod.stop().await?;
    pod.remove().await
}

/// A sandbox id as containerd makes them up.
const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

/// Promise: invalid_request_names_the_field.
async fn malformed_requests_name_the_field(bench: Bench) -> Result<()> {
    let controller = bench.node.sandboxer();
    let before = bench.node.snapshot()?;
    let home = bench.node.prepare(PodSpec::new("bad").host_network())?;
    let config = home.config().write_to_bytes()?;
    let good = |id: &str| {
        let mut request = controller.create_request(id);
        request.options = Some(any(CONFIG_TYPE, config.clone())).into();
        request
    };

    let long = "x".repeat(4096);
    for id in ["", ".", "..", "a/b", "../../etc", "/etc", "a\0b", "a b", "ä", long.as_str()] {
        let shown: String = id.chars().take(20).collect();
        refused(
            &format!("Create of id {shown:?}"),
            controller.create_raw(&good(id)).await,
            "sandbox_id",
        )?;
    }

    let mut request = good(ID);
    request.options.clear();
    refused("Create without a config", controller.create_raw(&request).await, "options")?;
    request.options = Some(any("runtime.v1.ContainerConfig", config.clone())).into();
    refused("Create with another type", controller.create_raw(&request).await, "options")?;
    request.options = Some(any(CONFIG_TYPE, vec![0x0a, 0xff])).into();
    refused("Create with a malformed config", controller.create_raw(&request).await, "options")?;

    let pods = bench.node.prepare(PodSpec::new("bad"))?;
    let file = bench.node.layout().top.join("no-namespace");
    std::fs::write(&file, "")?;
    let missing = bench.node.layout().top.join("missing");
    for path in [
        file.to_string_lossy(),
        missing.to_string_lossy(),
        "relative".into(),
        "/proc/self/ns/uts".into(),
    ] {
        let answer = controller.create(ID, pods.config(), &path).await;
        refused(&format!("Create with netns path {path}"), answer, "netns_path")?;
    }
    std::fs::remove_file(&file)?;
    pods.clear()?;
    home.clear()?;
    bench.node.settles_to(&before).await
}

/// INVALID_ARGUMENT, with a message that names the field.
fn refused(what: &str, answer: Result<(), grpc::Status>, field: &str) -> Result<()> {
    match answer {
        Err(status) if status.code == grpc::INVALID_ARGUMENT && status.message.contains(field) => {
            Ok(())
        }
        Err(status) => {
            bail!("{what}: {status}, not code {:?} that names {field:?}", grpc::INVALID_ARGUMENT)
        }
        Ok(()) => bail!("{what} was accepted"),
    }
}

async fn unknown_ids(bench: Bench) -> Result<()> {
    let controller = bench.node.sandboxer();
    let answers = [
        ("Start", controller.start(ID).await.map(drop)),
        ("Stop", controller.stop(ID).await),
        ("Wait", controller.wait(ID).await.map(drop)),
        ("Status", controller.status(ID, true).await.map(drop)),
        ("Metrics", controller.metrics(ID).await.map(drop)),
        ("Update", controller.update(ID, api::Sandbox::new(), &["extensions"]).await),
    ];
    for (method, answer) in answers {
        match answer {
            Err(status) if status.code == grpc::NOT_FOUND && status.message.contains(ID) => {}
            other => bail!("{method} of an unknown id: {other:?}"),
        }
    }
    controller.shutdown(ID).await.context("Shutdown of an unknown id")
}

/// Promise: cri_works.
async fn repeated_calls(bench: Bench) -> Result<()> {
    let controller = bench.node.sandboxer();
    let home = bench.node.prepare(PodSpec::new("twice").host_network())?;
    controller.create(ID, home.config(), "").await?;
    match controller.create(ID, home.config(), "").await {
        Err(status) if status.code == grpc::ALREADY_EXISTS => {}
        other => bail!("the same id again: {other:?}"),
    }
    let started = controller.start(ID).await?;
    ensure!(
        started.pid != 0 && kit::machine::processes::exists(started.pid),
        "no process {}",
        started.pid
    );
    ensure!(started.spec.is_some(), "no spec in Start's answer");
    let kind = started.labels.get("io.cri-containerd.kind").map(String::as_str);
    ensure!(kind == Some("sandbox"), "containerd's store does not find it: {:?}", started.labels);
    let status = controller.status(ID, false).await?;
    ensure!(status.state == "SANDBOX_READY" && status.pid == started.pid, "status is {status:?}");
    ensure!(
        status.created_at == started.created_at,
        "Start and Status differ in the time of creation"
    );
    let platform = controller.platform(ID).await?;
    ensure!(platform.os == "linux", "platform is {platform:?}");
    let metrics = controller.metrics(ID).await?;
    ensure!(
        metrics.data.type_url.starts_with("io.containerd.cgroups.v"),
        "metrics are of type {}",
        metrics.data.type_url
    );
    ensure!(controller.start(ID).await.is_err(), "started twice");
    ensure!(
        controller.status(ID, false).await?.pid == started.pid,
        "the second Start has changed the pod"
    );
    for _ in 0..2 {
        controller.stop(ID).await?;
    }
    let status = controller.status(ID, false).await?;
    ensure!(
        status.state == "SANDBOX_NOTREADY" && status.exited_at.is_some(),
        "status is {status:?}"
    );
    for _ in 0..2 {
        controller.shutdown(ID).await?;
    }
    match controller.status(ID, false).await {
        Err(status) if status.code == grpc::NOT_FOUND => {}
        other => bail!("status after Shutdown: {other:?}"),
    }
    home.clear()
}

/// Another client of containerd's, in a namespace of its own, asks for the id of a live pod.
///
/// Promise: other_namespaces_are_refused.
async fn another_namespace_of_containerd(bench: Bench) -> Result<()> {
    let pod = bench.run(PodSpec::new("namespace").host_network()).await?;
    let (layout, id) = (bench.node.layout(), pod.id());
    let through =
        Controller::of_namespace(layout.containerd_socket(), bench.handler.sandboxer(), "moby");
    let direct = Controller::of_namespace(layout.sandboxer_socket(), "", "moby");
    let pid = bench.node.sandboxer().status(id, false).await?.pid;
    for other in [&through, &direct] {
        let home = bench.node.prepare(PodSpec::new("other").host_network())?;
        let answers = [
            ("Create", other.create(ID, home.config(), "").await),
            ("Start", other.start(id).await.map(drop)),
            ("Status", other.status(id, false).await.map(drop)),
            ("Stop", other.stop(id).await),
            ("Shutdown", other.shutdown(id).await),
        ];
        home.clear()?;
        for (method, answer) in answers {
            match answer {
                Err(status)
                    if status.code == grpc::FAILED_PRECONDITION
                        && status.message.contains("k8s.io") => {}
                answer => bail!("{method} in another namespace: {answer:?}"),
            }
        }
    }
    match direct.wait(id).await {
        Err(status) if status.code == grpc::UNAVAILABLE && status.message.contains("k8s.io") => {}
        answer => bail!("Wait in another namespace: {answer:?}"),
    }
    let status = bench.node.sandboxer().status(id, false).await?;
    ensure!(
        status.state == "SANDBOX_READY" && status.pid == pid,
        "the pod has changed: {status:?}"
    );
    pod.remove().await
}
