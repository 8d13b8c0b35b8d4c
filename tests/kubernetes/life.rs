//! The life of a pod: its containers, and what kubectl does with them.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::Run;
use crate::cluster::until;
use crate::side::{Facts, LIMIT, Side, at, container, sleeping, with};

pub(crate) const CASES: &[(&str, Run)] = &[
    ("a_pod", Run::Each(a_pod)),
    ("exec_attach_and_logs", Run::Each(exec_attach_and_logs)),
    ("port_forward", Run::Each(port_forward)),
    ("probes", Run::Each(probes)),
    ("init_and_sidecar_containers", Run::Each(init_and_sidecar)),
    ("ephemeral_container", Run::Each(ephemeral)),
    ("lifecycle_hooks", Run::Each(hooks)),
    ("host_port", Run::Each(host_port)),
    ("missing_image", Run::Each(missing_image)),
    ("forced_deletion", Run::Each(forced_deletion)),
];

fn a_pod(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    side.run("a-pod", json!({ "containers": [sleeping("main")] }))?;
    facts.add("hostname", side.sh("a-pod", "hostname")?);
    let pod = side.get("pod/a-pod")?;
    for path in [
        "status.phase",
        "status.qosClass",
        "status.hostIP",
        "status.containerStatuses.0.ready",
        "status.containerStatuses.0.restartCount",
        "status.containerStatuses.0.image",
    ] {
        facts.add(path, at(&pod, path));
    }
    let mut conditions: Vec<String> = Vec::new();
    for condition in pod["status"]["conditions"].as_array().context("no conditions")? {
        conditions.push(format!("{}={}", at(condition, "type"), at(condition, "status")));
    }
    conditions.sort();
    facts.add("conditions", conditions.join(" "));
    facts.add("addresses", pod["status"]["podIPs"].as_array().map_or(0, Vec::len));
    facts.add("routes", side.sh("a-pod", "ip route | cut -d' ' -f1")?);
    facts.add("interfaces", side.sh("a-pod", "ls /sys/class/net")?);
    side.delete(&["pod/a-pod"])?;
    facts.add("events", side.events("a-pod")?);
    Ok(facts)
}

fn exec_attach_and_logs(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    let script = "echo begun; echo failing >&2; cat; echo ended";
    let main = with(container("main", script), json!({ "stdin": true, "stdinOnce": true }));
    let terminal = with(container("terminal", "tty; exec sleep 100000"), json!({ "tty": true }));
    side.run(
        "talks",
        json!({
            "restartPolicy": "Never",
            "containers": [main, terminal],
        }),
    )?;
    facts.expect("exec", side.sh("talks", "echo $((6 * 7))")?, "42")?;
    let piped = side.kubectl_with(&["exec", "-i", "talks", "--", "wc", "-c"], "four")?;
    facts.expect("exec with input", piped, "4")?;
    let failed = side.sh("talks", "exit 7").expect_err("it exits with 7").to_string();
    facts.expect("exit status", failed.contains("exit code 7"), "true")?;
    facts.expect("terminal", side.logs(&["talks", "-c", "terminal"])?, "/dev/pts/0")?;
    let attached = side.kubectl_with(&["attach", "-i", "talks", "-c", "main"], "by attach\n")?;
    facts.expect("attach", attached.contains("by attach"), "true")?;
    side.until("pod/talks", "main ends", |pod| {
        at(pod, "status.containerStatuses.0.state.terminated.exitCode") == "0"
    })?;
    // containerd reads the two streams one beside the other.
    let logs = side.logs(&["talks", "-c", "main"])?;
    let (errors, lines): (Vec<&str>, Vec<&str>) = logs.lines().partition(|line| *line == "failing");
    facts.expect("log of stderr", errors.join(" "), "failing")?;
    facts.expect("log of stdout", lines.join("\n"), "begun\nby attach\nended")?;
    facts.expect("tail", side.logs(&["talks", "-c", "main", "--tail=1"])?, "ended")?;
    side.delete(&["pod/talks"])?;
    Ok(facts)
}

/// The line that answers a line.
fn ask(mut stream: TcpStream, line: &str) -> Result<String> {
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    writeln!(stream, "{line}")?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer)?;
    ensure!(!answer.is_empty(), "it closes");
    Ok(answer)
}

fn port_forward(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    let serve = container("main", "exec probe serve 7000 answers");
    side.run("served", json!({ "containers": [serve] }))?;
    let local: u16 = if side.namespace() == "ours" { 17001 } else { 17000 };
    let mut forwarding = side.spawn(&["port-forward", "pod/served", &format!("{local}:7000")])?;
    let answer = until("the forwarded port answers", LIMIT, || {
        ask(TcpStream::connect(("127.0.0.1", local))?, "hello")
    });
    forwarding.kill()?;
    forwarding.wait()?;
    facts.expect("answer", answer?, "answers: hello")?;
    let ip = at(&side.get("pod/served")?, "status.podIP");
    let stream = TcpStream::connect((ip.as_str(), 7000))?;
    facts.expect("from the node", ask(stream, "direct")?, "answers: direct")?;
    side.delete(&["pod/served"])?;
    Ok(facts)
}

fn probes(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    let script = "mkdir -p /tmp/www; echo yes >/tmp/www/ready; touch /tmp/alive; \
                  exec httpd -f -p 8080 -h /tmp/www";
    let main = with(
        container("main", script),
        json!({
            "startupProbe": {
                "tcpSocket": { "port": 8080 }, "periodSeconds": 1, "failureThreshold": 60,
            },
            "readinessProbe": { "httpGet": { "path": "/ready", "port": 8080 }, "periodSeconds": 1 },
            "livenessProbe": {
                "exec": { "command": ["test", "-e", "/tmp/alive"] },
                "periodSeconds": 1, "failureThreshold": 1, "timeoutSeconds": 20,
            },
        }),
    );
    side.run("probed", json!({ "containers": [main] }))?;
    facts.add("started", at(&side.get("pod/probed")?, "status.containerStatuses.0.started"));
    side.sh("probed", "rm /tmp/www/ready")?;
    side.wait("pod/probed", "condition=Ready=false")?;
    facts.add("unready", at(&side.get("pod/probed")?, "status.containerStatuses.0.restartCount"));
    side.sh("probed", "rm /tmp/alive")?;
    let restarted = side.until("pod/probed", "is restarted", |pod| {
        at(pod, "status.containerStatuses.0.restartCount") != "0"
            && at(pod, "status.containerStatuses.0.ready") == "true"
    })?;
    let last = "status.containerStatuses.0.lastState.terminated";
    facts.add("restarts", at(&restarted, "status.containerStatuses.0.restartCount"));
    facts.add("reason", at(&restarted, &format!("{last}.reason")));
    facts.add("exit code", at(&restarted, &format!("{last}.exitCode")));
    side.delete(&["pod/probed"])?;
    facts.add("events", side.events("probed")?);
    Ok(facts)
}

fn init_and_sidecar(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    let mounts = json!({ "volumeMounts": [{ "name": "shared", "mountPath": "/shared" }] });
    let first = with(container("first", "echo first >/shared/order"), mounts.clone());
    let side_script = "echo sidecar >>/shared/order; trap 'exit 0' TERM; sleep 100000 & wait";
    let sidecar = with(container("sidecar", side_script), mounts.clone());
    let sidecar = with(sidecar, json!({ "restartPolicy": "Always" }));
    let second = with(container("second", "echo second >>/shared/order"), mounts.clone());
    let main = with(container("main", "cat /shared/order"), mounts);
    side.create(
        "ordered",
        json!({
            "restartPolicy": "Never",
            "initContainers": [first, sidecar, second],
            "containers": [main],
            "volumes": [{ "name": "shared", "emptyDir": {} }],
        }),
    )?;
    side.wait("pod/ordered", "jsonpath={.status.phase}=Succeeded")?;
    facts.expect("order", side.logs(&["ordered", "-c", "main"])?, "first\nsidecar\nsecond")?;
    let pod = side.get("pod/ordered")?;
    for index in 0..3 {
        let state = format!("status.initContainerStatuses.{index}.state.terminated");
        facts.add(format!("init {index}"), at(&pod, &format!("{state}.reason")));
        facts.add(format!("exit code {index}"), at(&pod, &format!("{state}.exitCode")));
    }
    side.delete(&["pod/ordered"])?;
    facts.add("events", side.events("ordered")?);
    Ok(facts)
}

fn ephemeral(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    side.run("debugged", json!({ "containers": [sleeping("main")] }))?;
    let image = format!("--image={}", kit::TEST_IMAGE);
    let script = "cat /proc/1/comm; tr '\\0' ' ' </proc/1/cmdline; echo; echo sees; sleep 100000";
    side.kubectl(&[
        "debug",
        "debugged",
        &image,
        "--container=debugger",
        "--target=main",
        "--profile=general",
        "--",
        "sh",
        "-c",
        script,
    ])?;
    side.until("pod/debugged", "the debugger runs", |pod| {
        at(pod, "status.ephemeralContainerStatuses.0.state.running.startedAt") != "none"
    })?;
    let said = until("the debugger speaks", LIMIT, || {
        let said = side.logs(&["debugged", "-c", "debugger"])?;
        ensure!(said.contains("sees"), "{said:?}");
        Ok(said)
    })?;
    facts.add("debugger", said);
    let restarts = at(&side.get("pod/debugged")?, "status.containerStatuses.0.restartCount");
    facts.expect("restarts", restarts, "0")?;
    side.delete(&["pod/debugged"])?;
    Ok(facts)
}

fn hooks(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    let main = with(
        sleeping("main"),
        json!({
            "lifecycle": {
                "postStart": { "exec": { "command": ["touch", "/shared/started"] } },
                "preStop": {
                    "exec": { "command": ["sh", "-c", "echo stopping >/shared/stopping"] },
                },
            },
            "terminationMessagePath": "/shared/message",
            "volumeMounts": [{ "name": "shared", "mountPath": "/shared" }],
        }),
    );
    let watcher = with(
        container(
            "watcher",
            "trap 'sleep 2; cat /shared/stopping; exit 0' TERM; \
                        sleep 100000 & wait",
        ),
        json!({
            "volumeMounts": [{ "name": "shared", "mountPath": "/shared" }],
        }),
    );
    side.run(
        "hooked",
        json!({
            "terminationGracePeriodSeconds": 20,
            "containers": [main, watcher],
            "volumes": [{ "name": "shared", "emptyDir": {} }],
        }),
    )?;
    facts.expect("postStart", side.sh("hooked", "ls /shared/started")?, "/shared/started")?;
    let mut following = side.cluster.kubectl_command(&[
        "--namespace",
        side.namespace(),
        "logs",
        "-f",
        "hooked",
        "-c",
        "watcher",
    ]);
    let following = following.stdout(std::process::Stdio::piped()).spawn()?;
    side.delete(&["pod/hooked"])?;
    let said = following.wait_with_output()?.stdout;
    facts.expect("preStop", String::from_utf8_lossy(&said), "stopping")?;
    Ok(facts)
}

fn host_port(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    let port: u16 = if side.namespace() == "ours" { 18001 } else { 18000 };
    let ports = json!({ "ports": [{ "containerPort": 7000, "hostPort": port }] });
    let serve = with(container("main", "exec probe serve 7000 answers"), ports);
    side.run("mapped", json!({ "containers": [serve] }))?;
    let address = at(&side.get("pod/mapped")?, "status.hostIP");
    let answer = until("the port of the node answers", LIMIT, || {
        ask(TcpStream::connect((address.as_str(), port))?, "hello")
    });
    facts.expect("answer", answer?, "answers: hello")?;
    side.delete(&["pod/mapped"])?;
    let refused = TcpStream::connect((address.as_str(), port)).is_err();
    facts.expect("closed after the pod", refused, "true")?;
    Ok(facts)
}

/// One container runs, the other cannot.
fn missing_image(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    let missing = with(
        sleeping("missing"),
        json!({ "image": "localhost/no-such-image:1", "imagePullPolicy": "Never" }),
    );
    side.create("lacks", json!({ "containers": [sleeping("main"), missing] }))?;
    let pod = side.until("pod/lacks", "lacks an image", |pod| {
        let waiting = "state.waiting.reason";
        let statuses = pod["status"]["containerStatuses"].as_array();
        let statuses = statuses.map(Vec::as_slice).unwrap_or_default();
        statuses.iter().any(|status| at(status, waiting) == "ErrImageNeverPull")
            && statuses.iter().any(|status| status["state"]["running"].is_object())
    })?;
    facts.add("phase", at(&pod, "status.phase"));
    facts.expect("the other", side.sh("lacks", "echo runs")?, "runs")?;
    side.delete(&["pod/lacks"])?;
    facts.add("events", side.events("lacks")?);
    Ok(facts)
}

/// A container that ignores SIGTERM, deleted without grace.
fn forced_deletion(side: &Side) -> Result<Facts> {
    let mut facts = Facts::default();
    let stubborn = container("main", "trap '' TERM; while :; do sleep 1; done");
    side.run(
        "stubborn",
        json!({
            "terminationGracePeriodSeconds": 600,
            "containers": [stubborn],
        }),
    )?;
    let uid = at(&side.get("pod/stubborn")?, "metadata.uid");
    side.kubectl(&["delete", "pod", "stubborn", "--force", "--grace-period=0"])?;
    let directory = std::path::Path::new("/var/lib/kubelet/pods").join(uid);
    until("kubelet has removed the pod", LIMIT, || {
        ensure!(!directory.exists(), "{} is there", directory.display());
        Ok(())
    })?;
    facts.add("removed", true);
    Ok(facts)
}
