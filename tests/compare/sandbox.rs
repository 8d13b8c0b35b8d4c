//! What happens to a pod's sandbox, and to the place where its state is.

use std::fs::{self, DirBuilder, File};
use std::io::Write as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::Once;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use kit::machine::{cgroup, processes};
use kit::{ContainerSpec, Handler, Node, PAUSE_IMAGE, Parts, Pod, PodSpec, until};
use nix::mount::{MsFlags, mount};
use nix::sys::signal::Signal;
use pause_sandboxer::config::CONTAINERD_NAMESPACE;
use pause_sandboxer::containerd::{GrpcEndpoint, images};
use pause_sandboxer::oci_image::{self, NAME as IMAGE};
use pause_sandboxer::pause::binary::PROGRAM;

use crate::cell::{Cell, seconds};
use crate::events::Run;
use crate::shims::signal;

/// How long CRI may take to notice an end.
const NOTICED: Duration = Duration::from_secs(30);

/// The handler of this sandboxer with the setting that `enable` writes for containerd 2.4.
pub(crate) const WITHOUT_PULL: &str = r#"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc-pause-no-pull]
runtime_type = "io.containerd.runc.v2"
sandboxer = "pause-sandboxer"
cni_conf_dir = "{top}/cni/conf"
disable_pause_image_pull = true

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc-pause-no-pull.options]
Root = "{top}/runc"
"#;

/// Puts the state of runc and of the sandboxer on the node's tmpfs, as both are below `/run`.
pub(crate) fn put_state_on_tmpfs(node: &Node) -> Result<()> {
    let layout = node.layout();
    for target in [layout.top.join("runc"), layout.sandboxer_state()] {
        let name = target.file_name().context("no name")?;
        let source = layout.state().join(name);
        for directory in [&source, &target] {
            DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
        }
        mount(Some(&source), &target, None::<&str>, MsFlags::MS_BIND, None::<&str>)
            .with_context(|| format!("bind {}", target.display()))?;
    }
    Ok(())
}

/// The pause process is killed.
pub(crate) async fn pause_killed(run: Run) -> Result<Cell> {
    let mut cell = Cell::default();
    let pod = run.pod("killed").await?;
    pod.run(ContainerSpec::sleeping("main")).await?;
    let begun = Instant::now();
    signal(pod.pause_pid().await?, Signal::SIGKILL)?;
    let noticed = until("the pod is not ready", NOTICED, async || {
        ensure!(!pod.is_ready().await?, "it is");
        Ok(())
    })
    .await;
    match noticed {
        Ok(()) => cell.fact(format!("noticed in {:.2} s", begun.elapsed().as_secs_f32())),
        Err(_) => cell.loss(format!("not noticed in {} s", NOTICED.as_secs())),
    }
    cell.remove(&pod).await?;
    Ok(cell)
}

/// A process that is killed when this is dropped.
struct Stranger(Child);

impl Drop for Stranger {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Moves a process into the cgroups of another one; answers how many.
fn join(pid: u32, other: u32) -> Result<usize> {
    let cgroups = processes::one(other)?.cgroups;
    let paths: Vec<&str> = cgroups.lines().filter_map(|line| line.splitn(3, ':').nth(2)).collect();
    let mut joined = 0;
    for hierarchy in cgroup::hierarchies()? {
        let directories = paths.iter().map(|path| hierarchy.join(path.trim_start_matches('/')));
        let own: Vec<PathBuf> = directories.filter(|dir| holds(dir, other)).collect();
        for directory in own {
            fs::write(directory.join("cgroup.procs"), pid.to_string())
                .with_context(|| format!("join {}", directory.display()))?;
            joined += 1;
        }
    }
    Ok(joined)
}

fn holds(directory: &std::path::Path, pid: u32) -> bool {
    let procs = fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
    procs.lines().any(|line| line == pid.to_string())
}

/// A process that is not the pod's is in the cgroup of its pause process.
pub(crate) async fn foreign_process(run: Run) -> Result<Cell> {
    let mut cell = Cell::default();
    let pod = run.pod("joined").await?;
    pod.run(ContainerSpec::sleeping("main")).await?;
    let mut stranger = Stranger(Command::new("sleep").arg("3600").spawn()?);
    ensure!(join(stranger.0.id(), pod.pause_pid().await?)? > 0, "it has joined no cgroup");
    cell.remove(&pod).await?;
    let lives = stranger.0.try_wait()?.is_none();
    cell.fact(if lives { "that process lives" } else { "that process is killed" });
    Ok(cell)
}

/// The pause image is removed, and nothing serves its registry, which is on this machine.
pub(crate) async fn no_pause_image(run: Run) -> Result<Cell> {
    let mut cell = Cell::default();
    run.node.cri().remove_image(PAUSE_IMAGE).await?;
    let ours = run.handler == Handler::Ours;
    let pulls_none = ours && !pulls_unused(run.node.parts());
    let home = run.node.prepare(PodSpec::new("offline"))?;
    let handler = if pulls_none { "runc-pause-no-pull" } else { run.handler.name() };
    let begun = Instant::now();
    match run.node.cri().run_pod_sandbox(home.config(), handler).await {
        Ok(id) => {
            cell.fact(format!("the pod starts in {}", seconds(begun.elapsed())));
            let pod = Pod::new(&run.node, run.handler, home, id);
            pod.run(ContainerSpec::sleeping("main")).await?;
            cell.remove(&pod).await?;
        }
        Err(status) => {
            eprintln!("compare: {status}");
            cell.loss("no pod starts");
            let _ = home.clear();
        }
    }
    if ours && !pulls_none {
        cell.fact("with [`enable --offline`](install.md#nodes-without-a-registry)");
    }
    Ok(cell)
}

/// Whether this containerd pulls a pause image also for pods of another sandboxer.
pub(crate) fn pulls_unused(parts: &Parts) -> bool {
    parts.version().starts_with("2.3.")
}

/// The file that names the sandboxer's own pause image, for `imports` of containerd's config, as
/// `enable --offline` does.
pub(crate) fn offline() -> Result<PathBuf> {
    let path = crate::results().join("offline.toml");
    let table = r#"[plugins."io.containerd.cri.v1.images".pinned_images]"#;
    // A containerd of another event may read it at any time.
    static WRITE: Once = Once::new();
    let mut written = Ok(());
    WRITE.call_once(|| {
        let text = format!("version = 3\n{table}\nsandbox = \"{IMAGE}\"\n");
        written = crate::page::replace(&path, &text);
    });
    written?;
    Ok(path)
}

/// Imports that image.
pub(crate) async fn import(node: &Node) -> Result<()> {
    let endpoint = GrpcEndpoint::new(node.layout().containerd_socket(), CONTAINERD_NAMESPACE);
    Ok(images::import(&endpoint, &oci_image::pause(PROGRAM)?, &[]).await?)
}

/// A file that takes all space of the node's tmpfs.
struct Full(PathBuf);

impl Full {
    fn new(node: &Node) -> Result<Self> {
        const SIZE: &str = "size=16m";
        let state = node.layout().state();
        mount(Some("state"), &state, None::<&str>, MsFlags::MS_REMOUNT, Some(SIZE))
            .context("limit the tmpfs")?;
        let full = Self(state.join("full"));
        let mut file = File::create(&full.0)?;
        for block in [1 << 20, 4096, 1] {
            let block = vec![0_u8; block];
            while file.write_all(&block).is_ok() {}
        }
        Ok(full)
    }
}

impl Drop for Full {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// The file system of containerd's, runc's and the sandboxer's state has no space.
pub(crate) async fn full_run(run: Run) -> Result<Cell> {
    let mut cell = Cell::default();
    let pod = run.pod("full").await?;
    pod.run(ContainerSpec::sleeping("main")).await?;
    let full = Full::new(&run.node)?;
    let removed = cell.remove_within(&pod, Duration::from_secs(20)).await?;
    drop(full);
    if !removed {
        cell.fact("with space again");
        cell.remove(&pod).await?;
    }
    Ok(cell)
}
