//! The numbers: as a table, and as `target/bench/report.json`.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

/// One ratio, and what it is to hold.
struct Bound {
    key: &'static str,
    what: &'static str,
    hold: Hold,
    /// What holds it back, should it not hold.
    held_back_by: &'static str,
}

#[derive(Clone, Copy)]
enum Hold {
    AtLeast(f64),
    AtMost(f64),
}

use Hold::{AtLeast, AtMost};

const BOUNDS: [Bound; 16] = [
    Bound {
        key: "start_builtin_over_ours",
        what: "controller Start through containerd, real netns, no CNI",
        hold: AtLeast(50.0),
        held_back_by: "containerd's own share of the call, which is the floor's",
    },
    Bound {
        key: "start_ours_over_floor",
        what: "the same, against the floor",
        hold: AtMost(2.0),
        held_back_by: "the kernel's own time for the steps, kernel_start_us, is more than the floor",
    },
    Bound {
        key: "start_ours_over_kernel",
        what: "the daemon's own time for Start, against the kernel's steps",
        hold: AtMost(1.5),
        held_back_by: "what a Start makes beyond those steps: a second mount that outlives containerd's restart, the shim's socket, the \
            process's identity, and two handovers between threads",
    },
    Bound {
        key: "stop_builtin_over_ours",
        what: "controller Stop",
        hold: AtLeast(40.0),
        held_back_by: "half of ours is containerd's share of the call (stop_floor_ms), a quarter the kernel's end of the process and its cgroups \
            (kernel_stop_us); tried without gain: one thread that kills, sees the end and cleans up, and unmounting meanwhile",
    },
    Bound {
        key: "run_hostnet_builtin_over_ours",
        what: "RunPodSandbox, host network",
        hold: AtLeast(15.0),
        held_back_by: "CRI's own work, run_hostnet_floor_ms, is two thirds of ours, and the kernel's steps, kernel_start_us, most of the rest",
    },
    Bound {
        key: "run_cni_ours_over_floor",
        what: "RunPodSandbox, bridge",
        hold: AtMost(1.06),
        held_back_by: "the spread of the CNI plugins' time, which is larger than a Start",
    },
    Bound {
        key: "cycle_builtin_over_ours",
        what: "run, create, start, stop, remove of a bridged pod with one container",
        hold: AtLeast(1.5),
        held_back_by: "runc, the shim and CNI, which take the same time with both",
    },
    Bound {
        key: "start_container_ours_over_builtin",
        what: "StartContainer in it",
        hold: AtMost(1.02),
        held_back_by: "the beginning of the shim, which the built-in's has spent on the pause: ours starts with CRI's Platform, as an idle pod is to \
            have none and nothing earlier tells that a container comes. start_second_container_…_ms is what a second container takes",
    },
    Bound {
        key: "stop_container_ours_over_builtin",
        what: "StopContainer in it",
        hold: AtMost(1.02),
        held_back_by: "runc, which takes the same time with both",
    },
    Bound {
        key: "pods_per_s_hostnet_ours_over_builtin",
        what: "pods per second, 8 clients",
        hold: AtLeast(10.0),
        held_back_by: "CRI's own work, which is the floor's",
    },
    Bound {
        key: "start_at_2000_over_0",
        what: "our Start with 2000 live pods against none",
        hold: AtMost(1.5),
        held_back_by: "the kernel's own growth, kernel_start_at_2000_us over kernel_start_at_0_us",
    },
    Bound {
        key: "idle_pss_builtin_over_ours",
        what: "user memory of an idle pod, all processes",
        hold: AtLeast(200.0),
        held_back_by: "containerd's own growth by a pod, containerd_kb_per_pod; without it, idle_pod_ours_without_containerd_kb",
    },
    Bound {
        key: "cpu_builtin_over_ours",
        what: "processor time of an idle pod, run to removed",
        hold: AtLeast(5.0),
        held_back_by: "containerd's own work, cpu_per_pod_floor_ms",
    },
    Bound {
        key: "daemon_kb_per_sandbox",
        what: "growth of the daemon's memory from 0 to 2000 sandboxes, per sandbox",
        hold: AtMost(6.0),
        held_back_by: "each piece of docs/performance.md, Memory of a sandbox, of which the owner's task and the HTTP/2 stream are the largest",
    },
    Bound {
        key: "recover_us_per_sandbox_over_kernel_start",
        what: "recovery of 2000, per sandbox, against one kernel Start",
        hold: AtMost(1.0),
        held_back_by: "the search of /proc for pauses that no record names",
    },
    Bound {
        key: "daemon_at_rest_mb",
        what: "the daemon's memory with nothing to do",
        hold: AtMost(5.0),
        held_back_by: "",
    },
];

/// What is none of the ratios but has a bound.
const BESIDE: [&str; 1] = ["daemon_at_rest_mb"];

/// All that was measured.
#[derive(Debug, Default)]
pub(crate) struct Report {
    medians: BTreeMap<String, f64>,
    ratios: BTreeMap<&'static str, f64>,
    p99: BTreeMap<String, f64>,
}

impl Report {
    pub(crate) fn new() -> Self {
        Self { medians: BTreeMap::from([("one".to_owned(), 1.0)]), ..Self::default() }
    }

    /// A median; its unit ends the key.
    pub(crate) fn median(&mut self, key: String, value: f64) {
        self.medians.insert(key, value);
    }

    /// A 99th percentile; its unit ends the key.
    pub(crate) fn p99(&mut self, key: String, value: f64) {
        self.p99.insert(key, value);
    }

    /// The ratio of two medians.
    pub(crate) fn ratio(&mut self, key: &'static str, above: &str, below: &str) {
        if let (Some(above), Some(below)) = (self.medians.get(above), self.medians.get(below)) {
            self.ratios.insert(key, above / below);
        }
    }

    /// The ratio of two 99th percentiles.
    pub(crate) fn p99_ratio(&mut self, key: &str, above: &str, below: &str) {
        if let (Some(above), Some(below)) = (self.p99.get(above), self.p99.get(below)) {
            let ratio = above / below;
            self.p99.insert(key.to_owned(), ratio);
        }
    }

    /// Those that take numbers of two parts.
    fn combine(&mut self) {
        if let (Some(own), Some(growth)) =
            (self.find("idle_pod_processes_builtin_kb"), self.find("_in_containerd_builtin_kb"))
        {
            self.median("idle_pod_builtin_kb".into(), own + growth);
            self.ratio("idle_pss_builtin_over_ours", "idle_pod_builtin_kb", "idle_pod_ours_kb");
        }
        if let Some(rest) = self.find("daemon_at_rest_kb") {
            self.ratios.insert("daemon_at_rest_mb", rest / 1024.0);
        }
    }

    fn find(&self, end: &str) -> Option<f64> {
        self.medians.iter().find(|(key, _)| key.ends_with(end)).map(|(_, value)| *value)
    }

    /// Prints it.
    pub(crate) fn print(&mut self) {
        self.combine();
        self.medians.remove("one");
        println!("\n{:52} {:>12}", "median", "");
        for (key, value) in &self.medians {
            println!("{key:52} {value:12.3}");
        }
        println!("\n{:52} {:>12}", "99th percentile", "");
        for (key, value) in &self.p99 {
            println!("{key:52} {value:12.3}");
        }
        println!("\n{:44} {:>9} {:>9}", "ratio", "", "to hold");
        for bound in &BOUNDS {
            let Some(value) = self.ratios.get(bound.key) else { continue };
            let verdict = if bound.holds(*value) { "" } else { "  MISSED" };
            println!(
                "{:44} {value:9.3} {:>9}{verdict}   {}",
                bound.key,
                bound.hold.text(),
                bound.what
            );
            if !bound.holds(*value) {
                println!("{:44} held back by: {}", "", bound.held_back_by);
            }
        }
    }

    /// Prints it and writes it to `target/bench/report.json`.
    pub(crate) fn finish(mut self, took: Duration) -> Result<()> {
        self.print();
        let mut holds = Map::new();
        for bound in &BOUNDS {
            let value = self
                .ratios
                .get(bound.key)
                .copied()
                .with_context(|| format!("{} is not measured", bound.key))?;
            let mut verdict = json!({ "value": value, "to_hold": bound.hold.text(), "holds": bound.holds(value) });
            if !bound.holds(value) {
                verdict["held_back_by"] = bound.held_back_by.into();
            }
            holds.insert(bound.key.to_owned(), verdict);
        }
        for key in BESIDE {
            self.ratios.remove(key);
        }
        let report = json!({
            "medians": self.medians,
            "ratios": self.ratios,
            "p99": self.p99,
            "holds": holds,
            "date": shell("date -u +%FT%TZ"),
            "machine": machine(),
            "command": std::env::args().collect::<Vec<_>>().join(" "),
            "seconds": took.as_secs(),
        });
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/bench");
        std::fs::create_dir_all(&directory)?;
        let path = directory.join("report.json");
        std::fs::write(&path, serde_json::to_vec_pretty(&report)?)?;
        std::fs::write(directory.join("numbers.md"), numbers(&report))?;
        println!("\n{} s; {}", took.as_secs(), path.display());
        Ok(())
    }
}

impl Bound {
    fn holds(&self, value: f64) -> bool {
        match self.hold {
            AtLeast(least) => value >= least,
            AtMost(most) => value <= most,
        }
    }
}

impl Hold {
    fn text(self) -> String {
        match self {
            AtLeast(least) => format!(">= {least}"),
            AtMost(most) => format!("<= {most}"),
        }
    }
}

/// The table of SPECIFICATION.md.
fn numbers(report: &Value) -> String {
    let mut text = "| number | what | to hold | measured |\n|---|---|---|---|\n".to_owned();
    for bound in &BOUNDS {
        let verdict = &report["holds"][bound.key];
        let value = verdict["value"].as_f64().unwrap_or(f64::NAN);
        let missed = verdict["held_back_by"]
            .as_str()
            .map(|why| format!(", missed: {why}"))
            .unwrap_or_default();
        text += &format!(
            "| `{}` | {} | {} | {value:.2}{missed} |\n",
            bound.key,
            bound.what,
            bound.hold.text()
        );
    }
    text
}

/// What the numbers are of.
fn machine() -> Value {
    json!({
        "processor": shell("sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1"),
        "processors": std::thread::available_parallelism().map_or(0, usize::from),
        "memory": shell("sed -n 's/^MemTotal: *//p' /proc/meminfo"),
        "kernel": shell("uname -sr"),
        "cgroup": if Path::new("/sys/fs/cgroup/cgroup.controllers").exists() { "v2" } else { "v1" },
    })
}

fn shell(script: &str) -> String {
    let output = Command::new("sh").args(["-c", script]).output();
    output
        .map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned())
        .unwrap_or_default()
}
