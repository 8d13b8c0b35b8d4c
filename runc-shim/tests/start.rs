//! The command `start`, without a containerd. Needs root.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::io::{PipeReader, Read as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use containerd_shim_protos::TaskClient;
use containerd_shim_protos::api::{ConnectRequest, DeleteResponse, ShutdownRequest, StateRequest};
use containerd_shim_protos::bootstrap_api::{BootstrapParams, BootstrapResult, Extension};
use containerd_shim_protos::protobuf::well_known_types::any::Any;
use containerd_shim_protos::protobuf::{Message as _, MessageField};
use containerd_shim_protos::shim::oci::Options;
use containerd_shim_protos::ttrpc::{self, context};
use containerd_shim_protos::types::introspection::RuntimeInfo;
use kit::machine::{cgroup, processes};

/// How long anything may take.
const WITHIN: Duration = Duration::from_secs(60);

/// Calls of `start` at the same time.
const AT_ONCE: usize = 100;

/// A directory of sockets, and bundles of one group beside it.
struct Group {
    dir: tempfile::TempDir,
    options: Options,
}

impl Group {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap(), options: Options::new() }
    }

    fn sockets(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    fn bundle(&self, id: &str) -> PathBuf {
        let bundle = self.dir.path().join(id);
        fs::create_dir_all(&bundle).unwrap();
        let config = r#"{"annotations":{"io.kubernetes.cri.sandbox-id":"group"}}"#;
        fs::write(bundle.join("config.json"), config).unwrap();
        bundle
    }

    fn command(&self, id: &str, action: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pause-sandboxer-runc-shim"));
        command.args(["-namespace", "test", "-address"]).arg(self.dir.path().join("c.sock"));
        command.args(["-publish-binary", "/none", "-id", id, action]);
        command.current_dir(self.bundle(id)).process_group(0).env_remove("SCHED_CORE");
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// What containerd 2.3 writes.
    fn params(&self, id: &str) -> Vec<u8> {
        let mut any = Any::new();
        any.type_url = "containerd.runc.v1.Options".to_owned();
        any.value = self.options.write_to_bytes().unwrap();
        let mut extension = Extension::new();
        extension.value = MessageField::some(any);
        let mut params = BootstrapParams::new();
        (params.instance_id, params.namespace) = (id.to_owned(), "test".to_owned());
        params.socket_dir = Some(self.sockets().display().to_string());
        params.extensions.push(extension);
        params.write_to_bytes().unwrap()
    }

    /// The addresses that `start` prints for so many containers at once.
    fn start(&self, count: usize) -> Vec<String> {
        let ids: Vec<String> = (0..count).map(|number| format!("c{number}")).collect();
        let started: Vec<_> = ids
            .iter()
            .map(|id| {
                let mut child = self.command(id, "start").spawn().unwrap();
                child.stdin.take().unwrap().write_all(&self.params(id)).unwrap();
                child
            })
            .collect();
        let answer = |output: Output| {
            assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
            let result = BootstrapResult::parse_from_bytes(&output.stdout).unwrap();
            assert_eq!((result.version, result.protocol.as_str()), (2, "ttrpc"));
            result.address
        };
        started.into_iter().map(|child| answer(child.wait_with_output().unwrap())).collect()
    }

    fn servers(&self) -> Vec<processes::Proc> {
        let sockets = self.sockets().display().to_string();
        let all = processes::all().unwrap().into_iter();
        all.filter(|it| it.state != 'Z' && it.command.contains(&sockets)).collect()
    }

    fn server(&self) -> processes::Proc {
        let servers = self.servers();
        assert_eq!(servers.len(), 1, "{servers:?}");
        servers.into_iter().next().unwrap()
    }

    /// The sockets, without the lock.
    fn files(&self) -> Vec<String> {
        let entries = fs::read_dir(self.sockets()).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| !name.ends_with(".lock")).collect()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for server in self.servers() {
            signal(server.pid, rustix::process::Signal::KILL);
        }
    }
}

fn signal(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
    let _ = rustix::process::kill_process(pid, signal);
}

fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let end = Instant::now() + WITHIN;
    while !check() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn client(address: &str) -> TaskClient {
    TaskClient::new(ttrpc::Client::connect(address).unwrap())
}

fn within() -> context::Context {
    context::with_timeout(i64::try_from(WITHIN.as_nanos()).unwrap())
}

/// Promise: shim_works_alone.
#[test]
fn a_hundred_starts_of_a_group_at_once_have_one_server() {
    let group = Group::new();
    // At first without a socket, then with that of a server that was killed.
    for _ in 0..2 {
        let addresses = group.start(AT_ONCE);
        assert!(addresses.iter().all(|one| *one == addresses[0]), "{addresses:?}");
        let server = group.server();
        let mut request = ConnectRequest::new();
        request.id = "none".to_owned();
        let connected = client(&addresses[0]).connect(within(), &request).unwrap();
        assert_eq!(connected.shim_pid, server.pid);
        for number in 0..AT_ONCE {
            let kept = group.dir.path().join(format!("c{number}/address"));
            assert_eq!(fs::read_to_string(kept).unwrap(), addresses[0]);
        }
        signal(server.pid, rustix::process::Signal::KILL);
        eventually("the server ends", || group.servers().is_empty());
        assert_eq!(group.files().len(), 1, "the socket of a killed server");
    }
}

/// Waits until a server answers: before it has blocked them, signals end it at once.
fn has_begun(address: &str) {
    let unknown = client(address).state(within(), &StateRequest::new());
    assert!(matches!(unknown, Err(ttrpc::Error::RpcStatus(_))), "{unknown:?}");
}

#[test]
fn the_last_socket_goes_with_its_server() {
    let group = Group::new();
    let address = &group.start(1)[0];
    let shut_down = || client(address).shutdown(within(), &ShutdownRequest::new());
    shut_down().unwrap();
    eventually("the server ends", || group.servers().is_empty());
    assert_eq!(group.files(), [""; 0]);

    // After a signal, the next `start` has another server.
    has_begun(&group.start(1)[0]);
    let first = group.server().pid;
    signal(first, rustix::process::Signal::TERM);
    eventually("the socket goes", || group.files().is_empty());
    group.start(2);
    eventually("the server ends", || group.servers().iter().all(|it| it.pid != first));
    assert_ne!(group.server().pid, first);
    assert_eq!(group.files().len(), 1);
}

#[test]
fn delete_removes_the_socket_of_a_dead_server_only() {
    let group = Group::new();
    group.start(2);
    let delete = |id: &str| {
        let mut command = group.command(id, "delete");
        let output = command.stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        DeleteResponse::parse_from_bytes(&output.stdout).unwrap()
    };
    assert_eq!(delete("c0").exit_status, 137);
    assert_eq!(group.files().len(), 1, "the server runs");
    signal(group.server().pid, rustix::process::Signal::KILL);
    eventually("the server ends", || group.servers().is_empty());
    delete("c1");
    assert_eq!(group.files(), [""; 0]);
}

#[test]
fn a_server_that_containerd_does_not_know_ends() {
    let group = Group::new();
    let (read, write) = std::io::pipe().unwrap();
    drop(read);
    let mut command = group.command("c0", "start");
    let mut child = command.stdout(Stdio::from(write)).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&group.params("c0")).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(!output.status.success(), "{output:?}");
    eventually("the server ends", || group.servers().is_empty());
    assert_eq!(group.files(), [""; 0]);
}

/// A `start` that cannot print the address of the server that it has launched.
fn unprinted(group: &Group) -> (Child, PipeReader) {
    let (read, write) = std::io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&write, true).unwrap();
    while rustix::io::write(&write, &[0; 4096]).is_ok() {}
    rustix::io::ioctl_fionbio(&write, false).unwrap();
    let mut child = group.command("c0", "start").stdout(Stdio::from(write)).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&group.params("c0")).unwrap();
    eventually("the server starts", || !group.servers().is_empty());
    (child, read)
}

#[test]
fn the_socket_of_a_server_that_died_before_it_was_known_goes() {
    let group = Group::new();
    let (child, mut printed) = unprinted(&group);
    signal(group.server().pid, rustix::process::Signal::KILL);
    eventually("the server ends", || group.servers().is_empty());
    let reader = std::thread::spawn(move || printed.read_to_end(&mut Vec::new()));
    let output = child.wait_with_output().unwrap();
    assert!(!output.status.success(), "{output:?}");
    reader.join().unwrap().unwrap();
    assert_eq!(group.files(), [""; 0]);
}

#[test]
fn a_start_that_hangs_blocks_its_own_group_only_and_has_no_part_in_the_next() {
    let group = Group::new();
    let (mut hung, _printed) = unprinted(&group);
    let mut other = group.command("other", "start");
    fs::write(group.dir.path().join("other/config.json"), "{}").unwrap();
    let mut other = other.spawn().unwrap();
    other.stdin.take().unwrap().write_all(&group.params("other")).unwrap();
    assert!(other.wait_with_output().unwrap().status.success());

    let mut next = group.command("c1", "start").spawn().unwrap();
    next.stdin.take().unwrap().write_all(&group.params("c1")).unwrap();
    let lock = group.sockets().join("pause-sandboxer-runc-shim.lock");
    let inode = format!(":{} ", fs::metadata(lock).unwrap().ino());
    let waits = |line: &str| line.contains("->") && line.contains(&inode);
    eventually("the next waits or ends", || {
        let locks = fs::read_to_string("/proc/locks").unwrap();
        locks.lines().any(waits) || next.try_wait().unwrap().is_some()
    });
    hung.kill().unwrap();
    hung.wait().unwrap();
    let output = next.wait_with_output().unwrap();
    let address = BootstrapResult::parse_from_bytes(&output.stdout).unwrap().address;
    let mut request = ConnectRequest::new();
    request.id = "none".to_owned();
    client(&address).connect(within(), &request).unwrap();
}

#[test]
fn a_server_has_its_own_place_on_the_node() {
    if kit::skip_without_root() {
        return;
    }
    let mut group = Group::new();
    let cgroup = format!("/start-{}", std::process::id());
    cgroup::make(&cgroup).unwrap();
    group.options.shim_cgroup.clone_from(&cgroup);
    let bundle = group.bundle("c0");
    assert!(Command::new("mkfifo").arg(bundle.join("log")).status().unwrap().success());
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::NONBLOCK;
    let log = rustix::fs::open(bundle.join("log"), flags, rustix::fs::Mode::empty()).unwrap();
    has_begun(&group.start(1)[0]);
    let server = group.server();
    let joined = |line: &str| line.ends_with(&format!(":{cgroup}"));
    assert!(server.cgroups.lines().any(joined), "{}", server.cgroups);
    let read = |pid: &str| fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
    let score = |pid: &str| read(pid).trim().parse::<i32>().unwrap();
    assert_eq!(score(&server.pid.to_string()), (score("self") + 1).min(1000));
    let pid = rustix::process::Pid::from_raw(server.pid.cast_signed()).unwrap();
    assert_eq!(rustix::process::getpgid(Some(pid)).unwrap(), pid);
    assert_eq!(fs::read_link(format!("/proc/{pid}/cwd")).unwrap(), Path::new("/"));
    signal(server.pid, rustix::process::Signal::TERM);
    eventually("the server ends", || group.servers().is_empty());
    let mut text = String::new();
    fs::File::from(log).read_to_string(&mut text).unwrap();
    assert!(text.contains("shim exits on SIGTERM"), "{text:?}");
    cgroup::remove(&cgroup).unwrap();

    // A cgroup that does not exist is an error, and nothing is left.
    let mut child = group.command("c0", "start").spawn().unwrap();
    child.stdin.take().unwrap().write_all(&group.params("c0")).unwrap();
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && text.contains(&format!("no cgroup {cgroup}")), "{text}");
    assert!(group.servers().is_empty() && group.files().is_empty());
}

#[test]
fn the_info_has_the_features_of_the_runtime() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pause-sandboxer-runc-shim"));
    let mut options = Options::new();
    options.binary_name = kit::Parts::get().unwrap().runc().display().to_string();
    let mut any = Any::new();
    any.type_url = "containerd.runc.v1.Options".to_owned();
    any.value = options.write_to_bytes().unwrap();
    let mut child =
        command.arg("-info").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(&any.write_to_bytes().unwrap()).unwrap();
    let output = child.wait_with_output().unwrap();
    let info = RuntimeInfo::parse_from_bytes(&output.stdout).unwrap();
    assert_eq!(info.name, "pause-sandboxer-runc-shim");
    assert_eq!(info.version.version, env!("CARGO_PKG_VERSION"));
    assert_eq!(info.options.as_ref(), Some(&any));
    let features: serde_json::Value = serde_json::from_slice(&info.features.value).unwrap();
    assert!(features["ociVersionMax"].is_string(), "{features}");
}
