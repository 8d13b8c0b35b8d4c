//! Processes and files of others that look like what a daemon has left.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use kit::machine::{cgroup, processes};
use kit::{PROBE, grpc, until};
use nix::mount::{MntFlags, umount2};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use crate::harness::{Case, alone};
use crate::pods::{Shape, is_whole, remove};
use crate::standalone::Standalone;

/// An unprivileged user.
const UNPRIVILEGED: u32 = 65534;

/// How many processes hide their command lines.
const HIDDEN: usize = 80;

pub(crate) fn cases() -> Vec<Case> {
    alone![
        a_process_that_says_it_is_a_pause_is_none,
        a_foreign_process_in_the_cgroup_of_a_lost_pause_survives,
        only_root_can_read_records,
        only_directories_are_records
    ]
}

/// Processes that are ended with the test.
struct Strangers {
    program: File,
    guesses: Vec<(String, String)>,
    alive: Vec<Child>,
}

impl Strangers {
    /// `guesses` are what their environment says.
    fn new(guesses: Vec<(String, String)>) -> Result<Self> {
        // Executed from memory, as a pause is, under the name that a pause has.
        let mut memfd = File::from(memfd_create(c"pause", MFdFlags::empty())?);
        memfd.write_all(PROBE)?;
        memfd.set_permissions(fs::Permissions::from_mode(0o755))?;
        let program = File::open(format!("/proc/self/fd/{}", memfd.as_raw_fd()))?;
        Ok(Self { program, guesses, alive: Vec::new() })
    }

    /// A process of an unprivileged user whose command line is `/pause ID`.
    fn start(&mut self, kind: &str, id: &str) -> Result<u32> {
        let child = Command::new(format!("/proc/self/fd/{}", self.program.as_raw_fd()))
            .arg0("/pause")
            .arg(id)
            .env_clear()
            .env("PROBE_AS", kind)
            .envs(self.guesses.iter().cloned())
            .uid(UNPRIVILEGED)
            .gid(UNPRIVILEGED)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .context("start a stranger")?;
        let pid = child.id();
        self.alive.push(child);
        Ok(pid)
    }

    fn all_live(&mut self) -> Result<()> {
        for child in &mut self.alive {
            let ended = child.try_wait()?;
            ensure!(ended.is_none(), "a stranger was ended: {ended:?}");
        }
        Ok(())
    }
}

impl Drop for Strangers {
    fn drop(&mut self) {
        for child in &mut self.alive {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Moves a process into a cgroup in every hierarchy.
fn enter(cgroup: &str, pid: u32) -> Result<()> {
    for hierarchy in cgroup::hierarchies()? {
        let file = hierarchy.join(cgroup.trim_start_matches('/')).join("cgroup.procs");
        // A hierarchy that has no pauses.
        if !file.exists() {
            continue;
        }
        fs::write(&file, pid.to_string()).with_context(|| format!("write {}", file.display()))?;
    }
    Ok(())
}

/// A directory that looks like a record of the given kind.
fn bait(
    standalone: &Standalone,
    name: &str,
    stage: impl FnOnce(PathBuf) -> Result<()>,
) -> Result<String> {
    let directory = standalone.path(name);
    fs::create_dir(&directory)?;
    fs::write(directory.join("record.json"), "{}")?;
    stage(directory.join("stage.json"))?;
    Ok(directory.display().to_string())
}

/// Unprivileged processes that say what a pause says, of paths and cgroups of their own choice:
/// nothing is read, killed or removed for them, and the daemon answers as soon as without them.
///
/// Promise: foreign_process_survives.
async fn a_process_that_says_it_is_a_pause_is_none() -> Result<()> {
    let standalone = Standalone::started().await?;
    let (controller, shape, id) =
        (standalone.controller(), Shape::plain(&standalone), standalone.id("living"));
    let pause = shape.run(&controller, &id).await?;
    standalone.kill()?;

    let state = fs::metadata(standalone.path("state"))?;
    let mut guesses: Vec<(String, String)> =
        (0..1000).map(|n| (format!("GUESS_{n}"), format!("0:{n}"))).collect();
    guesses.push(("PAUSE_SANDBOXER_STATE".to_owned(), format!("{}:{}", state.dev(), state.ino())));
    let mut strangers = Strangers::new(guesses)?;
    let endless = bait(&standalone, "endless", |stage| Ok(symlink("/dev/zero", stage)?))?;
    let waiting =
        bait(&standalone, "waiting", |stage| Ok(mkfifo(&stage, Mode::from_bits_truncate(0o666))?))?;
    for id in [endless.as_str(), &waiting, "../../x", "", ".."] {
        strangers.start("stranger", id)?;
    }
    for _ in 0..HIDDEN {
        strangers.start("hidden", &id)?;
    }
    // In the cgroup that its command line names there is a process of root's too.
    let shared = format!("{}/shared", standalone.cgroup());
    cgroup::make(&shared)?;
    let mut bystander = Command::new("sleep").arg("600").spawn()?;
    enter(&shared, bystander.id())?;
    enter(&shared, strangers.start("stranger", "shared")?)?;
    until("the strangers are there", Duration::from_secs(20), async || {
        let hidden = strangers.alive.iter().filter(|child| {
            let line = fs::read(format!("/proc/{}/cmdline", child.id()));
            line.is_ok_and(|line| line.is_empty())
        });
        ensure!(hidden.count() == HIDDEN, "not all have hidden themselves");
        Ok(())
    })
    .await?;

    // Should it read without end: the machine is others' too.
    let (mut command, own) = (Command::new("prlimit"), standalone.command());
    command.arg("--as=3000000000").arg(own.get_program()).args(own.get_args());
    let begun = Instant::now();
    standalone.start_as(command).await?;
    eprintln!("up after {:?} beside {} strangers", begun.elapsed(), strangers.alive.len());
    ensure!(
        !standalone.logged().contains("timed out after"),
        "recovery was held up:\n{}",
        standalone.logged()
    );
    ensure!(
        !standalone.logged().contains("killing pause process without a record"),
        "a stranger was believed:\n{}",
        standalone.logged()
    );
    let status = fs::read_to_string(format!("/proc/{}/status", standalone.pid()?))?;
    let peak =
        status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB"));
    let peak: u64 = peak.context("no VmHWM")?.parse()?;
    ensure!(peak < 100_000, "the daemon took {peak} kB");
    strangers.all_live()?;
    ensure!(
        bystander.try_wait()?.is_none(),
        "the process that shares a cgroup with a stranger was killed"
    );
    ensure!(!cgroup::below(&shared)?.is_empty(), "a cgroup that a stranger named was removed");
    ensure!(is_whole(&standalone, &controller, &id).await? == pause, "another pause");

    drop(strangers);
    bystander.kill()?;
    bystander.wait()?;
    until("the cgroup is empty", Duration::from_secs(5), async || cgroup::remove(&shared)).await?;
    remove(&controller, &id).await?;
    standalone.nothing_left().await
}

/// A pause whose record is removed by hand is ended; what else is in its cgroup stays there.
///
/// Promise: foreign_process_survives.
async fn a_foreign_process_in_the_cgroup_of_a_lost_pause_survives() -> Result<()> {
    let standalone = Standalone::started().await?;
    let (controller, shape, id) =
        (standalone.controller(), Shape::plain(&standalone), standalone.id("visited"));
    let pid = shape.run(&controller, &id).await?;
    let cgroup = format!("{}/{id}", standalone.cgroup());
    let mut visitor = Command::new("sleep").arg("600").spawn()?;
    enter(&cgroup, visitor.id())?;
    standalone.kill()?;
    for shm in [standalone.record(&id).join("shm"), standalone.shm(&id)] {
        umount2(&shm, MntFlags::MNT_DETACH)?;
    }
    for directory in [
        &standalone.record(&id),
        standalone.shm(&id).parent().context("no parent")?,
        &standalone.files(&id),
    ] {
        fs::remove_dir_all(directory)?;
    }
    standalone.start().await?;
    ensure!(
        !processes::one(pid).is_ok_and(|p| p.state != 'Z'),
        "the pause lives on:\n{}",
        standalone.logged()
    );
    ensure!(visitor.try_wait()?.is_none(), "a process in its cgroup was killed");
    visitor.kill()?;
    visitor.wait()?;
    until("the cgroup is empty", Duration::from_secs(5), async || cgroup::remove(&cgroup)).await?;
    standalone.nothing_left().await
}

/// Files, links and fifos among the records are neither sandboxes nor touched.
///
/// Promise: record_is_never_discarded.
async fn only_directories_are_records() -> Result<()> {
    let standalone = Standalone::started().await?;
    let (controller, shape, id) =
        (standalone.controller(), Shape::plain(&standalone), standalone.id("living"));
    shape.run(&controller, &id).await?;
    standalone.kill()?;
    let others = ["file", "link", "fifo", "no-id-"].map(|name| standalone.id(name));
    let [file, link, fifo, directory] = others.each_ref().map(|name| standalone.record(name));
    fs::write(&file, "")?;
    symlink(standalone.record(&id), &link)?;
    mkfifo(&fifo, Mode::from_bits_truncate(0o600))?;
    fs::create_dir(&directory)?;
    standalone.start().await?;
    is_whole(&standalone, &controller, &id).await?;
    for name in &others {
        let path = standalone.record(name);
        ensure!(
            standalone.logged().contains(&format!("not a sandbox directory: {}", path.display())),
            "not reported: {name}"
        );
        let status = controller.status(name, false).await.err().context("it has a status")?;
        ensure!(
            [grpc::NOT_FOUND, grpc::INVALID_ARGUMENT].contains(&status.code),
            "{name}: {status}"
        );
        ensure!(fs::symlink_metadata(&path).is_ok(), "{name} is gone");
    }
    for path in [file, link, fifo] {
        fs::remove_file(path)?;
    }
    fs::remove_dir(directory)?;
    remove(&controller, &id).await?;
    standalone.nothing_left().await
}

/// Records are private from the start.
///
/// Promise: only_root_calls.
async fn only_root_can_read_records() -> Result<()> {
    let standalone = Standalone::started().await?;
    let (controller, shape, id) =
        (standalone.controller(), Shape::plain(&standalone), standalone.id("private"));
    shape.run(&controller, &id).await?;
    let modes = || -> Result<Vec<u32>> {
        let all = [
            standalone.record(&id),
            standalone.record(&id).join("record.json"),
            standalone.record(&id).join("stage.json"),
        ];
        all.iter().map(|path| Ok(fs::metadata(path)?.mode() & 0o7777)).collect()
    };
    ensure!(modes()? == [0o700, 0o600, 0o600], "made with modes {:?}", modes()?);
    remove(&controller, &id).await?;
    standalone.nothing_left().await
}
