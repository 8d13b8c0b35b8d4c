//! Runs the cases, one after another, each within its time.

use std::pin::Pin;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use kit::{Handler, Node, Options, PodSpec};
use libtest_mimic::{Arguments, Failed, Trial};
use tokio::runtime::Runtime;

/// Time limit of a case, unless it has its own; a hang is a failure.
const LIMIT: Duration = Duration::from_secs(120);
/// Lines of each daemon's log that a failed case shows.
const LOG_LINES: usize = 40;

type Running = Pin<Box<dyn Future<Output = Result<()>>>>;

/// One case: alone, or with the node that all such cases share.
pub(crate) struct Case {
    name: &'static str,
    limit: Duration,
    body: Body,
}

enum Body {
    Alone(fn() -> Running),
    OnNode(fn(Arc<Node>) -> Running),
}

impl Case {
    /// A case that brings its own daemon.
    pub(crate) const fn alone(name: &'static str, run: fn() -> Running) -> Self {
        Self { name, limit: LIMIT, body: Body::Alone(run) }
    }

    /// A case of pods under containerd. It finds both daemons running, and must leave them so.
    pub(crate) const fn on_node(name: &'static str, run: fn(Arc<Node>) -> Running) -> Self {
        Self { name, limit: LIMIT, body: Body::OnNode(run) }
    }

    /// The same, with another limit.
    pub(crate) const fn within(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }
}

/// Names async functions as cases: `alone![a, b]`.
macro_rules! alone {
    ($($case:ident),* $(,)?) => {
        vec![$(crate::harness::Case::alone(stringify!($case), || Box::pin($case()))),*]
    };
}
pub(crate) use alone;

/// Names async functions as cases with the shared node: `on_node![a, b]`.
macro_rules! on_node {
    ($($case:ident),* $(,)?) => {
        vec![$(
            crate::harness::Case::on_node(stringify!($case), |node| Box::pin($case(node)))
        ),*]
    };
}
pub(crate) use on_node;

/// The sandboxer that is tested.
pub(crate) fn binary() -> &'static str {
    env!("CARGO_BIN_EXE_pause-sandboxer")
}

struct Suite {
    runtime: Runtime,
    node: Mutex<Option<Arc<Node>>>,
}

/// Runs the cases that the command line asks for.
pub(crate) fn run(cases: Vec<Case>) -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Leftovers and delays of one case must not be mistaken for those of another.
    arguments.test_threads = Some(1);
    let runtime = match Runtime::new() {
        Ok(runtime) => runtime,
        Err(e) => {
            eprintln!("no runtime: {e}");
            return ExitCode::FAILURE;
        }
    };
    crate::standalone::remove_orphans();
    let suite = Arc::new(Suite { runtime, node: Mutex::new(None) });
    let trials = cases
        .into_iter()
        .map(|case| {
            let suite = Arc::clone(&suite);
            Trial::test(case.name, move || {
                let begun = Instant::now();
                let done = suite.runtime.block_on(one(&suite, &case));
                eprintln!("{}: {:.1} s", case.name, begun.elapsed().as_secs_f32());
                done.map_err(|e| Failed::from(format!("{e:#}")))
            })
        })
        .collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    drop(lock(&suite.node).take());
    conclusion.exit_code()
}

async fn one(suite: &Suite, case: &Case) -> Result<()> {
    let node = match &case.body {
        Body::Alone(run) => return limited(case.limit, run()).await,
        Body::OnNode(run) => {
            let node = shared_node(suite).await?;
            let before = node.snapshot()?;
            let done = match limited(case.limit, run(Arc::clone(&node))).await {
                Ok(()) => node.settles_to(&before).await,
                failed => failed,
            };
            match done {
                Ok(()) => return Ok(()),
                Err(e) => Err::<(), _>(e).context(node.log_tails(LOG_LINES)).map(|()| node),
            }
        }
    };
    // The next case gets another.
    drop(lock(&suite.node).take());
    node.map(drop)
}

async fn limited(limit: Duration, running: Running) -> Result<()> {
    let limit = kit::patient(limit);
    match tokio::time::timeout(limit, running).await {
        Ok(done) => done,
        Err(_) => bail!("not done after {limit:?}"),
    }
}

async fn shared_node(suite: &Suite) -> Result<Arc<Node>> {
    if let Some(node) = lock(&suite.node).as_ref() {
        return Ok(Arc::clone(node));
    }
    // A daemon that is killed between Create and Start leaves a sandbox that containerd forgets and
    // its successor removes, by default within minutes.
    let sandboxer_config = "forgotten_interval = 1\n".to_owned();
    let options =
        Options { sandboxer: Some(binary().into()), sandboxer_config, ..Options::default() };
    let node = Node::start(options).await?;
    node.start_sandboxer().await?;
    // Makes what is made once for all pods, such as the bridge.
    let pod = node.run(Handler::Ours, PodSpec::new("warm-up")).await.context("warm-up")?;
    pod.run(kit::ContainerSpec::sleeping("main")).await.context("warm-up")?;
    pod.remove().await.context("warm-up")?;
    *lock(&suite.node) = Some(Arc::clone(&node));
    Ok(node)
}

/// A panic elsewhere leaves these values whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
