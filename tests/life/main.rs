//! What a kernel does not do on request: a pause that may or may not be alive, a cleanup or a thaw
//! that hangs, a panic of a sandbox's owner. The driver is a fake; files and mounts are real.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::Duration;

mod fixture;
mod recovery;

use fixture::{Node, request, soon};
use pause_sandboxer::controller::SandboxService;
use pause_sandboxer::podsandbox::Error;

/// Otherwise the caller of Shutdown takes the sandbox for removed, and it is made after that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_during_create_removes_the_sandbox() {
    let node = Node::new();
    let controller = node.controller().await;
    // The write of the record waits for a reader.
    let directory = node.dir.path().join("state/sandboxes/a");
    std::fs::create_dir(&directory).unwrap();
    let record = directory.join("record.json.new");
    nix::unistd::mkfifo(&record, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let creating = tokio::spawn({
        let controller = controller.clone();
        async move { controller.create(request("a")).await }
    });
    soon("the id is taken", async || controller.has("a").then_some(())).await;
    let mut removing = tokio::spawn({
        let controller = controller.clone();
        async move { controller.shutdown("a").await }
    });
    let early = tokio::time::timeout(Duration::from_millis(300), &mut removing).await;
    let reading = std::thread::spawn(move || std::fs::read(record).unwrap());
    assert!(early.is_err(), "it was answered before Create: {early:?}");
    creating.await.unwrap().unwrap();
    assert!(!reading.join().unwrap().is_empty());
    removing.await.unwrap().unwrap();
    assert!(!controller.has("a"));
    assert_eq!(node.leftovers(), Vec::<String>::new());
}

/// The owner itself kills, so what panics there is the owner.
///
/// Promise: panic_loses_no_pod.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_of_an_actor_loses_no_sandbox() {
    let node = Node::new();
    let controller = node.controller().await;
    controller.create(request("a")).await.unwrap();
    let pid = controller.start("a").await.unwrap().pid;
    let wait = tokio::spawn(controller.wait("a"));
    node.fake.panic_in_kill.store(true, Ordering::SeqCst);
    let stop = {
        let controller = controller.clone();
        tokio::spawn(async move { controller.stop("a").await })
    };
    soon("the fault", async || (!node.fake.panic_in_kill.load(Ordering::SeqCst)).then_some(()))
        .await;
    // Whatever comes while the owner is at fault, too.
    let shutdown = controller.shutdown("a").await;
    for answer in [stop.await.unwrap(), shutdown] {
        assert!(
            matches!(&answer, Err(Error::Fault { reason, .. }) if reason.contains("on order")),
            "{answer:?}"
        );
    }
    assert_eq!((node.fake.alive(), wait.is_finished()), (1, false));
    let status = controller.status("a", false).await.unwrap();
    assert_eq!((status.state, status.pid), ("SANDBOX_READY", pid));
    controller.stop("a").await.unwrap();
    assert_eq!(wait.await.unwrap().unwrap().status, 137);
    controller.shutdown("a").await.unwrap();
    assert_eq!((node.leftovers(), node.fake.alive()), (Vec::new(), 0));
}

/// The kernel keeps a thaw waiting, as behind its locks of cgroups: the runtime has other work.
#[tokio::test]
async fn a_thaw_that_hangs_keeps_no_other_sandbox_waiting() {
    let node = Node::new();
    let controller = node.controller().await;
    for id in ["frozen", "other"] {
        controller.create(request(id)).await.unwrap();
        controller.start(id).await.unwrap();
    }
    let (release, held) = mpsc::channel();
    *node.fake.hold_thaw.lock().unwrap() = Some(held);
    let stopping = controller.clone();
    let stop = tokio::spawn(async move { stopping.stop("frozen").await });
    soon("the thaw", async || node.fake.hold_thaw.lock().unwrap().is_none().then_some(())).await;
    controller.stop("other").await.unwrap();
    assert!(!stop.is_finished(), "stopped before it is thawed");
    drop(release);
    stop.await.unwrap().unwrap();
    for id in ["frozen", "other"] {
        controller.shutdown(id).await.unwrap();
    }
    assert_eq!((node.leftovers(), node.fake.alive()), (Vec::new(), 0));
}
