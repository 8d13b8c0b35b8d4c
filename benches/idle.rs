//! The cost of an idle pod: processor time from its run to its removal, and memory while it does
//! nothing.

use std::time::Duration;

use anyhow::Result;
use kit::PodSpec;
use kit::machine::processes::pss;

use crate::Plan;
use crate::account::of_pods;
use crate::pods;
use crate::report::Report;
use crate::samples::{median, order};
use crate::setup::{BUILTIN, OURS, Setup};

/// Until shims and Go runtimes have come to rest.
const SETTLES: Duration = Duration::from_millis(500);

#[derive(Clone, Debug, Default)]
struct Cost {
    /// Milliseconds of processor time per pod, of containerd and the built-in's shims, of the
    /// sandboxer, and of all.
    containerd: Vec<f64>,
    sandboxer: Vec<f64>,
    all: Vec<f64>,
    /// Kilobytes per pod, of its own processes and of containerd's growth.
    processes: Vec<f64>,
    growth: Vec<f64>,
}

pub(crate) async fn measure(setup: &mut Setup, plan: &Plan, report: &mut Report) -> Result<()> {
    let count = if plan.calls > 60 { 40 } else { 15 };
    let mut costs = vec![Cost::default(); setup.targets.len()];
    for round in 0..4 {
        for index in order(round, setup.targets.len()) {
            let cost = batch(setup, index, count).await?;
            // The first warms up.
            if round > 0 {
                add(&mut costs[index], cost);
            }
        }
    }
    for (target, cost) in setup.targets.iter().zip(costs) {
        let name = target.name;
        report.median(format!("cpu_per_pod_{name}_ms"), median(cost.all));
        report.median(format!("cpu_per_pod_{name}_in_containerd_ms"), median(cost.containerd));
        if name != BUILTIN {
            report.median(format!("cpu_per_pod_{name}_in_sandboxer_ms"), median(cost.sandboxer));
        }
        report.median(format!("idle_pod_processes_{name}_kb"), median(cost.processes));
        report.median(format!("idle_pod_{count}_in_containerd_{name}_kb"), median(cost.growth));
    }
    report.ratio(
        "cpu_builtin_over_ours",
        &format!("cpu_per_pod_{BUILTIN}_ms"),
        &format!("cpu_per_pod_{OURS}_ms"),
    );
    Ok(())
}

fn add(to: &mut Cost, one: Cost) {
    for (to, one) in [
        (&mut to.containerd, one.containerd),
        (&mut to.sandboxer, one.sandboxer),
        (&mut to.all, one.all),
        (&mut to.processes, one.processes),
        (&mut to.growth, one.growth),
    ] {
        to.extend(one);
    }
}

async fn batch(setup: &Setup, index: usize, count: usize) -> Result<Cost> {
    let target = &setup.targets[index];
    let containerd = setup.node.containerd_pid()?;
    let used = |who: &str| setup.accounts[who].used();
    let before = (used(BUILTIN)?, used(target.name)?, used("pods")?, pss(containerd)?);
    let mut pods = Vec::new();
    for number in 0..count {
        pods.push(
            pods::run(setup, target, PodSpec::new(&format!("idle-{number}")).host_network())
                .await?
                .0,
        );
    }
    tokio::time::sleep(SETTLES).await;
    let processes: f64 =
        of_pods(&setup.node)?.into_iter().map(|pid| pss(pid).unwrap_or_default()).sum();
    let growth = pss(containerd)? - before.3;
    for pod in pods {
        pod.remove().await?;
    }
    let each = |after: Duration, before: Duration| {
        vec![(after - before).as_secs_f64() * 1e3 / count as f64]
    };
    let (builtin, own) = (each(used(BUILTIN)?, before.0), each(used(target.name)?, before.1));
    // Those of the daemons are below that of all, and the others had nothing to do.
    let all = each(used("pods")?, before.2);
    Ok(Cost {
        containerd: builtin,
        sandboxer: own,
        all,
        processes: vec![processes / count as f64],
        growth: vec![growth / count as f64],
    })
}
