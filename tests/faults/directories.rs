//! Each directory that the daemon uses is full, or read-only.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use kit::{grpc, until};
use nix::mount::{MsFlags, mount};

use crate::bare::Bare;
use crate::harness::{Case, alone};
use crate::pods::{Shape, is_whole, remove};

pub(crate) fn cases() -> Vec<Case> {
    alone![full_directories, read_only_directories]
}

/// A daemon with a small file system of its own in place of one of its directories.
async fn with_small(directory: &str) -> Result<Bare> {
    let bare = Bare::new("")?;
    mount(
        Some("small"),
        &bare.path(directory),
        Some("tmpfs"),
        MsFlags::empty(),
        Some("size=256k,nr_inodes=200,mode=755"),
    )?;
    bare.start().await?;
    Ok(bare)
}

/// Takes all space and all inodes.
fn fill(directory: &Path) -> Result<()> {
    use std::io::{ErrorKind, Write as _};
    let filler = directory.join("filler");
    fs::create_dir(&filler)?;
    let mut file = fs::File::create(filler.join("space"))?;
    let full = |done: std::io::Result<()>| match done {
        Ok(()) => Ok(false),
        Err(e) if e.kind() == ErrorKind::StorageFull => Ok(true),
        Err(e) => Err(e),
    };
    while !full(file.write_all(&[0; 4096]))? {}
    for number in 0.. {
        if full(fs::File::create(filler.join(number.to_string())).map(drop))? {
            break;
        }
    }
    Ok(())
}

/// Create or Start fails and names the directory and the errno; nothing of the sandbox is left.
async fn refused(bare: &Bare, directory: &str, errno: i32) -> Result<()> {
    let (controller, shape, id) = (bare.controller(), Shape::plain(bare), bare.id("refused"));
    let error = match shape.create(&controller, &id).await {
        Err(error) => error,
        Ok(()) => match controller.start(&id).await {
            Err(error) => error,
            Ok(_) => bail!("it started with {directory} in that state"),
        },
    };
    for word in [&id, &bare.path(directory).display().to_string(), &format!("os error {errno}")] {
        ensure!(error.message.contains(word), "{word:?} is not in: {error}");
    }
    let status = controller.status(&id, false).await;
    ensure!(status.as_ref().is_err_and(|status| status.code == grpc::NOT_FOUND), "{status:?}");
    let left: Vec<String> = bare.left()?.into_iter().filter(|thing| thing.contains(&id)).collect();
    ensure!(left.is_empty(), "left: {left:#?}");
    Ok(())
}

async fn full_directories() -> Result<()> {
    for directory in ["state", "root", "run"] {
        let bare = with_small(directory).await?;
        let (controller, shape) = (bare.controller(), Shape::plain(&bare));
        let (living, again) = (bare.id("living"), bare.id("again"));
        shape.run(&controller, &living).await?;
        fill(&bare.path(directory))?;
        refused(&bare, directory, 28).await.with_context(|| format!("{directory} is full"))?;
        is_whole(&bare, &controller, &living).await?;
        // Whether the exit can be recorded or not: Stop and Shutdown need no space in the end.
        if let Err(error) = controller.stop(&living).await {
            ensure!(
                directory == "state" && error.message.contains("os error 28"),
                "{directory} is full: stop: {error}"
            );
        }
        fs::remove_dir_all(bare.path(directory).join("filler"))?;
        remove(&controller, &living).await.with_context(|| format!("{directory} is free again"))?;
        shape.run(&controller, &again).await.with_context(|| format!("{directory} is free again"))?;
        remove(&controller, &again).await?;
        bare.nothing_left_but(&[bare.path(directory)]).await?;
    }
    Ok(())
}

async fn read_only_directories() -> Result<()> {
    for directory in ["state", "root", "run"] {
        let bare = with_small(directory).await?;
        let (controller, shape) = (bare.controller(), Shape::plain(&bare));
        let (living, dying) = (bare.id("living"), bare.id("dying"));
        shape.run(&controller, &living).await?;
        let pid = shape.run(&controller, &dying).await?;
        // The lock of the state directory is open for writing; the records have a mount of their own.
        let point = bare.path(if directory == "state" { "state/sandboxes" } else { directory });
        let remount = |flags| {
            let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | flags;
            mount(None::<&str>, &point, None::<&str>, flags, None::<&str>)
        };
        remount(MsFlags::MS_RDONLY).context("make it read-only")?;
        refused(&bare, directory, 30).await.with_context(|| format!("{directory} is read-only"))?;
        is_whole(&bare, &controller, &living).await?;
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.cast_signed()), nix::sys::signal::Signal::SIGKILL)?;
        let exit = tokio::time::timeout(Duration::from_secs(5), controller.wait(&dying)).await.context("Wait")??;
        ensure!(exit.exit_status == 137, "exit status {}", exit.exit_status);
        let error = controller.shutdown(&dying).await.err().context("removed from a read-only directory")?;
        ensure!(error.message.contains("os error 30"), "{directory} is read-only: shutdown: {error}");
        remount(MsFlags::empty()).context("make it writable")?;
        // The back-off finishes what was asked for.
        until("the removal", Duration::from_secs(30), async || {
            let status = controller.status(&dying, false).await;
            ensure!(status.as_ref().is_err_and(|status| status.code == grpc::NOT_FOUND), "{status:?}");
            Ok(())
        })
        .await?;
        remove(&controller, &living).await?;
        bare.nothing_left_but(&[bare.path(directory)]).await?;
    }
    Ok(())
}
