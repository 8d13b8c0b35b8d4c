//! Runs every case with both sandboxers on one node, and looks after each at what it left.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::path::PathBuf;
use std::pin::Pin;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::{ContainerSpec, Handler, Node, Options, PodSpec, Snapshot};
use libtest_mimic::{Arguments, Failed, Trial};
use tokio::runtime::Runtime;

/// Time limit of a case; a hang is a failure that names its place.
const LIMIT: Duration = Duration::from_secs(90);
/// How often the sandboxer looks for what containerd never asks to remove; its own choice is every
/// minute. Some cases ask it in containerd's place, and are done sooner.
const FORGOTTEN_INTERVAL: Duration = Duration::from_secs(1);
/// How long is waited for what is known not to go.
const KNOWN_LEFT: Duration = Duration::from_secs(2);
/// Lines of each daemon's log that a failed case shows.
const LOG_LINES: usize = 40;

type Running = Pin<Box<dyn Future<Output = Result<()>>>>;

/// One case of the suite.
pub(crate) struct Case {
    name: &'static str,
    handlers: &'static [Handler],
    /// Why the built-in controller has no such case.
    why_ours_alone: Option<&'static str>,
    run: fn(Bench) -> Running,
}

impl Case {
    /// A case of both sandboxers.
    pub(crate) const fn both(name: &'static str, run: fn(Bench) -> Running) -> Self {
        Self { name, handlers: &Handler::ALL, why_ours_alone: None, run }
    }

    /// A case of this sandboxer alone, and why.
    pub(crate) const fn ours(
        name: &'static str,
        why: &'static str,
        run: fn(Bench) -> Running,
    ) -> Self {
        Self { name, handlers: &[Handler::Ours], why_ours_alone: Some(why), run }
    }
}

/// Names async functions as cases: `cases![both: a, b]`, `cases![ours, "the built-in has no such
/// thing": c]`.
macro_rules! cases {
    (both: $($case:ident),* $(,)?) => {
        vec![$(crate::harness::Case::both(stringify!($case), |bench| Box::pin($case(bench)))),*]
    };
    (ours, $why:literal: $($case:ident),* $(,)?) => {
        vec![$(
            crate::harness::Case::ours(stringify!($case), $why, |bench| Box::pin($case(bench)))
        ),*]
    };
}
pub(crate) use cases;

/// The arguments of a case.
#[derive(Clone)]
pub(crate) struct Bench {
    case: &'static str,
    pub(crate) handler: Handler,
    pub(crate) node: Arc<Node>,
    suite: Arc<Suite>,
    known: Arc<Mutex<Option<Known>>>,
}

impl Bench {
    /// Says what kinds of thing the built-in controller is known to leave after this case, and why.
    /// This sandboxer may leave nothing.
    pub(crate) fn builtin_leaves(&self, kinds: &'static [&'static str], why: &'static str) {
        *lock(&self.known) = Some(Known { kinds, why });
    }

    /// Runs a pod by the case's sandboxer.
    pub(crate) async fn run(&self, spec: PodSpec) -> Result<kit::Pod> {
        self.node.run(self.handler, spec).await
    }

    /// Restarts the sandboxer with further options.
    pub(crate) async fn restart_with(&self, options: &[&str]) -> Result<()> {
        self.node.stop_sandboxer().await?;
        let mut command = self.node.sandboxer_command()?;
        command.args(options);
        self.node.start_sandboxer_as(command).await
    }

    /// Says that the two sandboxers differ in `what`, why, and checks that this one does as is said
    /// of it.
    pub(crate) fn differs<T: PartialEq + Debug>(
        &self,
        what: &str,
        observed: &T,
        difference: Difference<T>,
    ) -> Result<()> {
        let Difference { builtin, ours, why } = difference;
        let line = format!("built-in {builtin:?}, ours {ours:?}: {why}");
        lock(&self.suite.differences).insert((self.case, what.to_owned()), line);
        let expected = match self.handler {
            Handler::Builtin => builtin,
            Handler::Ours => ours,
        };
        ensure!(
            *observed == expected,
            "{what}: {observed:?}, but expected of this sandboxer is {expected:?}"
        );
        Ok(())
    }
}

/// Known leftovers of the built-in controller after a case.
struct Known {
    kinds: &'static [&'static str],
    why: &'static str,
}

/// The expected behaviour of each of the two, and why they differ.
pub(crate) struct Difference<T> {
    pub(crate) builtin: T,
    pub(crate) ours: T,
    pub(crate) why: &'static str,
}

struct Suite {
    runtime: Runtime,
    /// Started by the first case; why it did not start, if it did not.
    node: Mutex<Option<Result<Arc<Node>, String>>>,
    warm: Mutex<Vec<Handler>>,
    differences: Mutex<BTreeMap<(&'static str, String), String>>,
}

/// Runs the cases that the command line asks for.
pub(crate) fn run(cases: Vec<Case>) -> ExitCode {
    let mut arguments = Arguments::from_args();
    // One case after another: what one leaves must not be mistaken for another's.
    arguments.test_threads = Some(1);
    let runtime = match Runtime::new() {
        Ok(runtime) => runtime,
        Err(e) => {
            eprintln!("no runtime: {e}");
            return ExitCode::FAILURE;
        }
    };
    let suite = Arc::new(Suite {
        runtime,
        node: Mutex::new(None),
        warm: Mutex::new(Vec::new()),
        differences: Mutex::new(BTreeMap::new()),
    });
    let mut trials = Vec::new();
    for case in cases {
        for &handler in case.handlers {
            let side = match handler {
                Handler::Builtin => "builtin",
                Handler::Ours => "ours",
            };
            let (suite, name, body) = (Arc::clone(&suite), case.name, case.run);
            trials.push(Trial::test(format!("{name}::{side}"), move || {
                if let Some(why) = case.why_ours_alone {
                    let line = format!("has no such case: {why}");
                    lock(&suite.differences).insert((name, "the built-in".to_owned()), line);
                }
                suite
                    .runtime
                    .block_on(one(&suite, name, handler, body))
                    .map_err(|e| Failed::from(format!("{e:#}")))
            }));
        }
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    let differences = std::mem::take(&mut *lock(&suite.differences));
    if !differences.is_empty() {
        println!("expected differences between the built-in controller and this sandboxer:");
        for ((case, what), line) in differences {
            println!("  {case}: {what}: {line}");
        }
    }
    drop(lock(&suite.node).take());
    conclusion.exit_code()
}

async fn one(
    suite: &Arc<Suite>,
    case: &'static str,
    handler: Handler,
    body: fn(Bench) -> Running,
) -> Result<()> {
    let node = shared_node(suite).await?;
    let done = checked(suite, &node, case, handler, body).await;
    if done.is_err() {
        let logs = node.log_tails(LOG_LINES);
        // Its leftovers would be mistaken for those of the next case, and a daemon that it has
        // ended would be missed.
        lock(&suite.warm).clear();
        drop(lock(&suite.node).take());
        return done.context(logs);
    }
    done
}

async fn checked(
    suite: &Arc<Suite>,
    node: &Arc<Node>,
    case: &'static str,
    handler: Handler,
    body: fn(Bench) -> Running,
) -> Result<()> {
    warm_up(suite, node, handler).await?;
    let before = node.snapshot()?;
    let known = Arc::new(Mutex::new(None));
    let bench = Bench {
        case,
        handler,
        node: Arc::clone(node),
        suite: Arc::clone(suite),
        known: Arc::clone(&known),
    };
    let limit = kit::patient(LIMIT);
    match tokio::time::timeout(limit, body(bench)).await {
        Ok(done) => done?,
        Err(_) => anyhow::bail!("not done after {limit:?}"),
    }
    let known = lock(&known).take();
    match known {
        Some(known) if handler == Handler::Builtin => {
            known_left(suite, node, case, &before, &known).await
        }
        _ => node.settles_to(&before).await,
    }
}

/// Writes down what the built-in controller has left, which may be of the known kinds only, and
/// removes it.
async fn known_left(
    suite: &Suite,
    node: &Node,
    case: &'static str,
    before: &Snapshot,
    known: &Known,
) -> Result<()> {
    let left = node.left_since(before, KNOWN_LEFT).await?;
    let strange: Vec<String> = left
        .iter()
        .filter(|thing| !known.kinds.contains(&thing.kind()))
        .map(ToString::to_string)
        .collect();
    ensure!(strange.is_empty(), "left behind, and not known for it:\n  {}", strange.join("\n  "));
    let mut counts = BTreeMap::new();
    for thing in &left {
        *counts.entry(thing.kind()).or_insert(0) += 1;
    }
    let line = format!("built-in {counts:?}, ours nothing: {}", known.why);
    lock(&suite.differences).insert((case, "left behind".to_owned()), line);
    node.remove_left(&left).await?;
    node.settles_to(before).await
}

async fn shared_node(suite: &Suite) -> Result<Arc<Node>> {
    if let Some(known) = lock(&suite.node).as_ref() {
        return known.clone().map_err(|reason| anyhow::anyhow!("the node did not start: {reason}"));
    }
    let sandboxer = Some(PathBuf::from(env!("CARGO_BIN_EXE_pause-sandboxer")));
    let sandboxer_config =
        format!("forgotten_interval = {}\n", kit::patient(FORGOTTEN_INTERVAL).as_secs());
    let options = Options { sandboxer, sandboxer_config, ..Options::default() };
    let started = Node::start(options).await;
    let known = started.as_ref().map(Arc::clone).map_err(|e| e.to_string());
    *lock(&suite.node) = Some(known);
    started
}

/// Makes what a sandboxer and the pod network make once for all pods, such as the bridge.
async fn warm_up(suite: &Suite, node: &Arc<Node>, handler: Handler) -> Result<()> {
    if handler == Handler::Ours && node.sandboxer_pid().is_err() {
        node.start_sandboxer().await?;
    }
    if !lock(&suite.warm).contains(&handler) {
        let pod = node.run(handler, PodSpec::new("warm-up")).await.context("warm-up")?;
        pod.run(ContainerSpec::sleeping("main")).await.context("warm-up")?;
        // Else the cases would be about another shim than the environment asks for.
        if handler == Handler::Ours && kit::shim::setting() == "own" {
            let log = std::fs::read_to_string(node.layout().sandboxer_log())?;
            ensure!(log.contains(&format!("/{}", kit::shim::NAME)), "the own shim is not used");
        }
        pod.remove().await.context("warm-up")?;
        lock(&suite.warm).push(handler);
    }
    Ok(())
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
