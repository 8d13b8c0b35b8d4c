//! kubelet's metrics of a pod, series by series.

use std::collections::BTreeMap;
use std::fs;

use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::Run;
use crate::cluster::{NODE, until};
use crate::side::{Facts, LIMIT, Side, at, container};

pub(crate) const CASES: &[(&str, Run)] =
    &[("metrics", Run::Both(metrics)), ("metrics_from_cri", Run::Both(metrics_from_cri))];

/// The end of the name of a fact that is true with a value above 0.
const ABOVE: &str = ", above 0";

/// The value of a label in a line of metrics.
fn label<'a>(line: &'a str, name: &str) -> &'a str {
    let begin = format!("{name}=\"");
    let after = line.split(['{', ',']).find_map(|part| part.strip_prefix(&begin));
    after.and_then(|value| value.split('"').next()).unwrap_or_default()
}

/// Adds how many series there are of the pod, by metric and by what they are about.
fn series(facts: &mut Facts, page: &str, side: &Side, pod: &str) -> Result<()> {
    let path = format!("/api/v1/nodes/{NODE}/proxy/metrics/{page}");
    let text = side.cluster.kubectl(&["get", "--raw", &path])?;
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        if label(line, "namespace") != side.namespace() || label(line, "pod") != pod {
            continue;
        }
        let metric = line.split('{').next().unwrap_or_default();
        let owner = match (label(line, "container"), label(line, "name")) {
            ("", "") => "pod",
            ("", _) => "sandbox",
            (container, _) => container,
        };
        *counts.entry(format!("{page}: {metric} of {owner}")).or_default() += 1;
        // A name is also there with an empty value.
        if owner == "main" && metric.ends_with("memory_working_set_bytes") {
            let value = line.rsplit_once("} ").and_then(|(_, rest)| rest.split(' ').next());
            let above = value.and_then(|value| value.parse().ok()).is_some_and(|n: f64| n > 0.0);
            facts.add(format!("{page}: {metric} of {owner}{ABOVE}"), above);
        }
    }
    ensure!(!counts.is_empty(), "{page} has nothing of {pod}");
    for (name, count) in counts {
        facts.add(name, count);
    }
    Ok(())
}

/// The paths of all values in an object; what is in an array has its name.
fn paths(value: &Value, path: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                paths(value, &format!("{path}.{key}"), found);
            }
        }
        Value::Array(items) => {
            for item in items {
                let name = item["name"].as_str().unwrap_or("?");
                paths(item, &format!("{path}[{name}]"), found);
            }
        }
        _ => found.push(path.to_owned()),
    }
}

fn summary(facts: &mut Facts, side: &Side, pod: &str) -> Result<()> {
    let path = format!("/api/v1/nodes/{NODE}/proxy/stats/summary");
    let summary: Value = serde_json::from_str(&side.cluster.kubectl(&["get", "--raw", &path])?)?;
    let pods = summary["pods"].as_array().context("no pods")?;
    let is_wanted = |stats: &&Value| {
        at(stats, "podRef.name") == pod && at(stats, "podRef.namespace") == side.namespace()
    };
    let stats = pods.iter().find(is_wanted).context("no such pod")?;
    let mut found = Vec::new();
    paths(stats, "summary: ", &mut found);
    found.sort();
    for path in found {
        facts.add(path, "there");
    }
    let mut containers = stats["containers"].as_array().into_iter().flatten();
    let main = containers.find(|container| container["name"] == "main").context("no main")?;
    for (owner, stats) in [("pod", stats), ("main", main)] {
        for value in ["memory.workingSetBytes", "cpu.usageCoreNanoSeconds"] {
            let above = at(stats, value).parse().is_ok_and(|n: u64| n > 0);
            facts.add(format!("summary: {value} of {owner}{ABOVE}"), above);
        }
    }
    Ok(())
}

fn all(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    series(&mut facts, "cadvisor", side, "measured")?;
    series(&mut facts, "resource", side, "measured")?;
    summary(&mut facts, side, "measured")?;
    Ok(facts)
}

/// The metrics of pods that have run for a while: kubelet collects each kind at its own pace.
fn collected(sides: &[Side; 2]) -> Result<[Facts; 2]> {
    // A container has metrics of a disk once it has used it. Which of them reads a program that is
    // not in memory is chance, so each writes.
    let scripts = ["while :; do echo; sleep 1; done", "trap 'exit 0' TERM; sleep 100000 & wait"];
    let containers = ["main", "other"].into_iter().zip(scripts).map(|(name, script)| {
        container(name, &format!("dd if=/dev/zero of=/written count=1 conv=fsync; {script}"))
    });
    let spec = json!({ "containers": containers.collect::<Vec<_>>() });
    // The first pods of a node read their programs from the disk, those of one handler before those
    // of the other, which the metrics would show.
    for side in sides {
        side.run("first", spec.clone())?;
        side.delete(&["pod/first"])?;
    }
    for side in sides {
        side.run("measured", spec.clone())?;
    }
    let mut last: Option<[Facts; 2]> = None;
    let mut same = 0;
    until("the metrics are complete", 2 * LIMIT, || {
        let now = [all(&sides[0])?, all(&sides[1])?];
        let pairs = |facts: &[Facts; 2]| facts.clone().map(|facts| facts.0);
        let stays = last.as_ref().is_some_and(|last| pairs(last) == pairs(&now));
        same = if stays { same + 1 } else { 0 };
        let mut all = now.iter().flat_map(|facts| &facts.0);
        let zero = all.find(|(name, value)| name.ends_with(ABOVE) && value != "true");
        ensure!(zero.is_none(), "{zero:?}");
        let complete = |facts: &Facts| facts.get("summary: .cpu.usageNanoCores").is_some();
        let done = same >= 5 && now.iter().all(complete);
        last = Some(now);
        // Five equal looks take 25 s, longer than kubelet takes between two of its own: 15 s at
        // most.
        std::thread::sleep(std::time::Duration::from_secs(5));
        ensure!(done, "they change");
        Ok(())
    })?;
    for side in sides {
        side.delete(&["pod/measured"])?;
    }
    last.context("no metrics")
}

fn metrics(sides: &[Side; 2]) -> Result<[Facts; 2]> {
    collected(sides)
}

fn metrics_from_cri(sides: &[Side; 2]) -> Result<[Facts; 2]> {
    let cluster = sides[0].cluster;
    let path = cluster.file("kubelet.yaml");
    let usual = fs::read_to_string(&path)?;
    let mut config: Value = serde_json::from_str(&usual)?;
    config["featureGates"] = json!({ "PodAndContainerStatsFromCRI": true });
    let restart = |config: &str| -> Result<()> {
        cluster.end_program("kubelet", Signal::SIGTERM)?;
        fs::write(&path, config)?;
        cluster.start_program("kubelet")?;
        cluster.kubelet_answers()
    };
    restart(&config.to_string())?;
    let facts = collected(sides);
    restart(&usual)?;
    facts
}
