//! containerd's snapshotter: its own, or the fuse-overlayfs snapshotter, whose root file systems a
//! FUSE program of the node serves.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};
use nix::mount::{MntFlags, MsFlags};

use crate::config::Layout;
use crate::process::Process;

/// The name of the fuse-overlayfs snapshotter, and its program, which is in `PATH`.
const FUSE_OVERLAYFS: &str = "fuse-overlayfs";
const PROGRAM: &str = "containerd-fuse-overlayfs-grpc";

/// The snapshotter of a node.
pub(crate) struct Snapshotter {
    /// Its name in containerd.
    pub name: &'static str,
    /// The part of containerd's config for it.
    pub config: String,
    /// Its process, if it has one of its own.
    pub process: Option<Process>,
}

impl Snapshotter {
    /// The one that the environment variable `KIT_SNAPSHOTTER` names (`fuse-overlayfs`), else
    /// `overlayfs` where the scratch directory takes one, else `native`.
    pub(crate) async fn start(layout: &Layout) -> Result<Self> {
        let Ok(named) = std::env::var("KIT_SNAPSHOTTER") else {
            let name = if takes_overlay(layout)? { "overlayfs" } else { "native" };
            return Ok(Self { name, config: String::new(), process: None });
        };
        ensure!(named == FUSE_OVERLAYFS, "KIT_SNAPSHOTTER is {named:?}, not {FUSE_OVERLAYFS}");
        let socket = layout.top.join("fuse.sock");
        let mut command = Command::new(PROGRAM);
        command.arg(&socket).arg(root(layout));
        let mut process = Process::spawn(command, &layout.top.join("logs/snapshotter.log"))?;
        while !socket.exists() {
            // It ends at once where it cannot mount with FUSE; its log has the reason.
            process.check()?;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let config = format!(
            "\n[proxy_plugins.{FUSE_OVERLAYFS}]\ntype = \"snapshot\"\naddress = {socket:?}\n"
        );
        Ok(Self { name: FUSE_OVERLAYFS, config, process: Some(process) })
    }
}

/// Where the fuse-overlayfs snapshotter has its snapshots.
fn root(layout: &Layout) -> PathBuf {
    layout.root().join("io.containerd.snapshotter.v1.fuse-overlayfs")
}

fn takes_overlay(layout: &Layout) -> Result<bool> {
    let at = |name: &str| layout.top.join("overlay").join(name);
    for name in ["lower", "upper", "work", "merged"] {
        std::fs::create_dir_all(at(name))?;
    }
    let options = format!(
        "lowerdir={},upperdir={},workdir={}",
        at("lower").display(),
        at("upper").display(),
        at("work").display()
    );
    let taken = nix::mount::mount(
        Some("overlay"),
        &at("merged"),
        Some("overlay"),
        MsFlags::empty(),
        Some(options.as_str()),
    );
    if taken.is_ok() {
        nix::mount::umount2(&at("merged"), MntFlags::empty())?;
    }
    std::fs::remove_dir_all(layout.top.join("overlay"))?;
    Ok(taken.is_ok())
}
