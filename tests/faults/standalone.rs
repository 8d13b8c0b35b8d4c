//! A sandboxer without containerd, with everything of its own: directories, sockets, cgroup parent.

use std::fs;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kit::controller::Controller;
use kit::machine::{cgroup, mounts, processes};
use kit::{Process, grpc, until};
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{binary, lock};

/// How long a daemon may take to answer after its start.
pub(crate) const DAEMON: Duration = Duration::from_secs(30);
/// Names of all scratch directories: this, the process, a count.
const PREFIX: &str = "psf-";
/// Where CRI's files are below containerd's root and state.
const CRI: &str = "io.containerd.grpc.v1.cri/sandboxes";

/// One daemon. Dropping it removes everything of it.
#[derive(Debug)]
pub(crate) struct Standalone {
    dir: PathBuf,
    name: String,
    process: Mutex<Option<Process>>,
}

impl Standalone {
    /// A daemon that is not started yet. `settings` are lines of its config file.
    pub(crate) fn new(settings: &str) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name =
            format!("{PREFIX}{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let dir = std::env::temp_dir().join(&name);
        for below in ["state", "root", "run", "programs"] {
            fs::create_dir_all(dir.join(below))?;
        }
        let top = dir.display();
        let config = format!(
            "socket = \"{top}/s.sock\"\nstate_dir = \"{top}/state\"\n\
             containerd_root = \"{top}/root\"\n\
             containerd_state = \"{top}/run\"\ncontainerd_address = \"{top}/c.sock\"\n\
             restrict_oom_score_adj = true\n{settings}"
        );
        fs::write(dir.join("config.toml"), config)?;
        cgroup::make(&format!("/{name}/pod"))?;
        Ok(Self { dir, name, process: Mutex::new(None) })
    }

    /// A daemon that answers.
    pub(crate) async fn started() -> Result<Self> {
        let standalone = Self::new("")?;
        standalone.start().await?;
        Ok(standalone)
    }

    /// A daemon that is not started yet, and serves its metrics at [`Standalone::metrics`].
    pub(crate) fn with_metrics() -> Result<Self> {
        let standalone = Self::new("")?;
        let config = standalone.path("config.toml");
        let setting = format!("metrics = \"unix://{}\"\n", standalone.metrics().display());
        fs::write(&config, fs::read_to_string(&config)? + &setting)?;
        Ok(standalone)
    }

    /// Waits until the sum of a series is in the range. The daemon retries what failed after at
    /// most seconds at first.
    pub(crate) async fn metric_is(&self, series: &str, range: RangeInclusive<f64>) -> Result<()> {
        until(&format!("{series} is in {range:?}"), Duration::from_secs(60), async || {
            let value = kit::metrics::value(&self.metrics(), series).await?;
            ensure!(range.contains(&value), "it is {value}");
            Ok(())
        })
        .await
    }

    /// The socket of the metrics.
    pub(crate) fn metrics(&self) -> PathBuf {
        self.path("m.sock")
    }

    pub(crate) fn path(&self, below: &str) -> PathBuf {
        self.dir.join(below)
    }

    pub(crate) fn log(&self) -> PathBuf {
        self.path("log")
    }

    /// The cgroup of all pods.
    pub(crate) fn cgroup(&self) -> String {
        format!("/{}/pod", self.name)
    }

    /// An id that no other daemon's sandbox has.
    pub(crate) fn id(&self, word: &str) -> String {
        format!("{}-{word}", self.name)
    }

    /// The directory of a record.
    pub(crate) fn record(&self, id: &str) -> PathBuf {
        self.path("state/sandboxes").join(id)
    }

    /// Where CRI looks for a sandbox's files.
    pub(crate) fn files(&self, id: &str) -> PathBuf {
        self.path("root").join(CRI).join(id)
    }

    /// Where CRI looks for a sandbox's shared memory.
    pub(crate) fn shm(&self, id: &str) -> PathBuf {
        self.path("run").join(CRI).join(id).join("shm")
    }

    /// A client with a connection of its own.
    pub(crate) fn controller(&self) -> Controller {
        Controller::new(self.path("s.sock"), "")
    }

    pub(crate) fn command(&self) -> Command {
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = Command::new(binary());
        command
            .arg("serve")
            .arg("--config")
            .arg(self.path("config.toml"))
            // Shims of the test go before those of the machine.
            .env("PATH", format!("{}:{path}", self.path("programs").display()));
        command
    }

    /// Starts it and waits until it answers.
    pub(crate) async fn start(&self) -> Result<()> {
        self.start_as(self.command()).await
    }

    /// Starts it by a command of the caller's.
    pub(crate) async fn start_as(&self, command: Command) -> Result<()> {
        self.spawn(command)?;
        self.answers().await
    }

    /// Starts it without waiting.
    pub(crate) fn spawn(&self, command: Command) -> Result<()> {
        let mut slot = lock(&self.process);
        ensure!(slot.is_none(), "the daemon is running");
        *slot = Some(Process::spawn(command, &self.log())?);
        Ok(())
    }

    /// Waits until it answers.
    pub(crate) async fn answers(&self) -> Result<()> {
        let controller = self.controller();
        until("the daemon answers", DAEMON, async || {
            lock(&self.process).as_mut().context("the daemon was not started")?.check()?;
            match controller.status("unknown", false).await {
                Err(status) if status.code == grpc::NOT_FOUND => Ok(()),
                other => bail!("status of an unknown id: {other:?}"),
            }
        })
        .await
    }

    pub(crate) fn pid(&self) -> Result<u32> {
        Ok(lock(&self.process).as_ref().context("the daemon was not started")?.pid())
    }

    /// Kills it, or takes notice of its end.
    pub(crate) fn kill(&self) -> Result<()> {
        lock(&self.process).take().context("the daemon was not started")?.kill().map(drop)
    }

    /// Ends it by SIGTERM.
    pub(crate) async fn stop(&self) -> Result<()> {
        let mut process = lock(&self.process).take().context("the daemon was not started")?;
        let status = process.stop(DAEMON).await?;
        ensure!(status.success(), "the daemon ended with {status}");
        Ok(())
    }

    /// Starts it with faults from its first call on. The daemon stays this process's child.
    pub(crate) async fn start_with(&self, injections: &[&str]) -> Result<()> {
        self.spawn_with(injections)?;
        self.answers().await
    }

    /// The same, without waiting.
    pub(crate) fn spawn_with(&self, injections: &[&str]) -> Result<()> {
        let (mut command, own) = (kit::strace::strace(injections), self.command());
        command.arg("-D").arg(own.get_program()).args(own.get_args());
        command.envs(own.get_envs().filter_map(|(name, value)| Some((name, value?))));
        self.spawn(command)
    }

    /// Ends the faults of [`Standalone::start_with`].
    pub(crate) async fn end_faults(&self) -> Result<()> {
        let status = format!("/proc/{}/status", self.pid()?);
        until("strace has ended", DAEMON, async || {
            let text = fs::read_to_string(&status)?;
            let tracer = text
                .lines()
                .find_map(|line| line.strip_prefix("TracerPid:"))
                .context("no tracer's line")?;
            let tracer = tracer.trim().parse::<i32>()?;
            if tracer == 0 {
                return Ok(());
            }
            kill(Pid::from_raw(tracer), Signal::SIGINT)?;
            bail!("it traces")
        })
        .await
    }

    /// The daemon's log.
    pub(crate) fn logged(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.log()).unwrap_or_default()).into_owned()
    }

    /// All pauses of its making, zombies left out.
    pub(crate) fn pauses(&self) -> Result<Vec<processes::Proc>> {
        let begin = format!("/pause {}-", self.name);
        Ok(processes::all()?.into_iter().filter(|p| p.command.starts_with(&begin)).collect())
    }

    /// Everything on the machine that sandboxes of this daemon have left.
    pub(crate) fn left(&self) -> Result<Vec<String>> {
        let mut left: Vec<String> =
            self.pauses()?.iter().map(|p| format!("process {} {}", p.pid, p.command)).collect();
        left.extend(
            crate::endpoint::shims(self)?.iter().map(|p| format!("shim {} {}", p.pid, p.command)),
        );
        if let Ok(daemon) = self.pid() {
            let zombies =
                processes::all()?.into_iter().filter(|p| p.parent == daemon && p.state == 'Z');
            left.extend(zombies.map(|p| format!("zombie {} {}", p.pid, p.comm)));
        }
        let dirs = [
            self.path("state/sandboxes"),
            self.path("state/shims"),
            self.path("root").join(CRI),
            self.path("run").join(CRI),
        ];
        for dir in dirs {
            let Ok(entries) = fs::read_dir(dir) else { continue };
            left.extend(
                entries.flatten().map(|entry| format!("directory {}", entry.path().display())),
            );
        }
        let own = self.path("state/sandboxes");
        let places = ["state", "root", "run"].map(|below| self.path(below));
        let ours =
            |point: &Path| places.iter().any(|place| point.starts_with(place)) && point != own;
        for mount in mounts::of("self")?.into_iter().filter(|mount| ours(&mount.point)) {
            left.push(format!("mount {}", mount.point.display()));
        }
        let parent = self.cgroup();
        let cgroups =
            cgroup::below(&parent)?.into_iter().filter(|path| !path.ends_with(&parent[1..]));
        left.extend(cgroups.map(|path| format!("cgroup {}", path.display())));
        Ok(left)
    }

    /// Waits until nothing is left.
    pub(crate) async fn nothing_left(&self) -> Result<()> {
        self.nothing_left_but(&[]).await
    }

    /// The same, with mounts of the test's own.
    pub(crate) async fn nothing_left_but(&self, mounts: &[PathBuf]) -> Result<()> {
        let known: Vec<String> =
            mounts.iter().map(|mount| format!("mount {}", mount.display())).collect();
        until("nothing is left", Duration::from_secs(10), async || {
            let left: Vec<String> =
                self.left()?.into_iter().filter(|thing| !known.contains(thing)).collect();
            ensure!(left.is_empty(), "left:\n  {}", left.join("\n  "));
            Ok(())
        })
        .await
    }
}

impl Drop for Standalone {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.logged());
        }
        drop(lock(&self.process).take());
        remove(&self.dir, &self.name);
    }
}

/// Removes what killed runs of this suite have left.
pub(crate) fn remove_orphans() {
    for entry in fs::read_dir(std::env::temp_dir()).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next()?.parse().ok());
        if pid.is_some_and(|pid| !processes::exists(pid)) {
            eprintln!("removing {name}, whose owner is gone");
            remove(&entry.path(), &name);
        }
    }
}

/// Ends and removes everything that bears the name. Reports what cannot be removed.
fn remove(dir: &Path, name: &str) {
    let parts = [format!("/{name}/"), format!("{}/", dir.display()), format!("/pause {name}-")];
    let begun = Instant::now();
    loop {
        let all = processes::all().unwrap_or_default();
        let own = |p: &&processes::Proc| {
            p.state != 'Z'
                && p.pid != std::process::id()
                && parts.iter().any(|part| p.command.contains(part) || p.cgroups.contains(part))
        };
        let living: Vec<u32> = all.iter().filter(own).map(|p| p.pid).collect();
        if living.is_empty() || begun.elapsed() > Duration::from_secs(5) {
            break;
        }
        for pid in living {
            let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    for mount in mounts::of("self")
        .unwrap_or_default()
        .iter()
        .rev()
        .filter(|mount| mount.point.starts_with(dir))
    {
        let _ = umount2(&mount.point, MntFlags::MNT_DETACH);
    }
    let mut cgroups = cgroup::below(&format!("/{name}")).unwrap_or_default();
    cgroups.sort_by_key(|path| std::cmp::Reverse(path.components().count()));
    for path in cgroups {
        if let Err(e) = fs::remove_dir(&path) {
            eprintln!("remove {}: {e}", path.display());
        }
    }
    if let Err(e) = fs::remove_dir_all(dir) {
        eprintln!("remove {}: {e}", dir.display());
    }
}
