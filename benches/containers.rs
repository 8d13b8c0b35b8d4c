//! What a container costs in a bridged pod: CreateContainer, StartContainer and StopContainer with the built-in controller, with a shim of
//! the sandboxer's and with one of containerd's, interleaved in one run. `cargo bench --bench containers [ROUNDS]`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

use std::time::{Duration, Instant};

use anyhow::Result;
use kit::{ContainerSpec, Handler, Node, Options, PodSpec};

const WHO: [(&str, Handler, &str); 3] = [
    ("built-in", Handler::Builtin, ""),
    ("own shim", Handler::Ours, "shim = \"sandboxer\"\n"),
    ("containerd's shim", Handler::Ours, "shim = \"containerd\"\n"),
];
const CALLS: [&str; 6] = ["run pod", "create", "start", "stop", "remove", "remove pod"];

#[tokio::main]
async fn main() -> Result<()> {
    let rounds: usize = std::env::args().filter_map(|word| word.parse().ok()).next().unwrap_or(20);
    let mut nodes = Vec::new();
    for (_, handler, config) in WHO {
        let options = Options {
            sandboxer: Some(env!("CARGO_BIN_EXE_pause-sandboxer").into()),
            sandboxer_config: config.to_owned(),
            ..Options::default()
        };
        let node = Node::start(options).await?;
        if handler == Handler::Ours {
            node.start_sandboxer().await?;
        }
        nodes.push(node);
    }
    let mut times = vec![vec![Vec::new(); CALLS.len()]; WHO.len()];
    for round in 0..=rounds {
        for (index, (_, handler, _)) in WHO.iter().enumerate() {
            let node = &nodes[index];
            let mut took = [Duration::ZERO; CALLS.len()];
            let mut now = Instant::now();
            let mut lap = |call: usize| {
                took[call] = now.elapsed();
                now = Instant::now();
            };
            let pod = node.run(*handler, PodSpec::new("bench")).await?;
            lap(0);
            let container = pod.create(ContainerSpec::sleeping("a")).await?;
            lap(1);
            node.cri().start_container(container.id()).await?;
            lap(2);
            node.cri().stop_container(container.id(), Duration::ZERO).await?;
            lap(3);
            node.cri().remove_container(container.id()).await?;
            lap(4);
            pod.remove().await?;
            lap(5);
            // The first round warms up.
            for (call, time) in took.iter().enumerate().filter(|_| round > 0) {
                times[index][call].push(*time);
            }
        }
    }
    print!("{:18}", format!("ms, of {rounds}"));
    CALLS.iter().for_each(|call| print!("{call:>12}"));
    println!("{:>12}", "all");
    for ((who, ..), calls) in WHO.iter().zip(&mut times) {
        let mut all = Duration::ZERO;
        print!("{who:18}");
        for call in calls {
            call.sort();
            all += call[call.len() / 2];
            print!("{:12.1}", call[call.len() / 2].as_secs_f64() * 1e3);
        }
        println!("{:12.1}", all.as_secs_f64() * 1e3);
    }
    Ok(())
}
