//! `list --watch`: a line for each change of a sandbox, as `kubectl get --watch` prints it.

use std::collections::BTreeMap;
use std::time::SystemTime;

use super::table::{self, COLUMNS, Row};
use crate::client::Sandbox;

/// The last printed row of each sandbox.
#[derive(Clone, Debug, Default)]
pub struct ListWatch {
    /// By sandbox id: the state and the pid, and the row.
    shown: BTreeMap<String, ((String, u32), Row)>,
    /// Widths of the columns; they only grow, so that most lines are aligned.
    widths: [usize; COLUMNS],
}

impl ListWatch {
    /// The lines to print now: a heading and all sandboxes the first time, and then those whose
    /// state or pid is another. The last line of one that is removed has the state `removed`.
    pub fn next(&mut self, sandboxes: &[Sandbox], now: SystemTime) -> String {
        let mut rows = Vec::new();
        if self.widths == [0; COLUMNS] {
            rows.push(table::HEADING.map(str::to_owned));
        }
        let mut last = std::mem::take(&mut self.shown);
        for sandbox in sandboxes {
            let row = table::row(sandbox, now);
            let key = (table::state(sandbox), sandbox.pid);
            if last.remove(&sandbox.id).is_none_or(|(known, _)| known != key) {
                rows.push(row.clone());
            }
            self.shown.insert(sandbox.id.clone(), (key, row));
        }
        for (_, mut row) in last.into_values() {
            let [_, _, _, state, pid, ..] = &mut row;
            *state = "removed".to_owned();
            *pid = table::dash();
            rows.push(row);
        }
        table::aligned_at_least(&rows, &mut self.widths)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sandbox(id: &str, state: &str, pid: u32) -> Sandbox {
        Sandbox { id: id.to_owned(), state: state.to_owned(), pid, ..Default::default() }
    }

    #[test]
    fn a_watched_list_has_a_line_for_each_change() {
        let now = SystemTime::UNIX_EPOCH;
        let mut watch = ListWatch::default();
        let first = watch.next(&[sandbox("a", "created", 0), sandbox("b", "ready", 7)], now);
        assert_eq!(
            first,
            "\
SANDBOX  POD  NAMESPACE  STATE    PID  AGE  MEMORY
a        -    -          created  -    -    -
b        -    -          ready    7    -    -
"
        );
        let same = watch.next(&[sandbox("a", "created", 0), sandbox("b", "ready", 7)], now);
        assert_eq!(same, "");
        let changed = watch.next(&[sandbox("a", "ready", 12345)], now);
        assert_eq!(
            changed,
            "\
a        -    -          ready    12345  -    -
b        -    -          removed  -      -    -
"
        );
        assert_eq!(watch.next(&[sandbox("a", "ready", 12345)], now), "");
    }

    #[test]
    fn an_empty_list_is_watched_under_its_heading() {
        let mut watch = ListWatch::default();
        assert!(watch.next(&[], SystemTime::UNIX_EPOCH).starts_with("SANDBOX "));
        assert_eq!(watch.next(&[], SystemTime::UNIX_EPOCH), "");
    }
}
