//! `pause-sandboxer selftest`: a whole pod through this node's own CRI, and then one of the default
//! handler.
//!
//! The image is made in memory and imported, so that no registry is needed. Names have a random
//! part, so that pods of the node are not affected. The test removes its own resources, also after
//! a signal, a failure or the deadline. At the end no mount, cgroup, process, network namespace,
//! CNI result or file with the name of the pod may exist.

use std::path::PathBuf;
use std::pin::{Pin, pin};
use std::time::{Duration, Instant};

use toml::{Table, Value};

use crate::check::Subject;
use crate::check::containerd::{self as node, NodeContainerd};
use crate::stop_signal;
use base::error::{IoContext as _, StepError, StepErrors};
use containerd_api::cri::CriClient;

mod image;
mod machine;
mod pod;

use pod::{PodPlan, TestPod, Timing};

/// Timeout for the resources of a removed pod to disappear.
const SETTLED: Duration = Duration::from_secs(15);

/// Where runc's shims have the state of containers, unless a handler's `Root` is set.
const RUNC_ROOT: &str = "/run/containerd/runc";

/// Polling interval of the check for leftover resources.
const INTERVAL: Duration = Duration::from_millis(100);

/// Maximum number of attempts: kubelet removes pods without an API object, such as the test pod.
const ATTEMPTS: usize = 5;

/// Why the test failed: a step, a requirement, a signal, the deadline, or what it left.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct SelftestError(String);

impl From<StepError> for SelftestError {
    fn from(step: StepError) -> Self {
        Self(step.to_string())
    }
}

impl From<String> for SelftestError {
    fn from(reason: String) -> Self {
        Self(reason)
    }
}

/// The options of the test.
#[derive(Clone, Debug)]
pub struct Selftest {
    /// The node.
    pub subject: Subject,
    /// The executable of the containers.
    pub program: &'static [u8],
    /// The runtime handler; `None`: the first one of this sandboxer.
    pub handler: Option<String>,
    /// Give the pods the node's network.
    pub host_network: bool,
    /// A command of the shell that restarts the sandboxer while the pod runs.
    pub restart: Option<String>,
    /// Deadline of all steps.
    pub within: Duration,
}

/// The outcome of one handler's pod.
struct Column {
    handler: String,
    timings: Vec<Timing>,
    /// The step that failed, and why.
    failed: Option<(&'static str, SelftestError)>,
}

/// The outcome of a test whose pods were started.
#[derive(Debug)]
pub struct SelftestReport {
    /// The table of the times, also of a test that failed.
    pub table: String,
    /// Why it failed: a step of a pod, or leftover resources or the image of the test.
    pub failed: Option<SelftestError>,
}

/// Runs the test. `say` gets a line for each retry.
///
/// # Errors
/// No pod was started. If the image may be left, the error says so.
pub async fn run(
    wanted: &Selftest,
    say: &mut dyn FnMut(String),
) -> Result<SelftestReport, SelftestError> {
    if !nix::unistd::geteuid().is_root() {
        return Err(SelftestError("must run as root".to_owned()));
    }
    let containerd = NodeContainerd::find(&wanted.subject);
    let merged = containerd.dump().await?;
    let (ours, others) = handlers(wanted, &merged, &containerd)?;
    let mut stop = pin!(stopped(wanted.within)?);
    let config = &wanted.subject.config;
    let cri = CriClient::new(&config.containerd_address);
    let (has_network, image) = prepare(wanted, &cri, stop.as_mut()).await?;
    let plan = |handler: &str, restart: Option<String>| PodPlan {
        handler: handler.to_owned(),
        systemd_cgroup: option_of(&merged, handler, "SystemdCgroup")
            .and_then(Value::as_bool)
            .unwrap_or_default(),
        runc_root: runc_root(&merged, handler),
        own_network: has_network && !wanted.host_network,
        image: image.clone(),
        restart,
    };
    let mut columns =
        vec![column(wanted, &cri, plan(&ours, wanted.restart.clone()), stop.as_mut(), say).await];
    if let (Some(other), None) = (others, &columns[0].failed) {
        columns.push(column(wanted, &cri, plan(&other, None), stop.as_mut(), say).await);
    }
    let removed = cri.remove_image(&image).await;
    let table = table(&columns);
    // The second pod runs only if the first one has not failed.
    let failed = columns.into_iter().find_map(Column::failure);
    Ok(SelftestReport {
        table,
        failed: after_removal(failed, removed.map_err(StepErrors::from)).err(),
    })
}

impl Column {
    fn failure(self) -> Option<SelftestError> {
        let (step, reason) = self.failed?;
        Some(SelftestError(format!("runtime handler {}, step {step}: {reason}", self.handler)))
    }
}

/// Adds the failed removal of the test's resources to the failure of the test, if it has failed.
///
/// # Errors
/// Both, if there are.
fn after_removal(
    failed: Option<SelftestError>,
    removed: Result<(), StepErrors>,
) -> Result<(), SelftestError> {
    let Err(steps) = removed else { return failed.map_or(Ok(()), Err) };
    let reason = failed.map(|failed| format!("{failed}; ")).unwrap_or_default();
    Err(SelftestError(format!("{reason}failed to remove resources of the test: {steps}")))
}

/// Whether the node has a network for pods, and the name of the image, which is imported.
///
/// # Errors
/// A step failed, or the test is to stop. If the image may be left, the error says so.
async fn prepare(
    wanted: &Selftest,
    cri: &CriClient,
    mut stop: Pin<&mut impl Future<Output = String>>,
) -> Result<(bool, String), SelftestError> {
    let status = unless_stopped(stop.as_mut(), cri.status()).await?.status.unwrap_or_default();
    let is_ready = |name: &str| status.conditions.iter().any(|c| c.type_ == name && c.status);
    let image = image::unique_name()?;
    if let Err(failed) =
        unless_stopped(stop, image::import(&wanted.subject.config, &image, wanted.program)).await
    {
        let removed = image::remove(&wanted.subject.config, &image).await;
        after_removal(Some(failed), removed.map_err(StepErrors::from))?;
    }
    Ok((is_ready("NetworkReady"), image))
}

/// The result of `work`, which is given up if the test is to stop.
async fn unless_stopped<T>(
    stop: Pin<&mut impl Future<Output = String>>,
    work: impl Future<Output = Result<T, StepError>>,
) -> Result<T, SelftestError> {
    tokio::select! {
        done = work => Ok(done?),
        reason = stop => Err(SelftestError(reason)),
    }
}

/// A word that no other test of the node has.
fn unique() -> Result<String, StepError> {
    const UUID: &str = "/proc/sys/kernel/random/uuid";
    Ok(std::fs::read_to_string(UUID).step_at("read file", UUID)?.trim().to_owned())
}

/// The handler of this sandboxer, and the default one to compare it with.
fn handlers(
    wanted: &Selftest,
    merged: &Table,
    containerd: &NodeContainerd,
) -> Result<(String, Option<String>), SelftestError> {
    let known = node::all(merged, &wanted.subject.config);
    let ours = match &wanted.handler {
        Some(named) if known.ours.contains(named) => named.clone(),
        Some(named) => {
            let reason = format!(
                "{named:?} is not a runtime handler of this sandboxer; its handlers are {:?}",
                known.ours
            );
            return Err(SelftestError(reason));
        }
        None => known.ours.first().cloned().ok_or_else(|| {
            let command = containerd.enable_command();
            SelftestError(format!(
                "containerd has no runtime handler of this sandboxer; run `{command}`"
            ))
        })?,
    };
    let default = if known.default.is_empty() { "runc".to_owned() } else { known.default };
    let other = Some(default).filter(|default| !known.ours.contains(default));
    Ok((ours, other))
}

/// An option of a handler's runtime.
fn option_of<'a>(merged: &'a Table, handler: &str, name: &str) -> Option<&'a Value> {
    let runtimes = node::runtime(merged)?.get("containerd")?.get("runtimes")?;
    runtimes.get(handler)?.get("options")?.get(name)
}

/// Where runc has the state of a handler's containers.
fn runc_root(merged: &Table, handler: &str) -> PathBuf {
    let set = option_of(merged, handler, "Root").and_then(Value::as_str);
    set.filter(|root| !root.is_empty()).unwrap_or(RUNC_ROOT).into()
}

/// Resolves with the reason to stop: a signal or the deadline. Signals are taken from the call on.
fn stopped(within: Duration) -> Result<impl Future<Output = String>, StepError> {
    let signal = stop_signal::taken()?;
    Ok(async move {
        tokio::select! {
            signal = signal => format!("stopped by {signal}"),
            () = tokio::time::sleep(within) => format!("stopped after {} s", within.as_secs()),
        }
    })
}

/// One handler's pod, repeated while another program ends it.
async fn column(
    wanted: &Selftest,
    cri: &CriClient,
    plan: PodPlan,
    mut stop: Pin<&mut impl Future<Output = String>>,
    say: &mut dyn FnMut(String),
) -> Column {
    let handler = plan.handler.clone();
    let mut attempt = 0;
    loop {
        attempt += 1;
        let mut pod = match TestPod::new(cri.clone(), plan.clone()) {
            Ok(pod) => pod,
            Err(step) => {
                let failed = Some(("make the pod's name", step.into()));
                return Column { handler, timings: Vec::new(), failed };
            }
        };
        let mut is_stopped = false;
        let done = tokio::select! {
            done = pod.run() => done,
            reason = stop.as_mut() => {
                is_stopped = true;
                Err(SelftestError(reason))
            }
        };
        let was_ended = done.is_err() && !is_stopped && pod.was_ended().await;
        let removed = remove_until_gone(wanted, &mut pod).await;
        if was_ended && removed.is_ok() && attempt < ATTEMPTS {
            say(format!(
                "another program, usually kubelet, stopped the test pod of {handler}; retrying \
                 (attempt {} of {ATTEMPTS})",
                attempt + 1
            ));
            continue;
        }
        let step = pod.last_step();
        let failed = after_removal(done.err(), removed).err().map(|reason| (step, reason));
        return Column { handler, timings: pod.timings().to_vec(), failed };
    }
}

/// Removes the pod, and waits until no resource on the machine has its name.
async fn remove_until_gone(wanted: &Selftest, pod: &mut TestPod) -> Result<(), StepErrors> {
    let begun = Instant::now();
    loop {
        let removed = pod.clean_up().await;
        let (words, paths) = pod.identity(&wanted.subject.config);
        let left = machine::traces(&words, &paths);
        if removed.is_ok() && left.is_empty() {
            return Ok(());
        }
        if begun.elapsed() > SETTLED {
            let mut steps = StepErrors::default();
            steps.check_all(removed);
            if !left.is_empty() {
                let left: Vec<String> = left.into_iter().collect();
                let reason = std::io::Error::other(left.join(", "));
                steps.check(Err(StepError::new("leftover resources", reason)));
            }
            return Err(steps);
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// The times in a table: a row for each step of the first column.
fn table(columns: &[Column]) -> String {
    let width = columns.iter().map(|column| column.handler.len()).max().unwrap_or_default().max(10);
    let mut text = format!("{:<24}", "STEP");
    for column in columns {
        text += &format!("  {:>width$}", column.handler);
    }
    text.push('\n');
    for (step, _) in columns.first().map_or(&[][..], |first| &first.timings) {
        text += &format!("{step:<24}");
        for column in columns {
            let time = column.timings.iter().find(|(name, _)| name == step);
            let time = time.map(|(_, time)| format!("{:.1} ms", time.as_secs_f64() * 1000.0));
            text += &format!("  {:>width$}", time.unwrap_or_else(|| "-".to_owned()));
        }
        text.push('\n');
    }
    for column in columns {
        match &column.failed {
            None => text += &format!("{}: no leftover resources\n", column.handler),
            Some((step, _)) => text += &format!("{}: failed in step {step}\n", column.handler),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use base::config::Config;

    use super::*;

    #[test]
    fn the_table_has_a_row_for_each_step() {
        let column = |handler: &str, timings: &[Timing], failed| Column {
            handler: handler.to_owned(),
            timings: timings.to_vec(),
            failed,
        };
        let ms = Duration::from_millis;
        let failed = || SelftestError("no image".to_owned());
        let columns = [
            column("runc-pause", &[("a", ms(1)), ("b", ms(1500))], None),
            column("runc", &[("a", ms(20))], Some(("b", failed()))),
        ];
        let shown = table(&columns);
        let lines: Vec<Vec<&str>> =
            shown.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["STEP", "runc-pause", "runc"]);
        assert_eq!(lines[1], ["a", "1.0", "ms", "20.0", "ms"]);
        assert_eq!(lines[2], ["b", "1500.0", "ms", "-"]);
        let end = "runc-pause: no leftover resources\nrunc: failed in step b\n";
        assert!(shown.ends_with(end), "{shown}");
        // The second handler's failure is one of the test.
        let failed = columns.into_iter().find_map(Column::failure).unwrap();
        assert_eq!(failed.to_string(), "runtime handler runc, step b: no image");
    }

    /// Serves gRPC at a socket: success for the methods of these names, no answer for others.
    fn serve(address: &Path, answered: &'static [&'static str]) {
        let listener = std::os::unix::net::UnixListener::bind(address).unwrap();
        listener.set_nonblocking(true).unwrap();
        let served = async move {
            let listener = tokio::net::UnixListener::from_std(listener).unwrap();
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let mut unanswered = Vec::new();
                    let Ok(mut calls) = h2::server::handshake(stream).await else { return };
                    while let Some(Ok((call, mut answer))) = calls.accept().await {
                        if answered.iter().any(|name| call.uri().path().ends_with(name)) {
                            let success = http::Response::builder().header("grpc-status", "0");
                            answer.send_response(success.body(()).unwrap(), true).unwrap();
                        } else {
                            unanswered.push((call, answer));
                        }
                    }
                });
            }
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        std::thread::spawn(move || runtime.block_on(served));
    }

    /// Promise: selftest_leaves_nothing.
    #[test]
    fn a_test_whose_containerd_hangs_is_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let prepared = |answered: &'static [&'static str]| {
            let address = dir.path().join(answered.len().to_string());
            serve(&address, answered);
            let cri = CriClient::new(&address);
            let config = Config { containerd_address: address, ..Config::default() };
            let wanted = Selftest {
                subject: Subject { config, containerd_config: None, containerd_program: None },
                program: b"",
                handler: None,
                host_network: false,
                restart: None,
                within: Duration::ZERO,
            };
            let failed = runtime.block_on(async {
                let stop = pin!(async {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    "stopped".to_owned()
                });
                prepare(&wanted, &cri, stop).await.unwrap_err()
            });
            failed.to_string()
        };
        assert_eq!(prepared(&[]), "stopped");
        assert_eq!(prepared(&["/Status", "Images/Delete"]), "stopped");
        let failed = prepared(&["/Status"]);
        let left = "stopped; failed to remove resources of the test: remove image \
                    localhost/pause-sandboxer/selftest:";
        assert!(failed.starts_with(left) && failed.contains("`crictl rmi localhost/"), "{failed}");
    }

    #[test]
    fn the_state_of_runc_is_where_the_handler_has_it() {
        let merged: Table = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes]\n\
            a.options = { Root = '/r' }\nb.options = { Root = '' }\n"
            .parse()
            .unwrap();
        let root = |handler| runc_root(&merged, handler);
        assert_eq!(
            [root("a"), root("b"), root("c")],
            ["/r", RUNC_ROOT, RUNC_ROOT].map(PathBuf::from)
        );
    }

    #[test]
    fn an_error_of_the_removal_is_added() {
        let failed = || Some(SelftestError("no image".to_owned()));
        let step = || StepErrors::from(StepError::new("remove image", std::io::Error::other("x")));
        after_removal(None, Ok(())).unwrap();
        let error = |failed, removed| after_removal(failed, removed).unwrap_err().to_string();
        assert_eq!(error(failed(), Ok(())), "no image");
        let left = "failed to remove resources of the test: remove image: x";
        assert_eq!(error(None, Err(step())), left);
        assert_eq!(error(failed(), Err(step())), format!("no image; {left}"));
    }
}
