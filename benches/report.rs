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
    /// The cause of a bound that does not hold.
    held_back_by: &'static str,
}

#[derive(Clone, Copy)]
enum Hold {
    AtLeast(f64),
    AtMost(f64),
}

use Hold::{AtLeast, AtMost};

const BOUNDS: [Bound; 30] = [
    Bound {
        key: "start_builtin_over_ours",
        what: "the controller's Start through containerd, real netns, no CNI",
        hold: AtLeast(50.0),
        held_back_by: "the kernel's steps, kernel_start_us, and containerd's share, \
            start_floor_ms, take most of ours",
    },
    Bound {
        key: "create_start_ours_over_floor",
        what: "the controller's Create and Start together, against the floor",
        hold: AtMost(2.0),
        held_back_by: "the kernel's steps alone, kernel_start_us, take longer than the floor. \
            Create also waits for containerd's record of the sandbox",
    },
    Bound {
        key: "start_ours_over_kernel",
        what: "the daemon's own time for Start, against the kernel's steps",
        hold: AtMost(1.5),
        held_back_by: "the work beyond those steps: a second mount that survives a restart of \
            containerd, the shim's socket, the process's identity, two handovers between threads",
    },
    Bound {
        key: "stop_builtin_over_ours",
        what: "the controller's Stop",
        hold: AtLeast(40.0),
        held_back_by: "half of ours is containerd's share of the call (stop_floor_ms), a quarter \
            the kernel's end of the process and its cgroups (kernel_stop_us). Two changes brought \
            no gain: one thread that kills, sees the exit and cleans up; unmounting in parallel",
    },
    Bound {
        key: "run_hostnet_builtin_over_ours",
        what: "RunPodSandbox, host network",
        hold: AtLeast(15.0),
        held_back_by: "CRI's own work, run_hostnet_floor_ms, is two thirds of ours, the kernel's \
            steps, kernel_start_us, most of the rest",
    },
    Bound {
        key: "run_cni_ours_over_floor",
        what: "RunPodSandbox, bridge",
        hold: AtMost(1.06),
        held_back_by: "the spread of the CNI plugins' time, which is larger than a Start",
    },
    Bound {
        key: "cycle_builtin_over_ours",
        what: "run, create, start, stop and remove a bridged pod with one container",
        hold: AtLeast(1.75),
        held_back_by: "runc, the shim and CNI, with the same time in both",
    },
    Bound {
        key: "create_container_ours_over_builtin",
        what: "CreateContainer in it",
        hold: AtMost(1.0),
        held_back_by: "the start of the pod's shim, which the built-in starts with the pause \
            process; containerd takes most of the call with both",
    },
    Bound {
        key: "start_container_ours_over_builtin",
        what: "StartContainer in it",
        hold: AtMost(0.95),
        held_back_by: "the start of the shim, which the built-in starts with the pause process. \
            Ours starts with CRI's Platform call, because an idle pod has no shim and no earlier \
            call announces a container. start_second_container_…_ms is the time of a second \
            container",
    },
    Bound {
        key: "stop_container_ours_over_builtin",
        what: "StopContainer in it",
        hold: AtMost(1.0),
        held_back_by: "runc, with the same time in both",
    },
    Bound {
        key: "remove_container_ours_over_builtin",
        what: "RemoveContainer in it",
        hold: AtMost(1.0),
        held_back_by: "containerd, which takes most of the call with both",
    },
    Bound {
        key: "remove_pod_ours_over_builtin",
        what: "RemovePodSandbox after it",
        hold: AtMost(1.0),
        held_back_by: "CNI and CRI, which take most of the call with both",
    },
    Bound {
        key: "pod_with_container_kb",
        what: "memory of shim and pause process of a pod with one container",
        hold: AtMost(256.0),
        held_back_by: SHIM,
    },
    Bound {
        key: "pod_with_container_builtin_over_ours",
        what: "the same, against the built-in",
        hold: AtLeast(18.0),
        held_back_by: SHIM,
    },
    Bound {
        key: "pod_after_1000_execs_kb",
        what: "the same after 1000 execs and 100 MB of output",
        hold: AtMost(320.0),
        held_back_by: "the heap of the shim, which grows with the work and is not given back",
    },
    Bound {
        key: "exec_ours_over_builtin",
        what: "ExecSync of a program that exits at once",
        hold: AtMost(0.95),
        held_back_by: SHIM,
    },
    Bound {
        key: "cpu_exec_builtin_over_ours",
        what: "its processor time in containerd, sandboxer and shim, without runc",
        hold: AtLeast(3.0),
        held_back_by: "containerd's own work, cpu_per_exec_…_in_containerd_ms, which is most \
            of ours",
    },
    Bound {
        key: "idle_wakeups_builtin_over_ours",
        what: "context switches of shim and pause process of an idle pod; from containerd 2.3 on \
            each container is asked for its stats once a second",
        hold: AtLeast(10.0),
        held_back_by: SHIM,
    },
    Bound {
        key: "idle_cpu_builtin_over_ours",
        what: "their processor time",
        hold: AtLeast(2.0),
        held_back_by: SHIM,
    },
    Bound {
        key: "output_ours_over_builtin",
        what: "throughput of a container's output, from its standard output to its log",
        hold: AtLeast(1.0),
        held_back_by: STREAMS,
    },
    Bound {
        key: "exec_stdin_ours_over_builtin",
        what: "throughput of the input of an exec",
        hold: AtLeast(1.0),
        held_back_by: STREAMS,
    },
    Bound {
        key: "output_loaded_ours_over_builtin",
        what: "throughput of a container's output beside processes that take all processors",
        hold: AtLeast(1.0),
        held_back_by: STREAMS,
    },
    Bound {
        key: "exec_stdin_loaded_ours_over_builtin",
        what: "throughput of the input of an exec beside them",
        hold: AtLeast(1.0),
        held_back_by: STREAMS,
    },
    Bound {
        key: "pods_per_s_hostnet_ours_over_builtin",
        what: "pods per second, 8 clients",
        hold: AtLeast(10.0),
        held_back_by: "CRI's own work, which the floor shows",
    },
    Bound {
        key: "start_at_2000_over_0",
        what: "our Start with 2000 live pods, against none",
        hold: AtMost(1.5),
        held_back_by: "the kernel's own growth, kernel_start_at_2000_us over kernel_start_at_0_us",
    },
    Bound {
        key: "idle_pss_builtin_over_ours",
        what: "memory of an idle pod's processes and of the sandboxer's growth; containerd's own \
            growth, containerd_kb_per_pod, is not in it",
        hold: AtLeast(200.0),
        held_back_by: "the growth of the daemon, daemon_kb_per_sandbox, and pause_kb",
    },
    Bound {
        key: "cpu_builtin_over_ours",
        what: "processor time of an idle pod, from run to removal",
        hold: AtLeast(5.0),
        held_back_by: "containerd's own work, cpu_per_pod_floor_ms",
    },
    Bound {
        key: "daemon_kb_per_sandbox",
        what: "growth of the daemon's memory from 0 to 2000 sandboxes, per sandbox",
        hold: AtMost(8.0),
        held_back_by: "the parts in docs/performance.md, Memory of a sandbox; the largest are the \
            actor's task and the HTTP/2 stream",
    },
    Bound {
        key: "recover_us_per_sandbox_over_kernel_start",
        what: "recovery of 2000, per sandbox, against one kernel Start",
        hold: AtMost(1.0),
        held_back_by: "the search of /proc for pause processes without a record",
    },
    Bound {
        key: "daemon_at_rest_mb",
        what: "the daemon's memory while idle",
        hold: AtMost(5.0),
        held_back_by: "",
    },
];

/// Holds back each number of a pod with a container.
const SHIM: &str = "the pod's shim, a process of its own with a heap";

/// Holds back the throughput of streams.
const STREAMS: &str = "containerd's own work, with the same time in both. The copier thread does \
    not splice: a splice holds the lock of containerd's FIFO";

/// Values with a bound that are not ratios.
const BESIDE: [&str; 3] = ["daemon_at_rest_mb", "pod_with_container_kb", "pod_after_1000_execs_kb"];

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

    /// A ratio that is no ratio of two medians.
    pub(crate) fn add_ratio(&mut self, key: &'static str, value: f64) {
        self.ratios.insert(key, value);
    }

    /// The ratio of two medians.
    pub(crate) fn ratio(&mut self, key: &'static str, above: &str, below: &str) {
        if let (Some(above), Some(below)) = (self.medians.get(above), self.medians.get(below)) {
            self.ratios.insert(key, above / below);
        }
    }

    /// Those that take numbers of two parts.
    fn combine(&mut self) {
        self.ratio(
            "idle_pss_builtin_over_ours",
            "idle_pod_processes_builtin_kb",
            "idle_pod_ours_kb",
        );
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
            let (to_hold, holds_now) = (bound.hold.text(), bound.holds(value));
            let mut verdict = json!({ "value": value, "to_hold": to_hold, "holds": holds_now });
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

/// Returns the table and the list of docs/performance.md.
fn numbers(report: &Value) -> String {
    let mut table = "| number | to hold | measured |\n|---|---|---|\n".to_owned();
    let mut list = String::new();
    for bound in &BOUNDS {
        let verdict = &report["holds"][bound.key];
        let value = verdict["value"].as_f64().unwrap_or(f64::NAN);
        let why = verdict["held_back_by"].as_str();
        let missed = if why.is_some() { ", missed" } else { "" };
        table += &format!("| `{}` | {} | {value:.2}{missed} |\n", bound.key, bound.hold.text());
        let why = why.map(|why| format!(" Missed: {why}.")).unwrap_or_default();
        list += &wrapped(&format!("- `{}`: {}.{why}", bound.key, bound.what));
    }
    table + "\n" + &list
}

/// An item of a list in lines of at most 100 columns.
fn wrapped(item: &str) -> String {
    let (mut text, mut line) = (String::new(), String::new());
    for word in item.split_whitespace() {
        if line.chars().count() + 1 + word.chars().count() > 100 {
            text += &line;
            text.push('\n');
            line = " ".to_owned();
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line += word;
    }
    text + &line + "\n"
}

/// The subject of the numbers.
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
