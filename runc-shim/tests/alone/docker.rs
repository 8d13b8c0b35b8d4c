//! Containers of Docker, whose daemon has the node's containerd.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use anyhow::{Context as _, Result, ensure};
use kit::image::Layer;
use kit::machine::{mounts, processes};
use kit::{Node, Process, until};
use rustix::mount::UnmountFlags;
use serde_json::json;

use crate::engine::{self, COUNTS, Engine, commands, counts_on, fetched, shim_dies};
use crate::{SOON, program, run, shim};

/// The names of the image, and of the runtime in Docker's config.
const IMAGE: &str = "busybox";
const RUNTIME: &str = "small";

/// The daemon.
struct Docker<'a> {
    node: &'a Node,
    program: PathBuf,
    process: Option<Process>,
}

impl<'a> Docker<'a> {
    fn new(node: &'a Node) -> Result<Self> {
        Ok(Self { node, program: fetched("docker/usr/sbin/dockerd")?, process: None })
    }

    fn top(&self) -> &Path {
        &self.node.layout().top
    }

    /// The client.
    fn engine(&self) -> Result<Engine> {
        let client = fetched("docker/usr/bin/docker")?.display().to_string();
        let host = format!("--host=unix://{}/d.sock", self.top().display());
        let config = format!("--config={}/docker-client", self.top().display());
        let options = ["--network", "none"].map(str::to_owned);
        let program = vec![client, host, config];
        Ok(Engine { program, options: options.into(), image: IMAGE, shows_dead: true })
    }

    async fn start(&mut self, engine: &Engine) -> Result<()> {
        let layout = self.node.layout();
        let in_top = |name: &str| self.top().join(name).display().to_string();
        let config = json!({
            "hosts": [format!("unix://{}", in_top("d.sock"))],
            "data-root": in_top("docker"),
            "exec-root": in_top("dx"),
            "pidfile": in_top("docker.pid"),
            "containerd": layout.containerd_socket(),
            "containerd-namespace": layout.name,
            "cgroup-parent": layout.cgroup(),
            "exec-opts": ["native.cgroupdriver=cgroupfs"],
            "live-restore": true,
            "runtimes": { RUNTIME: { "runtimeType": program() } },
            "default-runtime": RUNTIME,
            "bridge": "none",
            "iptables": false,
            "ip-forward": false,
            "userland-proxy": false,
        });
        fs::write(in_top("docker.json"), config.to_string())?;
        let mut command = Command::new(&self.program);
        let path = std::env::var("PATH").unwrap_or_default();
        command.arg("--config-file").arg(in_top("docker.json"));
        command.env("PATH", format!("{path}:/usr/sbin:/sbin"));
        let mut process = Process::spawn(command, &self.top().join("logs/docker.log"))?;
        let checked = Mutex::new(&mut process);
        until("Docker answers", SOON, async || {
            checked.lock().unwrap().check()?;
            engine.succeeds(&["version"]).map(drop)
        })
        .await?;
        self.process = Some(process);
        Ok(())
    }

    fn process(&mut self) -> Result<Process> {
        self.process.take().context("it does not run")
    }
}

/// Writes a root file system.
fn write_image(path: &Path) -> Result<()> {
    let mut layer = Layer::new(fs::File::create(path)?);
    for directory in ["bin/", "dev/", "etc/", "proc/", "sys/", "tmp/"] {
        layer.directory(directory, 0o755)?;
    }
    layer.file("bin/busybox", 0o755, &fs::read("/bin/busybox")?)?;
    for applet in ["cat", "sh", "sleep", "test", "touch"] {
        layer.symlink(&format!("bin/{applet}"), "busybox")?;
    }
    Ok(layer.finish()?.sync_all()?)
}

#[test]
#[ignore = "`make test-shim-alone` fetches Docker"]
fn docker_runs_and_restores_containers() {
    run(async |node| {
        let mut docker = Docker::new(node)?;
        let engine = docker.engine()?;
        docker.start(&engine).await?;
        let image = docker.top().join("image.tar");
        write_image(&image)?;
        engine.succeeds(&["import", &image.display().to_string(), IMAGE])?;
        commands(&engine, node).await?;
        let output = engine.run(&["--rm", "-t"], "test -t 1 && echo terminal")?;
        ensure!(output.stdout == b"terminal\r\n", "{output:?}");
        let answers = "while read -r line; do echo \"got $line\"; done";
        engine.run_detached("answers", &["-i"], answers)?;
        engine.attach_answers("answers")?;
        engine.remove_last(node, &["answers"]).await?;
        let again = ["--restart", "always"];
        engine.run_detached("again", &again, "echo life; sleep 0.2; exit 1")?;
        engine.says("again", "life", 3).await?;
        engine.remove_last(node, &["again"]).await?;
        shim_dies(&engine, node).await?;
        restored(&mut docker, &engine).await?;
        docker.process()?.stop(SOON).await?;
        // What Docker keeps for itself.
        for mount in mounts::of("self")?.iter().rev() {
            if ["docker", "dx"].iter().any(|name| mount.point.starts_with(docker.top().join(name)))
            {
                rustix::mount::unmount(&mount.point, UnmountFlags::DETACH)?;
            }
        }
        for name in ["docker", "dx"] {
            let directory = docker.top().join(name);
            fs::remove_dir_all(&directory).with_context(|| directory.display().to_string())?;
        }
        for name in ["docker.json", "image.tar"] {
            fs::remove_file(docker.top().join(name)).with_context(|| name.to_owned())?;
        }
        engine::forget(node)
    });
}

/// A container through kills and restarts of containerd and of Docker.
async fn restored(docker: &mut Docker<'_>, engine: &Engine) -> Result<()> {
    let node = docker.node;
    engine.run_detached("counts", &[], COUNTS)?;
    let before = (shim(node)?.pid, engine.state("counts", "Pid")?);
    let is_same = async |engine: &Engine| -> Result<()> {
        ensure!((shim(node)?.pid, engine.state("counts", "Pid")?) == before, "another process");
        engine.exec_answers("counts")?;
        counts_on(engine, "counts").await
    };
    is_same(engine).await?;
    node.kill_containerd()?;
    node.start_containerd().await?;
    // It does not connect at once.
    until("Docker has containerd again", SOON, async || engine.exec_answers("counts")).await?;
    is_same(engine).await.context("after a kill of containerd")?;
    docker.process()?.stop(SOON).await?;
    docker.start(engine).await?;
    is_same(engine).await.context("after a stop of Docker")?;
    let waits = "while test ! -e /e; do sleep 0.05; done; exit 6";
    engine.run_detached("waits", &[], waits)?;
    engine.succeeds(&["exec", "-d", "waits", "sh", "-c", "sleep 0.5; touch /e"])?;
    let pid: u32 = engine.state("waits", "Pid")?.parse()?;
    docker.process()?.kill()?;
    until("it ends while Docker is down", SOON, async || {
        ensure!(!processes::exists(pid), "{pid}");
        Ok(())
    })
    .await?;
    docker.start(engine).await?;
    engine.ends("waits", 6).await?;
    engine.remove("waits")?;
    is_same(engine).await.context("after a kill of Docker")?;
    engine.remove_last(node, &["counts"]).await
}
