//! `pause-sandboxer serve`: prepare, listen, recover, ready, serve, drain.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::fcntl::{Flock, FlockArg};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::stat::{Mode, umask};
use pause_sandboxer::cli::Settings;
use pause_sandboxer::config::Config;
use pause_sandboxer::containerd::Store;
use pause_sandboxer::controller::Controller;
use pause_sandboxer::error::{IoContext as _, Step};
use pause_sandboxer::pause::native::Native;
use pause_sandboxer::podsandbox::{Environment, selinux};
use pause_sandboxer::{gc, logging, metrics_http, pool, process, wire};
use sd_notify::NotifyState;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::time::{Interval, MissedTickBehavior};

/// Threads that run the daemon's tasks: its work is waiting, not computing, and it shares the node
/// with pods.
const WORKERS: usize = 2;

/// Within it the threads are looked at, twice at least, where no service manager watches.
const UNWATCHED: Duration = Duration::from_secs(60);

/// Within it a stopped daemon has answered its callers; systemd would wait 90 s before it kills.
const DRAIN: Duration = Duration::from_secs(20);

/// How long the last child of a killed daemon may take to execute its program.
const LAST_CHILD: Duration = Duration::from_secs(10);

/// Runs the daemon until SIGTERM or SIGINT. `settings` are the sources of `config`, for SIGHUP.
///
/// # Errors
/// The step that failed.
pub(crate) fn serve(config: Config, settings: Settings) -> Result<(), Step> {
    logging::init(&config).map_err(|reason| Step::new("begin to log", io::Error::other(reason)))?;
    log_panics();
    if !nix::unistd::geteuid().is_root() {
        return Err(Step::new(
            "serve",
            io::Error::new(io::ErrorKind::PermissionDenied, "needs root"),
        ));
    }
    // What pods read is made by its mode, whatever the daemon was started with.
    umask(Mode::from_bits_truncate(0o022));
    process::take_signals().step("take back signals")?;
    let open_files = raise_open_files();
    process::share_heaps();
    make_dir(&config.state_dir)?;
    only_roots(&config.state_dir)?;
    let _lock = lock(&config.state_dir)?;
    let watched = sd_notify::watchdog_enabled().unwrap_or(UNWATCHED);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .max_blocking_threads(pool::THREADS)
        // Twice as long as between two looks of the watchdog, so that there is always a thread:
        // where pods have taken all process ids, no other can be started.
        .thread_keep_alive(watched / 2)
        .thread_name("sandboxer")
        .enable_all()
        .build()
        .step("make the runtime")?;
    let result = runtime
        .block_on(run(&config, open_files, watched, || settings.load().map_err(|e| e.to_string())));
    // What still blocks, such as the retry of a cleanup, the next daemon takes up.
    runtime.shutdown_timeout(Duration::from_secs(1));
    result
}

/// The daemon's life on the runtime. `open_files` is for shims; within `watched` the threads are
/// looked at; `reload` reads the settings again.
async fn run(
    config: &Config,
    open_files: Option<u64>,
    watched: Duration,
    reload: impl Fn() -> Result<Config, String>,
) -> Result<(), Step> {
    let mut end = End::watch()?;
    let mut hangup = watch_signal(SignalKind::hangup())?;
    log::info!(version = env!("CARGO_PKG_VERSION"), state_dir = config.state_dir.display().to_string(); "starting");
    notify(&[NotifyState::Status("recovering")]);
    let driver = Arc::new(Native::new()?.of(&config.state_dir));
    // New pods may depend on it; those that live must be taken over all the same.
    let labelled = selinux::executable(config)
        .and_then(|label| label.map_or(Ok(()), |label| driver.label(&label)));
    labelled.unwrap_or_else(|step| log::error!("pods with SELinux labels may not start: {step}"));
    let environment = Arc::new(Environment::new(config.clone(), driver, open_files)?);
    // Before the pods are taken over, as containerd gives its first connection a second; calls
    // wait.
    let (grpc, ttrpc) = listen(config)?;
    let (stop, stopped) = watch::channel(false);
    let (answering, verbs) = watch::channel(None);
    let mut serving = tokio::spawn(
        wire::Server::ahead(verbs, grpc, ttrpc)
            .counted(Arc::clone(&environment.telemetry))
            .of_namespace(&config.containerd_namespace)
            .run(stopped),
    );
    // It logs what it finds. Where containerd is not up yet, the first Create finds it.
    let _ = environment.mounts.admit();
    let opened = tokio::select! {
        opened = Controller::open(environment) => opened.map(Some),
        () = end.told() => {
            log::info!("told to end during recovery");
            Ok(None)
        }
    };
    let controller = match opened {
        Ok(Some(controller)) => controller,
        ended => {
            // Calls that wait end in UNAVAILABLE, and are repeated. The receiver is gone only if
            // the server is.
            let _ = stop.send(true);
            let _ = serving.await;
            return ended.map(drop);
        }
    };
    answering.send_replace(Some(Arc::clone(&controller)));
    let store = Store {
        address: config.containerd_address.clone(),
        namespace: config.containerd_namespace.clone(),
    };
    let collecting =
        tokio::spawn(gc::collect(Arc::clone(&controller), store, config.forgotten_interval));
    let exposing =
        tokio::spawn(metrics_http::serve(Arc::clone(&controller), config.metrics.clone()));
    log::info!(socket = config.socket.display().to_string(); "ready");
    notify(&[NotifyState::Ready, NotifyState::Status("serving")]);
    let mut watchdog = Watchdog::new(watched);
    loop {
        tokio::select! {
            ended = &mut serving => {
                // It ends by itself only by a fault of its listeners or a panic.
                ended.map_err(|e| Step::new("serve", io::Error::other(e)))??;
                return Err(Step::new("serve", io::Error::other("the server ended by itself")));
            }
            () = end.told() => break,
            _ = hangup.recv() => reread(&reload),
            stuck = watchdog.looks() => watchdog.tells(&stuck),
        }
    }
    log::info!("draining");
    notify(&[NotifyState::Stopping, NotifyState::Status("draining")]);
    collecting.abort();
    exposing.abort();
    // The receiver is gone only if the server is.
    let _ = stop.send(true);
    let drained = async {
        let _ = serving.await;
        controller.drain().await;
    };
    tokio::select! {
        () = drained => log::info!("drained"),
        () = tokio::time::sleep(DRAIN) => log::warn!(seconds = DRAIN.as_secs(); "not drained in time, ending all the same"),
        () = end.told() => log::warn!("told to end again, ending at once"),
    }
    Ok(())
}

/// The signals that tell the daemon to end.
struct End {
    terminate: Signal,
    interrupt: Signal,
}

impl End {
    fn watch() -> Result<Self, Step> {
        Ok(Self {
            terminate: watch_signal(SignalKind::terminate())?,
            interrupt: watch_signal(SignalKind::interrupt())?,
        })
    }

    /// Returns at the next of them.
    async fn told(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Keep-alives for the service manager's watchdog, while the daemon does what pods need. That tasks
/// run says little, as blocking work is done by threads.
struct Watchdog {
    ticks: Interval,
    /// Less than the time after which the service manager takes the daemon for hung, with the wait
    /// for the next tick.
    patience: Duration,
}

impl Watchdog {
    /// One that needs a keep-alive within that time.
    fn new(within: Duration) -> Self {
        let patience = within / 4;
        let mut ticks = tokio::time::interval(patience.max(Duration::from_millis(1)));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { ticks, patience }
    }

    /// Returns at the next tick, with the classes of threads that have done nothing in time.
    async fn looks(&mut self) -> Vec<pool::Class> {
        self.ticks.tick().await;
        pool::stuck(self.patience).await
    }

    fn tells(&self, stuck: &[pool::Class]) {
        if stuck.is_empty() {
            return notify(&[NotifyState::Watchdog]);
        }
        let names: Vec<&str> = stuck.iter().map(|class| class.name()).collect();
        log::error!(threads = names.join(", "); "all threads of a kind hang; the watchdog gets no keep-alive");
    }
}

fn watch_signal(kind: SignalKind) -> Result<Signal, Step> {
    signal(kind).step("watch signals")
}

/// Takes the log level from the settings as they are now; all else takes a restart.
fn reread(reload: &impl Fn() -> Result<Config, String>) {
    match reload() {
        Ok(config) => {
            logging::set_level(config.log_level);
            log::info!(log_level = config.log_level.as_str(); "read the log level again");
        }
        Err(reason) => log::error!(reason = reason; "settings are left as they were"),
    }
}

/// Logs a panic as one line instead of several on standard error; the task that panicked ends, the
/// daemon does not.
fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let message = panic.payload_as_str().unwrap_or("no message");
        let place = panic.location().map_or_else(String::new, ToString::to_string);
        log::error!(place = place, thread = std::thread::current().name().unwrap_or(""); "panic: {message}");
    }));
}

/// Raises the limit of open files to the hard limit: each sandbox holds a pidfd and each caller a
/// socket. Answers what it was.
fn raise_open_files() -> Option<u64> {
    let limits = getrlimit(Resource::RLIMIT_NOFILE);
    if let Err(e) = limits.and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard)) {
        log::warn!(error = e.desc(); "cannot raise the limit of open files");
    }
    limits.ok().map(|(soft, _)| soft)
}

fn make_dir(path: &Path) -> Result<(), Step> {
    DirBuilder::new().recursive(true).mode(0o700).create(path).step_at("make directory", path)
}

/// Makes sure that root alone can write records: the daemon kills, mounts and removes by them.
fn only_roots(state_dir: &Path) -> Result<(), Step> {
    const STEP: &str = "use state directory";
    let about = std::fs::metadata(state_dir).step_at(STEP, state_dir)?;
    let (user, mode) = (about.uid(), about.mode() & 0o7777);
    if user == 0 && mode & 0o022 == 0 {
        return Ok(());
    }
    let path = state_dir.display();
    let reason = format!(
        "it belongs to user {user} with mode {mode:04o}, so others than root may write it; see what is in it, then: \
         chown root:root {path} && chmod 0700 {path}"
    );
    Err(Step::at(STEP, state_dir, io::Error::new(io::ErrorKind::PermissionDenied, reason)))
}

/// Makes sure that no other daemon has this state directory. The lock ends with the process.
fn lock(state_dir: &Path) -> Result<Flock<File>, Step> {
    const STEP: &str = "lock state directory";
    let path = state_dir.join("lock");
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .step_at(STEP, &path)?;
    let mut file = file;
    let begun = Instant::now();
    let mut lock = loop {
        let e = match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => break lock,
            Err((back, e)) => {
                file = back;
                e
            }
        };
        let mut holder = String::new();
        if e != nix::Error::EWOULDBLOCK
            || file.rewind().and_then(|()| file.read_to_string(&mut holder)).is_err()
        {
            return Err(Step::at(STEP, &path, e.into()));
        }
        // A pause that a killed daemon was making has the lock until it executes its program, when
        // recovery can find it.
        let ended = !Path::new("/proc").join(holder.trim()).join("exe").exists();
        if !ended || begun.elapsed() > LAST_CHILD {
            let reason = io::Error::other(format!("in use by process {}", holder.trim()));
            return Err(Step::at(STEP, &path, reason));
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    lock.set_len(0)
        .and_then(|()| lock.rewind())
        .and_then(|()| writeln!(&mut *lock, "{}", std::process::id()))
        .step_at(STEP, &path)?;
    Ok(lock)
}

/// The gRPC and the ttrpc socket: those that the service manager passed, told apart by their paths,
/// else our own.
fn listen(config: &Config) -> Result<(UnixListener, UnixListener), Step> {
    const STEP: &str = "take over the service manager's socket";
    let (grpc, ttrpc) = (config.socket.clone(), config.ttrpc_socket());
    let mut passed: Vec<(PathBuf, UnixListener)> = Vec::new();
    for descriptor in sd_notify::listen_fds().step(STEP)? {
        let listener = UnixListener::from(process::inherited(descriptor).step(STEP)?);
        let address = listener.local_addr().step(STEP)?;
        let path = address.as_pathname().map(Path::to_owned).unwrap_or_default();
        // containerd would dial a path where nobody listens.
        if path != grpc && path != ttrpc {
            let reason = format!("is neither {} nor {}", grpc.display(), ttrpc.display());
            return Err(Step::at(STEP, path, io::Error::other(reason)));
        }
        listener.set_nonblocking(true).step_at(STEP, &path)?;
        passed.push((path, listener));
    }
    let mut take = |path: &Path| match passed.iter().position(|(of, _)| of == path) {
        Some(index) => Ok(passed.swap_remove(index).1),
        None => {
            path.parent().map_or(Ok(()), make_dir)?;
            wire::bind(path)
        }
    };
    Ok((take(&grpc)?, take(&ttrpc)?))
}

/// Tells the service manager, if there is one.
fn notify(state: &[NotifyState<'_>]) {
    if let Err(e) = sd_notify::notify(state) {
        log::warn!(error = e.to_string(); "cannot tell the service manager");
    }
}
