//! An endpoint without a node.

use std::path::Path;
use std::process::{Child, Command};

use super::*;
use crate::pause::held::Namespace;
use crate::shim::{Endpoint, Owner, Settings, Shims};

/// The endpoint of a sandbox below `dir`, and what all share.
fn endpoint(dir: &Path) -> (Arc<Shims>, Arc<Owned>) {
    let settings = Settings {
        containerd_address: dir.join("containerd.sock"),
        containerd_namespace: "k8s.io".to_owned(),
        containerd_state: dir.join("state"),
        state_dir: dir.to_owned(),
        sandboxes: dir.to_owned(),
        on_demand_address: String::new(),
        binaries: Default::default(),
        open_files: None,
    };
    let shims = Arc::new(Shims::new(settings).unwrap());
    let Endpoint::Owned(owned) = shims.endpoint(Owner::Sandboxer, &"pod".into(), &Arc::default()) else {
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

    fn bereaved(&self) {}
}

fn next(owned: &Arc<Owned>) -> Next {
    let pod: Arc<dyn Pod> = Arc::new(NoPod);
    owned.next(&pod)
}

/// A process that is on record as the shim.
fn recorded(shims: &Shims, owned: &Owned) -> Child {
    let child = Command::new("sleep").arg("1000").spawn().unwrap();
    let identity = shims.launcher.open(child.id()).unwrap().unwrap().identity().clone();
    owned.group.bundle().make("pod", true).unwrap();
    owned.group.bundle().record(Some(&Recorded::Running { identity })).unwrap();
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
    assert!(!owned.group.bundle().dir().exists());
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
    owned.group.bundle().make("pod", true).unwrap();
    owned.group.bundle().record_death("on order").unwrap();
    fs::create_dir(dir.path().join("pod/shim/shim.json")).unwrap();
    owned.recover().await;
    assert!(matches!(next(&owned), Next::Bereaved));
    assert!(matches!(next(&owned), Next::Recover));
}
