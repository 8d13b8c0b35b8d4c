//! `Metrics` of the controller, against the files of the kernel and against CRI's own statistics.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use containerd_shim_protos::{cgroups, cgroups_v2};
use kit::Pod;
use kit::machine::{cgroup, cgroup_driver};
use protobuf::Message as _;

use crate::fact::Facts;

/// Asks the controller for the metrics of the pod, whose containers must have ended.
pub(crate) async fn observe(pod: &Pod, facts: &mut Facts) -> Result<()> {
    let before = used(pod)?;
    let metric = match pod.node().controller(pod.handler()).metrics(pod.id()).await {
        Err(e) => {
            facts.add("Metrics", format!("refused with code {}", e.code as i32));
            return Ok(());
        }
        Ok(metric) => metric,
    };
    let after = used(pod)?;
    facts.add("Metrics", "reported");
    facts.add("Metrics: type", &metric.data.type_url);
    facts.add("Metrics: id", &metric.id);
    let reported =
        decode(&metric.data.type_url, &metric.data.value).context("decode the metrics")?;
    let between =
        |low: Option<u64>, reported: Option<u64>, high: Option<u64>| match (low, reported, high) {
            (Some(low), Some(reported), Some(high)) if (low..=high).contains(&reported) => {
                "as the kernel's".to_owned()
            }
            other => format!("between the kernel's: {other:?}"),
        };
    facts.add("Metrics: cpu", between(before.cpu, reported.cpu, after.cpu));
    for (name, [before, reported, after]) in [
        ("processes", [before.processes, reported.processes, after.processes]),
        ("memory", [before.memory, reported.memory, after.memory]),
    ] {
        // Less when something ends between the two.
        let value = between(before.min(after), reported, before.max(after));
        facts.add(format!("Metrics: {name}"), value);
    }
    facts.add("Metrics: limit of memory", between(before.limit, reported.limit, after.limit));
    Ok(())
}

/// The facts in metrics of this type.
fn decode(type_url: &str, value: &[u8]) -> Result<Used> {
    if type_url == "io.containerd.cgroups.v2.Metrics" {
        let reported = cgroups_v2::metrics::Metrics::parse_from_bytes(value)?;
        return Ok(Used {
            // Microseconds.
            cpu: reported.cpu.as_ref().map(|cpu| cpu.usage_usec),
            memory: reported.memory.as_ref().map(|memory| memory.usage),
            limit: reported.memory.as_ref().map(|memory| memory.usage_limit),
            processes: reported.pids.as_ref().map(|pids| pids.current),
        });
    }
    let reported = cgroups::metrics::Metrics::parse_from_bytes(value)?;
    Ok(Used {
        // Nanoseconds.
        cpu: reported.cpu.as_ref().map(|cpu| cpu.usage.total),
        memory: reported.memory.as_ref().map(|memory| memory.usage.usage),
        limit: reported.memory.as_ref().map(|memory| memory.usage.limit),
        processes: reported.pids.as_ref().map(|pids| pids.current),
    })
}

/// The usage of the pod's parent cgroup, in the units of its version.
#[derive(Clone, Copy, Debug)]
struct Used {
    cpu: Option<u64>,
    memory: Option<u64>,
    limit: Option<u64>,
    processes: Option<u64>,
}

fn used(pod: &Pod) -> Result<Used> {
    let given = &pod.config().linux.cgroup_parent;
    // Of a slice the name counts, wherever it is said to be.
    let parent = cgroup_driver::slice(given).map_or_else(|| given.clone(), cgroup_driver::path);
    let parent = parent.trim_start_matches('/');
    let hierarchies = cgroup::hierarchies()?;
    let read = |file: &str| {
        let files = hierarchies.iter().map(|hierarchy| hierarchy.join(parent).join(file));
        files.filter_map(|path| fs::read_to_string(path).ok()).find_map(|text| number(text.trim()))
    };
    if cgroup::unified()? {
        let stat = fs::read_to_string(
            hierarchies.iter().map(|h| h.join(parent)).collect::<PathBuf>().join("cpu.stat"),
        );
        let usage = stat.ok().and_then(|text| {
            text.lines().find_map(|line| line.strip_prefix("usage_usec ")?.parse().ok())
        });
        return Ok(Used {
            cpu: usage,
            memory: read("memory.current"),
            limit: read("memory.max"),
            processes: read("pids.current"),
        });
    }
    Ok(Used {
        cpu: read("cpuacct.usage"),
        memory: read("memory.usage_in_bytes"),
        limit: read("memory.limit_in_bytes"),
        processes: read("pids.current"),
    })
}

/// A number of the kernel's; `max` is the greatest there is.
fn number(text: &str) -> Option<u64> {
    if text == "max" { Some(u64::MAX) } else { text.parse().ok() }
}
