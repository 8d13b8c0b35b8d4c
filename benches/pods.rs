//! Pods as CRI runs them: with the node's network, with a bridge, and with a container from its
//! creation to its removal.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kit::{ContainerSpec, Handler, Pod, PodSpec};

use crate::Plan;
use crate::report::Report;
use crate::samples::{Samples, order};
use crate::setup::{BUILTIN, BUILTIN_WITH, FLOOR, OURS, Setup, Target};

/// Runs a pod, and says how long CRI took.
pub(crate) async fn run(setup: &Setup, target: &Target, spec: PodSpec) -> Result<(Pod, Duration)> {
    let home = setup.node.prepare(spec)?;
    let begun = Instant::now();
    let id = setup.node.cri().run_pod_sandbox(home.config(), &target.handler()).await;
    let took = begun.elapsed();
    let id = id.with_context(|| format!("{}: RunPodSandbox", target.name))?;
    Ok((Pod::new(&setup.node, Handler::Ours, home, id), took))
}

pub(crate) async fn measure(setup: &mut Setup, plan: &Plan, report: &mut Report) -> Result<()> {
    for (network, rounds) in [("hostnet", plan.calls / 2), ("cni", plan.calls / 2)] {
        let spec = |name: &str| match network {
            "hostnet" => PodSpec::new(name).host_network(),
            _ => PodSpec::new(name),
        };
        let mut runs = vec![Samples::default(); setup.targets.len()];
        let mut stops = runs.clone();
        for round in 0..=rounds {
            for index in order(round, setup.targets.len()) {
                let (pod, ran) = run(setup, &setup.targets[index], spec("bench")).await?;
                let begun = Instant::now();
                pod.stop().await?;
                let stopped = begun.elapsed();
                pod.remove().await?;
                if round > 0 {
                    runs[index].push(ran);
                    stops[index].push(stopped);
                }
            }
        }
        for (index, target) in setup.targets.iter().enumerate() {
            report.median(format!("run_{network}_{}_ms", target.name), runs[index].median_ms());
            report.median(format!("stop_{network}_{}_ms", target.name), stops[index].median_ms());
        }
    }
    report.ratio(
        "run_hostnet_builtin_over_ours",
        &format!("run_hostnet_{BUILTIN}_ms"),
        &format!("run_hostnet_{OURS}_ms"),
    );
    report.ratio(
        "run_cni_ours_over_floor",
        &format!("run_cni_{OURS}_ms"),
        &format!("run_cni_{FLOOR}_ms"),
    );
    Ok(())
}

/// The calls of a pod's life with one container.
const CALLS: [&str; 7] = [
    "run_pod",
    "create_container",
    "start_container",
    "stop_container",
    "remove_container",
    "stop_pod",
    "remove_pod",
];

/// How long its container lives. The daemon records a new sandbox in containerd after its first
/// calls: the work has ended before the container stops, as with nearly all containers.
const LIVES: Duration = Duration::from_millis(200);

/// How long calls took, one after the other.
struct Laps {
    took: Vec<Duration>,
    begun: Instant,
}

impl Laps {
    fn begin(&mut self) {
        self.begun = Instant::now();
    }

    fn end(&mut self) {
        self.took.push(self.begun.elapsed());
        self.begin();
    }
}

pub(crate) async fn cycles(setup: &mut Setup, plan: &Plan, report: &mut Report) -> Result<()> {
    let with_containers = setup.targets.iter().filter(|target| target.runs_containers).cloned();
    let targets: Vec<Target> = with_containers.chain(BUILTIN_WITH).collect();
    let mut cycles = vec![Samples::default(); targets.len()];
    let mut calls = vec![vec![Samples::default(); CALLS.len()]; targets.len()];
    for round in 0..=plan.pods {
        for index in order(round, targets.len()) {
            let (pod, ran) = run(setup, &targets[index], PodSpec::new("bench")).await?;
            let cri = setup.node.cri();
            let mut laps = Laps { took: vec![ran], begun: Instant::now() };
            let container = pod.create(ContainerSpec::sleeping("main")).await?;
            laps.end();
            cri.start_container(container.id()).await?;
            laps.end();
            tokio::time::sleep(LIVES).await;
            laps.begin();
            cri.stop_container(container.id(), Duration::ZERO).await?;
            laps.end();
            cri.remove_container(container.id()).await?;
            laps.end();
            pod.stop().await?;
            laps.end();
            cri.remove_pod_sandbox(pod.id()).await?;
            laps.end();
            pod.clear().await?;
            if round > 0 {
                cycles[index].push(laps.took.iter().sum());
                calls[index].iter_mut().zip(laps.took).for_each(|(samples, lap)| samples.push(lap));
            }
        }
    }
    for (index, target) in targets.iter().enumerate() {
        report.median(format!("cycle_{}_ms", target.name), cycles[index].median_ms());
        for (call, samples) in CALLS.iter().zip(&calls[index]) {
            report.median(format!("cycle_{call}_{}_ms", target.name), samples.median_ms());
        }
    }
    let key_of = |what: &str, who: &str| format!("cycle_{what}_{who}_ms");
    report.ratio(
        "cycle_builtin_over_ours",
        &format!("cycle_{BUILTIN}_ms"),
        &format!("cycle_{OURS}_ms"),
    );
    for (key, call) in [
        ("create_container_ours_over_builtin", CALLS[1]),
        ("start_container_ours_over_builtin", CALLS[2]),
        ("stop_container_ours_over_builtin", CALLS[3]),
        ("remove_container_ours_over_builtin", CALLS[4]),
        ("remove_pod_ours_over_builtin", CALLS[6]),
    ] {
        report.ratio(key, &key_of(call, OURS), &key_of(call, BUILTIN));
    }
    second(setup, &targets, plan, report).await
}

/// StartContainer of a pod's second container, whose shim has had one: what of the first one's time
/// is the shim's own beginning.
async fn second(
    setup: &mut Setup,
    targets: &[Target],
    plan: &Plan,
    report: &mut Report,
) -> Result<()> {
    let mut starts = vec![Samples::default(); targets.len()];
    for round in 0..=plan.pods / 2 {
        for index in order(round, targets.len()) {
            let (pod, _) = run(setup, &targets[index], PodSpec::new("bench")).await?;
            let cri = setup.node.cri();
            let first = pod.create(ContainerSpec::sleeping("first")).await?;
            cri.start_container(first.id()).await?;
            let second = pod.create(ContainerSpec::sleeping("second")).await?;
            let begun = Instant::now();
            cri.start_container(second.id()).await?;
            if round > 0 {
                starts[index].push(begun.elapsed());
            }
            pod.stop().await?;
            pod.remove().await?;
        }
    }
    for (target, starts) in targets.iter().zip(&starts) {
        report.median(format!("start_second_container_{}_ms", target.name), starts.median_ms());
    }
    Ok(())
}
