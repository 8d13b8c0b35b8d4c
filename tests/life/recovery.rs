//! A new daemon with the records of an earlier one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::Duration;

use pause_sandboxer::controller::{Controller, SandboxService};
use pause_sandboxer::podsandbox::{Environment, Error};
use tokio::runtime::Builder;

use crate::fixture::{Node, own, request};

/// The state of every sandbox, by its id.
async fn listed(controller: &Controller) -> BTreeMap<String, String> {
    let (all, _) = controller.list("", 1000).await.unwrap();
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
