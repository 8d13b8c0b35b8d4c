//! `make conformance`: kubelet's own test suite of CRI, critest, with the pods of containerd's
//! built-in controller, with this sandboxer's, and with those of the built-in controller whose shim
//! is the own one. It fails when a case passes with the first and not with another, and when fewer
//! cases pass than are known to.
//!
//! usage: conformance [CASE...], each a regular expression
//!
//! All happens in network and IPC namespaces of its own, with a registry on loopback that holds
//! images made here. CONFORMANCE_DIR names what `tests/kit/fetch-conformance` has fetched.
//!
//! Promise: conformance_holds.

mod crictl;
mod images;
mod known;
mod registry;
mod suite;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::machine::cgroup;
use kit::{Handler, Node, Options, Thing};
use nix::sched::{CloneFlags, unshare};
use serde_json::json;
use suite::{Critest, Outcome, Outcomes};

/// The handler of the built-in controller with the own shim.
const ALONE: &str = "runc-small";
/// How long what the pods have left may take to go. Segments of shared memory, which critest
/// leaves, stay.
const SETTLE: Duration = Duration::from_secs(5);

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("conformance: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<bool> {
    let focus: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let directory = std::env::var_os("CONFORMANCE_DIR")
        .map(PathBuf::from)
        .context("CONFORMANCE_DIR is not set; `make conformance` sets it")?;
    // Before there are threads, which would keep the machine's. Cases use fixed ports, map ports
    // with iptables and make segments of shared memory.
    unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWIPC).context("unshare")?;
    let up = Command::new("ip").args(["link", "set", "lo", "up"]).status()?;
    ensure!(up.success(), "ip link set lo up: {up}");
    tokio::runtime::Runtime::new()?.block_on(all(&directory, &focus))
}

async fn all(directory: &Path, focus: &[String]) -> Result<bool> {
    let sandboxer = PathBuf::from(env!("CARGO_BIN_EXE_pause-sandboxer"));
    let shim = sandboxer.with_file_name(kit::shim::NAME);
    let options = Options {
        containerd_config: registry::CONTAINERD.to_owned() + &alone(&shim),
        sandboxer: Some(sandboxer),
        ..Options::default()
    };
    let node = Node::start(options).await?;
    prepare(&node).await?;
    let images = images::all(registry::ADDRESS, &directory.join("busybox"))?;
    let _registry = registry::start(&directory.join("docker-registry"), &node, images).await?;
    let critest = Critest::new(directory.to_owned());
    let version = node.parts().version();
    // A part of the cases has no floor.
    let floor = if focus.is_empty() { known::floor(&version)? } else { 0 };
    let mut runs = Vec::new();
    for handler in [Handler::Builtin.name(), Handler::Ours.name(), ALONE] {
        // The first pod makes what stays, such as the bridge.
        let own = (handler == ALONE).then_some(shim.as_path());
        crictl::session(&directory.join("crictl"), &node, handler, own)
            .with_context(|| format!("crictl with {handler}"))?;
        let before = node.snapshot()?;
        runs.push(critest.run(&node, handler, focus).await?);
        let mut left = node.left_since(&before, SETTLE).await?;
        if handler == Handler::Builtin.name() {
            // If a plugin of NRI refuses a pod, containerd may not remove it.
            left.retain(|thing| matches!(thing, Thing::Pod(..) | Thing::Record(..)));
            node.remove_left(&left).await?;
            continue;
        }
        // Segments are of critest itself.
        left.retain(|thing| !matches!(thing, Thing::Segment(..)));
        let text = left.iter().map(|thing| format!("\n  {thing}")).collect::<String>();
        ensure!(left.is_empty(), "{handler}: left behind:{text}");
    }
    // Pods without a cgroup parent have made it. Another node's may be in it.
    drop(cgroup::remove(cgroup::WITHOUT_PARENT));
    let [builtin, ours, alone] = runs.as_slice() else { unreachable!("three handlers") };
    let runs = Runs { builtin, ours, alone };
    let fine = runs.compare(floor);
    runs.write(&version, directory)?;
    Ok(fine)
}

/// The handler [`ALONE`], as text of containerd's config.
fn alone(shim: &Path) -> String {
    let table = format!("plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.{ALONE}");
    format!(
        "\n[{table}]\nruntime_type = \"io.containerd.runc.v2\"\nruntime_path = {shim:?}\n\
         \n[{table}.options]\nRoot = \"{{top}}/runc\"\n"
    )
}

/// A node that maps ports, with a runc that knows idmapped mounts, and with the sandboxer.
async fn prepare(node: &Arc<Node>) -> Result<()> {
    node.stop_containerd().await?;
    let top = &node.layout().top;
    let portmap = node.parts().cni_plugins().join("portmap");
    std::os::unix::fs::symlink(portmap, top.join("cni/bin/portmap"))?;
    let path = top.join("cni/conf/10-pods.conflist");
    let mut network: serde_json::Value = serde_json::from_slice(&fs::read(&path)?)?;
    let plugins = network["plugins"].as_array_mut().context("a network without plugins")?;
    plugins.push(json!({ "type": "portmap", "capabilities": { "portMappings": true } }));
    fs::write(&path, network.to_string())?;
    let path = node.layout().containerd_config();
    let root = format!("Root = \"{}/runc\"\n", top.display());
    let runc = node.parts().runc().canonicalize()?;
    let with = format!("{root}BinaryName = \"{}\"\n", runc.display());
    fs::write(&path, fs::read_to_string(&path)?.replace(&root, &with))?;
    node.start_containerd().await?;
    node.start_sandboxer().await
}

/// The outcomes by handler.
struct Runs<'a> {
    builtin: &'a Outcomes,
    ours: &'a Outcomes,
    /// Of [`ALONE`].
    alone: &'a Outcomes,
}

impl Runs<'_> {
    /// Each, with its name in the results and in words.
    fn each(&self) -> [(&'static str, &'static str, &Outcomes); 3] {
        [
            ("builtin", "the built-in controller", self.builtin),
            ("ours", "this sandboxer", self.ours),
            ("alone", "the built-in controller and the own shim", self.alone),
        ]
    }

    /// Prints what did not pass with all, and whether the other two pass all that the built-in
    /// controller with containerd's shim passes, and this sandboxer at least `floor` cases.
    fn compare(&self, floor: usize) -> bool {
        let none = Outcome::Failed("it did not run".to_owned());
        let mut regressions = 0;
        for case in self.names() {
            let theirs = self.builtin.get(case).unwrap_or(&none);
            for (_, with, outcomes) in self.each() {
                let here = outcomes.get(case).unwrap_or(&none);
                if *here != Outcome::Passed {
                    let is_worse = *theirs == Outcome::Passed;
                    regressions += usize::from(is_worse);
                    let mark = if is_worse { "NOT HERE: " } else { "" };
                    println!("{mark}{case}: {} with {with} ({})", here.word(), here.why());
                }
            }
        }
        let passed = |outcomes: &Outcomes| {
            outcomes.values().filter(|outcome| **outcome == Outcome::Passed).count()
        };
        let counts = self.each().map(|(_, with, outcomes)| (with, passed(outcomes)));
        for (with, count) in counts {
            println!("conformance: {count} cases passed with {with}");
        }
        println!(
            "conformance: {regressions} passed with the built-in controller and not with another"
        );
        let few = passed(self.ours) < floor;
        if few {
            println!("conformance: {floor} cases pass with this sandboxer on this release");
        }
        regressions == 0 && !few
    }

    /// All cases.
    fn names(&self) -> BTreeSet<&String> {
        self.each().into_iter().flat_map(|(_, _, outcomes)| outcomes.keys()).collect()
    }

    /// Writes the outcomes to the directory of results.
    fn write(&self, version: &str, directory: &Path) -> Result<()> {
        let Some(results) = std::env::var_os("RESULTS_DIR").map(PathBuf::from) else {
            return Ok(());
        };
        let critest = fs::read_to_string(directory.join("complete"))?;
        let cases: Vec<_> = self
            .names()
            .into_iter()
            .map(|case| {
                let mut line = json!({ "case": case });
                for (name, _, outcomes) in self.each() {
                    line[name] = json!(outcomes.get(case).map(|one| (one.word(), one.why())));
                }
                line
            })
            .collect();
        let date = Command::new("date").args(["-u", "+%F"]).output()?.stdout;
        let date = String::from_utf8(date)?.trim().to_owned();
        let result = json!({
            "containerd": version,
            "critest": critest.trim(),
            "date": date,
            "cases": cases,
        });
        fs::create_dir_all(&results)?;
        fs::write(
            results.join(format!("conformance-{version}.json")),
            serde_json::to_string_pretty(&result)?,
        )
        .context("write the results")
    }
}
