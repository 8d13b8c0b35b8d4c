//! Sandboxes of a standalone daemon: what they are to be, and how they are asked for.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use kit::controller::Controller;
use kit::cri::api::{self, NamespaceMode};
use kit::grpc::Status;
use kit::until;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

use crate::standalone::Standalone;

/// The wanted state of a sandbox.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    /// Below which cgroup; empty: the daemon's own.
    pub(crate) cgroup_parent: String,
    /// A network namespace of its own.
    pub(crate) netns: Option<PathBuf>,
    /// Users of its own.
    pub(crate) userns: bool,
}

impl Shape {
    /// With the node's network, below the daemon's cgroup of pods.
    pub(crate) fn plain(standalone: &Standalone) -> Self {
        Self { cgroup_parent: standalone.cgroup(), netns: None, userns: false }
    }

    /// The CRI config.
    pub(crate) fn config(&self) -> api::PodSandboxConfig {
        let network = if self.netns.is_some() { NamespaceMode::POD } else { NamespaceMode::NODE };
        let mut namespaces = api::NamespaceOption { network: network.into(), ..Default::default() };
        namespaces.pid = NamespaceMode::CONTAINER.into();
        if self.userns {
            let mapping = api::IDMapping {
                container_id: 0,
                host_id: 1_000_000,
                length: 65536,
                ..Default::default()
            };
            namespaces.userns_options = Some(api::UserNamespace {
                mode: NamespaceMode::POD.into(),
                uids: vec![mapping.clone()],
                gids: vec![mapping],
                ..Default::default()
            })
            .into();
        }
        let security = api::LinuxSandboxSecurityContext {
            namespace_options: Some(namespaces).into(),
            ..Default::default()
        };
        let linux = api::LinuxPodSandboxConfig {
            cgroup_parent: self.cgroup_parent.clone(),
            security_context: Some(security).into(),
            ..Default::default()
        };
        let hostname = if self.netns.is_some() { "pod".to_owned() } else { String::new() };
        api::PodSandboxConfig { hostname, linux: Some(linux).into(), ..Default::default() }
    }

    /// Create.
    pub(crate) async fn create(&self, controller: &Controller, id: &str) -> Result<(), Status> {
        let netns =
            self.netns.as_deref().map(|path| path.display().to_string()).unwrap_or_default();
        controller.create(id, &self.config(), &netns).await
    }

    /// Create and Start; the pause's pid.
    pub(crate) async fn run(&self, controller: &Controller, id: &str) -> Result<u32, Status> {
        self.create(controller, id).await?;
        Ok(controller.start(id).await?.pid)
    }
}

/// Stop and Shutdown.
pub(crate) async fn remove(controller: &Controller, id: &str) -> Result<(), Status> {
    controller.stop(id).await?;
    controller.shutdown(id).await
}

/// The state that Status tells.
pub(crate) async fn state(controller: &Controller, id: &str) -> Result<String, Status> {
    Ok(controller.status(id, false).await?.state)
}

/// Checks that a sandbox is ready with this pause, and that the pause is alive.
pub(crate) async fn is_whole(
    standalone: &Standalone,
    controller: &Controller,
    id: &str,
) -> Result<u32> {
    let status = controller.status(id, false).await?;
    ensure!(status.state == "SANDBOX_READY", "{id} is {}", status.state);
    // The kernel resumes the daemon a moment before the program's command line is there.
    let pause = until("its pause", Duration::from_secs(5), async || {
        standalone
            .pauses()?
            .into_iter()
            .find(|p| p.command.ends_with(id))
            .with_context(|| format!("{id}: no pause"))
    })
    .await?;
    ensure!(
        pause.pid == status.pid && pause.state != 'Z',
        "{id}: status tells {}, its pause is {pause:?}",
        status.pid
    );
    for file in ["hostname", "hosts", "resolv.conf"] {
        ensure!(standalone.files(id).join(file).exists(), "{id} has no {file}");
    }
    ensure!(standalone.shm(id).exists(), "{id} has no shared memory");
    Ok(pause.pid)
}

/// A network namespace that is bind-mounted on a file, as containerd makes them.
#[derive(Debug)]
pub(crate) struct Netns(PathBuf);

impl Netns {
    pub(crate) fn new(path: PathBuf) -> Result<Self> {
        File::create(&path)?;
        let target = path.clone();
        let made = thread::spawn(move || {
            unshare(CloneFlags::CLONE_NEWNET)?;
            mount(
                Some("/proc/thread-self/ns/net"),
                &target,
                None::<&str>,
                MsFlags::MS_BIND,
                None::<&str>,
            )
        });
        made.join().map_err(|_| anyhow!("panicked"))?.context("make a network namespace")?;
        Ok(Self(path))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// Unmounts and removes it.
    pub(crate) fn remove(&self) -> Result<()> {
        umount2(&self.0, MntFlags::MNT_DETACH)?;
        Ok(fs::remove_file(&self.0)?)
    }
}

impl Drop for Netns {
    fn drop(&mut self) {
        let _ = self.remove();
    }
}
