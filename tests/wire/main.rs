//! Both transports of the wire against a service that is not there: what every caller sees,
//! whatever it sends.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pause_sandboxer::error::StepError;
use pause_sandboxer::protos::{controller as c, types};
use pause_sandboxer::telemetry::Telemetry;
use pause_sandboxer::wire;
use protobuf::well_known_types::any::Any;
use protobuf::{Message, MessageField};
use tempfile::TempDir;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;

mod client;
mod connections;
mod fake;
mod inspect;
mod malformed;
mod namespaces;
mod stop;
mod waits;

use client::{CONTROLLER, Client};
use fake::{FAILURES, Fake};

/// Longer than anything here takes on a slow machine.
const SOON: Duration = Duration::from_secs(20);

/// A server on two sockets of its own.
struct Node {
    dir: TempDir,
    sandboxes: Arc<Fake>,
    telemetry: Arc<Telemetry>,
    stop: watch::Sender<bool>,
    running: JoinHandle<Result<(), StepError>>,
}

impl Node {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let sandboxes = Arc::new(Fake::default());
        let bind = |name: &str| wire::bind(&dir.path().join(name)).unwrap();
        let telemetry = Arc::new(Telemetry::default());
        let server =
            wire::Server::new(Arc::clone(&sandboxes), bind("a.sock"), bind("a.sock.ttrpc"));
        let server = server.counted(Arc::clone(&telemetry));
        let (stop, stopped) = watch::channel(false);
        let running = tokio::spawn(server.run(stopped));
        Self { dir, sandboxes, telemetry, stop, running }
    }

    fn grpc_socket(&self) -> PathBuf {
        self.dir.path().join("a.sock")
    }

    fn ttrpc_socket(&self) -> PathBuf {
        self.dir.path().join("a.sock.ttrpc")
    }

    /// One client of each protocol.
    async fn clients(&self) -> [Client; 2] {
        [Client::grpc(&self.grpc_socket()).await, Client::ttrpc(&self.ttrpc_socket()).await]
    }

    /// Says stop and waits for the server's end.
    async fn drain(self) -> Duration {
        let begun = Instant::now();
        self.stop.send_replace(true);
        timeout(SOON, self.running).await.expect("the server ends").unwrap().unwrap();
        begun.elapsed()
    }
}

/// Waits until `count` Waits are pending.
async fn until_waiting(sandboxes: &Fake, count: usize) {
    let reached = async {
        while sandboxes.waiting.load(Ordering::SeqCst) != count {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(SOON, reached)
        .await
        .unwrap_or_else(|_| panic!("{:?} of {count} Waits are pending", sandboxes.waiting));
}

fn id(id: &str) -> String {
    id.to_owned()
}

fn wait(sandbox: &str) -> c::ControllerWaitRequest {
    c::ControllerWaitRequest { sandbox_id: id(sandbox), ..Default::default() }
}

fn status(sandbox: &str, verbose: bool) -> c::ControllerStatusRequest {
    c::ControllerStatusRequest { sandbox_id: id(sandbox), verbose, ..Default::default() }
}

fn any(url: &str, value: &[u8]) -> Any {
    kit::controller::any(url, value.to_vec())
}

fn moment(seconds: i64) -> Option<(i64, i32)> {
    Some((seconds, 500_000_000))
}

fn at(time: &MessageField<protobuf::well_known_types::timestamp::Timestamp>) -> Option<(i64, i32)> {
    time.as_ref().map(|time| (time.seconds, time.nanos))
}

fn sandbox() -> types::Sandbox {
    let runtime = types::sandbox::Runtime { name: "runc".into(), ..Default::default() };
    types::Sandbox {
        sandbox_id: id("a"),
        runtime: MessageField::some(runtime),
        extensions: [("metadata".to_owned(), any("m", b"{}"))].into(),
        ..Default::default()
    }
}

#[tokio::test]
async fn the_nine_rpcs_of_the_controller_carry_everything() {
    let node = Node::start();
    for client in node.clients().await {
        let sandbox = sandbox();
        let create = c::ControllerCreateRequest {
            sandbox_id: id("a"),
            options: MessageField::some(any("runtime.v1.PodSandboxConfig", b"cfg")),
            netns_path: "/run/netns/x".into(),
            sandbox: MessageField::some(sandbox.clone()),
            ..Default::default()
        };
        let answer: c::ControllerCreateResponse = client.call("Create", create).await.unwrap();
        assert_eq!(answer.sandbox_id, "a");
        let created = node.sandboxes.created.lock().unwrap().pop().unwrap();
        assert_eq!((created.id.as_str(), created.netns_path.as_str()), ("a", "/run/netns/x"));
        assert_eq!(created.options.unwrap().value, b"cfg");
        assert_eq!(created.sandbox.as_ref().unwrap().runtime_name, "runc");
        assert_eq!(created.sandbox.unwrap().extensions["metadata"].value, b"{}");

        let start = c::ControllerStartRequest { sandbox_id: id("a"), ..Default::default() };
        let answer: c::ControllerStartResponse = client.call("Start", start).await.unwrap();
        assert_eq!((answer.sandbox_id.as_str(), answer.pid, answer.version), ("a", 4711, 2));
        assert_eq!(
            (answer.address.as_str(), at(&answer.created_at)),
            ("ttrpc+unix:///run/x.sock", moment(1))
        );
        assert_eq!(
            (answer.labels["selinux_label"].as_str(), &*answer.spec.value),
            ("s0", &b"{}"[..])
        );

        let platform = c::ControllerPlatformRequest { sandbox_id: id("a"), ..Default::default() };
        let answer: c::ControllerPlatformResponse =
            client.call("Platform", platform).await.unwrap();
        let platform = answer.platform.unwrap();
        assert_eq!(
            (&*platform.os, &*platform.architecture, &*platform.variant),
            ("linux", "arm64", "v8")
        );

        let answer: c::ControllerStatusResponse =
            client.call("Status", status("a", true)).await.unwrap();
        assert_eq!((answer.pid, answer.state.as_str(), answer.version), (4711, "SANDBOX_READY", 2));
        assert_eq!((at(&answer.created_at), at(&answer.exited_at)), (moment(1), None));
        assert_eq!(answer.info["info"], "{}");
        let answer: c::ControllerStatusResponse =
            client.call("Status", status("ended", false)).await.unwrap();
        assert_eq!((answer.state.as_str(), at(&answer.exited_at)), ("SANDBOX_NOTREADY", moment(3)));
        assert!(answer.info.is_empty());

        let answer: c::ControllerWaitResponse = client.call("Wait", wait("ended")).await.unwrap();
        assert_eq!((answer.exit_status, at(&answer.exited_at)), (137, moment(3)));

        let metrics = c::ControllerMetricsRequest { sandbox_id: id("a"), ..Default::default() };
        let answer: c::ControllerMetricsResponse = client.call("Metrics", metrics).await.unwrap();
        let metric = answer.metrics.unwrap();
        assert_eq!(
            (metric.id.as_str(), at(&metric.timestamp), &*metric.data.value),
            ("a", moment(2), &[1, 2][..])
        );
        assert_eq!(metric.data.type_url, "io.containerd.cgroups.v2.Metrics");

        let update = c::ControllerUpdateRequest {
            sandbox_id: id("a"),
            sandbox: MessageField::some(sandbox),
            fields: vec!["extensions".into()],
            ..Default::default()
        };
        let _: c::ControllerUpdateResponse = client.call("Update", update).await.unwrap();
        let (sandbox, info, fields) = node.sandboxes.updated.lock().unwrap().pop().unwrap();
        assert_eq!((sandbox.as_str(), fields), ("a", vec!["extensions".to_owned()]));
        assert_eq!(info.extensions["metadata"].type_url, "m");
        let nothing = c::ControllerUpdateRequest { sandbox_id: id("a"), ..Default::default() };
        let failure =
            client.call::<c::ControllerUpdateResponse>("Update", nothing).await.unwrap_err();
        assert_eq!(failure, (3, "sandbox \"a\": sandbox: missing".into()));

        let stop = c::ControllerStopRequest { sandbox_id: id("a"), ..Default::default() };
        let _: c::ControllerStopResponse = client.call("Stop", stop).await.unwrap();
        let shutdown = c::ControllerShutdownRequest { sandbox_id: id("a"), ..Default::default() };
        let _: c::ControllerShutdownResponse = client.call("Shutdown", shutdown).await.unwrap();
    }
}

/// All requests have the sandbox id in field 1, so one message stands for all.
fn only_id(sandbox: &str) -> Vec<u8> {
    wait(sandbox).write_to_bytes().unwrap()
}

const CONTROLLER_METHODS: [&str; 8] =
    ["Create", "Start", "Platform", "Stop", "Wait", "Status", "Shutdown", "Metrics"];

fn methods() -> impl Iterator<Item = (&'static str, &'static str)> {
    CONTROLLER_METHODS.iter().map(|method| (CONTROLLER, *method))
}

#[tokio::test]
async fn every_error_has_the_same_code_and_text_on_both_protocols() {
    let node = Node::start();
    let [grpc, ttrpc] = node.clients().await;
    for (service, method) in methods() {
        for (sandbox, code) in FAILURES {
            // containerd takes any other end of a Wait for the exit of the sandbox.
            let code = if (method, sandbox) == ("Wait", "quarantined") { 14 } else { code };
            let over_grpc = grpc.raw(service, method, only_id(sandbox), None).await.unwrap_err();
            let over_ttrpc = ttrpc.raw(service, method, only_id(sandbox), None).await.unwrap_err();
            assert_eq!(over_grpc.0, code, "{method} {sandbox}: {over_grpc:?}");
            assert!(over_grpc.1.contains(sandbox), "{over_grpc:?}");
            assert_eq!(over_grpc, over_ttrpc);
        }
    }
}

#[tokio::test]
async fn a_deadline_ends_a_call_and_a_caller_who_gives_up_drops_it() {
    let node = Node::start();
    for client in node.clients().await {
        let (code, text) = client
            .raw(CONTROLLER, "Wait", only_id("a"), Some(Duration::from_millis(50)))
            .await
            .unwrap_err();
        // ttrpc's client ends the call by itself at its deadline, and then says so without a code.
        assert!(code == 4 || matches!(client, Client::Ttrpc(_)), "{code} {text}");
        until_waiting(&node.sandboxes, 0).await;
    }
    let [grpc, ttrpc] = node.clients().await;
    let call = tokio::spawn(async move { grpc.raw(CONTROLLER, "Wait", only_id("a"), None).await });
    until_waiting(&node.sandboxes, 1).await;
    call.abort();
    until_waiting(&node.sandboxes, 0).await;
    // ttrpc has no way to cancel one call: the connection's end does.
    let call = tokio::spawn(async move { ttrpc.raw(CONTROLLER, "Wait", only_id("a"), None).await });
    until_waiting(&node.sandboxes, 1).await;
    call.abort();
    until_waiting(&node.sandboxes, 0).await;
}

/// Begins `count` Waits of one client.
fn begin_waits(
    client: &Client,
    count: usize,
) -> JoinSet<Result<c::ControllerWaitResponse, client::Failure>> {
    let mut waits = JoinSet::new();
    for _ in 0..count {
        let client = client.clone();
        waits.spawn(async move { client.call("Wait", wait("a")).await });
    }
    waits
}

/// Time of the fastest Status of 51: a busy machine delays some of them, a queue all.
async fn status_time(client: &Client) -> Duration {
    let mut times = Vec::new();
    for _ in 0..51 {
        let begun = Instant::now();
        client.call::<c::ControllerStatusResponse>("Status", status("a", false)).await.unwrap();
        times.push(begun.elapsed());
    }
    times.into_iter().min().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_pending_waits_slow_nothing() {
    let node = Node::start();
    for client in node.clients().await {
        let alone = status_time(&client).await;
        let mut waits = begin_waits(&client, 1000);
        until_waiting(&node.sandboxes, 1000).await;
        let with_waits = status_time(&client).await;
        // Noise, and far less than standing in line behind a thousand.
        let most = alone * 20 + Duration::from_millis(20);
        assert!(with_waits < most, "{with_waits:?} with the Waits, {alone:?} alone");
        node.sandboxes.end.notify_waiters();
        while let Some(ended) = waits.join_next().await {
            assert_eq!(ended.unwrap().unwrap().exit_status, 137);
        }
    }
}

/// Runs perl, which every Debian has, as another user: connects and tells what it reads.
fn connect_as(uid: u32, socket: &Path) -> String {
    let script = r#"
        use Socket;
        socket(my $s, AF_UNIX, SOCK_STREAM, 0) or die "socket: $!";
        connect($s, pack_sockaddr_un($ARGV[0])) or do { print "connect: $!"; exit };
        my $n = sysread($s, my $buf, 1);
        print defined $n ? "read $n" : "read: $!";
    "#;
    let output = Command::new("perl")
        .args(["-e", script])
        .arg(socket)
        .env("LC_ALL", "C")
        .uid(uid)
        .gid(uid)
        .output()
        .expect("perl runs");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Promise: only_root_calls.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_user_is_refused_by_mode_and_by_credentials() {
    let node = Node::start();
    std::fs::set_permissions(node.dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
    for socket in [node.grpc_socket(), node.ttrpc_socket()] {
        assert_eq!(std::fs::metadata(&socket).unwrap().permissions().mode() & 0o7777, 0o600);
        assert_eq!(connect_as(65534, &socket), "connect: Permission denied");
        std::fs::set_permissions(&socket, PermissionsExt::from_mode(0o666)).unwrap();
        // Let in by the mode, hung up on by the credentials.
        let answer = connect_as(65534, &socket);
        assert!(answer == "read 0" || answer == "read: Connection reset by peer", "{answer}");
    }
    for client in node.clients().await {
        client.call::<c::ControllerStatusResponse>("Status", status("a", false)).await.unwrap();
    }
}
