//! An endpoint without a node.

use std::path::Path;
use std::process::{Child, Command};

use super::*;
use crate::process::held::Namespace;
use crate::shim::{Endpoint, Owner, Settings, Shims};

/// The endpoint of a sandbox below `dir`, and what all share.
fn endpoint(dir: &Path) -> (Arc<Shims>, Arc<Handover>) {
    let settings = Settings {
        containerd_address: dir.join("containerd.sock"),
        containerd_namespace: "k8s.io".to_owned(),
        containerd_state: dir.join("state"),
        state_dir: dir.to_owned(),
        sandboxes: dir.to_owned(),
        on_demand_address: String::new(),
        binaries: Default::default(),
        open_files: None,
        environment: Default::default(),
    };
    let shims = Arc::new(Shims::new(settings).unwrap());
    let Endpoint::Handover(owned) =
        shims.endpoint(Owner::Sandboxer, &"pod".into(), &Arc::default())
    else {
        unreachable!("its owner is the sandboxer")
    };
    std::fs::create_dir(dir.join("pod")).unwrap();
    (shims, owned)
}

struct NoPod;

impl Pod for NoPod {
    fn namespaces(&self) -> Result<Vec<Namespace>, Step> {
        Ok(Vec::new())
    }

    fn lives(&self) -> bool {
        true
    }

    fn bereaved(&self) {}
}

fn next(owned: &Arc<Handover>) -> Next {
    let pod: Arc<dyn Pod> = Arc::new(NoPod);
    owned.next(&pod)
}

/// A process that is on record as the shim.
fn recorded(shims: &Shims, owned: &Handover) -> Child {
    let child = Command::new("sleep").arg("1000").spawn().unwrap();
    let identity = shims.launcher.open(child.id()).unwrap().unwrap().identity().clone();
    owned.shim.bundle().make("pod", true).unwrap();
    owned.shim.bundle().record(Some(&Recorded::Running { identity })).unwrap();
    child
}

#[tokio::test]
async fn nobody_listens_behind_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let (_shims, owned) = endpoint(dir.path());
    owned.listen().await.unwrap();
    assert!(owned.socket().exists());
    owned.end().await.unwrap();
    owned.listen().await.unwrap();
    owned.recover().await;
    assert!(!owned.socket().exists());
}

#[tokio::test]
async fn the_end_looks_for_the_shim_that_is_on_record() {
    let dir = tempfile::tempdir().unwrap();
    let (shims, owned) = endpoint(dir.path());
    let mut child = recorded(&shims, &owned);
    owned.end().await.unwrap();
    // Its end was seen, which takes a child away.
    assert!(child.try_wait().is_err(), "the shim lives");
    assert!(!owned.shim.bundle().dir().exists());
}

#[tokio::test]
async fn what_cannot_be_told_is_looked_for_again() {
    let dir = tempfile::tempdir().unwrap();
    let (shims, owned) = endpoint(dir.path());
    let mut child = recorded(&shims, &owned);
    let (record, aside) = (dir.path().join("pod/shim/shim.json"), dir.path().join("aside"));
    fs::rename(&record, &aside).unwrap();
    fs::create_dir(&record).unwrap();
    owned.recover().await;
    assert!(matches!(next(&owned), Next::Recover));
    assert!(!owned.socket().exists(), "it listens, though a shim may serve");
    fs::remove_dir(&record).unwrap();
    fs::rename(&aside, &record).unwrap();
    owned.try_recover().await.unwrap();
    assert!(matches!(next(&owned), Next::Watch(shim) if shim.identity().pid == child.id()));
    owned.end().await.unwrap();
    // Its end was seen, which takes a child away.
    assert!(child.try_wait().is_err(), "the shim lives");
}

#[tokio::test]
async fn an_idle_endpoint_rests_until_somebody_wants_something() {
    let dir = tempfile::tempdir().unwrap();
    let (_shims, owned) = endpoint(dir.path());
    let pod: Arc<dyn Pod> = Arc::new(NoPod);
    owned.serve(pod.clone());
    assert!(owned.now().rest.as_ref().is_some_and(|rest| rest.called.is_none()));
    owned.listen().await.unwrap();
    assert!(owned.now().rest.as_ref().is_some_and(|rest| rest.called.is_some()));
    // Held by this test and by the rest, and by no task.
    assert_eq!(Arc::strong_count(&pod), 2);
    owned.prepare();
    assert!(owned.now().rest.is_none());
    owned.end().await.unwrap();
    while Arc::strong_count(&pod) > 1 {
        tokio::task::yield_now().await;
    }
    assert!(owned.now().rest.is_none(), "an endpoint that has ended holds its pod");
}

#[tokio::test]
async fn a_call_ends_the_rest() {
    let dir = tempfile::tempdir().unwrap();
    let (_shims, owned) = endpoint(dir.path());
    owned.listen().await.unwrap();
    owned.serve(Arc::new(NoPod));
    let _called = std::os::unix::net::UnixStream::connect(owned.socket()).unwrap();
    while owned.now().rest.is_some() {
        tokio::task::yield_now().await;
    }
    owned.end().await.unwrap();
}

#[tokio::test]
async fn a_pod_that_lost_its_shim_hears_of_it_though_no_more_can_be_told() {
    let dir = tempfile::tempdir().unwrap();
    let (_shims, owned) = endpoint(dir.path());
    owned.shim.bundle().make("pod", true).unwrap();
    owned.shim.bundle().record_death("on order").unwrap();
    fs::create_dir(dir.path().join("pod/shim/shim.json")).unwrap();
    owned.recover().await;
    assert!(matches!(next(&owned), Next::Bereaved));
    assert!(matches!(next(&owned), Next::Recover));
}

/// A shim that hangs up on a caller of Shutdown, and ends a moment later.
#[tokio::test]
async fn a_shim_that_hangs_up_is_not_killed() {
    let dir = tempfile::tempdir().unwrap();
    let (shims, owned) = endpoint(dir.path());
    let socket = dir.path().join("shim.sock");
    let listener = tokio::net::UnixListener::bind(&socket).unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", "read line; sleep 0.2; exit 5"]).stdin(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    let shim = shims.launcher.open(child.id()).unwrap().unwrap();
    let told = child.stdin.take().unwrap();
    let hangs_up = tokio::spawn(async move {
        drop(listener.accept().await.unwrap());
        drop(told);
    });
    owned.shim.end_shim(&shim, Some(&socket)).await.unwrap();
    assert_eq!(shim.exited().await.status, 5);
    hangs_up.await.unwrap();
    // Its end was seen, which takes a child away.
    assert!(child.try_wait().is_err());
}

/// A pod whose namespaces cannot be opened at first.
#[derive(Default)]
struct Unseen(std::sync::atomic::AtomicU32);

impl Pod for Unseen {
    fn namespaces(&self) -> Result<Vec<Namespace>, Step> {
        match self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed) {
            0 | 1 => Err(Step::new("open namespace", io::Error::from_raw_os_error(libc::EMFILE))),
            _ => Ok(Vec::new()),
        }
    }

    fn lives(&self) -> bool {
        true
    }

    fn bereaved(&self) {}
}

#[tokio::test(start_paused = true)]
async fn what_a_shim_has_left_is_looked_for_again() {
    let dir = tempfile::tempdir().unwrap();
    let (_shims, owned) = endpoint(dir.path());
    let pod = Arc::new(Unseen::default());
    let exit = Exit { status: 0, at: std::time::SystemTime::now() };
    owned.after(exit, &(pod.clone() as Arc<dyn Pod>)).await;
    assert_eq!(pod.0.load(std::sync::atomic::Ordering::Relaxed), 3);
}
