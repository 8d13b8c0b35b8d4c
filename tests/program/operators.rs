//! An operator's view of a daemon with a real sandbox: list, metrics, log.

use std::fs;
use std::io::{Read as _, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use pause_sandboxer::protos::controller::{
    ControllerCreateRequest, ControllerShutdownRequest, ControllerStartRequest,
};
use pause_sandboxer::protos::controller_ttrpc::ControllerClient;
use pause_sandboxer::protos::cri::{
    LinuxPodSandboxConfig, LinuxSandboxSecurityContext, NamespaceMode, NamespaceOption,
    PodSandboxConfig, PodSandboxMetadata,
};
use protobuf::well_known_types::any::Any;
use protobuf::{Message as _, MessageField};

use super::daemon::{Daemon, Scratch, TIMEOUT, program, stderr, stdout};

const ID: &str = "0123456789abcdef0123";
const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

/// A controller's client on a runtime of its own.
struct Controller {
    runtime: tokio::runtime::Runtime,
    client: ControllerClient,
}

impl Controller {
    fn of(scratch: &Scratch) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let address = format!("unix://{}", scratch.path("run/s.sock.ttrpc").display());
        let client = runtime.block_on(ttrpc::asynchronous::Client::connect(&address)).unwrap();
        Self { runtime, client: ControllerClient::new(client) }
    }

    fn context() -> ttrpc::context::Context {
        let mut context = ttrpc::context::with_duration(TIMEOUT);
        context.add("traceparent".to_owned(), PARENT.to_owned());
        context
    }

    /// Runs a sandbox in the node's network.
    fn run(&self, id: &str, pod: &str) -> u32 {
        let node = NamespaceOption { network: NamespaceMode::NODE.into(), ..Default::default() };
        let security = LinuxSandboxSecurityContext {
            namespace_options: MessageField::some(node),
            ..Default::default()
        };
        let config = PodSandboxConfig {
            metadata: MessageField::some(PodSandboxMetadata {
                name: pod.to_owned(),
                namespace: "prod".to_owned(),
                uid: "u-1".to_owned(),
                ..Default::default()
            }),
            linux: MessageField::some(LinuxPodSandboxConfig {
                security_context: MessageField::some(security),
                ..Default::default()
            }),
            ..Default::default()
        };
        let options = Any {
            type_url: "runtime.v1.PodSandboxConfig".to_owned(),
            value: config.write_to_bytes().unwrap(),
            ..Default::default()
        };
        let create = ControllerCreateRequest {
            sandbox_id: id.to_owned(),
            options: MessageField::some(options),
            ..Default::default()
        };
        let start = ControllerStartRequest { sandbox_id: id.to_owned(), ..Default::default() };
        self.runtime.block_on(async {
            self.client.create(Self::context(), &create).await.unwrap();
            self.client.start(Self::context(), &start).await.unwrap().pid
        })
    }

    fn shut_down(&self, id: &str) {
        let request = ControllerShutdownRequest { sandbox_id: id.to_owned(), ..Default::default() };
        self.runtime.block_on(self.client.shutdown(Self::context(), &request)).unwrap();
    }
}

fn asked(scratch: &Scratch, words: &[&str]) -> std::process::Output {
    program().args(words).args(scratch.flags()).output().unwrap()
}

/// The output of a command that must succeed.
fn output_of(scratch: &Scratch, words: &[&str]) -> String {
    let output = asked(scratch, words);
    assert!(output.status.success(), "{words:?}: {}", stderr(&output));
    stdout(&output).to_owned()
}

/// Promise: operators_see_every_sandbox.
#[test]
fn a_sandbox_is_listed() {
    let scratch = Scratch::new();
    let daemon = Daemon::start(&scratch, &scratch.flags());
    daemon.noticed("READY=1");
    assert_eq!(output_of(&scratch, &["list"]).lines().count(), 1, "the head of the table");
    let controller = Controller::of(&scratch);
    let pid = controller.run(ID, "web-0");
    let list = output_of(&scratch, &["list"]);
    let line: Vec<&str> = list.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(
        line[..5],
        ["0123456789abc", "web-0", "prod", "ready", pid.to_string().as_str()],
        "{list}"
    );
    let json: serde_json::Value =
        serde_json::from_str(&output_of(&scratch, &["list", "-o", "json"])).unwrap();
    assert_eq!(
        (&json[0]["id"], &json[0]["pid"], &json[0]["uid"]),
        (&ID.into(), &pid.into(), &"u-1".into())
    );
    controller.shut_down(ID);
    assert_eq!(output_of(&scratch, &["list"]).lines().count(), 1);
}

/// Promise: operators_see_every_sandbox.
#[test]
fn a_missing_daemon_is_an_error_and_no_empty_list() {
    let scratch = Scratch::new();
    let output = asked(&scratch, &["list", "-otext"]);
    assert_eq!((output.status.code(), stdout(&output)), (Some(3), ""));
    let reason = format!(
        "pause-sandboxer: cannot reach the daemon at {}: No such file or directory (os error 2); \
         start it: systemctl start pause-sandboxer\n",
        scratch.path("run/s.sock.ttrpc").display()
    );
    assert_eq!(stderr(&output), reason);
}

/// Promise: operators_see_every_sandbox.
#[test]
fn a_quarantined_record_is_shown_with_the_reason() {
    let scratch = Scratch::new();
    fs::create_dir_all(scratch.path("state/sandboxes/odd")).unwrap();
    scratch.write("state/sandboxes/odd/record.json", "{");
    let daemon = Daemon::start(&scratch, &scratch.flags());
    daemon.noticed("READY=1");
    let list = output_of(&scratch, &["list"]);
    assert!(
        list.lines().nth(1).unwrap().starts_with("odd      -    -          quarantined"),
        "{list}"
    );
    let json: serde_json::Value =
        serde_json::from_str(&output_of(&scratch, &["list", "-o", "json"])).unwrap();
    assert!(json[0]["reason"].as_str().unwrap().contains("not a record"), "{json}");
}

#[test]
fn lines_of_a_sandbox_name_its_pod_and_the_trace_of_the_call() {
    let scratch = Scratch::new();
    let mut daemon = Daemon::start(&scratch, &scratch.flags());
    daemon.noticed("READY=1");
    let controller = Controller::of(&scratch);
    let pid = controller.run(ID, "web-0");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.cast_signed()), Signal::SIGKILL).unwrap();
    daemon.logged(&format!("sandbox created sandbox={ID} pod=web-0 namespace=prod"));
    let line = daemon.logged("sandbox started");
    assert!(line.contains(&format!(" sandbox={ID} pid={pid} duration_ms=")), "{line}");
    let line = daemon.logged("sandbox stopped");
    assert!(
        line.contains(
            &format!(" sandbox={ID} status=137 reason=signal pod=web-0 namespace=prod\n")[..]
        ),
        "{line}"
    );
    controller.shut_down(ID);
    daemon.logged(&format!("sandbox removed sandbox={ID} pod=web-0 namespace=prod"));
    // Ended by a call, which has a trace; that of the first was over by then.
    controller.run(ID, "web-1");
    controller.shut_down(ID);
    let line = daemon.logged("sandbox stopped");
    let trace = PARENT.split('-').nth(1).unwrap();
    assert!(line.contains(&format!("pod=web-1 namespace=prod trace={trace}\n")), "{line}");
}

/// Asks by HTTP; the whole answer.
fn http(stream: &mut (impl std::io::Read + Write), request: &str) -> String {
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn pods_with_very_long_names_are_listed() {
    let scratch = Scratch::new();
    let daemon = Daemon::start(&scratch, &scratch.flags());
    daemon.noticed("READY=1");
    let controller = Controller::of(&scratch);
    // Together more than an answer can carry.
    let ids = ["a", "b", "c"].map(|letter| letter.repeat(20));
    for id in &ids {
        controller.run(id, &"n".repeat(2 << 20));
    }
    let list: serde_json::Value =
        serde_json::from_str(&output_of(&scratch, &["list", "-o", "json"])).unwrap();
    let listed: Vec<&str> =
        list.as_array().unwrap().iter().map(|line| line["id"].as_str().unwrap()).collect();
    assert_eq!(listed, ids);
    for id in &ids {
        controller.shut_down(id);
    }
}

const GET: &str = "GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n";

/// Retries until the address accepts connections: readiness does not wait for metrics.
fn connected<S>(mut connect: impl FnMut() -> std::io::Result<S>) -> S {
    let begun = Instant::now();
    loop {
        match connect() {
            Ok(stream) => return stream,
            Err(e) => assert!(begun.elapsed() < TIMEOUT, "{e}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Promise: only_root_calls.
/// Promise: operators_see_every_sandbox.
#[test]
fn metrics_on_a_unix_socket() {
    let scratch = Scratch::new();
    let path = scratch.path("run/m.sock");
    let flags = [scratch.flags(), vec![format!("--metrics=unix://{}", path.display())]].concat();
    let daemon = Daemon::start(&scratch, &flags);
    daemon.noticed("READY=1");
    let controller = Controller::of(&scratch);
    controller.run(ID, "web-0");
    let answer = http(&mut connected(|| UnixStream::connect(&path)), GET);
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(
        head.contains(
            "\r\nContent-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n"
        ),
        "{head}"
    );
    assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())), "{head}");
    for line in [
        "pause_sandboxer_sandboxes{state=\"ready\"} 1",
        "pause_sandboxer_calls_total{method=\"Create\",code=\"OK\"} 1",
        "pause_sandboxer_calls_total{method=\"Start\",code=\"OK\"} 1",
        "pause_sandboxer_recovered_sandboxes 0",
    ] {
        assert!(body.lines().any(|shown| shown == line), "{line} is not in\n{body}");
    }
    for (request, status) in [
        ("GET / HTTP/1.1\r\n\r\n", "404"),
        ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
        ("nonsense\r\n\r\n", "405"),
        (&format!("GET /metrics HTTP/1.1\r\n{}", "x: y\r\n".repeat(2000)), "431"),
    ] {
        let mut stream = UnixStream::connect(&path).unwrap();
        // Who sends too much may be hung up on before all is sent.
        let _ = stream.write_all(request.as_bytes());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{request:.40}: {answer}");
    }
    controller.shut_down(ID);
}

/// Promise: caller_harms_only_itself.
#[test]
fn slow_readers_of_metrics_delay_no_other_caller() {
    let scratch = Scratch::new();
    // A port that was free a moment ago.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let flags = [scratch.flags(), vec![format!("--metrics={address}")]].concat();
    let mut daemon = Daemon::start(&scratch, &flags);
    daemon.noticed("READY=1");
    let mut idle = vec![connected(|| TcpStream::connect(address))];
    idle.extend((0..100).map(|_| TcpStream::connect(address).unwrap()));
    // The daemon keeps running, with no more descriptors than the few whom it serves at a time.
    let controller = Controller::of(&scratch);
    controller.run(ID, "web-0");
    let open = fs::read_dir(format!("/proc/{}/fd", daemon.child.id())).unwrap().count();
    assert!(open < 60, "{open} descriptors");
    assert!(output_of(&scratch, &["list"]).contains("web-0"));
    drop(idle);
    let answer = http(&mut TcpStream::connect(address).unwrap(), GET);
    assert!(answer.contains("pause_sandboxer_sandboxes{state=\"ready\"} 1\n"), "{answer}");
    controller.shut_down(ID);
    // Nor does one hold up its end.
    let _idle = TcpStream::connect(address).unwrap();
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.ended().code(), Some(0));
}

#[test]
fn pods_run_while_metrics_cannot_be_served() {
    let scratch = Scratch::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let flags =
        [scratch.flags(), vec![format!("--metrics={}", taken.local_addr().unwrap())]].concat();
    let mut daemon = Daemon::start(&scratch, &flags);
    daemon.noticed("READY=1");
    daemon.logged("failed to serve metrics; retrying: bind 127.0.0.1:");
    let address = taken.local_addr().unwrap();
    drop(taken);
    daemon.logged("serving metrics");
    assert!(http(&mut TcpStream::connect(address).unwrap(), GET).ends_with("# EOF\n"));
}
