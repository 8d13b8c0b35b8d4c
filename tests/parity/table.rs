//! The table: one line per field, the two values and why they differ, if they do.

use std::collections::BTreeMap;

use anyhow::Result;

use crate::fact::{ABSENT, Facts};
use crate::known::{self, Known};

/// Longest value that a line shows whole, characters; of an unexplained difference everything is
/// shown.
const WIDTH: usize = 44;

/// The results of the two for one field.
type Pair = (String, String);

/// The lines so far.
pub(crate) struct Table {
    known: Vec<&'static Known>,
    /// The results of the two for each field of a plain pod.
    plain: BTreeMap<String, Pair>,
    used: Vec<bool>,
    same: usize,
    explained: usize,
    /// The lines that fail, for the end of the table.
    unexplained: Vec<String>,
    failed: Vec<String>,
}

impl Table {
    /// An empty one.
    ///
    /// # Errors
    /// The machine does not tell what is known of it.
    pub(crate) fn new() -> Result<Self> {
        let known = known::here()?;
        let used = vec![false; known.len()];
        Ok(Self {
            known,
            plain: BTreeMap::new(),
            used,
            same: 0,
            explained: 0,
            unexplained: Vec::new(),
            failed: Vec::new(),
        })
    }

    /// Compares what the two made of a case, and prints it. The first case is the plain pod; of
    /// every other one are shown the fields that are another than there.
    pub(crate) fn compare(&mut self, case: &str, builtin: &Facts, ours: &Facts) {
        let first = self.plain.is_empty();
        println!("\n== {case}");
        let mut unshown = 0;
        for field in
            fields(builtin, ours).into_iter().filter(|field| comparable(field, builtin, ours))
        {
            let value = |facts: &Facts| facts.get(&field).unwrap_or(ABSENT).to_owned();
            let pair = (value(builtin), value(ours));
            let show = first || self.plain.get(&field) != Some(&pair);
            let verdict = self.verdict(case, &field, &pair);
            let line = line(&field, &pair, verdict);
            match verdict {
                Some(_) if !show => unshown += 1,
                Some(_) => println!("  {line}"),
                None => {
                    println!("  {line}");
                    self.unexplained.push(format!("{case}: {line}"));
                }
            }
            if first {
                self.plain.insert(field, pair);
            }
        }
        if unshown > 0 {
            println!("  {unshown} more fields: as in the plain pod, with both");
        }
    }

    /// The reason, which is empty where the two are the same; `None`: there is none.
    fn verdict(&mut self, case: &str, field: &str, (builtin, ours): &Pair) -> Option<&'static str> {
        if builtin == ours {
            self.same += 1;
            return Some("");
        }
        let index = self.known.iter().position(|known| {
            let Known { case: c, field: f, builtin: b, ours: o, .. } = known;
            like(c, case) && like(f, field) && like(b, builtin) && like(o, ours)
        })?;
        self.explained += 1;
        *self.used.get_mut(index)? = true;
        Some(self.known.get(index)?.why)
    }

    /// A case that could not be observed.
    pub(crate) fn fail(&mut self, case: &str, error: &anyhow::Error) {
        println!("\n== {case}\n  FAILED: {error:#}");
        self.failed.push(format!("{case}: FAILED: {error:#}"));
    }

    /// Prints the sums; `all`: every case was run. True: the two differ in nothing that is not
    /// explained, and all that is explained was seen.
    pub(crate) fn end(self, all: bool) -> bool {
        let Self { known, used, same, explained, unexplained, failed, .. } = self;
        println!();
        for line in unexplained.iter().chain(&failed) {
            println!("{line}");
        }
        println!(
            "{same} the same, {explained} explained differences, {} unexplained, {} cases failed",
            unexplained.len(),
            failed.len()
        );
        let unseen: Vec<&Known> =
            known.into_iter().zip(used).filter(|(_, used)| !used).map(|(known, _)| known).collect();
        for Known { case, field, why, .. } in unseen.iter().filter(|_| all) {
            println!("explained, but not seen any more: {case}: {field}: {why}");
        }
        unexplained.is_empty() && failed.is_empty() && (unseen.is_empty() || !all)
    }
}

/// Whether both can have the field: what one of the two has refused has no fields.
fn comparable(field: &str, builtin: &Facts, ours: &Facts) -> bool {
    let differ = |stage: &str| builtin.get(stage) != ours.get(stage);
    let of_container = field.starts_with("container: ") || field.starts_with("in the pod: ");
    let in_both = builtin.get(field).is_some() && ours.get(field).is_some();
    match field {
        _ if field.starts_with("RunPodSandbox") => true,
        "container" | "pause: Uid" | "pause: uid_map" | "pause: cgroup of cpu" => true,
        _ if differ("RunPodSandbox") => in_both,
        _ if of_container && differ("container") => in_both,
        _ => true,
    }
}

fn fields(builtin: &Facts, ours: &Facts) -> Vec<String> {
    let mut fields: Vec<String> = Vec::new();
    for (field, _) in builtin.iter().chain(ours.iter()) {
        if !fields.iter().any(|known| known == field) {
            fields.push(field.to_owned());
        }
    }
    // By the first word, so that what only one of the two has stands with its kind.
    let rank = |field: &String| {
        let word = field.split(['.', ':', '[']).next().unwrap_or_default();
        ["RunPodSandbox", "pause", "container", "status", "verbose status", "info", "spec", "stats"]
            .iter()
            .position(|known| *known == word)
            .unwrap_or(usize::MAX)
    };
    fields.sort_by_key(rank);
    fields
}

fn line(field: &str, (builtin, ours): &Pair, verdict: Option<&str>) -> String {
    match verdict {
        Some("") => format!("{field} | {} | same", short(builtin)),
        Some(why) => format!("{field} | {} | {} | {why}", short(builtin), short(ours)),
        None => format!("{field} | {builtin} | {ours} | DIFFERS without a reason"),
    }
}

fn short(text: &str) -> String {
    let text = if text.is_empty() { "(empty)" } else { text };
    match text.char_indices().nth(WIDTH) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Whether `text` is as `pattern` says, in which `*` stands for anything.
pub(crate) fn like(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = text.strip_prefix(first) else { return false };
    let mut last = None;
    for part in parts {
        if let Some(between) = last.replace(part) {
            match rest.find(between) {
                Some(at) => rest = &rest[at + str::len(between)..],
                None => return false,
            }
        }
    }
    last.map_or(rest.is_empty(), |last| rest.ends_with(last))
}
