//! `make test-kubernetes`: every kind of pod in a cluster of a real Kubernetes, by containerd's
//! built-in controller and by this sandboxer, side by side. A case passes if it holds with both and
//! shows the same with both, but for the differences in `known.rs`.
//!
//! It runs in a lane (`tests/kit/lanes`), or with `make test-kubernetes-vm` on a node with systemd
//! and cgroup version 2 (`tests/vm`), on what `tests/kit/fetch-kubernetes` makes, which
//! KUBERNETES_DIR names. It writes its results to RESULTS_DIR; `docs/compatibility.md` has those of
//! the last run.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod cgroups;
mod cluster;
mod fields;
mod installer;
mod known;
mod life;
mod machine;
mod metrics;
mod resources;
mod restarts;
mod results;
mod session;
mod side;
mod times;
mod workloads;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, RwLock};

use anyhow::{Context, Result, ensure};
use kit::Handler;
use libtest_mimic::{Arguments, Failed, Trial};

use cluster::Cluster;
use machine::Machine;
use results::Outcome;
use side::{Facts, Side};

/// Cases at a time on a machine of usual speed: most of their time is waiting.
const AT_ONCE: u32 = 3;

/// How a case is run.
enum Run {
    /// By both handlers at the same time, beside other cases.
    Each(fn(&Side) -> Result<Facts>),
    /// By both handlers, one after the other, and by nothing else.
    Alone(fn(&Side) -> Result<Facts>),
    /// Once, with pods of both handlers, and by nothing else.
    Both(fn(&[Side; 2]) -> Result<[Facts; 2]>),
}

struct Case {
    name: &'static str,
    run: Run,
}

fn cases() -> Vec<Case> {
    [
        session::CASES,
        times::CASES,
        cgroups::CASES,
        life::CASES,
        fields::CASES,
        resources::CASES,
        workloads::CASES,
        metrics::CASES,
        restarts::CASES,
        installer::CASES,
    ]
    .into_iter()
    .flatten()
    .map(|(name, run)| Case {
        name,
        run: match run {
            Run::Each(f) => Run::Each(*f),
            Run::Alone(f) => Run::Alone(*f),
            Run::Both(f) => Run::Both(*f),
        },
    })
    .collect()
}

/// The objects that all cases share.
struct Shared {
    cluster: Cluster,
    /// Taken for writing by a case that runs alone.
    alone: RwLock<()>,
    outcomes: Mutex<BTreeMap<&'static str, Outcome>>,
}

fn sides(cluster: &Cluster) -> [Side<'_>; 2] {
    Handler::ALL.map(|handler| Side { cluster, handler })
}

fn one(shared: &Shared, case: &Case) -> Result<()> {
    // The lock is held until the programs are checked: the next case may stop one of them.
    let (_beside_others, _alone) = match case.run {
        Run::Each(_) => (Some(shared.alone.read().unwrap()), None),
        Run::Alone(_) | Run::Both(_) => (None, Some(shared.alone.write().unwrap())),
    };
    let [builtin, ours] = match case.run {
        Run::Each(run) => {
            let [builtin, ours] = sides(&shared.cluster);
            std::thread::scope(|scope| {
                let ours = scope.spawn(move || run(&ours));
                [run(&builtin), ours.join().expect("a case panicked")]
            })
        }
        Run::Alone(run) => sides(&shared.cluster).map(|side| run(&side)),
        Run::Both(run) => match run(&sides(&shared.cluster)) {
            Ok(facts) => facts.map(Ok),
            Err(e) => [Err(anyhow::Error::msg("see the other")), Err(e)],
        },
    };
    shared.cluster.check_programs()?;
    let outcome = Outcome::of(case.name, &builtin, &ours);
    let unexplained = outcome.unexplained();
    shared.outcomes.lock().unwrap().insert(case.name, outcome);
    let ours = ours.context("with this sandboxer");
    let builtin = builtin.context("with the built-in controller");
    match (builtin, ours) {
        (Err(a), Err(b)) => Err(a.context(format!("{b:#}"))),
        (Err(e), Ok(_)) | (Ok(_), Err(e)) => Err(e),
        (Ok(_), Ok(_)) => {
            ensure!(unexplained.is_empty(), "differs:\n  {}", unexplained.join("\n  "));
            Ok(())
        }
    }
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    let on_a_node = Machine::get().is_ok_and(|machine| machine.is_node());
    let at_once = kit::fewer("cases at a time", AT_ONCE);
    arguments.test_threads = arguments.test_threads.or(usize::try_from(at_once).ok());
    let Some(kubernetes) = std::env::var_os("KUBERNETES_DIR").map(PathBuf::from) else {
        eprintln!("kubernetes: KUBERNETES_DIR is not set; `make test-kubernetes` sets it");
        return ExitCode::FAILURE;
    };
    let shared = match start(&arguments, &kubernetes) {
        Ok(shared) => Arc::new(shared),
        Err(e) => {
            eprintln!("kubernetes: {e:#}");
            return ExitCode::FAILURE;
        }
    };
    let cannot_run = known::cannot_run(on_a_node);
    let can_run = |case: &Case| !cannot_run.iter().any(|(name, _)| *name == case.name);
    let to_run: Vec<Case> = cases().into_iter().filter(can_run).collect();
    let count = to_run.len();
    let trials = to_run.into_iter().map(|case| {
        let (name, shared) = (case.name, shared.clone());
        Trial::test(name, move || {
            let shared = shared.as_ref().as_ref().expect("a cluster");
            one(shared, &case).map_err(|e| {
                // The harness says why at the end of all cases, which is up to an hour later.
                eprintln!("{name}: {e:#}");
                Failed::from(format!("{e:#}"))
            })
        })
    });
    let skipped = cannot_run.iter().map(|(name, why)| {
        Trial::test(*name, move || Err(Failed::from(*why))).with_ignored_flag(true)
    });
    let conclusion = libtest_mimic::run(&arguments, trials.chain(skipped).collect());
    let Some(shared) = shared.as_ref() else { return conclusion.exit_code() };
    let whole = arguments.filter.is_none() && arguments.skip.is_empty();
    let outcomes = shared.outcomes.lock().unwrap();
    let whole = whole.then_some(count);
    if let Err(e) = results::report(&shared.cluster, &outcomes, cannot_run, whole) {
        eprintln!("kubernetes: {e:#}");
        return ExitCode::FAILURE;
    }
    conclusion.exit_code()
}

/// The cluster, unless the cases are only listed.
fn start(arguments: &Arguments, kubernetes: &std::path::Path) -> Result<Option<Shared>> {
    if arguments.list {
        return Ok(None);
    }
    let cluster = Cluster::start(kubernetes)?;
    let class = include_str!("../../packaging/kubernetes/runtimeclass.yaml");
    cluster::output(cluster.kubectl_command(&["apply", "-f", "-"]), class.as_bytes())?;
    cluster.kubectl(&["label", "node", cluster::NODE, "pause-sandboxer/ready=true"])?;
    for side in sides(&cluster) {
        side.prepare()?;
    }
    Ok(Some(Shared { cluster, alone: RwLock::default(), outcomes: Mutex::default() }))
}
