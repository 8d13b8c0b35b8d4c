//! Pods with a network of their own.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::machine::processes;
use kit::{ContainerSpec, Pod, PodSpec, until};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use crate::harness::{Bench, Case, cases};

/// Where the server in a pod listens.
const PORT: u16 = 8080;

pub(crate) fn cases() -> Vec<Case> {
    cases![both: pod_network, port_forward]
}

async fn pod_network(bench: Bench) -> Result<()> {
    let pod = bench.run(PodSpec::new("bridged")).await?;
    let ip = pod.ip().await?;
    let node = processes::namespace("self", "net")?;
    let pause = processes::namespace(&pod.pause_pid().await?.to_string(), "net")?;
    ensure!(pause != node, "the pause is in the node's network");
    let container = serving(&pod).await?;
    let inside = container.sh("readlink /proc/self/ns/net").await?;
    ensure!(inside.trim() == pause, "the container is in {inside}, the pause in {pause}");
    let addresses = container.sh("ip -4 -o addr show dev eth0").await?;
    ensure!(
        addresses.contains(&format!("inet {ip}/")),
        "status says {ip}, the pod has {addresses}"
    );
    ensure!(
        container.sh("ip -4 -o addr show dev lo").await?.contains("127.0.0.1/8"),
        "lo has no address"
    );
    ensure!(ask(&ip, "from the node").await? == "bridged: from the node", "another answer");

    let other = bench.run(PodSpec::new("other")).await?;
    let client = other.run(ContainerSpec::sleeping("main")).await?;
    let answer = client.sh(&format!("echo from a pod | nc -w 5 {ip} {PORT} | head -n 1")).await?;
    ensure!(answer == "bridged: from a pod\n", "the other pod was answered {answer:?}");
    ensure!(other.ip().await? != ip, "two pods have the address {ip}");
    other.remove().await?;
    pod.remove().await
}

/// Promise: cri_works.
async fn port_forward(bench: Bench) -> Result<()> {
    let pod = bench.run(PodSpec::new("forward")).await?;
    serving(&pod).await?;
    for line in ["one", "two"] {
        let answer = pod.forward(PORT, line).await?;
        ensure!(answer == format!("forward: {line}"), "answered {answer:?}");
    }
    match pod.forward(PORT + 1, "refused").await {
        Err(e) if format!("{e:#}").contains("refused") => {}
        other => anyhow::bail!("forward to a port without a listener: {other:?}"),
    }
    pod.remove().await
}

/// A container that serves at [`PORT`] under the pod's name.
async fn serving(pod: &Pod) -> Result<kit::Container> {
    let name = pod.config().metadata.name.clone();
    let container = pod
        .run(ContainerSpec::new("server", &["probe", "serve", &PORT.to_string(), &name]))
        .await?;
    until("the server listens", Duration::from_secs(5), async || {
        let log = container.log()?;
        ensure!(log.iter().any(|(_, line)| line == "listening"), "its log: {log:?}");
        Ok(())
    })
    .await?;
    Ok(container)
}

async fn ask(ip: &str, line: &str) -> Result<String> {
    let mut stream =
        TcpStream::connect((ip, PORT)).await.with_context(|| format!("connect {ip}"))?;
    stream.write_all(format!("{line}\n").as_bytes()).await?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).await?;
    Ok(answer.trim_end().to_owned())
}
