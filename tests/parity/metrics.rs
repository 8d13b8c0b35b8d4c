//! `Metrics` of the controller, against the files of the kernel and against CRI's own statistics.

use std::fs;

use anyhow::{Context, Result};
use containerd_shim_protos::cgroups::metrics::Metrics;
use kit::Pod;
use kit::machine::cgroup;
use protobuf::Message as _;

use crate::fact::Facts;

/// Asks the controller for the metrics of the pod, whose containers must have ended.
pub(crate) async fn look(pod: &Pod, facts: &mut Facts) -> Result<()> {
    let before = used(pod)?;
    let metric = match pod.node().controller(pod.handler()).metrics(pod.id()).await {
        Err(e) => {
            facts.add("Metrics", format!("refused with code {}", e.code));
            return Ok(());
        }
        Ok(metric) => metric,
    };
    let after = used(pod)?;
    facts.add("Metrics", "told");
    facts.add("Metrics: type", &metric.data.type_url);
    facts.add("Metrics: id", &metric.id);
    let told = Metrics::parse_from_bytes(&metric.data.value).context("decode the metrics")?;
    let between = |low: Option<u64>, value: u64, high: Option<u64>| match (low, high) {
        (Some(low), Some(high)) if (low..=high).contains(&value) => "as the kernel's".to_owned(),
        other => format!("{value}, the kernel's {other:?}"),
    };
    facts.add("Metrics: cpu", between(before.cpu, told.cpu.usage.total, after.cpu));
    facts.add("Metrics: processes", between(before.processes, told.pids.current, after.processes));
    let (low, high) = (before.memory.min(after.memory), before.memory.max(after.memory));
    facts.add("Metrics: memory", between(low, told.memory.usage.usage, high));
    facts.add("Metrics: limit of memory", between(before.limit, told.memory.usage.limit, after.limit));
    Ok(())
}

/// What the kernel tells of the pod's parent cgroup.
#[derive(Clone, Copy, Debug)]
struct Used {
    cpu: Option<u64>,
    memory: Option<u64>,
    limit: Option<u64>,
    processes: Option<u64>,
}

fn used(pod: &Pod) -> Result<Used> {
    let parent = pod.config().linux.cgroup_parent.trim_start_matches('/').to_owned();
    let hierarchies = cgroup::hierarchies()?;
    let read = |file: &str| {
        let files = hierarchies.iter().map(|hierarchy| hierarchy.join(&parent).join(file));
        files.filter_map(|path| fs::read_to_string(path).ok()).find_map(|text| text.trim().parse().ok())
    };
    Ok(Used {
        cpu: read("cpuacct.usage"),
        memory: read("memory.usage_in_bytes"),
        limit: read("memory.limit_in_bytes"),
        processes: read("pids.current"),
    })
}
