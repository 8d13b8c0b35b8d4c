//! `pause-sandboxer serve`: prepare, listen, recover, ready, serve, drain.

use std::io;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::stat::{Mode, umask};
use pause_sandboxer::cli::ServeOptions;
use pause_sandboxer::config::{CONTAINERD_NAMESPACE, Config, ShimOwner};
use pause_sandboxer::containerd::GrpcEndpoint;
use pause_sandboxer::containerd::containers::Containers;
use pause_sandboxer::controller::Controller;
use pause_sandboxer::error::{IoContext as _, StepError};
use pause_sandboxer::pause::native::Native;
use pause_sandboxer::podsandbox::{Environment, selinux};
use pause_sandboxer::process::inheritance::Inheritance;
use pause_sandboxer::shim::{hang, own::OwnShim};
use pause_sandboxer::{cri_view, gc, logging, metrics_http, pool, process, wire};
use sd_notify::NotifyState;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::task::JoinHandle;

mod state_dir;
mod watchdog;

use watchdog::Watchdog;

/// Threads of the runtime: its tasks wait more than they compute, and share the node with pods.
const WORKERS: usize = 2;

/// Timeout of the watchdog without a service manager.
const WATCHDOG_DEFAULT: Duration = Duration::from_secs(15);

/// Timeout of the drain: less than `TimeoutStopSec=` of the packaged unit, 30 s.
const DRAIN: Duration = Duration::from_secs(20);

/// Runs the daemon until SIGTERM or SIGINT. `settings` are the sources of `config`, for SIGHUP.
///
/// # Errors
/// The step that failed.
pub(crate) fn serve(config: &Config, settings: &ServeOptions) -> Result<(), StepError> {
    logging::init(config)
        .map_err(|reason| StepError::new("initialize logging", io::Error::other(reason)))?;
    log_panics();
    if !nix::unistd::geteuid().is_root() {
        let error = io::Error::new(io::ErrorKind::PermissionDenied, "needs root");
        return Err(StepError::new("serve", error));
    }
    let own = Inheritance::read("self")?;
    // Files that pods read get their modes whatever umask was inherited.
    umask(Mode::from_bits_truncate(0o022));
    process::take_signals().step("reset signals")?;
    raise_open_files();
    process::share_heaps();
    let _lock = state_dir::open(&config.state_dir)?;
    state_dir::refuse_moved(&config.socket, &config.state_dir)?;
    let timeout = sd_notify::watchdog_enabled().unwrap_or(WATCHDOG_DEFAULT);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(pool::THREADS)
        // Longer than the period of the watchdog, which keeps one thread alive: if pods use up all
        // process ids, no other can be started.
        .thread_keep_alive(timeout / 2)
        .thread_name("sandboxer")
        .enable_all()
        .build()
        .step("make the runtime")?;
    let result = runtime.block_on(run(config, settings, own, timeout));
    // The next daemon resumes what is still blocked, such as the retry of a cleanup.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

/// Builds the daemon, then supervises it until its end. `own` is what it was started
/// with, `timeout` that of the watchdog.
async fn run(
    config: &Config,
    settings: &ServeOptions,
    own: Inheritance,
    timeout: Duration,
) -> Result<(), StepError> {
    let mut signals = Signals::watch()?;
    let state_dir = config.state_dir.display().to_string();
    log::info!(version = env!("CARGO_PKG_VERSION"), state_dir = state_dir; "daemon starts");
    notify(&[NotifyState::Status("recovering")]);
    let environment = environment(config, own)?;
    // Before the recovery: containerd gives its first connection one second, while calls wait.
    let (grpc, ttrpc) = listen(config)?;
    state_dir::note(&config.socket, &config.state_dir);
    let (stop, stopped) = watch::channel(false);
    let (answering, controllers) = watch::channel(None);
    let server = wire::Server::before_recovery(controllers, grpc, ttrpc)
        .counted(Arc::clone(&environment.telemetry));
    let mut server = RunningServer { stop, task: tokio::spawn(server.run(stopped)) };
    // Logs its result. If containerd is not up yet, the first Create repeats the check.
    let _ = environment.mounts.admit();
    let recovered = tokio::select! {
        recovered = Controller::open(environment) => recovered.map(Some),
        () = signals.stop() => {
            log::info!("received stop signal during recovery");
            Ok(None)
        }
    };
    let controller = match recovered {
        Ok(Some(controller)) => controller,
        stopped => {
            server.stop().await;
            return stopped.map(drop);
        }
    };
    let sandboxes = controller.live().len();
    answering.send_replace(Some(Arc::clone(&controller)));
    let background = background(config, &controller);
    log::info!(
        socket = config.socket.display().to_string(), sandboxes = sandboxes;
        "daemon is ready"
    );
    notify(&[NotifyState::Ready, NotifyState::Status("serving")]);
    supervise(&mut server, &mut signals, Watchdog::new(timeout), settings).await?;
    log::info!("daemon completes pending calls");
    notify(&[NotifyState::Stopping, NotifyState::Status("draining")]);
    background.iter().for_each(JoinHandle::abort);
    drain(&mut server, &mut signals, &controller).await;
    Ok(())
}

/// Opens the state that all sandboxes share.
fn environment(config: &Config, own: Inheritance) -> Result<Arc<Environment>, StepError> {
    let driver = Arc::new(Native::new()?.for_state_dir(&config.state_dir));
    let labelled = selinux::executable(config)
        .and_then(|label| label.map_or(Ok(()), |label| driver.label(&label)));
    if let Err(e) = labelled {
        // Only new pods need the label; living ones must be recovered in any case.
        log::error!("failed to label pause program; pods with SELinux labels may not start: {e}");
    }
    Environment::new(config.clone(), driver, own, own_shim(config)).map(Arc::new)
}

/// This project's own shim. It is opened even if new pods do not get it: pods of an earlier daemon
/// may have it.
fn own_shim(config: &Config) -> Option<OwnShim> {
    match OwnShim::open_beside() {
        Ok(own) => Some(own),
        Err(step) => {
            if config.shim == ShimOwner::Own {
                log::warn!("own shim is not available; new pods get the runtime's shim: {step}");
            }
            None
        }
    }
}

/// Starts the tasks that no call waits for.
fn background(config: &Config, controller: &Arc<Controller>) -> [JoinHandle<()>; 5] {
    let containerd = GrpcEndpoint::new(&config.containerd_address, CONTAINERD_NAMESPACE);
    let containers = Containers::new(containerd.clone(), &config.state_dir);
    let interval = Duration::from_secs(config.forgotten_interval.into());
    let all = Arc::clone(controller);
    let endpoints =
        move || all.live().iter().map(|sandbox| Arc::clone(sandbox.endpoint())).collect();
    let (compared, address) = (Arc::clone(controller), config.containerd_address.clone());
    [
        tokio::spawn(async move { cri_view::count(compared, &address, interval).await }),
        tokio::spawn(hang::end_hung_shims(endpoints)),
        tokio::spawn(gc::collect_containers(Arc::clone(controller), containers, interval)),
        tokio::spawn(gc::collect(Arc::clone(controller), containerd, interval)),
        tokio::spawn(metrics_http::serve(Arc::clone(controller), config.metrics.clone())),
    ]
}

/// The server of both protocols.
struct RunningServer {
    stop: watch::Sender<bool>,
    task: JoinHandle<Result<(), StepError>>,
}

impl RunningServer {
    /// Ends pending Waits with UNAVAILABLE, which containerd retries, and waits for the other
    /// calls, 3 seconds at most.
    async fn stop(&mut self) {
        // The receiver is gone only if the server is.
        let _ = self.stop.send(true);
        let _ = (&mut self.task).await;
    }
}

/// Handles signals and the watchdog until the daemon is stopped.
async fn supervise(
    server: &mut RunningServer,
    signals: &mut Signals,
    mut watchdog: Watchdog,
    settings: &ServeOptions,
) -> Result<(), StepError> {
    let Signals { terminate, interrupt, hangup } = signals;
    loop {
        tokio::select! {
            ended = &mut server.task => {
                // Only a fault of a listener or a panic ends it.
                ended.map_err(|e| StepError::new("serve", io::Error::other(e)))??;
                return Err(StepError::new("serve", io::Error::other("the server exited")));
            }
            _ = terminate.recv() => return Ok(()),
            _ = interrupt.recv() => return Ok(()),
            _ = hangup.recv() => reload(settings),
            stalled = watchdog.tick() => {
                // Without a service manager nothing would restart the daemon.
                if stalled && sd_notify::watchdog_enabled().is_some() {
                    notify(&[NotifyState::Status("stopping: threads are blocked")]);
                    // A thread in an uninterruptible system call keeps the connections of a killed
                    // daemon open, and their callers would wait for it.
                    server.stop().await;
                    let reason =
                        "threads are blocked: see `all threads of a class are blocked` above";
                    return Err(StepError::new("serve", io::Error::other(reason)));
                }
            }
        }
    }
}

/// Waits for pending calls and jobs, up to a timeout or a second signal.
async fn drain(server: &mut RunningServer, signals: &mut Signals, controller: &Controller) {
    let drained = async {
        server.stop().await;
        controller.drain().await;
    };
    tokio::select! {
        () = drained => log::info!("daemon has completed pending calls"),
        () = tokio::time::sleep(DRAIN) => {
            log::warn!(seconds = DRAIN.as_secs(); "drain timed out; daemon exits");
        }
        () = signals.stop() => {
            log::warn!("received second stop signal; daemon exits without drain");
        }
    }
}

/// The signals that the daemon handles.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn watch() -> Result<Self, StepError> {
        let watch = |kind| signal(kind).step("watch signals");
        Ok(Self {
            terminate: watch(SignalKind::terminate())?,
            interrupt: watch(SignalKind::interrupt())?,
            hangup: watch(SignalKind::hangup())?,
        })
    }

    /// Waits for a signal that stops the daemon.
    async fn stop(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Reloads the log level; other settings need a restart.
fn reload(settings: &ServeOptions) {
    match settings.load() {
        Ok(config) => {
            log::set_max_level(config.log_level);
            log::info!(log_level = config.log_level.as_str(); "log level reloaded");
        }
        Err(e) => {
            log::error!(reason = e.to_string(); "config reload failed; keeping settings");
        }
    }
}

/// Logs a panic as one line. It ends the task that panicked, not the daemon.
fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let message = panic.payload_as_str().unwrap_or("no message");
        let place = panic.location().map_or_else(String::new, ToString::to_string);
        let thread = std::thread::current();
        log::error!(place = place, thread = thread.name().unwrap_or(""); "panic: {message}");
    }));
}

/// Raises the limit of open files to the hard limit, as each sandbox holds a pidfd and each client
/// a socket.
fn raise_open_files() {
    let limits = getrlimit(Resource::RLIMIT_NOFILE);
    if let Err(e) = limits.and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard)) {
        log::warn!(error = e.desc(); "failed to raise open file limit");
    }
}

/// The gRPC and the ttrpc listener: those passed by the service manager, matched by path, or new
/// ones.
fn listen(config: &Config) -> Result<(UnixListener, UnixListener), StepError> {
    const STEP: &str = "take over the service manager's socket";
    let (grpc, ttrpc) = (config.socket.clone(), config.ttrpc_socket());
    let mut passed: Vec<(PathBuf, UnixListener)> = Vec::new();
    for descriptor in sd_notify::listen_fds().step(STEP)? {
        let listener = UnixListener::from(process::inherited(descriptor).step(STEP)?);
        let address = listener.local_addr().step(STEP)?;
        let path = address.as_pathname().map(Path::to_owned).unwrap_or_default();
        // Otherwise containerd would dial a path without a listener.
        if path != grpc && path != ttrpc {
            let reason = format!("is neither {} nor {}", grpc.display(), ttrpc.display());
            return Err(StepError::at(STEP, path, io::Error::other(reason)));
        }
        listener.set_nonblocking(true).step_at(STEP, &path)?;
        passed.push((path, listener));
    }
    let mut take = |path: &Path| match passed.iter().position(|(address, _)| address == path) {
        Some(index) => Ok(passed.swap_remove(index).1),
        None => {
            path.parent().map_or(Ok(()), state_dir::make_dir)?;
            wire::bind(path)
        }
    };
    Ok((take(&grpc)?, take(&ttrpc)?))
}

/// Notifies the service manager, if there is one.
fn notify(state: &[NotifyState<'_>]) {
    if let Err(e) = sd_notify::notify(state) {
        log::warn!(error = e.to_string(); "failed to notify service manager");
    }
}
