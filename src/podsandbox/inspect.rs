//! Summary and report of a sandbox, for `pause-sandboxer list`, `stats` and `inspect`.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::time::{Duration, SystemTime};

use protobuf::well_known_types::any::Any;
use serde_json::{Value, json};

use super::actor::Published;
use super::jobs::Jobs;
use super::machine::Phase;
use super::metrics::usage::{Usage, read_usage};
use super::record::{Record, Stage};
use super::status;
use crate::error::{StepError, bounded};
use crate::log_context::PodNames;
use crate::process::Exit;
use crate::protos::cri::PodSandboxConfig;
use crate::shim;
use crate::time::rfc3339;

/// The namespaces of a process, as `/proc/PID/ns` names them.
const NAMESPACES: [&str; 7] = ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"];

/// Longest name that is kept of a pod and its like, bytes; no name of Kubernetes is longer.
const LONGEST_NAME: usize = 253;

/// Longest reason in a line, bytes.
const LONGEST_REASON: usize = 1024;

/// Most bytes of a report: an answer of 4 MiB is the largest that ttrpc carries.
const LARGEST_REPORT: usize = 3 << 20;

/// A line of the list of sandboxes. Callers choose what it is made of: each text in it has a bound,
/// so that a page of lines fits an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SandboxSummary {
    /// The sandbox id.
    pub id: String,
    /// Its pod, as far as it is known.
    pub pod: PodNames,
    /// The phase, or what else is so of the id, in words.
    pub state: &'static str,
    /// Process id of the pause process on the node; 0 where none lives.
    pub pid: u32,
    /// When it was created; `None` where that is not known.
    pub created_at: Option<SystemTime>,
    /// Runtime name, such as `io.containerd.runc.v2`.
    pub runtime: String,
    /// Cleanups that have failed in a row.
    pub failed_cleanups: u32,
    /// Why it ended or was quarantined.
    pub reason: Option<String>,
    /// Resource usage of the pod; `None` if it was not requested or is unknown.
    pub usage: Option<Usage>,
    /// Memory that the pod's shim has for itself, bytes; `None` if it was not requested, the pod
    /// has no shim, or it cannot be read.
    pub shim_memory: Option<u64>,
}

impl SandboxSummary {
    /// The line of a record that recovery could not adopt.
    pub fn quarantined(id: &str, reason: &str) -> Self {
        Self {
            id: id.to_owned(),
            pod: PodNames::default(),
            state: "quarantined",
            pid: 0,
            created_at: None,
            runtime: String::new(),
            failed_cleanups: 0,
            reason: Some(bounded(reason, LONGEST_REASON)),
            usage: None,
            shim_memory: None,
        }
    }

    /// As JSON; a report of one sandbox adds to these keys.
    pub fn to_json(&self) -> Value {
        json!({
            "id": self.id,
            "pod": { "name": self.pod.name, "namespace": self.pod.namespace, "uid": self.pod.uid },
            "state": self.state,
            "pid": self.pid,
            "created_at": self.created_at.map(rfc3339),
            "age_seconds": self
                .created_at
                .map(|at| at.elapsed().unwrap_or(Duration::ZERO).as_secs()),
            "runtime": self.runtime,
            "failed_cleanups": self.failed_cleanups,
            "reason": self.reason,
            "usage": self.usage.map(|usage| json!({
                "memory_bytes": usage.memory,
                "cpu_microseconds": usage.cpu_usec,
                "tasks": usage.tasks,
            })),
            "shim_memory_bytes": self.shim_memory,
        })
    }
}

/// The line of a sandbox. With `usage` it has what the pod and its shim use, and blocks.
pub(super) fn summarize(jobs: &Jobs, published: Published, usage: bool) -> SandboxSummary {
    let (usage, shim_memory) =
        if usage { (pod_usage(jobs), shim_memory(jobs)) } else { (None, None) };
    SandboxSummary {
        id: jobs.id().to_string(),
        pod: jobs.log_context.pod().clone(),
        state: published.phase.name(),
        pid: living(published),
        created_at: Some(jobs.facts.created_at),
        runtime: bounded(&jobs.facts.runtime.name, LONGEST_NAME),
        failed_cleanups: published.failures,
        reason: jobs.end_reason(published.exit).map(|reason| bounded(&reason, LONGEST_REASON)),
        usage,
        shim_memory,
    }
}

fn pod_usage(jobs: &Jobs) -> Option<Usage> {
    let failed = |step: &StepError| {
        log::debug!(sandbox = jobs.id().as_str(); "failed to read usage of pod: {step}");
    };
    read_usage(&jobs.facts.cgroup_ref.cgroup_parent).inspect_err(failed).ok().flatten()
}

/// Memory that the pod's shim has for itself, bytes; `None`: it has none, or it cannot be read.
/// Blocks.
pub(super) fn shim_memory(jobs: &Jobs) -> Option<u64> {
    let failed = |step: &StepError| {
        log::debug!(sandbox = jobs.id().as_str(); "failed to read memory of shim: {step}");
    };
    jobs.shim.private_memory().inspect_err(failed).ok().flatten()
}

/// Process id of the pause process; 0 where none lives, for who asks may take it for a process of
/// this pod's.
fn living(published: Published) -> u32 {
    if matches!(published.phase, Phase::Ready | Phase::Unknown) && published.exit.is_none() {
        published.pid
    } else {
        0
    }
}

/// All that is known of a sandbox. `record` and `stage` as they are on disk, or why they cannot be
/// read. Blocks.
pub(super) fn report(
    jobs: &Jobs,
    published: Published,
    record: &Result<Record, String>,
    stage: &Result<Stage, String>,
) -> Value {
    let mut all = summarize(jobs, published, true).to_json();
    let pid = living(published);
    let add = [
        ("exit", published.exit.map_or(Value::Null, |ended| exit(ended, jobs))),
        (
            "plan",
            record
                .as_ref()
                .map_or(Value::Null, |record| or_error(serde_json::to_value(&record.plan))),
        ),
        ("namespaces", namespaces(pid)),
        ("cgroups", cgroups(pid)),
        ("files", files(jobs)),
        (
            "task",
            json!({
                "address": jobs.shim.address(),
                "version": shim::TASK_VERSION,
                "has_shim": jobs.shim.has_shim(),
                "own_shim": jobs.facts.runtime.own_shim,
            }),
        ),
        (
            "record",
            json!({
                "path": jobs.store.dir().display().to_string(),
                "stage": match stage {
                    Ok(stage) => or_error(serde_json::to_value(stage)),
                    Err(e) => json!({ "error": e }),
                },
                "version": record.as_ref().ok().map(|record| record.version),
                "error": record.as_ref().err(),
            }),
        ),
        ("containerd", record.as_ref().map_or(Value::Null, known_to_containerd)),
        (
            "config",
            record.as_ref().map_or(Value::Null, |record| or_error(status::config_json(record))),
        ),
    ];
    if let Value::Object(all) = &mut all {
        all.extend(fitting(add, LARGEST_REPORT));
    }
    all
}

/// The values with their keys; a value that does not fit into the remaining `left`
/// bytes is replaced by its length.
fn fitting<const N: usize>(values: [(&str, Value); N], mut left: usize) -> [(String, Value); N] {
    values.map(|(key, value)| {
        let length = value.to_string().len();
        match left.checked_sub(length) {
            Some(rest) => {
                left = rest;
                (key.to_owned(), value)
            }
            None => {
                (key.to_owned(), json!({ "error": format!("{length} bytes are too many to show") }))
            }
        }
    })
}

fn or_error<E: std::fmt::Display>(value: Result<Value, E>) -> Value {
    value.unwrap_or_else(|e| json!({ "error": e.to_string() }))
}

fn exit(exit: Exit, jobs: &Jobs) -> Value {
    let reason = jobs.end.get().map(|reason| reason.name());
    json!({ "status": exit.status, "at": rfc3339(exit.at), "reason": reason })
}

/// Inodes of the pause process's namespaces, by name.
fn namespaces(pid: u32) -> Value {
    let inode =
        |name: &&str| fs::metadata(format!("/proc/{pid}/ns/{name}")).map(|meta| meta.ino()).ok();
    NAMESPACES
        .iter()
        .filter_map(|name| Some(((*name).to_owned(), Value::from(inode(name)?))))
        .collect()
}

/// Where the pause process is in each hierarchy, as `/proc/PID/cgroup` tells.
fn cgroups(pid: u32) -> Value {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    text.lines().map(|line| Value::from(line.to_owned())).collect()
}

/// The files that CRI mounts into containers, and whether they are there.
fn files(jobs: &Jobs) -> Value {
    let all = jobs.files.all();
    all.into_iter()
        .map(|(name, path)| {
            let shown = path.display().to_string();
            json!({ "name": name, "path": shown, "exists": path.exists() })
        })
        .collect()
}

fn known_to_containerd(record: &Record) -> Value {
    let kind = |blob: &Any| blob.type_url.clone();
    json!({
        "netns_path": record.netns_path,
        "labels": record.info.labels,
        "runtime_options": record.info.runtime_options.as_ref().map(kind),
        "extensions": record.info.extensions.keys().collect::<Vec<_>>(),
    })
}

/// The pod's names in its CRI config.
pub(super) fn pod_names(pod: &PodSandboxConfig) -> PodNames {
    let name = |text: &str| bounded(text, LONGEST_NAME).into();
    PodNames {
        name: name(&pod.metadata.name),
        namespace: name(&pod.metadata.namespace),
        uid: name(&pod.metadata.uid),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_omits_fields_that_are_too_long() {
        let [short, long, last] = fitting(
            [("short", json!("12345678")), ("long", json!("123456789")), ("last", json!(0))],
            20,
        );
        assert_eq!((short.1, last.1), (json!("12345678"), json!(0)));
        assert_eq!(long.1["error"], "11 bytes are too many to show");
    }
}
