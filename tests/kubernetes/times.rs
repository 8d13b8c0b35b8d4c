//! How long kubelet takes for pods of both handlers, one after the other in turn. The times are
//! written down, and no case depends on them.

use std::io::BufReader;
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::Run;
use crate::cluster::NODE;
use crate::results;
use crate::side::{Facts, LIMIT, Side, at, sleeping};

pub(crate) const CASES: &[(&str, Run)] = &[("times_of_kubelet", Run::Both(times))];

/// Pods of each handler.
const PODS: usize = 15;
const NAME: &str = "timed";
/// kubelet's own measurement of the call that makes a sandbox, by handler.
const CALL: &str = "kubelet_run_podsandbox_duration_seconds";

/// What the API server tells of one pod, and when.
#[derive(Default)]
struct Life {
    created: Option<Instant>,
    sandbox: Option<Instant>,
    ready: Option<Instant>,
    deleted: Option<Instant>,
    gone: Option<Instant>,
}

impl Life {
    fn see(&mut self, when: Instant, event: &Value) {
        let pod = &event["object"];
        let holds = |name: &str| {
            let conditions = pod["status"]["conditions"].as_array();
            conditions.into_iter().flatten().any(|c| at(c, "type") == name && c["status"] == "True")
        };
        let set = |at: &mut Option<Instant>, is: bool| {
            if is {
                at.get_or_insert(when);
            }
        };
        set(&mut self.created, true);
        set(&mut self.sandbox, holds("PodReadyToStartContainers"));
        set(&mut self.ready, holds("Ready"));
        set(&mut self.deleted, pod["metadata"]["deletionTimestamp"].is_string());
        set(&mut self.gone, event["type"] == "DELETED");
    }
}

/// A watch of a namespace's pods: a time is that of an event's arrival, so that the time of a
/// `kubectl` that makes or deletes the pod is no part of it.
struct Watch {
    kubectl: Child,
    events: Receiver<(Instant, Value)>,
}

impl Watch {
    fn begin(side: &Side) -> Result<Self> {
        let mut command = side.cluster.kubectl_command(&[
            "--namespace",
            side.namespace(),
            "get",
            "pods",
            "--watch",
            "--output-watch-events",
            "--output=json",
        ]);
        let mut kubectl = command.stdout(Stdio::piped()).spawn()?;
        let lines = BufReader::new(kubectl.stdout.take().context("no stdout")?);
        let (sender, events) = channel();
        std::thread::spawn(move || {
            for event in serde_json::Deserializer::from_reader(lines).into_iter::<Value>() {
                let Ok(event) = event else { return };
                if sender.send((Instant::now(), event)).is_err() {
                    return;
                }
            }
        });
        Ok(Self { kubectl, events })
    }

    /// Follows a pod until something is known of it.
    fn follow(&self, pod: &str, life: &mut Life, until: fn(&Life) -> bool) -> Result<()> {
        while !until(life) {
            let (when, event) = self.events.recv_timeout(kit::patient(LIMIT)).context(NAME)?;
            if at(&event, "object.metadata.name") == pod {
                life.see(when, &event);
            }
        }
        Ok(())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.kubectl.kill();
        let _ = self.kubectl.wait();
    }
}

/// One pod from its creation to its end.
fn one(side: &Side, watch: &Watch, name: &str) -> Result<Life> {
    let mut life = Life::default();
    side.create(name, json!({ "containers": [sleeping("main")] }))?;
    watch.follow(name, &mut life, |life| life.ready.is_some())?;
    side.kubectl(&["delete", "pod", name, "--wait=false"])?;
    watch.follow(name, &mut life, |life| life.gone.is_some())?;
    Ok(life)
}

/// kubelet's sum, in seconds, and number of calls that make a sandbox, of a handler.
fn calls(side: &Side) -> Result<(f64, f64)> {
    let path = format!("/api/v1/nodes/{NODE}/proxy/metrics");
    let page = side.cluster.kubectl(&["get", "--raw", &path])?;
    let handler = match side.handler {
        kit::Handler::Builtin => "",
        kit::Handler::Ours => side.handler.name(),
    };
    let value = |kind: &str| {
        let begin = format!("{CALL}_{kind}{{runtime_handler=\"{handler}\"}} ");
        let line = page.lines().find_map(|line| line.strip_prefix(&begin));
        line.map_or(Ok(0.0), str::parse::<f64>).with_context(|| begin.clone())
    };
    Ok((value("sum")?, value("count")?))
}

/// Median and 90th percentile.
fn spread(mut times: Vec<Duration>) -> [Duration; 2] {
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100];
    [at(50), at(90)]
}

type Between = fn(&Life) -> Option<(Instant, Instant)>;

const ROWS: [(&str, Between); 3] = [
    ("creation to PodReadyToStartContainers", |life| Some((life.created?, life.sandbox?))),
    ("creation to Ready", |life| Some((life.created?, life.ready?))),
    ("deletion to gone", |life| Some((life.deleted?, life.gone?))),
];

fn times(sides: &[Side; 2]) -> Result<[Facts; 2]> {
    let watches = [Watch::begin(&sides[0])?, Watch::begin(&sides[1])?];
    let before = [calls(&sides[0])?, calls(&sides[1])?];
    let mut lives = [Vec::new(), Vec::new()];
    for number in 0..PODS {
        // Each handler is the first of every second pair.
        for turn in 0..2 {
            let index = (number + turn) % 2;
            let name = format!("{NAME}-{number}");
            lives[index].push(one(&sides[index], &watches[index], &name)?);
        }
    }
    let after = [calls(&sides[0])?, calls(&sides[1])?];
    let mut rows = Vec::new();
    for (what, between) in ROWS {
        let mut both = [[Duration::ZERO; 2]; 2];
        for (both, lives) in both.iter_mut().zip(&lives) {
            let took = lives.iter().map(|life| between(life).map(|(from, to)| to - from));
            *both = spread(took.collect::<Option<_>>().with_context(|| format!("no {what}"))?);
        }
        rows.push(row(what, both.map(|both| both.map(|time| time.as_secs_f64()))));
    }
    let mut means = [0.0; 2];
    for index in 0..2 {
        let (sum, count) = (after[index].0 - before[index].0, after[index].1 - before[index].1);
        ensure!(count >= PODS as f64, "{CALL}: {count} calls");
        means[index] = sum / count;
    }
    let mean = json!({
        "what": format!("{CALL}, mean"), "builtin_ms": ms(means[0]), "ours_ms": ms(means[1]),
        "builtin_over_ours": ratio(means[0], means[1]),
    });
    println!("{mean}");
    rows.push(mean);
    let written = json!({ "pods_of_each": PODS, "rows": rows });
    results::write(sides[0].cluster, "kubernetes-times", written)?;
    let mut facts = Facts::default();
    facts.add("pods", PODS);
    Ok([facts.clone(), facts])
}

fn ms(seconds: f64) -> f64 {
    (seconds * 1e4).round() / 10.0
}

fn ratio(builtin: f64, ours: f64) -> f64 {
    (builtin / ours * 100.0).round() / 100.0
}

fn row(what: &str, [builtin, ours]: [[f64; 2]; 2]) -> Value {
    let row = json!({
        "what": what,
        "builtin_ms": { "median": ms(builtin[0]), "p90": ms(builtin[1]) },
        "ours_ms": { "median": ms(ours[0]), "p90": ms(ours[1]) },
        "builtin_over_ours": ratio(builtin[0], ours[0]),
    });
    println!("{row}");
    row
}
