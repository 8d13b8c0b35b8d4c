//! A new daemon with the records of an earlier one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::Duration;

use pause_sandboxer::controller::{Controller, SandboxService};
use pause_sandboxer::podsandbox::{Environment, Error};
use tokio::runtime::Builder;

use crate::fixture::{Node, own, request, soon};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_recovers_running_exited_and_unknown_sandboxes() {
    let node = Node::new();
    let controller = node.controller().await;
    for id in ["alive", "dead", "stopped", "created"] {
        controller.create(request(id)).await.unwrap();
    }
    let alive = controller.start("alive").await.unwrap();
    let dead = controller.start("dead").await.unwrap();
    controller.start("stopped").await.unwrap();
    controller.stop("stopped").await.unwrap();
    controller.drain().await;
    assert!(matches!(controller.status("alive", false).await, Err(Error::Stopping { .. })));
    drop(controller);
    // It dies unwatched.
    node.fake.pauses.lock().unwrap().remove(&dead.pid);

    let cleanups = || node.fake.cleanups.load(Ordering::SeqCst);
    let before = cleanups();

    // On a runtime of its own: it ends as a killed daemon does, and its owners do not race with
    // their successors.
    let daemon = tokio::runtime::Runtime::new().unwrap();
    let environment =
        Arc::new(Environment::new(node.config(), node.fake.clone(), own(), None).unwrap());
    let controller = daemon.spawn(Controller::open(environment)).await.unwrap().unwrap();
    let status = controller.status("alive", false).await.unwrap();
    assert_eq!(
        (status.pid, status.state, status.created_at),
        (alive.pid, "SANDBOX_READY", alive.created_at)
    );
    assert_eq!(controller.wait("dead").await.unwrap().status, 255);
    assert_eq!(controller.wait("stopped").await.unwrap().status, 137, "the exit is on record");
    // The earlier daemon may have ended between an exit and its cleanup.
    soon("both that have ended are cleaned up", async || (cleanups() >= before + 2).then_some(()))
        .await;
    controller.start("created").await.unwrap();
    node.fake.end(alive.pid, 9);
    assert_eq!(controller.wait("alive").await.unwrap().status, 9, "its exit is watched again");
    drop(controller);
    daemon.shutdown_background();

    node.fake.orders.lock().unwrap().cannot_tell = true;
    let controller = node.controller().await;
    assert_eq!(listed(&controller).await["created"], "unknown");
    assert!(controller.stop("created").await.unwrap_err().to_string().contains("os error 24"));
    node.fake.orders.lock().unwrap().cannot_tell = false;
    controller.stop("created").await.unwrap();
    assert_eq!(controller.wait("created").await.unwrap().status, 137);
    for id in ["alive", "dead", "stopped", "created"] {
        controller.shutdown(id).await.unwrap();
    }
    assert_eq!(node.leftovers(), Vec::<String>::new());
}

/// The state of every sandbox, by its id.
async fn listed(controller: &Controller) -> BTreeMap<String, &'static str> {
    let (all, _) = controller.list("", 1000, false).await.unwrap();
    all.into_iter().map(|sandbox| (sandbox.id, sandbox.state)).collect()
}

/// A controller whose sandbox "a" was started by another, and the pid of its pause.
async fn restarted(node: &Node, before: impl FnOnce()) -> (Arc<Controller>, u32) {
    let controller = node.controller().await;
    controller.create(request("a")).await.unwrap();
    let pid = controller.start("a").await.unwrap().pid;
    drop(controller);
    before();
    (node.controller().await, pid)
}

/// containerd would keep the answer until its next start.
///
/// Promise: undecided_is_not_dead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn status_of_an_unknown_pause_waits_until_it_is_found() {
    let node = Node::new();
    let (controller, pid) =
        restarted(&node, || node.fake.orders.lock().unwrap().cannot_tell = true).await;
    assert_eq!(listed(&controller).await["a"], "unknown");
    let asked = tokio::spawn({
        let controller = controller.clone();
        async move { controller.status("a", false).await.unwrap() }
    });
    // It is looked for once more meanwhile.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    assert!(!asked.is_finished());
    node.fake.orders.lock().unwrap().cannot_tell = false;
    let status = asked.await.unwrap();
    assert_eq!((status.state, status.pid), ("SANDBOX_READY", pid));
    controller.shutdown("a").await.unwrap();
    assert_eq!(node.leftovers(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn status_of_a_pause_that_is_not_found_is_unknown_in_the_end() {
    let node = Node::new();
    let (controller, _) =
        restarted(&node, || node.fake.orders.lock().unwrap().cannot_tell = true).await;
    let begun = tokio::time::Instant::now();
    for _ in 0..2 {
        assert_eq!(controller.status("a", false).await.unwrap().state, "SANDBOX_UNKNOWN");
        // Once for all calls.
        assert_eq!(begun.elapsed().as_secs(), 30);
    }
    node.fake.orders.lock().unwrap().cannot_tell = false;
    controller.shutdown("a").await.unwrap();
    assert_eq!(node.leftovers(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shim_that_is_not_found_makes_no_pause_unknown() {
    let node = Node::new();
    let shim = node.dir.path().join("state/sandboxes/a/shim");
    let record = shim.join("shim.json");
    let (controller, pid) = restarted(&node, || {
        std::fs::create_dir_all(&shim).unwrap();
        // A reader of it waits for a writer.
        nix::unistd::mkfifo(&record, nix::sys::stat::Mode::S_IRWXU).unwrap();
    })
    .await;
    assert_eq!(listed(&controller).await["a"], "ready");
    let status = controller.status("a", false).await.unwrap();
    assert_eq!((status.state, status.pid), ("SANDBOX_READY", pid));
    // It is looked for again and again: from now on there is none.
    let aside = record.with_extension("aside");
    std::fs::rename(&record, &aside).unwrap();
    drop(std::fs::File::options().write(true).open(&aside).unwrap());
    controller.shutdown("a").await.unwrap();
    assert_eq!(node.leftovers(), Vec::<String>::new());
}

/// As on a node that has no process ids left: the threads of the first runtime are to have more
/// stack than there is memory.
#[test]
fn a_recovery_without_threads_quarantines_no_record() {
    let without_threads =
        Builder::new_current_thread().thread_stack_size(1 << 60).enable_all().build().unwrap();
    let with_threads = Builder::new_current_thread().enable_all().build().unwrap();
    let node = Node::new();
    with_threads
        .block_on(async { node.controller().await.create(request("created")).await.unwrap() });
    let environment =
        || Arc::new(Environment::new(node.config(), node.fake.clone(), own(), None).unwrap());
    let failed = without_threads.block_on(Controller::open(environment())).unwrap_err();
    assert_eq!(
        failed.to_string(),
        "start a thread: Resource temporarily unavailable (os error 11)"
    );
    with_threads.block_on(async {
        let controller = node.controller().await;
        controller.start("created").await.unwrap();
        controller.shutdown("created").await.unwrap();
    });
    assert_eq!(node.leftovers(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_that_cannot_be_read_is_kept_and_its_id_stays_taken() {
    let node = Node::new();
    let controller = node.controller().await;
    controller.create(request("newer")).await.unwrap();
    drop(controller);
    let record = node.dir.path().join("state/sandboxes/newer/record.json");
    let text =
        std::fs::read_to_string(&record).unwrap().replacen("\"version\":1", "\"version\":99", 1);
    std::fs::write(&record, &text).unwrap();
    std::fs::create_dir(node.dir.path().join("state/sandboxes/broken")).unwrap();
    std::fs::write(node.dir.path().join("state/sandboxes/broken/record.json"), "{").unwrap();
    std::fs::create_dir(node.dir.path().join("state/sandboxes/empty")).unwrap();

    let controller = node.controller().await;
    assert!(matches!(controller.create(request("newer")).await, Err(Error::AlreadyExists { .. })));
    let error = controller.status("newer", false).await.unwrap_err().to_string();
    assert!(error.contains("version 99"), "{error}");
    let known = "sandbox newer: its record is quarantined: ";
    assert!(error.starts_with(known), "{error}");
    // On the wire it is UNAVAILABLE, so that containerd asks again.
    assert!(matches!(controller.wait("newer").await, Err(Error::Quarantined { .. })));
    assert!(controller.status("broken", false).await.is_err());
    assert!(matches!(controller.status("empty", false).await, Err(Error::NotFound { .. })));
    assert_eq!(std::fs::read_to_string(&record).unwrap(), text);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recovery_undoes_an_interrupted_start() {
    let node = Node::new();
    let controller = node.controller().await;
    controller.create(request("cut")).await.unwrap();
    drop(controller);
    // The first thing that a start makes.
    std::fs::create_dir(node.dir.path().join("state/sandboxes/cut/shm")).unwrap();
    let controller = node.controller().await;
    assert!(matches!(controller.status("cut", false).await, Err(Error::NotFound { .. })));
    assert_eq!(node.leftovers(), Vec::<String>::new());
}

/// Recovery's removal of an interrupted start hangs beyond the deadline of the record: the id stays
/// taken until the removal has ended, and no other job of the sandbox runs meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sandbox_waits_for_what_recovery_left_under_way() {
    let node = Node::new();
    let controller = node.controller().await;
    controller.create(request("cut")).await.unwrap();
    drop(controller);
    std::fs::create_dir(node.dir.path().join("state/sandboxes/cut/shm")).unwrap();
    let (release, held) = mpsc::channel();
    node.fake.orders.lock().unwrap().hold_cleanup = Some(held);
    let controller = node.controller().await;
    let mut removal = Box::pin(controller.shutdown("cut"));
    assert!(
        tokio::time::timeout(Duration::from_secs(1), &mut removal).await.is_err(),
        "removed beside the first removal"
    );
    assert_eq!(node.fake.cleanups.load(Ordering::SeqCst), 1);
    assert!(matches!(controller.create(request("cut")).await, Err(Error::AlreadyExists { .. })));
    drop(release);
    removal.await.unwrap();
    controller.create(request("cut")).await.unwrap();
    controller.start("cut").await.unwrap();
    controller.shutdown("cut").await.unwrap();
    assert_eq!((node.leftovers(), node.fake.alive()), (Vec::new(), 0));
}

/// As many adoptions hang in the kernel as recovery has threads: the other records have theirs all
/// the same.
///
/// Promise: hung_step_delays_no_other_pod.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn records_that_hang_keep_no_other_record_from_recovery() {
    const HANG: usize = 32;
    const ALL: usize = HANG + 4;
    let node = Node::new();
    let controller = node.controller().await;
    for number in 0..ALL {
        let id = format!("pod-{number}");
        controller.create(request(&id)).await.unwrap();
        controller.start(&id).await.unwrap();
    }
    drop(controller);
    let (releases, held): (Vec<_>, Vec<_>) = (0..HANG).map(|_| mpsc::channel()).unzip();
    node.fake.orders.lock().unwrap().hold_adoptions = held;
    let controller = node.controller().await;
    let (states, mut ready) = (listed(&controller).await, 0);
    for number in 0..ALL {
        ready += usize::from(states[&format!("pod-{number}")] == "ready");
    }
    assert_eq!(ready, ALL - HANG, "pods are ready");
    drop(releases);
    for number in 0..ALL {
        controller.shutdown(&format!("pod-{number}")).await.unwrap();
    }
    assert_eq!((node.leftovers(), node.fake.alive()), (Vec::new(), 0));
}

/// A daemon that is killed while it undoes an interrupted start leaves that to the next one.
#[test]
fn an_undo_that_is_interrupted_is_continued_by_the_next_daemon() {
    let node = Node::new();
    let runtime = || {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(2).enable_all().build().unwrap()
    };
    let first = runtime();
    first.block_on(async { node.controller().await.create(request("cut")).await.unwrap() });
    first.shutdown_background();
    // Start makes it first.
    std::fs::create_dir(node.dir.path().join("state/sandboxes/cut/shm")).unwrap();
    let (release, held) = mpsc::channel();
    node.fake.orders.lock().unwrap().hold_cleanup = Some(held);
    let second = runtime();
    drop(second.block_on(node.controller()));
    second.shutdown_background();
    drop(release);
    runtime().block_on(async {
        let controller = node.controller().await;
        let gone = async {
            while !matches!(controller.status("cut", false).await, Err(Error::NotFound { .. })) {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), gone).await.expect("it is removed");
    });
    assert_eq!(node.leftovers(), Vec::<String>::new());
}
