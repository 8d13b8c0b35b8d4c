//! Nodes with a broken daemon.

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kit::cri::api;
use kit::{Handler, PodSpec};

use crate::bench::{Bench, PROGRAM};
use crate::{BrokenNode, broken};

pub(crate) fn all() -> Vec<BrokenNode> {
    broken! {
        the_daemon_does_not_run:
            "FAIL  daemon: is not running: {top}/s.sock: ",
            "start it: systemctl start pause-sandboxer", 1, NoSandbox;
        the_daemon_is_stopped_by_a_signal:
            "FAIL  daemon: no response on {top}/s.sock within 2 s: process {daemon} is stopped by \
             a signal",
            "continue it: kill -CONT {daemon}", 1, NoSandbox;
        systemd_holds_the_socket_and_no_daemon_runs:
            "FAIL  daemon: no response on {top}/s.sock within 2 s: no daemon runs, and systemd",
            "systemctl start pause-sandboxer.service; if it fails", 1, NoSandbox;
        another_program_has_the_socket:
            "FAIL  daemon: the listener on {top}/s.sock is not a gRPC server",
            "set socket to a path that only the daemon uses", 1, NoSandbox;
        the_daemon_runs_another_build:
            "warn  daemon: process ", "systemctl restart pause-sandboxer", 4, Runs;
        the_daemon_has_other_mounts:
            "FAIL  mounts: ", "systemctl cat pause-sandboxer shows the drop-in", 1, NoSandbox;
        the_limits_of_the_daemon_are_lower:
            "warn  inherited: containers get lower limits than with containerd: LimitNOFILE=",
            "grant CAP_SYS_RESOURCE to the daemon, or set", 4, Runs;
        others_can_write_the_state_directory:
            "FAIL  state directory: users other than root can write {top}/sandboxer",
            "examine its content, then: chown root:root", 1, NotTried;
        a_record_is_quarantined:
            "warn  sandboxes: 1 records are quarantined", "pause-sandboxer list -o json shows the reason", 4, Runs;
        containerd_was_started_without_the_daemon:
            "FAIL  sandboxes: 1 pods run, but CRI lists them as NotReady",
            "systemctl restart containerd.service, while the daemon responds", 1, NotTried;
    }
}

async fn the_daemon_does_not_run(bench: &mut Bench) -> Result<()> {
    bench.node.stop_sandboxer().await
}

async fn the_daemon_is_stopped_by_a_signal(bench: &mut Bench) -> Result<()> {
    bench.stop(bench.node.sandboxer_pid()?).await?;
    no_answer(bench, "is stopped by a signal; continue it: kill -CONT").await
}

/// Every command says within seconds that no daemon answers, and why.
async fn no_answer(bench: &Bench, reason: &str) -> Result<()> {
    for words in [&["list"][..], &["list", "-o", "json"]] {
        let (text, status, took) = bench.run(words).await?;
        ensure!(took < kit::patient(Duration::from_secs(4)), "{words:?} took {took:?}: {text}");
        ensure!(status == 3 && text.contains(reason), "{words:?}: {status}: {text}");
    }
    Ok(())
}

/// The listeners of both sockets, which stay until the node ends.
fn listen(bench: &Bench) -> Result<[UnixListener; 2]> {
    let socket = bench.node.layout().sandboxer_socket();
    let ttrpc = socket.with_extension("sock.ttrpc");
    let bind = |path: &std::path::Path| {
        let _ = fs::remove_file(path);
        UnixListener::bind(path)
    };
    Ok([bind(&socket)?, bind(&ttrpc)?])
}

async fn systemd_holds_the_socket_and_no_daemon_runs(bench: &mut Bench) -> Result<()> {
    bench.node.stop_sandboxer().await?;
    bench.listeners = listen(bench)?.into();
    no_answer(bench, "no daemon runs, and systemd holds its socket; systemctl start").await
}

async fn another_program_has_the_socket(bench: &mut Bench) -> Result<()> {
    bench.node.stop_sandboxer().await?;
    for listener in listen(bench)? {
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                let _ = stream.read(&mut [0; 24]);
                let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
            }
        });
    }
    Ok(())
}

async fn the_daemon_runs_another_build(bench: &mut Bench) -> Result<()> {
    let program = bench.programs.path().join(PROGRAM);
    let other = [fs::read(&program)?, b"x".to_vec()].concat();
    fs::remove_file(&program)?;
    kit::write_program(&program, &other)?;
    bench.restart_daemon().await
}

async fn the_daemon_has_other_mounts(bench: &mut Bench) -> Result<()> {
    let daemon = bench.node.sandboxer_command()?;
    bench.node.stop_sandboxer().await?;
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private"]).arg(daemon.get_program());
    command.args(daemon.get_args());
    bench.node.start_sandboxer_as(command).await
}

async fn the_limits_of_the_daemon_are_lower(bench: &mut Bench) -> Result<()> {
    let daemon = bench.node.sandboxer_command()?;
    bench.node.stop_sandboxer().await?;
    let mut command = Command::new("setpriv");
    command.args(["--bounding-set", "-sys_resource", "--inh-caps", "-sys_resource"]);
    command.args(["prlimit", "--nofile=2048:2048"]).arg(daemon.get_program());
    command.args(daemon.get_args());
    bench.node.start_sandboxer_as(command).await
}

async fn others_can_write_the_state_directory(bench: &mut Bench) -> Result<()> {
    let open = fs::Permissions::from_mode(0o777);
    Ok(fs::set_permissions(bench.node.layout().sandboxer_state(), open)?)
}

async fn a_record_is_quarantined(bench: &mut Bench) -> Result<()> {
    let record = bench.node.layout().sandboxer_state().join("sandboxes/odd");
    fs::create_dir_all(&record)?;
    fs::write(record.join("record.json"), "{")?;
    bench.restart_daemon().await
}

/// The remedy is shown to help: it ends the problem. The alert sees it.
///
/// Promise: alerts_fire_on_their_failure.
async fn containerd_was_started_without_the_daemon(bench: &mut Bench) -> Result<()> {
    let lose = async |bench: &Bench| {
        bench.node.stop_sandboxer().await?;
        bench.restart_containerd().await?;
        bench.node.start_sandboxer().await
    };
    // The status of one pod is that of the daemon; kubelet looks at the list.
    let is_ready = async |bench: &Bench| -> Result<bool> {
        let all = bench.node.cri().list_pod_sandbox(api::PodSandboxFilter::new()).await?;
        Ok(all.iter().all(|pod| pod.state.enum_value() == Ok(api::PodSandboxState::SANDBOX_READY)))
    };
    let metrics = bench.node.layout().top.join("metrics");
    let counts = async |expected: f64| {
        kit::until("the metric is so", Duration::from_secs(60), async || {
            let name = "pause_sandboxer_sandboxes_not_ready_in_cri";
            let found = kit::metrics::value(&metrics, name).await?;
            ensure!(found == expected, "{found}, not {expected}");
            Ok(())
        })
        .await
    };
    let set =
        format!("forgotten_interval = 1\nmetrics = \"unix://{}\"\nlog_level", metrics.display());
    bench.set("log_level", &set)?;
    bench.restart_daemon().await?;
    let pod = bench.node.run(Handler::Ours, PodSpec::new("web").host_network()).await?;
    counts(0.0).await?;
    lose(bench).await?;
    ensure!(!is_ready(bench).await?, "CRI lists it as ready");
    counts(1.0).await?;
    // containerd has called Wait again by then.
    let waits = "pause_sandboxer_calls_in_flight{method=\"Wait\"}";
    kit::until("containerd waits for the pod", Duration::from_secs(60), async || {
        ensure!(kit::metrics::find(&metrics, waits).await? == Some(1.0), "no Wait");
        Ok(())
    })
    .await?;
    ensure!(!is_ready(bench).await?, "CRI lists it as ready");
    counts(1.0).await?;
    bench.restart_containerd().await?;
    ensure!(is_ready(bench).await?, "a restart of containerd does not help");
    counts(0.0).await?;
    let good = bench.check().await?;
    ensure!(good.problems.is_empty(), "{}", good.text);
    lose(bench).await?;
    let id = pod.id().to_owned();
    bench.pod = Some(pod);
    let found = bench.check().await?;
    let named = found.problems.first().context("no problem")?;
    ensure!(named.line.ends_with(&id), "the pod is not named: {}", named.line);
    Ok(())
}
