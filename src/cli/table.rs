//! Responses of the daemon as tables and as JSON.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::client::Sandbox;
use crate::time::{rfc3339, span};

/// Length of a short id, characters; the same as in crictl.
const SHORT: usize = 13;

/// The first line of the list.
const HEADING: [&str; 6] = ["SANDBOX", "POD", "NAMESPACE", "STATE", "PID", "AGE"];

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
        })
    };
    sandboxes.iter().map(one).collect()
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
SANDBOX        POD  NAMESPACE  STATE        PID   AGE
0123456789abc  web  default    ready        4711  1m30s
b?[2J          -    -          quarantined  -     -
"
        );
        assert_eq!(list_json(&[sandbox()])[0]["id"], "0123456789abcdef");
    }
}
