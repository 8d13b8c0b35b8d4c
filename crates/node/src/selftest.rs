//! `pause-sandboxer selftest`: a whole pod through this node's own CRI, and the times of its steps.
//!
//! The images are made in memory and imported, so that no registry is needed. Names have a random
//! part, so that pods of the node are not affected. The test removes its own resources, also after
//! a signal, a failure or the deadline. At the end no mount, cgroup, process, network namespace,
//! CNI result or file with the name of the pod may exist.

use std::fmt::Display;
use std::path::PathBuf;
use std::pin::{Pin, pin};
use std::time::Duration;

use toml::Value;

use crate::check::Subject;
use crate::check::containerd::{self as node, Mode, NodeContainerd, pause_image, shim_only};
use crate::check::kubelet::Handlers;
use crate::client;
use crate::stop_signal;
use base::error::{IoContext as _, StepError};
use containerd_api::cri::CriClient;

mod image;
mod machine;
mod pod;
mod timed_pod;

use image::PauseImage;
use pod::PodPlan;

/// Where runc's shims have the state of containers, unless a handler's `Root` is set.
const RUNC_ROOT: &str = "/run/containerd/runc";

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
    /// The executable of a pause image.
    pub pause_program: &'static [u8],
    /// The runtime handler; `None`: the first one of this sandboxer, or else of its shim.
    pub handler: Option<String>,
    /// Give the pod the node's network.
    pub host_network: bool,
    /// A command of the shell that restarts the sandboxer while the pod runs.
    pub restart: Option<String>,
    /// Deadline of all steps.
    pub within: Duration,
}

/// The outcome of a test whose pod was started.
#[derive(Debug)]
pub struct SelftestReport {
    /// The table of the times, also of a test that failed.
    pub table: String,
    /// Why it failed: a step of the pod, or leftover resources or the image of the test.
    pub failed: Option<SelftestError>,
}

/// Runs the test. `say` gets a line for each retry, and for a pause image that is missing.
///
/// # Errors
/// The node has no daemon, no supported containerd or no runtime handler for the test.
pub async fn run(
    wanted: &Selftest,
    say: &mut dyn FnMut(String),
) -> Result<SelftestReport, SelftestError> {
    if !nix::unistd::geteuid().is_root() {
        return Err(SelftestError("must run as root".to_owned()));
    }
    let subject = shim_only::find_node(&wanted.subject).await;
    let subject = subject.unwrap_or_else(|| wanted.subject.clone());
    let wanted = &Selftest { subject, ..wanted.clone() };
    let config = &wanted.subject.config;
    let containerd = NodeContainerd::find(&wanted.subject);
    let release = containerd.release().await?;
    let merged = containerd.dump().await?;
    let known = node::all(&merged, config);
    let ours = handler(wanted, &known, &containerd)?;
    let has_daemon = known.ours.contains(&ours);
    if has_daemon {
        // Without a daemon each call of the test would wait for its timeout.
        client::list(config).await.map_err(|e| e.to_string())?;
    }
    let mut stop = pin!(stopped(wanted.within)?);
    let cri = CriClient::new(&config.containerd_address);
    let needed = match has_daemon {
        true => pause_image::needed(&merged, release, known.all.get(&ours).into_iter()),
        // Without a daemon the built-in controller runs the pod, and needs its pause image.
        false => pause_image::name(&merged),
    };
    let mut pause = None;
    let tested = async {
        if let Some(name) = needed
            && unless_stopped(stop.as_mut(), cri.image(&name)).await?.is_none()
        {
            let mode = if has_daemon { Mode::Sandboxer } else { Mode::ShimOnly };
            say(without_image(&name, &containerd.enable_command(mode)));
            let image = pause.insert(PauseImage::new(&name, wanted.pause_program)?);
            unless_stopped(stop.as_mut(), image.import(config)).await?;
        }
        test_pod(wanted, &cri, &known, &ours, stop.as_mut(), say).await
    };
    let tested = tested.await;
    let removed = match &pause {
        Some(image) => image.remove(config).await,
        None => Ok(()),
    };
    let (table, failed) = match tested {
        Ok(report) => (report.table, report.failed),
        Err(failed) => (String::new(), Some(failed)),
    };
    let failed = after_removal(failed, removed).err();
    Ok(SelftestReport { table, failed })
}

/// The line about a pause image that the node lacks. `command` repeats the last `enable`.
fn without_image(name: &str, command: &str) -> String {
    let offline = pause_image::offline(command);
    format!(
        "pause image {name} is not on the node: the test imports one under this name, and removes \
         it; without it pods start only if a registry has it: `{command}{offline}` imports it for \
         good"
    )
}

/// The pod of the test, in its image.
///
/// # Errors
/// It was not started. If the image may be left, the error says so.
async fn test_pod(
    wanted: &Selftest,
    cri: &CriClient,
    known: &Handlers,
    handler: &String,
    mut stop: Pin<&mut impl Future<Output = String>>,
    say: &mut dyn FnMut(String),
) -> Result<SelftestReport, SelftestError> {
    let (has_network, image) = prepare(wanted, cri, stop.as_mut()).await?;
    let plan = PodPlan {
        handler: handler.clone(),
        has_daemon: known.ours.contains(handler),
        systemd_cgroup: option_of(known, handler, "SystemdCgroup")
            .and_then(Value::as_bool)
            .unwrap_or_default(),
        runc_root: runc_root(known, handler),
        own_network: has_network && !wanted.host_network,
        image: image.clone(),
        restart: wanted.restart.clone(),
    };
    let SelftestReport { table, failed } = timed_pod::run(wanted, cri, plan, stop, say).await;
    let failed = after_removal(failed, cri.remove_image(&image).await).err();
    Ok(SelftestReport { table, failed })
}

/// Adds the failed removal of the test's resources to the failure of the test, if it has failed.
///
/// # Errors
/// Both, if there are.
fn after_removal(
    failed: Option<SelftestError>,
    removed: Result<(), impl Display>,
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
        after_removal(Some(failed), removed)?;
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

/// The handler that is tested.
fn handler(
    wanted: &Selftest,
    known: &Handlers,
    containerd: &NodeContainerd,
) -> Result<String, SelftestError> {
    match &wanted.handler {
        Some(named) if known.has(named) => Ok(named.clone()),
        Some(named) => {
            let reason = format!(
                "{named:?} is not a runtime handler of this sandboxer; its handlers are {:?}",
                [&known.ours[..], &known.shim_only].concat()
            );
            Err(SelftestError(reason))
        }
        None => known.ours.first().or(known.shim_only.first()).cloned().ok_or_else(|| {
            let command = containerd.enable_command(Mode::Sandboxer);
            SelftestError(format!(
                "containerd has no runtime handler of this sandboxer; run `{command}`"
            ))
        }),
    }
}

/// An option of a handler's runtime.
fn option_of<'a>(known: &'a Handlers, handler: &str, name: &str) -> Option<&'a Value> {
    known.all.get(handler)?.get("options")?.get(name)
}

/// Where runc has the state of a handler's containers.
fn runc_root(known: &Handlers, handler: &str) -> PathBuf {
    let set = option_of(known, handler, "Root").and_then(Value::as_str);
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use base::config::Config;
    use toml::Table;

    use super::*;

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
                pause_program: b"",
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
        let known = node::all(&merged, &Config::default());
        let root = |handler| runc_root(&known, handler);
        assert_eq!(
            [root("a"), root("b"), root("c")],
            ["/r", RUNC_ROOT, RUNC_ROOT].map(PathBuf::from)
        );
    }

    #[test]
    fn an_error_of_the_removal_is_added() {
        let failed = || Some(SelftestError("no image".to_owned()));
        let step = || StepError::new("remove image", std::io::Error::other("x"));
        after_removal(None, Ok::<_, StepError>(())).unwrap();
        let error = |failed, removed| after_removal(failed, removed).unwrap_err().to_string();
        assert_eq!(error(failed(), Ok(())), "no image");
        let left = "failed to remove resources of the test: remove image: x";
        assert_eq!(error(None, Err(step())), left);
        assert_eq!(error(failed(), Err(step())), format!("no image; {left}"));
    }
}
