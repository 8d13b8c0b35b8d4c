//! Responses of the daemon as tables and as JSON.

use std::collections::HashMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use crate::client::{Sandbox, Usage};
use crate::time::{rfc3339, span};

/// Length of a short id, characters; the same as in crictl.
const SHORT: usize = 13;

/// The first line of the list.
const HEADING: [&str; 7] = ["SANDBOX", "POD", "NAMESPACE", "STATE", "PID", "AGE", "MEMORY"];

/// The list of sandboxes.
pub fn list(sandboxes: &[Sandbox], now: SystemTime) -> String {
    let rows = sandboxes.iter().map(|sandbox| row(sandbox, now));
    aligned(&Vec::from_iter([HEADING.map(str::to_owned)].into_iter().chain(rows)))
}

/// The line of one sandbox.
fn row(sandbox: &Sandbox, now: SystemTime) -> [String; HEADING.len()] {
    let age = created(sandbox).map(|at| span(now.duration_since(at).unwrap_or_default()));
    [
        short(&sandbox.id),
        or_dash(&sandbox.pod),
        or_dash(&sandbox.namespace),
        state(sandbox),
        if sandbox.pid == 0 { dash() } else { sandbox.pid.to_string() },
        age.unwrap_or_else(dash),
        sandbox.usage.as_ref().map_or_else(dash, |usage| bytes(usage.memory)),
    ]
}

/// The list as JSON, with whole ids.
pub fn list_json(sandboxes: &[Sandbox]) -> Value {
    let one = |sandbox: &Sandbox| {
        json!({
            "id": sandbox.id, "pod": sandbox.pod, "namespace": sandbox.namespace,
            "uid": sandbox.uid, "state": sandbox.state, "pid": sandbox.pid,
            "created_at": created(sandbox).map(rfc3339), "runtime": sandbox.runtime,
            "failed_cleanups": sandbox.failed_cleanups, "reason": sandbox.reason,
            "usage": sandbox.usage.as_ref().map(|usage| json!({
                "memory_bytes": usage.memory, "cpu_microseconds": usage.cpu_usec,
                "tasks": usage.tasks,
            })),
            "shim_memory_bytes": sandbox.shim_memory,
        })
    };
    sandboxes.iter().map(one).collect()
}

/// The CPU time of each pod at the previous query, from which its share of a CPU is computed.
#[derive(Clone, Debug, Default)]
pub struct Stats(HashMap<String, (SystemTime, u64)>);

impl Stats {
    /// The resource usage of the pods. The share of a CPU is the average since the previous query;
    /// `-` at the first one.
    pub fn next(&mut self, sandboxes: &[Sandbox], now: SystemTime) -> String {
        let mut rows = vec![
            ["POD", "NAMESPACE", "STATE", "CPU", "CPU TIME", "MEMORY", "TASKS", "SHIM"]
                .map(str::to_owned),
        ];
        let mut seen = HashMap::new();
        let (mut memory, mut tasks, mut shims) = (0, 0, 0);
        for sandbox in sandboxes {
            let usage = sandbox.usage.as_ref();
            let number = |field: fn(&Usage) -> String| usage.map_or_else(dash, field);
            let share = usage.and_then(|usage| {
                let (at, before) = self.0.get(&sandbox.id)?;
                let micros = now.duration_since(*at).ok()?.as_micros().max(1);
                Some(format!(
                    "{:.1}%",
                    usage.cpu_usec.saturating_sub(*before) as f64 * 100.0 / micros as f64
                ))
            });
            if let Some(usage) = usage {
                seen.insert(sandbox.id.clone(), (now, usage.cpu_usec));
                memory += usage.memory;
                tasks += usage.tasks;
            }
            rows.push([
                or_dash(&sandbox.pod),
                or_dash(&sandbox.namespace),
                state(sandbox),
                share.unwrap_or_else(dash),
                number(|usage| format!("{:.1}s", usage.cpu_usec as f64 / 1e6)),
                number(|usage| bytes(usage.memory)),
                number(|usage| usage.tasks.to_string()),
                sandbox.shim_memory.map_or_else(dash, bytes),
            ]);
            shims += sandbox.shim_memory.unwrap_or_default();
        }
        self.0 = seen;
        let ready = sandboxes.iter().filter(|sandbox| sandbox.state == "ready").count();
        format!(
            "sandboxes: {}, ready: {ready}; memory: {}, tasks: {tasks}, shims: {}\n{}",
            sandboxes.len(),
            bytes(memory),
            bytes(shims),
            aligned(&rows)
        )
    }
}

/// The keys of a report that come first.
const FIRST: [&str; 15] = [
    "id",
    "pod",
    "state",
    "reason",
    "exit",
    "failed_cleanups",
    "pid",
    "created_at",
    "age_seconds",
    "runtime",
    "usage",
    "task",
    "files",
    "namespaces",
    "cgroups",
];

/// The details of a sandbox: one field per line, nested fields indented.
pub fn report(report: &Value) -> String {
    let mut text = String::new();
    if let Value::Object(map) = report {
        // The keys that operators need most come first.
        for key in FIRST.iter().filter(|key| map.contains_key(**key)) {
            lines(&Map::from_iter([((*key).to_owned(), map[*key].clone())]), 0, &mut text);
        }
        let rest = map.iter().filter(|(key, _)| !FIRST.contains(&key.as_str()));
        lines(&rest.map(|(key, value)| (key.clone(), value.clone())).collect(), 0, &mut text);
    }
    text
}

fn lines(map: &Map<String, Value>, depth: usize, text: &mut String) {
    let indent = "  ".repeat(depth);
    for (key, value) in map {
        match value {
            Value::Null => {}
            Value::Object(inner) if inner.is_empty() => {}
            Value::Array(inner) if inner.is_empty() => {}
            Value::Object(inner) => {
                text.push_str(&format!("{indent}{key}:\n"));
                lines(inner, depth + 1, text);
            }
            Value::Array(inner) => {
                text.push_str(&format!("{indent}{key}:\n"));
                for one in inner {
                    text.push_str(&format!("{indent}  - {}\n", plain(one)));
                }
            }
            other => text.push_str(&format!("{indent}{key}: {}\n", plain(other))),
        }
    }
}

/// A value on one line; control characters of a caller's are escaped.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) if !text.is_empty() && !text.chars().any(char::is_control) => {
            text.clone()
        }
        other => other.to_string(),
    }
}

fn created(sandbox: &Sandbox) -> Option<SystemTime> {
    let at = sandbox.created_at.as_ref()?;
    Some(UNIX_EPOCH + Duration::new(at.seconds.try_into().ok()?, at.nanos.try_into().ok()?))
}

/// The state, with the number of failed cleanups.
fn state(sandbox: &Sandbox) -> String {
    match sandbox.failed_cleanups {
        0 => or_dash(&sandbox.state),
        failed => format!("{} (cleanup failed {failed}x)", sandbox.state),
    }
}

fn short(id: &str) -> String {
    shown(id.char_indices().nth(SHORT).map_or(id, |(end, _)| &id[..end]))
}

fn dash() -> String {
    "-".to_owned()
}

fn or_dash(text: &str) -> String {
    if text.is_empty() { dash() } else { shown(text) }
}

/// Replaces control characters: the author of a pod must not control the operator's terminal.
fn shown(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Bytes in the largest unit that leaves a whole number before the point.
fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let (mut value, mut unit) = (bytes as f64, 0);
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes}B") } else { format!("{value:.1}{}", UNITS[unit]) }
}

/// The rows with aligned columns, two blanks apart.
fn aligned<const N: usize>(rows: &[[String; N]]) -> String {
    let mut widths = [0; N];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = cell.chars().count().max(*width);
        }
    }
    let mut text = String::new();
    for row in rows {
        let cells: String =
            row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}  ")).collect();
        text.push_str(cells.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use protobuf::MessageField;
    use protobuf::well_known_types::timestamp::Timestamp;

    use super::*;

    fn sandbox() -> Sandbox {
        Sandbox {
            id: "0123456789abcdef".to_owned(),
            pod: "web".to_owned(),
            namespace: "default".to_owned(),
            state: "ready".to_owned(),
            pid: 4711,
            created_at: MessageField::some(Timestamp { seconds: 100, ..Default::default() }),
            usage: MessageField::some(Usage {
                memory: 3 << 20,
                cpu_usec: 1_500_000,
                tasks: 2,
                ..Default::default()
            }),
            shim_memory: Some(132 << 10),
            ..Default::default()
        }
    }

    fn at(seconds: u64) -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(seconds)
    }

    #[test]
    fn a_list_has_a_row_for_each_sandbox() {
        let quarantined = Sandbox {
            id: "b\x1b[2J".to_owned(),
            state: "quarantined".to_owned(),
            ..Default::default()
        };
        assert_eq!(
            list(&[sandbox(), quarantined], at(190)),
            "\
SANDBOX        POD  NAMESPACE  STATE        PID   AGE    MEMORY
0123456789abc  web  default    ready        4711  1m30s  3.0MiB
b?[2J          -    -          quarantined  -     -      -
"
        );
        assert_eq!(list_json(&[sandbox()])[0]["id"], "0123456789abcdef");
    }

    #[test]
    fn stats_show_the_usage_since_the_last_time() {
        let mut stats = Stats::default();
        let first = stats.next(&[sandbox()], at(10));
        assert!(
            first
                .starts_with("sandboxes: 1, ready: 1; memory: 3.0MiB, tasks: 2, shims: 132.0KiB\n")
        );
        assert!(
            first.ends_with("web  default    ready  -    1.5s      3.0MiB  2      132.0KiB\n"),
            "{first}"
        );
        let mut later = sandbox();
        later.usage.mut_or_insert_default().cpu_usec += 500_000;
        let second = stats.next(&[later], at(12));
        assert!(
            second.ends_with("web  default    ready  25.0%  2.0s      3.0MiB  2      132.0KiB\n"),
            "{second}"
        );
    }

    #[test]
    fn a_report_shows_what_there_is() {
        let order = json!({ "config": 1, "pid": 2, "id": 3 });
        assert_eq!(report(&order), "id: 3\npid: 2\nconfig: 1\n");
        let value =
            json!({ "a": 1, "b": { "c": "x", "d": null, "e": {} }, "f": ["g", "h\ni"], "k": "" });
        assert_eq!(report(&value), "a: 1\nb:\n  c: x\nf:\n  - g\n  - \"h\\ni\"\nk: \"\"\n");
    }

    #[test]
    fn sizes_have_binary_units() {
        for (number, text) in [
            (0, "0B"),
            (1023, "1023B"),
            (1536, "1.5KiB"),
            (5 << 30, "5.0GiB"),
            (u64::MAX, "16777216.0TiB"),
        ] {
            assert_eq!(bytes(number), text);
        }
    }
}
