//! An endpoint without a node.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use containerd_shim_protos::shim::oci::Options;
use kit::controller::any;
use process_identity::Stat;
use protobuf::Message as _;
use tokio::time::{sleep, timeout};

use super::*;
use crate::config::Config;
use crate::process::handle::NamespaceHandle;
use crate::shim::bundle::{Recorded, tests::Tmpfs};
use crate::shim::own::OwnShim;
use crate::shim::{Runtime, ShimSettings};

mod callers;
mod ending;

/// The settings of shims whose files are below `dir`.
pub(in crate::shim) fn settings(dir: &Path, own_shim: Option<OwnShim>) -> ShimSettings {
    let config = Config {
        containerd_address: dir.join("containerd.sock"),
        containerd_state: dir.join("state"),
        state_dir: dir.to_owned(),
        ..Config::default()
    };
    let own = crate::process::inheritance::Inheritance::read("self").unwrap();
    ShimSettings { config: Arc::new(config), own, own_shim }
}

/// The endpoint of a sandbox below `dir`, and what all share.
fn make_endpoint(dir: &Path) -> (Arc<Shims>, Arc<Endpoint>) {
    // Deletes nothing, and does not fail.
    make_endpoint_with(dir, "/bin/true".into())
}

/// The same with a shim's binary.
fn make_endpoint_with(dir: &Path, binary: PathBuf) -> (Arc<Shims>, Arc<Endpoint>) {
    let shims = Arc::new(Shims::new(settings(dir, None)).unwrap());
    // A runtime that is named by a path is the shim itself.
    let runtime = Runtime { name: binary.to_str().unwrap().to_owned(), ..Runtime::default() };
    let endpoint = Endpoint::new(&shims, &"pod".try_into().unwrap(), &Arc::new(runtime));
    std::fs::create_dir_all(dir.join("sandboxes/pod")).unwrap();
    (shims, endpoint)
}

struct NoPod;

impl Pod for NoPod {
    fn namespaces(&self) -> Result<Vec<NamespaceHandle>, StepError> {
        Ok(Vec::new())
    }

    fn cgroup_parent(&self) -> &str {
        ""
    }

    fn lives(&self) -> bool {
        true
    }

    fn fail(&self) {}
}

fn no_answer() -> StepError {
    StepError::new("probe shim", io::Error::other("it did not answer"))
}

fn next(endpoint: &Arc<Endpoint>) -> Step {
    let pod: Arc<dyn Pod> = Arc::new(NoPod);
    endpoint.next(&pod)
}

/// A process that is on record as the shim.
fn recorded(shims: &Shims, endpoint: &Endpoint) -> Child {
    let child = Command::new("sleep").arg("1000").spawn().unwrap();
    record(shims, endpoint, &child);
    child
}

fn record(shims: &Shims, endpoint: &Endpoint, child: &Child) {
    let identity = shims.launcher.open(child.id()).unwrap().unwrap().identity().clone();
    endpoint.shim.bundle().make_bundle("pod").unwrap();
    endpoint.shim.bundle().record(Some(&Recorded::Running { identity, socket: None })).unwrap();
}

#[tokio::test]
async fn an_ended_endpoint_does_not_listen_again() {
    let dir = tempfile::tempdir().unwrap();
    let (_shims, endpoint) = make_endpoint(dir.path());
    endpoint.listen().await.unwrap();
    assert!(endpoint.socket().exists());
    endpoint.close().await.unwrap();
    endpoint.listen().await.unwrap();
    endpoint.try_recover().await.unwrap();
    assert!(!endpoint.socket().exists());
}

/// The state directories of the daemon and of containerd are on one file system, such as `/run`.
#[tokio::test]
async fn a_pod_whose_shim_has_died_is_removed_on_a_full_file_system() {
    if kit::skip_without_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let full = Tmpfs::mount(dir.path().join("run"));
    // The shim's `delete`: copies the options that it finds.
    let (binary, found) = (dir.path().join("shim"), dir.path().join("found"));
    let script =
        format!("#!/bin/sh\nexec /bin/cat options.json config.json >{}\n", found.display());
    kit::write_program(&binary, script.as_bytes()).unwrap();
    let name = binary.to_str().unwrap().to_owned();
    let (shims, _) = make_endpoint_with(full.path(), binary);
    let options = Options { root: "/r".to_owned(), ..Default::default() };
    let value = options.write_to_bytes().unwrap();
    let options = Some(any("containerd.runc.v1.Options", value));
    let runtime = Runtime { name, options, ..Runtime::default() };
    let endpoint = Endpoint::new(&shims, &"pod".try_into().unwrap(), &Arc::new(runtime));
    endpoint.shim.bundle().make_bundle("pod").unwrap();
    let bundle =
        full.path().join("state/io.containerd.runtime.v2.task/k8s.io").join("c".repeat(64));
    fs::create_dir_all(&bundle).unwrap();
    for (name, content) in [("sandbox", "pod"), ("options.json", "options"), ("config.json", "{}")]
    {
        fs::write(bundle.join(name), content).unwrap();
    }
    full.fill();
    endpoint.close().await.unwrap();
    assert_eq!(fs::read_to_string(found).unwrap(), "options{}");
    assert!(!endpoint.shim.bundle().dir().exists());
}

#[tokio::test]
async fn the_end_kills_the_recorded_shim() {
    let dir = tempfile::tempdir().unwrap();
    let (shims, endpoint) = make_endpoint(dir.path());
    let mut child = recorded(&shims, &endpoint);
    endpoint.close().await.unwrap();
    // Its end was seen, which takes a child away.
    assert!(child.try_wait().is_err(), "the shim lives");
    assert!(!endpoint.shim.bundle().dir().exists());
}

/// A process in a cgroup that is named by its container's id, with a bundle of `sandbox`.
struct InContainer {
    child: Child,
    cgroup: String,
}

impl InContainer {
    fn new(dir: &Path, digit: &str, sandbox: &str, child: Child) -> Self {
        // As long as CRI's ids, and no other test process's.
        let id = format!("{:08x}{}", std::process::id(), digit.repeat(56));
        let bundle = dir.join("state/io.containerd.runtime.v2.task/k8s.io").join(&id);
        std::fs::create_dir_all(&bundle).unwrap();
        std::fs::write(bundle.join("sandbox"), sandbox).unwrap();
        let cgroup = format!("/{id}");
        let inside = Self { child, cgroup };
        kit::machine::cgroup::make(&inside.cgroup).unwrap();
        for dir in kit::machine::cgroup::below(&inside.cgroup).unwrap() {
            std::fs::write(dir.join("cgroup.procs"), inside.child.id().to_string()).unwrap();
        }
        inside
    }
}

impl Drop for InContainer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        kit::machine::cgroup::remove(&self.cgroup).unwrap();
    }
}

/// Waits for what is to be the case soon.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(20), "not in time: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Splices from standard input, a pipe with something in it, to a socket that takes no more: it
/// holds the lock of the pipe as long as it lives.
const HOLD_PIPE: &str = r#"
    use Socket; use IO::Handle;
    socketpair(my $full, my $other, AF_UNIX, SOCK_STREAM, 0) or die;
    $full->blocking(0);
    1 while defined syswrite($full, "x" x 4096);
    $full->blocking(1);
    syscall($ARGV[0] + 0, 0, 0, fileno($full), 0, 4096, 0);
"#;

/// The shim waits for the lock of a pipe that a container holds: a signal does not end it before
/// the container.
///
/// Promise: failed_shim_leaves_nothing.
#[tokio::test]
async fn the_end_frees_a_shim_that_a_container_holds_in_the_kernel() {
    if kit::skip_without_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (shims, endpoint) = make_endpoint(dir.path());
    let (output, mut input) = std::io::pipe().unwrap();
    input.write_all(b"written by the container").unwrap();
    let splice = libc::SYS_splice.to_string();
    let mut container = Command::new("perl");
    container.args(["-e", HOLD_PIPE, &splice]).stdin(output.try_clone().unwrap());
    let mut container = InContainer::new(dir.path(), "a", "pod", container.spawn().unwrap());
    let sleeps = Command::new("sleep").arg("1000").spawn().unwrap();
    let mut other = InContainer::new(dir.path(), "b", "other", sleeps);
    let state = |pid: u32| Stat::of_process(pid).map_or(0, |stat| stat.state);
    let holder = container.child.id();
    until("the container holds the pipe", || {
        let call = fs::read_to_string(format!("/proc/{holder}/syscall")).unwrap_or_default();
        call.split(' ').next() == Some(&splice) && state(holder) == b'S'
    });
    let mut shim = Command::new("cat").stdin(output).stdout(Stdio::null()).spawn().unwrap();
    until("the shim waits for the pipe", || state(shim.id()) == b'D');
    record(&shims, &endpoint, &shim);
    timeout(Duration::from_secs(60), endpoint.close()).await.unwrap().unwrap();
    // Its end was seen, which takes a child away.
    assert!(shim.try_wait().is_err(), "the shim lives");
    assert!(container.child.try_wait().unwrap().is_some(), "the container lives");
    assert!(other.child.try_wait().unwrap().is_none(), "another pod's container was killed");
    assert!(!endpoint.shim.bundle().dir().exists());
}

/// Its handler names a cgroup that is not there; its exit while no daemon runs is missed without a
/// record all the same.
#[tokio::test]
async fn a_shim_that_cannot_be_placed_is_recorded_when_its_launch_was_interrupted() {
    let dir = tempfile::tempdir().unwrap();
    let (shims, _) = make_endpoint(dir.path());
    let options = Options { shim_cgroup: "/no/such/cgroup".to_owned(), ..Default::default() };
    let options = any("containerd.runc.v1.Options", options.write_to_bytes().unwrap());
    let runtime = Runtime { options: Some(options), ..Runtime::default() };
    let endpoint = Endpoint::new(&shims, &"pod".try_into().unwrap(), &Arc::new(runtime));
    let mut child = recorded(&shims, &endpoint);
    let bundle = endpoint.shim.bundle();
    bundle.record(Some(&Recorded::Launching)).unwrap();
    let process = shims.launcher.open(child.id()).unwrap().unwrap();
    let identity = process.identity().clone();
    let running = endpoint.shim.adopt(process, true, Some(7));
    assert_eq!(bundle.recorded().unwrap(), Some(Recorded::Running { identity, socket: Some(7) }));
    drop(running);
    endpoint.end_shim().await.unwrap();
    // Its end was seen, which takes a child away.
    assert!(child.try_wait().is_err(), "the shim lives");
}

#[tokio::test]
async fn an_unreadable_record_is_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let (shims, endpoint) = make_endpoint(dir.path());
    let mut child = recorded(&shims, &endpoint);
    let (record, aside) =
        (dir.path().join("sandboxes/pod/shim/shim.json"), dir.path().join("aside"));
    fs::rename(&record, &aside).unwrap();
    fs::create_dir(&record).unwrap();
    let recovered = endpoint.recover();
    sleep(RETRY_DELAY * 3 / 2).await;
    assert!(!recovered.is_finished());
    assert!(!endpoint.socket().exists(), "it listens, though a shim may serve");
    fs::remove_dir(&record).unwrap();
    fs::rename(&aside, &record).unwrap();
    timeout(Duration::from_secs(20), recovered).await.unwrap().unwrap();
    assert!(matches!(next(&endpoint), Step::Watch(shim) if shim.identity().pid == child.id()));
    endpoint.close().await.unwrap();
    // Its end was seen, which takes a child away.
    assert!(child.try_wait().is_err(), "the shim lives");
}

#[tokio::test]
async fn an_idle_endpoint_has_no_task() {
    let dir = tempfile::tempdir().unwrap();
    let (_shims, endpoint) = make_endpoint(dir.path());
    let pod: Arc<dyn Pod> = Arc::new(NoPod);
    endpoint.serve(pod.clone());
    assert!(endpoint.state().idle.as_ref().is_some_and(|idle| idle._called.is_none()));
    endpoint.listen().await.unwrap();
    assert!(endpoint.state().idle.as_ref().is_some_and(|idle| idle._called.is_some()));
    // Held by this test and by the rest, and by no task.
    assert_eq!(Arc::strong_count(&pod), 2);
    endpoint.prepare().await.unwrap();
    assert!(endpoint.state().idle.is_none());
    endpoint.close().await.unwrap();
    while Arc::strong_count(&pod) > 1 {
        tokio::task::yield_now().await;
    }
    assert!(endpoint.state().idle.is_none(), "an endpoint that has ended holds its pod");
}

/// The Create of a caller may reach the shim before the daemon's first call.
#[tokio::test]
async fn containers_of_a_shim_that_exits_before_it_answers_are_ended() {
    if kit::skip_without_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (_shims, endpoint) = make_endpoint(dir.path());
    endpoint.listen().await.unwrap();
    let pod: Arc<dyn Pod> = Arc::new(NoPod);
    // Of a Create that did not reach it.
    let bundle = dir.path().join("state/io.containerd.runtime.v2.task/k8s.io/created");
    std::fs::create_dir_all(&bundle).unwrap();
    std::fs::write(bundle.join("sandbox"), "pod").unwrap();
    endpoint.launch_and_watch(&pod).await;
    assert_eq!(endpoint.death(), None);
    assert!(bundle.join("sandbox").exists());

    let sleeps = Command::new("sleep").arg("1000").spawn().unwrap();
    let mut container = InContainer::new(dir.path(), "c", "pod", sleeps);
    endpoint.launch_and_watch(&pod).await;
    until("the container is ended", || container.child.try_wait().unwrap().is_some());
    assert!(endpoint.death().is_some(), "the sandbox has not failed");
    assert_eq!(endpoint.shim.bundle().recorded().unwrap(), None);
    endpoint.close().await.unwrap();
}

/// A killed shim that hangs in the kernel until it is let go.
#[derive(Debug)]
struct Hanging {
    identity: Identity,
    freed: Notify,
}

impl Process for Hanging {
    fn identity(&self) -> &Identity {
        &self.identity
    }

    fn kill(&self) -> Result<(), StepError> {
        Ok(())
    }

    fn exited(&self) -> futures::future::BoxFuture<'_, Exit> {
        Box::pin(async {
            self.freed.notified().await;
            Exit { status: 137, at: std::time::SystemTime::now() }
        })
    }
}

#[tokio::test]
async fn callers_do_not_wait_for_the_exit_of_a_killed_shim() {
    let dir = tempfile::tempdir().unwrap();
    let (_shims, endpoint) = make_endpoint(dir.path());
    endpoint.listen().await.unwrap();
    let identity =
        Identity { pid: 0, start_time: 0, pid_namespace: 0, boot_id: Arc::from("no boot") };
    let shim = Arc::new(Hanging { identity, freed: Notify::new() });
    let ending = tokio::spawn({
        let (endpoint, shim, pod) = (endpoint.clone(), shim.clone(), Arc::new(NoPod));
        async move { endpoint.end_silent(shim, no_answer(), &(pod as _)).await }
    });
    // Those who call later too.
    for _ in 0..3 {
        let mut caller = tokio::net::UnixStream::connect(endpoint.socket()).await.unwrap();
        let read = tokio::io::AsyncReadExt::read_u8(&mut caller);
        let end = timeout(Duration::from_secs(10), read).await.expect("the caller waits");
        assert_eq!(end.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    }
    assert!(!ending.is_finished());
    shim.freed.notify_one();
    timeout(Duration::from_secs(20), ending).await.unwrap().unwrap();
    endpoint.close().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_socket_that_cannot_be_watched_is_retried_with_growing_delays_or_after_a_change() {
    let dir = tempfile::tempdir().unwrap();
    let (_shims, endpoint) = make_endpoint(dir.path());
    endpoint.listen().await.unwrap();
    endpoint.changed.notified().await;
    let listener = endpoint.state().listener.clone();
    // The kernel refuses to watch a file.
    let file = Arc::new(OwnedFd::from(fs::File::open(dir.path()).unwrap()));
    for (changes, expected) in [(false, 31), (true, 16)] {
        let begun = tokio::time::Instant::now();
        endpoint.state().idle = None;
        endpoint.state().listener = Some(file.clone());
        endpoint.serve(Arc::new(NoPod));
        sleep(Duration::from_secs(16)).await;
        endpoint.state().listener = listener.clone();
        if changes {
            endpoint.notify(endpoint.state());
        }
        while endpoint.state().idle.is_none() {
            sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(begun.elapsed().as_secs(), expected, "a change: {changes}");
    }
    endpoint.close().await.unwrap();
}

#[tokio::test]
async fn the_end_of_an_endpoint_ends_its_recovery() {
    let dir = tempfile::tempdir().unwrap();
    let (_shims, endpoint) = make_endpoint(dir.path());
    fs::create_dir_all(dir.path().join("sandboxes/pod/shim/shim.json")).unwrap();
    let recovered = endpoint.recover();
    sleep(Duration::from_millis(100)).await;
    assert!(!recovered.is_finished());
    assert!(endpoint.close().await.is_err(), "what it cannot see may run");
    timeout(RETRY_DELAY / 2, recovered).await.unwrap().unwrap();
}

/// The flag belongs to the socket, which the shim shares.
#[tokio::test]
async fn an_accept_that_blocks_blocks_no_thread() {
    let dir = tempfile::tempdir().unwrap();
    let (_shims, endpoint) = make_endpoint(dir.path());
    endpoint.listen().await.unwrap();
    let listener = endpoint.state().listener.clone().unwrap().try_clone().unwrap();
    UnixListener::from(listener).set_nonblocking(false).unwrap();
    let caller = UnixStream::connect(endpoint.socket()).unwrap();
    let rejected = endpoint.reject_callers(no_answer());
    tokio::time::timeout(Duration::from_secs(10), rejected).await.unwrap();
    caller.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    assert_eq!((&caller).read(&mut [0]).unwrap(), 0, "the caller is hung up on");
    endpoint.close().await.unwrap();
}

#[tokio::test]
async fn a_call_wakes_an_idle_endpoint() {
    let dir = tempfile::tempdir().unwrap();
    let (_shims, endpoint) = make_endpoint(dir.path());
    endpoint.listen().await.unwrap();
    endpoint.serve(Arc::new(NoPod));
    let _called = std::os::unix::net::UnixStream::connect(endpoint.socket()).unwrap();
    while endpoint.state().idle.is_some() {
        tokio::task::yield_now().await;
    }
    endpoint.close().await.unwrap();
}
