//! The results of the cases, compared, printed and written down.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use kit::machine::cgroup_driver::CgroupDriver;
use serde_json::{Value, json};

use crate::cluster::{Cluster, output};
use crate::known::{self, Known};
use crate::machine::Machine;
use crate::side::Facts;

/// A case by both handlers.
pub(crate) struct Outcome {
    case: &'static str,
    passed: [bool; 2],
    /// Facts that are not the same, and why, where it is known.
    differences: Vec<(Difference, Option<&'static Known>)>,
    facts: [Facts; 2],
}

struct Difference {
    fact: String,
    builtin: String,
    ours: String,
}

impl Outcome {
    pub(crate) fn of(case: &'static str, builtin: &Result<Facts>, ours: &Result<Facts>) -> Self {
        let passed = [builtin.is_ok(), ours.is_ok()];
        let facts = [builtin, ours].map(|facts| facts.as_ref().cloned().unwrap_or_default());
        let mut differences = Vec::new();
        if passed == [true, true] {
            for difference in compare(&facts[0], &facts[1]) {
                let known = known::DIFFERENCES.iter().find(|known| {
                    known.case == case
                        && known::matches(known.fact, &difference.fact)
                        && known::matches(known.builtin, &difference.builtin)
                        && known::matches(known.ours, &difference.ours)
                });
                differences.push((difference, known));
            }
        }
        Self { case, passed, differences, facts }
    }

    /// Differences without a reason, and reasons for what is no difference any more.
    pub(crate) fn unexplained(&self) -> Vec<String> {
        if self.passed != [true, true] {
            return Vec::new();
        }
        let new = self.differences.iter().filter(|(_, known)| known.is_none());
        let new =
            new.map(|(d, _)| format!("{}: built-in {:?}, ours {:?}", d.fact, d.builtin, d.ours));
        let gone = known::DIFFERENCES.iter().filter(|known| {
            let is = |(_, found): &(Difference, Option<&'static Known>)| {
                found.is_some_and(|found| std::ptr::eq(found, *known))
            };
            known.always && known.case == self.case && !self.differences.iter().any(is)
        });
        let gone = gone.map(|known| format!("{}: known difference that is none", known.fact));
        new.chain(gone).collect()
    }

    fn to_json(&self) -> Value {
        let facts: Vec<Value> = self.facts[0]
            .0
            .iter()
            .map(|(name, value)| {
                json!({ "fact": name, "builtin": value, "ours": self.facts[1].get(name) })
            })
            .collect();
        json!({
            "case": self.case,
            "builtin": self.passed[0],
            "ours": self.passed[1],
            "differences": self.differences.len(),
            "unexplained": self.unexplained(),
            "facts": facts,
        })
    }
}

fn compare(builtin: &Facts, ours: &Facts) -> Vec<Difference> {
    let names: BTreeSet<&str> =
        builtin.0.iter().chain(&ours.0).map(|(name, _)| name.as_str()).collect();
    let shown = |facts: &Facts, name: &str| facts.get(name).unwrap_or("none").to_owned();
    let both = names.into_iter().map(|name| Difference {
        fact: name.to_owned(),
        builtin: shown(builtin, name),
        ours: shown(ours, name),
    });
    both.filter(|difference| difference.builtin != difference.ours).collect()
}

/// Prints what ran, and writes it down after a run of all cases, of which `whole` is the number. A
/// case without an outcome has failed: it panicked, or one of the programs ended.
pub(crate) fn report(
    cluster: &Cluster,
    outcomes: &BTreeMap<&'static str, Outcome>,
    cannot_run: &[(&str, &str)],
    whole: Option<usize>,
) -> Result<()> {
    for outcome in outcomes.values() {
        let count = outcome.facts[0].0.len();
        println!("{}: {count} facts, {:?}", outcome.case, outcome.passed);
        for (d, known) in &outcome.differences {
            println!("    {}: built-in {:?}, ours {:?}", d.fact, d.builtin, d.ours);
            println!("        {}", known.map_or("NOT EXPLAINED", |known| known.why));
        }
    }
    for (case, why) in cannot_run {
        println!("skipped: {case}: {why}");
    }
    ensure!(!outcomes.is_empty(), "no case ran");
    let Some(cases) = whole else { return Ok(()) };
    let same = |o: &&Outcome| o.passed == [true, true] && o.differences.is_empty();
    let explained = |o: &&Outcome| {
        o.passed == [true, true] && !o.differences.is_empty() && o.unexplained().is_empty()
    };
    let same = outcomes.values().filter(same).count();
    let explained = outcomes.values().filter(explained).count();
    let result = json!({
        "same": same,
        "explained": explained,
        "failed": cases - same - explained,
        "skipped": cannot_run.len(),
        "cases": outcomes.values().map(Outcome::to_json).collect::<Vec<_>>(),
    });
    write(cluster, "kubernetes", result)
}

/// Writes a result down, with the versions, the cgroup driver and the date, where RESULTS_DIR says.
pub(crate) fn write(cluster: &Cluster, name: &str, mut result: Value) -> Result<()> {
    let Some(results) = std::env::var_os("RESULTS_DIR").map(PathBuf::from) else { return Ok(()) };
    let mut date = Command::new("date");
    date.args(["-u", "+%F"]);
    let [kubernetes, containerd] = cluster.versions()?;
    let driver = match Machine::cgroup_driver() {
        CgroupDriver::Cgroupfs => "cgroupfs",
        CgroupDriver::Systemd => "systemd",
    };
    result["kubernetes"] = kubernetes.as_str().into();
    result["containerd"] = containerd.as_str().into();
    result["cgroup_driver"] = driver.into();
    result["date"] = output(date, b"")?.trim().into();
    fs::create_dir_all(&results)?;
    let path = results.join(format!("{name}-{kubernetes}-{containerd}-{driver}.json"));
    fs::write(&path, serde_json::to_string_pretty(&result)?)
        .with_context(|| path.display().to_string())
}
