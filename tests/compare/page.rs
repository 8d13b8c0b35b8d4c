//! The page of the manual.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use kit::Kind;

use crate::cell::{Cell, seconds};
use crate::churn::Churn;
use crate::events::Event;

/// The comparison with one containerd.
pub(crate) struct Section {
    version: String,
    /// When, of what and where.
    measured: String,
    /// An event, with the built-in controller and with this sandboxer.
    pub(crate) rows: Vec<(Event, Cell, Cell)>,
    /// In the same order.
    pub(crate) churn: Option<(Churn, Churn)>,
}

const HEAD: &str = "\
# Failures, measured

`make compare` writes this page: the same events with containerd's built-in controller and its shim
`containerd-shim-runc-v2`, and with this sandboxer, each with a containerd of its own in a scratch
directory. Bold is what is lost or left. Stop and remove are StopPodSandbox and RemovePodSandbox;
after a failure they are repeated, as kubelet does, for 90 s. What is left is compared with the
state before the pod: on the machine, and in containerd's metadata.

Four losses are containerd's own, with either handler. Three, if it is killed at that moment:
- RunPodSandbox makes the pod's lease before the pod's record, and the network namespace before the
  record names it (`sandbox_run.go`). Nothing removes them later.
- CreateContainer makes a lease that expires after 24 hours, and the container's snapshot, before
  the container's record (`NewContainer`).
- When a container has exited, containerd logs the exit code and has the shim delete the task, and
  only then writes the code to its disk (`handleContainerExit`). Killed in between, it reports 255,
  `Unknown`, after its start.

The fourth, if a shim is killed in StartContainer: containerd cannot kill the container's task
(`ttrpc: closed`), and so does not delete it. With 2.3 the bundle stays, and each scrape of its
metrics logs an error, until containerd starts again. 2.4 runs the shim's command `delete`, which
usually removes the bundle.

A pod whose shim is killed ends, with either handler. With this sandboxer it stays if the shim had
no container, or only one that was being created: the next attempt to create it succeeds.
containerd 2.4 ends the containers of a dead shim itself. If it has done so before this sandboxer
looks, the pod stays as well, and kubelet starts them again.

Repeat it with `make compare PODS=N`, as root on a Debian 12 machine with Go. With `PODS=100` it
takes 25 minutes; without `PODS` each churn has 10,000 pods, and it takes hours. With
`COMPARE=2.4.2` the page has this release of containerd only. An interrupted run leaves this page as
it is. `tests/compare/` has the events.
";

impl Section {
    /// The comparison begins.
    pub(crate) fn begin(version: String) -> Result<Self> {
        let date = output("date", &["-u", "+%F"])?;
        // Of the programs, which were built before.
        let commit = std::env::var("COMMIT").context("COMMIT")?;
        let kernel = output("uname", &["-r"])?;
        let cgroups = if kit::machine::cgroup::unified()? { 2 } else { 1 };
        let cpus = std::thread::available_parallelism()?;
        let load = fs::read_to_string("/proc/loadavg")?;
        let load = load.split_whitespace().nth(1).unwrap_or_default().to_owned();
        let measured = format!(
            "Measured on {date} at {commit} with the release programs. Processors: {cpus}; Linux \
             {kernel},\ncgroup version {cgroups}, five-minute load average {load} at the beginning."
        );
        Ok(Self { version, measured, rows: Vec::new(), churn: None })
    }

    /// Writes its part of the page, or prints it.
    pub(crate) fn write(&self, print: bool) -> Result<()> {
        let mut text = format!("\n## containerd {}\n{}\n", self.version, self.measured);
        text += "Both handlers run at the same time, each on its own node.\n\n";
        text += "| event | built-in | this sandboxer |\n|---|---|---|\n";
        for (event, builtin, ours) in &self.rows {
            let reports: Vec<String> = event.reports.iter().map(|report| link(report)).collect();
            let reports = match reports.is_empty() {
                true => String::new(),
                false => format!(" ({})", reports.join(", ")),
            };
            text += &format!("| {}{reports} | {builtin} | {ours} |\n", event.what);
        }
        if let Some((builtin, ours)) = &self.churn {
            text += &churn(&self.version, builtin, ours);
        }
        if print {
            println!("{text}");
            return Ok(());
        }
        replace(&part(&self.version), &text)
    }
}

/// The part of the page that one release has.
fn part(version: &str) -> PathBuf {
    crate::results().join(format!("{version}.md"))
}

/// Writes the page from the parts of these releases.
pub(crate) fn write(versions: &[String]) -> Result<()> {
    let mut text = HEAD.to_owned();
    for version in versions {
        let part = part(version);
        text += &fs::read_to_string(&part).with_context(|| part.display().to_string())?;
    }
    replace(&Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/compare.md"), &text)
}

/// A link to a thread.
fn link(report: &str) -> String {
    let (repository, number) = report.split_once('#').unwrap_or((report, ""));
    let name = match repository {
        "containerd/containerd" => "",
        other => other.split('/').next_back().unwrap_or_default(),
    };
    format!("[{name}#{number}](https://github.com/{repository}/issues/{number})")
}

fn churn(version: &str, builtin: &Churn, ours: &Churn) -> String {
    let pods = builtin.pods;
    let mut text = format!(
        "\n### {pods} pods in a churn, containerd {version}\nFour at a time, each with a network \
         namespace and one container, which runs for 0.2 s. After\neach sixth pod one of these is \
         killed, in turn: containerd, a random shim, the sandboxer (not with\nthe built-in), a \
         random shim. A writer syncs each MiB all the time. Calls are repeated for 120 s.\nAs \
         kubelet does, the churn makes a pod anew that has ended before its container ran, and\n\
         removes what failed calls of RunPodSandbox have left in CRI's list. Leftovers are \
         counted {} s\nafter the last pod, or as soon as there are none.\n\n\
         | | built-in | this sandboxer |\n|---|---|---|\n",
        crate::events::COLLECT.as_secs()
    );
    let [a, b] = [builtin, ours].map(|churn| churn.kills);
    let c = [builtin, ours].map(|churn| churn.anew);
    text += &format!("| kills of containerd | {} | {} |\n", a[0], b[0]);
    text += &format!("| kills of the sandboxer | none runs | {} |\n", b[1]);
    text += &format!("| kills of shims | {} | {} |\n", a[2], b[2]);
    text += &format!("| pods that ended before their container ran | {} | {} |\n", c[0], c[1]);
    text += &format!("| time | {} | {} |\n", seconds(builtin.took), seconds(ours.took));
    let mut row = |what: &str, count: &dyn Fn(&Churn) -> usize| {
        let [a, b] = [builtin, ours].map(|churn| match count(churn) {
            0 => "0".to_owned(),
            many => format!("**{many}**"),
        });
        text += &format!("| {what} | {a} | {b} |\n");
    };
    row("exit codes lost, of containers whose shim was not killed", &|churn| churn.codes_lost);
    row("exit codes that containerd has logged and lost", &|churn| churn.codes_forgotten);
    row("pods whose container did not start", &|churn| churn.not_run);
    row("pods that cannot be removed", &|churn| churn.stuck);
    for kind in Kind::ALL {
        row(&format!("left: {}", kind.names()), &|churn| churn.left.count(kind));
    }
    text
}

fn output(program: &str, arguments: &[&str]) -> Result<String> {
    let done = Command::new(program).args(arguments).output().context(program.to_owned())?;
    ensure!(done.status.success(), "{program}: {}", String::from_utf8_lossy(&done.stderr));
    Ok(String::from_utf8(done.stdout)?.trim().to_owned())
}

/// Replaces a page at once.
pub(crate) fn replace(page: &Path, text: &str) -> Result<()> {
    let new = crate::results().join("new");
    fs::write(&new, text)?;
    fs::rename(&new, page).with_context(|| format!("write {}", page.display()))
}
