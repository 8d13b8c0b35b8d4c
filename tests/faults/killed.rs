//! The daemon is killed at every system call of a sandbox's life that changes the system, and
//! started again. The sandbox is whole then, or it is gone without a trace, and the same one can be
//! run.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kit::controller::Controller;
use kit::grpc;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::endpoint::{self, Caller};
use crate::harness::{Case, alone};
use crate::pods::{Netns, Shape, is_whole, remove};
use crate::standalone::Standalone;
use crate::tracer::{Seen, Tracer};

/// A machine as slow as this is not what is tested.
const LIMIT: Duration = Duration::from_secs(300);

pub(crate) fn cases() -> Vec<Case> {
    let cases = alone![
        killed_in_create_and_start,
        killed_in_start_without_a_cgroup,
        killed_in_start_with_users_and_network,
        killed_in_stop,
        killed_in_shutdown,
        killed_in_the_cleanup_after_an_exit,
        killed_in_the_launch_of_a_shim,
        killed_in_the_end_of_a_shim,
    ];
    cases.into_iter().map(|case| case.within(LIMIT)).collect()
}

/// Which part of a sandbox's life is traced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    CreateStart,
    Stop,
    Shutdown,
    ExitCleanup,
    /// A first caller at the endpoint, until its shim has all that it is to have.
    Launch,
    /// Shutdown of a sandbox with a shim.
    ShimEnd,
}

/// Promise: kill_at_any_call_loses_nothing.
async fn killed_in_create_and_start() -> Result<()> {
    let standalone = Standalone::started().await?;
    let shape = Shape::plain(&standalone);
    let calls = at_every_call(&standalone, &shape, Part::CreateStart).await?;
    for needed in [
        "record.json",
        "stage.json",
        "shm",
        "hosts",
        "clone",
        "child: write",
        "child: execveat",
        "mkdirat",
    ] {
        ensure!(
            calls.iter().any(|call| call.contains(needed)),
            "nothing of {needed} among {calls:#?}"
        );
    }
    Ok(())
}

/// Nothing but the pause itself tells then whose it is.
async fn killed_in_start_without_a_cgroup() -> Result<()> {
    let standalone = Standalone::started().await?;
    let shape = Shape { cgroup_parent: String::new(), ..Shape::plain(&standalone) };
    let calls = at_every_call(&standalone, &shape, Part::CreateStart).await?;
    ensure!(
        calls.iter().any(|call| call.contains("child: execveat")),
        "no execveat among {calls:#?}"
    );
    ensure!(
        standalone.logged().contains("killing pause process without a record"),
        "no pause was ever left alone"
    );
    Ok(())
}

async fn killed_in_start_with_users_and_network() -> Result<()> {
    let standalone = Standalone::started().await?;
    let netns = Netns::new(standalone.path("netns"))?;
    for shape in [
        Shape { netns: Some(netns.path().to_owned()), ..Shape::plain(&standalone) },
        Shape { cgroup_parent: String::new(), userns: true, ..Shape::plain(&standalone) },
    ] {
        let calls = at_every_call(&standalone, &shape, Part::CreateStart).await?;
        ensure!(
            calls.iter().any(|call| call.contains("child: setns")),
            "no setns among {calls:#?}"
        );
    }
    Ok(())
}

/// Promise: kill_at_any_call_loses_nothing.
async fn killed_in_stop() -> Result<()> {
    let standalone = Standalone::started().await?;
    let calls = at_every_call(&standalone, &Shape::plain(&standalone), Part::Stop).await?;
    for needed in ["pidfd_send_signal", "waitid", "stage.json", "umount2", "unlinkat"] {
        ensure!(calls.iter().any(|call| call.contains(needed)), "no {needed} among {calls:#?}");
    }
    Ok(())
}

/// Promise: kill_at_any_call_loses_nothing.
async fn killed_in_shutdown() -> Result<()> {
    let standalone = Standalone::started().await?;
    let calls = at_every_call(&standalone, &Shape::plain(&standalone), Part::Shutdown).await?;
    for needed in ["pidfd_send_signal", "umount2", "record.json", "rmdir"] {
        ensure!(calls.iter().any(|call| call.contains(needed)), "no {needed} among {calls:#?}");
    }
    Ok(())
}

/// Promise: kill_at_any_call_loses_nothing.
async fn killed_in_the_cleanup_after_an_exit() -> Result<()> {
    let standalone = Standalone::started().await?;
    let calls = at_every_call(&standalone, &Shape::plain(&standalone), Part::ExitCleanup).await?;
    for needed in ["waitid", "stage.json", "umount2"] {
        ensure!(calls.iter().any(|call| call.contains(needed)), "no {needed} among {calls:#?}");
    }
    Ok(())
}

/// Promise: killed_shim_leaves_nothing.
async fn killed_in_the_launch_of_a_shim() -> Result<()> {
    let standalone = endpoint::with_shim()?;
    standalone.start().await?;
    let calls = at_every_call(&standalone, &Shape::plain(&standalone), Part::Launch).await?;
    for needed in [
        "config.json",
        "/log",
        "shim.json",
        "clone",
        "child: setsid",
        "child: execve",
        "oom_score_adj",
    ] {
        ensure!(
            calls.iter().any(|call| call.contains(needed)),
            "nothing of {needed} among {calls:#?}"
        );
    }
    ensure!(standalone.logged().contains("adopted shim"), "no shim was ever found again");
    Ok(())
}

async fn killed_in_the_end_of_a_shim() -> Result<()> {
    let standalone = endpoint::with_shim()?;
    standalone.start().await?;
    let calls = at_every_call(&standalone, &Shape::plain(&standalone), Part::ShimEnd).await?;
    for needed in ["waitid", "/shims/", "shim.json", "record.json"] {
        ensure!(
            calls.iter().any(|call| call.contains(needed)),
            "nothing of {needed} among {calls:#?}"
        );
    }
    Ok(())
}

/// Kills at the first call, the second, and so on until the part is done before the next comes.
/// Answers the calls of the last, whole run.
async fn at_every_call(standalone: &Standalone, shape: &Shape, part: Part) -> Result<Vec<String>> {
    let id = standalone.id("killed");
    let begun = Instant::now();
    for nth in 1.. {
        let (seen, answered) = one(standalone, shape, part, &id, nth)
            .await
            .with_context(|| format!("{part:?}, killed at call {nth}"))?;
        if !seen.killed {
            eprintln!(
                "{part:?}: killed at each of {} calls, {:.1} s",
                nth - 1,
                begun.elapsed().as_secs_f32()
            );
            return Ok(seen.calls);
        }
        standalone.kill()?;
        let at = seen.calls.last().cloned().unwrap_or_default();
        settles(standalone, shape, part, &id, answered).await.with_context(|| {
            format!("{part:?}, killed at call {nth}: {at}\nlog ends:\n{}", log_end(standalone))
        })?;
    }
    bail!("unreachable: there are not that many calls")
}

/// One life of the sandbox, of which `part` is traced; with a caller whom a shim has answered, if
/// any was.
async fn one(
    standalone: &Standalone,
    shape: &Shape,
    part: Part,
    id: &str,
    nth: usize,
) -> Result<(Seen, Option<Caller>)> {
    let controller = standalone.controller();
    let mut pid = 0;
    if part != Part::CreateStart {
        pid = shape.run(&controller, id).await.context("run before")?;
    }
    let mut answered = None;
    if part == Part::ShimEnd {
        Caller::connect(standalone).await?.ask(id).await?;
        endpoint::settled_in(standalone, id).await?;
    }
    let tracer = Tracer::attach(standalone.pid()?, nth)?;
    // Any of these may fail with the daemon; what counts is what is found afterwards.
    let done: Result<()> = match part {
        Part::CreateStart => shape.run(&controller, id).await.map(drop).map_err(Into::into),
        Part::Stop => controller.stop(id).await.map_err(Into::into),
        Part::Shutdown | Part::ShimEnd => controller.shutdown(id).await.map_err(Into::into),
        Part::Launch => {
            let caller = Caller::connect(standalone).await?;
            match caller.ask(id).await {
                Ok(()) => {
                    answered = Some(caller);
                    endpoint::settled_in(standalone, id).await
                }
                Err(e) => Err(e),
            }
        }
        Part::ExitCleanup => {
            kill(Pid::from_raw(pid.cast_signed()), Signal::SIGKILL)?;
            // Answered when the cleanup is done.
            match controller.wait(id).await {
                Ok(_) => cleaned(standalone, &controller, id).await.map_err(Into::into),
                Err(e) => Err(e.into()),
            }
        }
    };
    let seen = tracer.finish()?;
    if !seen.killed {
        done.context("without a kill")?;
        remove_whatever(&controller, id).await?;
        standalone.nothing_left().await?;
    }
    Ok((seen, answered))
}

/// Waits until the cleanup after the exit is done: nothing but the record and files is left.
async fn cleaned(
    standalone: &Standalone,
    controller: &Controller,
    id: &str,
) -> Result<(), grpc::Status> {
    loop {
        controller.status(id, false).await?;
        let left = standalone.left().unwrap_or_default();
        if left.iter().all(|thing| thing.starts_with("directory")) {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Starts the daemon again and looks at what there is.
async fn settles(
    standalone: &Standalone,
    shape: &Shape,
    part: Part,
    id: &str,
    answered: Option<Caller>,
) -> Result<()> {
    let launched = endpoint::shims(standalone)?;
    standalone.start().await?;
    let controller = standalone.controller();
    if part == Part::Launch {
        // Who called a shim that was executed has its answer; who called none was hung up on, and
        // calls again.
        ensure!(
            launched.len() == usize::from(answered.is_some()),
            "answered: {}, {launched:?}",
            answered.is_some()
        );
        if let Some(caller) = answered {
            caller.ask(id).await.context("the connection from before")?;
        }
        Caller::connect(standalone).await?.ask(id).await.context("a new connection")?;
        endpoint::settled_in(standalone, id).await?;
        let shim = endpoint::one(standalone)?;
        ensure!(
            launched.iter().all(|before| before.pid == shim.pid),
            "another shim: {launched:?}, {shim:?}"
        );
    }
    match controller.status(id, false).await {
        Err(status) if status.code == grpc::NOT_FOUND => {
            // Gone: without a trace, and at once, since it answers only after recovery.
            let left = standalone.left()?;
            ensure!(left.is_empty(), "gone, but left:\n  {}", left.join("\n  "));
        }
        Err(status) => bail!("neither whole nor gone: {status}"),
        Ok(status) if status.state == "SANDBOX_READY" => {
            ensure!(part != Part::ExitCleanup, "ready, but its pause was killed");
            is_whole(standalone, &controller, id).await?;
        }
        Ok(status) if status.state == "SANDBOX_NOTREADY" && part == Part::CreateStart => {
            // Created and not started: it can be.
            ensure!(status.pid == 0, "not ready, but it was never ended: {status:?}");
            controller.start(id).await.context("start what was created")?;
            is_whole(standalone, &controller, id).await?;
        }
        Ok(status) if status.state == "SANDBOX_NOTREADY" => {
            ensure!(standalone.pauses()?.is_empty(), "not ready, but its pause lives");
            let exit = controller.wait(id).await?;
            ensure!([137, 255].contains(&exit.exit_status), "exit status {}", exit.exit_status);
        }
        Ok(status) => bail!("it is {}", status.state),
    }
    remove_whatever(&controller, id).await?;
    standalone.nothing_left().await?;
    // The same sandbox again.
    shape.run(&controller, id).await.context("run it again")?;
    is_whole(standalone, &controller, id).await.context("run again")?;
    remove(&controller, id).await.context("remove it again")?;
    standalone.nothing_left().await
}

async fn remove_whatever(controller: &Controller, id: &str) -> Result<()> {
    match controller.stop(id).await {
        Err(status) if status.code == grpc::NOT_FOUND => {}
        other => other.context("stop")?,
    }
    controller.shutdown(id).await.context("shutdown")
}

fn log_end(standalone: &Standalone) -> String {
    let log = standalone.logged();
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(15)..].join("\n")
}
