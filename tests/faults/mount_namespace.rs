//! A daemon whose unit was given a mount namespace of its own, as by `PrivateTmp=yes`.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use kit::{Handler, Node, PodSpec};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use pause_sandboxer::mounts::{View, view};

use crate::harness::{Case, alone, on_node};

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = alone![mounts_are_seen_where_they_are_propagated];
    cases.extend(on_node![node_mount_namespace_of_its_own]);
    cases
}

/// The verdict on a process's mounts matches the fate of a mount: this process is containerd, and
/// others mount below its state directory.
async fn mounts_are_seen_where_they_are_propagated() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let state = dir.path().join("state");
    fs::create_dir(&state)?;
    let address = dir.path().join("c.sock");
    let _listener = UnixListener::bind(&address)?;
    ensure!(view("self", &address, &state)? == View::Same, "of this process itself");
    let none = None::<&str>;
    mount(Some(&state), &state, none, MsFlags::MS_BIND, none)?;
    let judged =
        mount(none, &state, none, MsFlags::MS_SHARED, none).map_err(Into::into).and_then(|()| {
            let own = fs::metadata(&state)?.dev();
            for (name, commands, propagation, seen) in [
                ("private", "", "private", false),
                ("shared with its own alone", "mount --make-rshared / && ", "private", false),
                ("as by PrivateTmp=", "mount --make-rshared / && ", "slave", false),
                ("receiving only", "", "slave", false),
                ("of one peer group", "", "unchanged", true),
            ] {
                let script = format!(
                    "{commands}mkdir -p \"$1/x\" && mount -t tmpfs x \"$1/x\" && echo mounted \
                    && exec sleep 1000"
                );
                let mut command = Command::new("unshare");
                command
                    .args(["--mount", "--propagation", propagation, "sh", "-c", &script, "sh"])
                    .arg(&state);
                let mut child = command.stdout(Stdio::piped()).spawn()?;
                let mut line = String::new();
                let looked = BufReader::new(child.stdout.take().context("its output")?)
                    .read_line(&mut line)
                    .map(|_| {
                        (
                            view(&child.id().to_string(), &address, &state),
                            fs::metadata(state.join("x")).map(|meta| meta.dev()),
                        )
                    });
                child.kill()?;
                child.wait()?;
                // It stays where it was propagated to.
                let _ = umount2(&state.join("x"), MntFlags::MNT_DETACH);
                let (view, device) = looked?;
                ensure!(line == "mounted\n", "{name}: nothing was mounted");
                ensure!((device? != own) == seen, "{name}: the mount is seen here: {}", !seen);
                ensure!((view? == View::Propagated) == seen, "{name}: it is said otherwise");
            }
            Ok(())
        });
    umount2(&state, MntFlags::MNT_DETACH)?;
    judged
}

/// Without the refusal its pods run, and their containers have a /dev/shm that is not the pod's.
async fn node_mount_namespace_of_its_own(node: Arc<Node>) -> Result<()> {
    node.stop_sandboxer().await?;
    let plain = node.sandboxer_command()?;
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--propagation", "slave"])
        .arg(plain.get_program())
        .args(plain.get_args());
    node.start_sandboxer_as(command).await?;

    let failed =
        node.run(Handler::Ours, PodSpec::new("apart")).await.err().context("the pod was made")?;
    let said = format!("{failed:#}");
    for part in ["code 9: ", "mount where containerd sees it", "PrivateTmp="] {
        ensure!(said.contains(part), "{part} is not in {said}");
    }
    let log = fs::read_to_string(node.layout().sandboxer_log())?;
    ensure!(log.matches("refusing pods: ").count() == 1, "the log says it not once:\n{log}");
    node.stop_sandboxer().await?;
    node.start_sandboxer().await
}
