//! What an operator budgets for pods: the memory of everything that serves them at several numbers
//! of pods, the processor time while nothing happens, and how long pods take to start, with both
//! controllers counted alike: `make budget`, which writes the tables to `target/bench/budget.md`.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kit::machine::processes::{self, Memory};
use kit::{ContainerSpec, Cri, Handler, Node, Pod, PodSpec};
use serde::Serialize;
use tokio::task::JoinSet;

use crate::chart;
use crate::concurrency;
use crate::samples::Samples;
use crate::setup::{BUILTIN, OURS, Setup, Target};

/// Numbers of live pods.
const LEVELS: [usize; 7] = [0, 10, 30, 110, 250, 500, 1000];
/// kubelet's default for the pods of a node. So many are started by one client.
pub(crate) const NODE: usize = 110;
/// Those that start the others.
const CLIENTS: usize = 8;
/// Until Go runtimes have collected what they will collect soon.
const SETTLES: Duration = Duration::from_secs(5);
/// How long nothing happens while processor time is counted.
const AT_REST: Duration = Duration::from_secs(30);
/// New nodes whose first pod is measured.
const COLD: usize = 5;

/// The memory of one number of pods, kilobytes.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) target: &'static str,
    pub(crate) with_container: bool,
    pub(crate) pods: usize,
    pub(crate) shims: Memory,
    pub(crate) pauses: Memory,
    /// All of the daemon.
    pub(crate) daemon: Memory,
    /// What containerd has grown by since it had no pod.
    pub(crate) containerd: Memory,
}

/// How long pods of one kind took to start, milliseconds, and the processor time at rest.
#[derive(Clone, Debug, Serialize)]
struct Times {
    target: &'static str,
    with_container: bool,
    /// Median of the first pod of a new node.
    cold_ms: f64,
    one_client_p50_ms: f64,
    one_client_p99_ms: f64,
    one_client_per_s: f64,
    /// 0 without so many pods.
    eight_clients_p50_ms: f64,
    eight_clients_p99_ms: f64,
    eight_clients_per_s: f64,
    /// Milliseconds of processor time of all processes per minute and pod, with 110 pods.
    at_rest_ms: f64,
    /// Of the daemon and of containerd's growth, kilobytes, when all pods are removed again.
    after: (Memory, Memory),
}

impl Row {
    /// Proportional set sizes of all processes, kilobytes.
    pub(crate) fn pss(&self) -> f64 {
        self.shims.pss + self.pauses.pss + self.daemon.pss + self.containerd.pss
    }
}

/// Measures with at most so many pods, prints the tables and writes them to `target/bench`.
pub(crate) async fn measure(most: usize) -> Result<()> {
    ensure!(most >= NODE, "at least {NODE} pods");
    let (mut rows, mut times) = (Vec::new(), Vec::new());
    for (name, with_container) in [(BUILTIN, false), (OURS, false), (BUILTIN, true), (OURS, true)] {
        let kind = Kind { target: Target::named(name), with_container };
        let (more, took) = kind.measure(most).await.with_context(|| kind.target.name)?;
        eprintln!("{} {}: measured", kind.target.name, pods_of(with_container));
        rows.extend(more);
        times.push(took);
    }
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/bench");
    std::fs::create_dir_all(&directory)?;
    let text = memory_table(&rows) + "\n" + &times_table(&times);
    println!("{text}");
    std::fs::write(directory.join("budget.md"), text)?;
    std::fs::write(directory.join("memory.svg"), chart::memory(&rows))?;
    let all = serde_json::json!({ "memory": rows, "times": times });
    std::fs::write(directory.join("budget.json"), serde_json::to_vec_pretty(&all)?)?;
    Ok(())
}

/// Pods of one target, with or without a container.
struct Kind {
    target: Target,
    with_container: bool,
}

impl Kind {
    async fn measure(&self, most: usize) -> Result<(Vec<Row>, Times)> {
        let mut cold = Samples::default();
        for _ in 1..COLD {
            let setup = Setup::new().await?;
            let (pods, first) = self.run(&setup, 1, 0..1).await?;
            cold.extend(first);
            concurrency::remove(pods).await?;
        }
        let setup = Setup::new().await?;
        let (warm, first) = self.run(&setup, 1, 0..1).await?;
        cold.extend(first);
        concurrency::remove(warm).await?;
        // Memory that containerd and the daemon need for any pod is not growth.
        let (warm, _) = self.run(&setup, CLIENTS, 0..16).await?;
        concurrency::remove(warm).await?;
        tokio::time::sleep(SETTLES).await;
        let without = Memory::of(setup.node.containerd_pid()?)?;

        let (mut rows, mut pods) = (Vec::new(), Vec::new());
        let (mut one, mut eight) = (Rate::default(), Rate::default());
        let mut at_rest_ms = 0.0;
        for level in LEVELS.into_iter().filter(|level| *level <= most) {
            let begun = Instant::now();
            let (clients, rate) = if level <= NODE { (1, &mut one) } else { (CLIENTS, &mut eight) };
            let (more, samples) = self.run(&setup, clients, pods.len()..level).await?;
            rate.add(samples, more.len(), begun.elapsed());
            pods.extend(more);
            tokio::time::sleep(SETTLES).await;
            rows.push(self.row(&setup, level, without)?);
            if level == NODE {
                let used = || setup.accounts["pods"].used();
                let before = used()?;
                tokio::time::sleep(AT_REST).await;
                let minutes = AT_REST.as_secs_f64() / 60.0;
                at_rest_ms = (used()? - before).as_secs_f64() * 1e3 / minutes / level as f64;
            }
        }
        concurrency::remove(pods).await?;
        tokio::time::sleep(SETTLES).await;
        let after = self.row(&setup, 0, without)?;
        let times = Times {
            target: self.target.name,
            with_container: self.with_container,
            cold_ms: cold.median_ms(),
            one_client_p50_ms: one.samples.median_ms(),
            one_client_p99_ms: one.samples.p99_us() / 1e3,
            one_client_per_s: one.per_second(),
            eight_clients_p50_ms: eight.samples.median_ms(),
            eight_clients_p99_ms: eight.samples.p99_us() / 1e3,
            eight_clients_per_s: eight.per_second(),
            at_rest_ms,
            after: (after.daemon, after.containerd),
        };
        Ok((rows, times))
    }

    /// Starts pods with the node's network, each client one after another; how long each took.
    async fn run(
        &self,
        setup: &Setup,
        clients: usize,
        numbers: std::ops::Range<usize>,
    ) -> Result<(Vec<Pod>, Samples)> {
        let mut shares = vec![Vec::new(); clients];
        for number in numbers {
            let spec = PodSpec::new(&format!("budget-{number}")).host_network();
            shares[number % clients].push(setup.node.prepare(spec)?);
        }
        let mut running = JoinSet::new();
        for share in shares {
            let (node, handler) = (setup.node.clone(), self.target.handler());
            let with_container = self.with_container;
            running.spawn(async move {
                let cri = Cri::new(node.layout().containerd_socket());
                let (mut pods, mut samples) = (Vec::new(), Samples::default());
                for home in share {
                    let begun = Instant::now();
                    let id = cri.run_pod_sandbox(home.config(), &handler).await?;
                    let pod = Pod::new(&node, Handler::Ours, home, id);
                    if with_container {
                        pod.run(ContainerSpec::sleeping("main")).await?;
                    }
                    samples.push(begun.elapsed());
                    pods.push(pod);
                }
                anyhow::Ok((pods, samples))
            });
        }
        let (mut pods, mut all) = (Vec::new(), Samples::default());
        while let Some(ended) = running.join_next().await {
            let (more, samples) = ended??;
            pods.extend(more);
            all.extend(samples);
        }
        Ok((pods, all))
    }

    fn row(&self, setup: &Setup, pods: usize, without: Memory) -> Result<Row> {
        let (mut shims, mut pauses) = (Memory::default(), Memory::default());
        let (top, inside) = (setup.node.layout().top.display().to_string(), inside(&setup.node));
        let mut found = 0;
        for process in processes::all()? {
            let memory = || Memory::of(process.pid);
            if is_shim(&process) && process.command.contains(&top) {
                shims += memory()?;
            } else if process.command.starts_with("/pause") && process.cgroups.contains(&inside) {
                found += 1;
                pauses += memory()?;
            }
        }
        ensure!(found == pods, "{found} pauses of {pods} pods");
        let daemon = match setup.daemons.get(self.target.sandboxer()) {
            Some(daemon) => Memory::of(daemon.pid()?)?,
            None => Memory::default(),
        };
        let containerd = Memory::of(setup.node.containerd_pid()?)? - without;
        let (target, with_container) = (self.target.name, self.with_container);
        Ok(Row { target, with_container, pods, shims, pauses, daemon, containerd })
    }
}

/// Pods and how long they took.
#[derive(Default)]
struct Rate {
    samples: Samples,
    pods: usize,
    took: Duration,
}

impl Rate {
    fn add(&mut self, samples: Samples, pods: usize, took: Duration) {
        self.samples.extend(samples);
        self.pods += pods;
        self.took += took;
    }

    fn per_second(&self) -> f64 {
        if self.pods == 0 { 0.0 } else { self.pods as f64 / self.took.as_secs_f64() }
    }
}

/// Of `/proc/PID/cgroup`: the node's cgroup is above.
fn inside(node: &Node) -> String {
    format!(":{}/", node.layout().cgroup())
}

fn is_shim(process: &processes::Proc) -> bool {
    process.comm.starts_with("containerd-shim") || process.comm == "runc-shim"
}

/// The name of a target in the tables.
fn name(target: &str) -> &str {
    match target {
        BUILTIN => "built-in",
        other => other,
    }
}

/// The kind of pods in the tables.
fn pods_of(with_container: bool) -> &'static str {
    if with_container { "with a container" } else { "idle" }
}

fn memory_table(rows: &[Row]) -> String {
    let mut text =
        "| pods | controller | shims | pauses | daemon | containerd's growth | all, MB | \
        a pod, kB |\n|---|---|---|---|---|---|---|---|\n"
            .to_owned();
    let cell = |memory: &Memory| format!("{:.1} ({:.1})", memory.pss / 1e3, memory.rss / 1e3);
    for row in rows {
        let each = if row.pods == 0 { 0.0 } else { row.pss() / row.pods as f64 };
        text += &format!(
            "| {} {} | {} | {} | {} | {} | {} | {:.1} | {each:.0} |\n",
            row.pods,
            pods_of(row.with_container),
            name(row.target),
            cell(&row.shims),
            cell(&row.pauses),
            cell(&row.daemon),
            cell(&row.containerd),
            row.pss() / 1e3,
        );
    }
    text
}

fn times_table(times: &[Times]) -> String {
    let mut text = "| pods | controller | first pod, ms | one client: p50, p99, ms | per second | \
        eight clients: p50, p99, ms | per second | at rest, ms per minute and pod | daemon and \
        containerd's growth after all pods, MB |\n|---|---|---|---|---|---|---|---|---|\n"
        .to_owned();
    for time in times {
        let eight = if time.eight_clients_per_s > 0.0 {
            format!(
                "{:.0}, {:.0} | {:.1}",
                time.eight_clients_p50_ms, time.eight_clients_p99_ms, time.eight_clients_per_s
            )
        } else {
            "| ".to_owned()
        };
        text += &format!(
            "| {} | {} | {:.0} | {:.0}, {:.0} | {:.1} | {eight} | {:.2} | {:.1}, {:.1} |\n",
            pods_of(time.with_container),
            name(time.target),
            time.cold_ms,
            time.one_client_p50_ms,
            time.one_client_p99_ms,
            time.one_client_per_s,
            time.at_rest_ms,
            time.after.0.pss / 1e3,
            time.after.1.pss / 1e3,
        );
    }
    text
}
