//! The life of a sandbox on a fake driver: real files, real mounts, a pause that lives and dies on
//! order.
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

use fixture::{Node, request, request_with, soon};
use nix::mount::{MntFlags, umount2};
use pause_sandboxer::controller::SandboxService;
use pause_sandboxer::podsandbox::{CreateRequest, Error, SandboxInfo};
use pause_sandboxer::protos::cri::{
    IDMapping, Int64Value, LinuxSandboxSecurityContext, NamespaceMode, SecurityProfile,
    UserNamespace, security_profile::ProfileType,
};

/// By which containerd's store finds sandboxes.
const KIND: &str = "io.cri-containerd.kind";

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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn run_stop_remove() {
    let node = Node::new();
    let controller = node.controller().await;
    let labelled = request_with("a", |pod| drop(pod.labels.insert("app".into(), "web".into())));
    controller.create(labelled).await.unwrap();
    assert!(matches!(controller.create(request("a")).await, Err(Error::AlreadyExists { .. })));
    let status = controller.status("a", false).await.unwrap();
    assert_eq!((status.pid, status.state), (0, "SANDBOX_NOTREADY"));

    let started = controller.start("a").await.unwrap();
    assert_eq!(started.version, 3);
    assert!(started.spec.is_some());
    assert_eq!((&*started.labels["app"], &*started.labels[KIND]), ("web", "sandbox"));
    assert!(matches!(controller.start("a").await, Err(Error::State { .. })));
    let status = controller.status("a", true).await.unwrap();
    assert_eq!((status.pid, status.state), (started.pid, "SANDBOX_READY"));
    assert_eq!(status.created_at, started.created_at);

    let waiting = tokio::spawn({
        let controller = controller.clone();
        async move { controller.wait("a").await }
    });
    controller.stop("a").await.unwrap();
    assert_eq!(waiting.await.unwrap().unwrap().status, 137);
    assert_eq!(
        controller.wait("a").await.unwrap().status,
        137,
        "Wait after the exit answers as well"
    );
    let status = controller.status("a", false).await.unwrap();
    assert_eq!((status.state, status.exited_at.is_some()), ("SANDBOX_NOTREADY", true));
    controller.stop("a").await.unwrap();
    controller.shutdown("a").await.unwrap();
    controller.shutdown("a").await.unwrap();
    assert!(matches!(controller.stop("a").await, Err(Error::NotFound { .. })));
    assert_eq!(node.leftovers(), Vec::<String>::new());
    controller.create(request("a")).await.unwrap();
    controller.shutdown("a").await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_start_leaves_nothing() {
    let node = Node::new();
    let controller = node.controller().await;
    node.fake.orders.lock().unwrap().fail_start = true;
    controller.create(request("a")).await.unwrap();
    let error = controller.start("a").await.unwrap_err().to_string();
    for part in ["a", "start", "clone", "/on/order", "os error 11"] {
        assert!(error.contains(part), "{error}");
    }
    assert_eq!(node.leftovers(), Vec::<String>::new());
    assert!(matches!(controller.status("a", false).await, Err(Error::NotFound { .. })));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_whose_caller_gives_up_leaves_nothing() {
    let node = Node::new();
    let controller = node.controller().await;
    node.fake.orders.lock().unwrap().start_takes = Duration::from_secs(2);
    controller.create(request("a")).await.unwrap();
    assert!(tokio::time::timeout(Duration::from_millis(50), controller.start("a")).await.is_err());
    soon("the removal", async || controller.status("a", false).await.is_err().then_some(())).await;
    assert_eq!(node.leftovers(), Vec::<String>::new());
    assert_eq!(node.fake.alive(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exit_is_published_before_a_cleanup_that_fails_and_is_retried() {
    let node = Node::new();
    let controller = node.controller().await;
    controller.create(request("a")).await.unwrap();
    let pid = controller.start("a").await.unwrap().pid;
    {
        let mut orders = node.fake.orders.lock().unwrap();
        orders.fail_cleanups = 1;
        orders.panic_in_cleanup = true;
    }
    node.fake.end(pid, 3);
    assert_eq!(controller.wait("a").await.unwrap().status, 3);
    // One panic, one EBUSY, then success: all by themselves.
    soon("three tries", async || (node.fake.cleanups.load(Ordering::SeqCst) >= 3).then_some(()))
        .await;
    controller.stop("a").await.unwrap();
    controller.shutdown("a").await.unwrap();
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stop_names_the_step_of_a_cleanup_that_fails() {
    let node = Node::new();
    let controller = node.controller().await;
    controller.create(request("a")).await.unwrap();
    controller.start("a").await.unwrap();
    node.fake.orders.lock().unwrap().fail_cleanups = 1;
    let error = controller.stop("a").await.unwrap_err().to_string();
    assert!(error.contains("remove cgroup /a/b") && error.contains("os error 16"), "{error}");
    controller.stop("a").await.unwrap();
    controller.shutdown("a").await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_come_back_with_the_same_shared_memory() {
    let node = Node::new();
    let controller = node.controller().await;
    controller.create(request("a")).await.unwrap();
    controller.start("a").await.unwrap();
    let cri = "io.containerd.grpc.v1.cri/sandboxes/a";
    let (root, run) =
        (node.dir.path().join("root").join(cri), node.dir.path().join("run").join(cri));
    std::fs::write(run.join("shm/word"), "kept").unwrap();
    // As containerd does at its start with what it does not know.
    umount2(&run.join("shm"), MntFlags::MNT_DETACH).unwrap();
    std::fs::remove_dir_all(&run).unwrap();
    std::fs::remove_dir_all(&root).unwrap();
    // Not right after Start, when it takes its own files for granted.
    let back = async || {
        controller.status("a", false).await.unwrap();
        std::fs::read_to_string(run.join("shm/word")).ok()
    };
    assert_eq!(soon("the files", back).await, "kept");
    let of_node = std::fs::read("/proc/sys/kernel/hostname").unwrap();
    assert_eq!(std::fs::read(root.join("hostname")).unwrap(), of_node);
    assert_eq!(std::fs::read(root.join("hosts")).unwrap(), std::fs::read("/etc/hosts").unwrap());
    assert!(root.join("resolv.conf").exists());
    controller.shutdown("a").await.unwrap();
    assert_eq!(node.leftovers(), Vec::<String>::new());
}

/// Promise: invalid_request_names_the_field.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_requests_name_the_field_and_leave_nothing() {
    let node = Node::new();
    let controller = node.controller().await;
    let with = |change: fn(&mut CreateRequest)| {
        let mut request = request("a");
        change(&mut request);
        request
    };
    let cases: [(&str, CreateRequest); 6] = [
        ("sandbox_id", with(|r| r.id = "../a".into())),
        ("sandbox_id", with(|r| r.id = "x".repeat(4096))),
        ("options", with(|r| r.options = None)),
        (
            "options",
            with(|r| r.options.as_mut().unwrap().type_url = "google.protobuf.Empty".to_owned()),
        ),
        ("options", with(|r| r.options.as_mut().unwrap().value = vec![0xff, 0xff])),
        (
            "netns_path",
            with(|r| {
                r.options.as_mut().unwrap().value = Default::default();
                r.netns_path = "/etc/hosts".to_owned();
            }),
        ),
    ];
    for (field, request) in cases {
        let error = controller.create(request).await.unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }), "{error}");
        assert!(error.to_string().contains(field), "{error}");
        assert!(error.to_string().len() < 300, "{error}");
    }
    assert_eq!(node.leftovers(), Vec::<String>::new());
}

/// Settings that no container of the pod could run with, although the sandbox could.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn configs_that_the_built_in_controller_refuses_are_refused() {
    let node = Node::new();
    let controller = node.controller().await;
    let security = |change: fn(&mut LinuxSandboxSecurityContext)| {
        request_with("a", |pod| {
            let linux = pod.linux.mut_or_insert_default();
            change(linux.security_context.mut_or_insert_default());
        })
    };
    let cases: [(&str, CreateRequest); 4] = [
        (
            "userns_options.uids",
            security(|context| {
                let mapping = |container_id| IDMapping {
                    container_id,
                    host_id: 100_000,
                    length: 65536,
                    ..Default::default()
                };
                let users = UserNamespace {
                    mode: NamespaceMode::POD.into(),
                    uids: vec![mapping(1)],
                    gids: vec![mapping(0)],
                    ..Default::default()
                };
                context.namespace_options.mut_or_insert_default().userns_options =
                    Some(users).into();
            }),
        ),
        (
            "run_as_user",
            security(|context| {
                context.run_as_user = Some(Int64Value { value: -1, ..Default::default() }).into();
            }),
        ),
        (
            "seccomp.localhost_ref",
            security(|context| {
                let profile = SecurityProfile {
                    profile_type: ProfileType::Localhost.into(),
                    localhost_ref: "/no/such/profile".to_owned(),
                    ..Default::default()
                };
                context.seccomp = Some(profile).into();
            }),
        ),
        (
            "labels",
            request_with("a", |pod| drop(pod.labels.insert("long".into(), "x".repeat(4096)))),
        ),
    ];
    for (field, request) in cases {
        let refused = controller.create(request).await;
        let Err(Error::Invalid { field: named, .. }) = &refused else {
            panic!("{field}: {refused:?}");
        };
        assert!(named.contains(field), "{field}: {refused:?}");
    }
    assert_eq!(node.leftovers(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_update_of_one_extension_keeps_the_others() {
    let node = Node::new();
    let controller = node.controller().await;
    let info = |extensions: &[(&str, &str)]| {
        let payload = |value: &str| kit::controller::any(value, Vec::new());
        let extensions =
            extensions.iter().map(|(key, value)| ((*key).to_owned(), payload(value))).collect();
        SandboxInfo { extensions, ..request("a").sandbox.unwrap() }
    };
    let request =
        CreateRequest { sandbox: Some(info(&[("kept", "1"), ("given", "1")])), ..request("a") };
    controller.create(request).await.unwrap();
    let update = info(&[("given", "2"), ("other", "2")]);
    controller.update("a", update, vec!["extensions.given".to_owned()]).await.unwrap();
    let record = std::fs::read(node.dir.path().join("state/sandboxes/a/record.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    let extensions = record["info"]["extensions"].as_object().unwrap();
    let values = extensions.iter().map(|(key, any)| format!("{key}={}", any["type_url"]));
    assert_eq!(values.collect::<Vec<_>>().join(" "), "given=\"2\" kept=\"1\"");
    controller.shutdown("a").await.unwrap();
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
