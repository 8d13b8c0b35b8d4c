//! Callers that wait for a shim that does not come.

use nix::sys::resource::{Resource, setrlimit};

use super::*;

/// The variable with which this program is a process of a single test.
const ALONE: &str = "KIT_ALONE";

/// A pod whose pause process has exited.
struct EndedPod;

impl Pod for EndedPod {
    fn namespaces(&self) -> Result<Vec<NamespaceHandle>, StepError> {
        Ok(Vec::new())
    }

    fn cgroup_parent(&self) -> &str {
        ""
    }

    fn lives(&self) -> bool {
        false
    }

    fn fail(&self) {}
}

fn is_disconnected(caller: &UnixStream) -> bool {
    caller.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    matches!((&*caller).read(&mut [0]), Ok(0))
}

/// The caller may be this daemon: a call that timed out stays in the queue of the socket.
#[tokio::test(flavor = "multi_thread")]
async fn no_shim_is_launched_for_a_pod_that_has_ended() {
    let dir = tempfile::tempdir().unwrap();
    let (_shims, endpoint) = make_endpoint(dir.path());
    endpoint.listen().await.unwrap();
    drop(UnixStream::connect(endpoint.socket()).unwrap());
    let caller = UnixStream::connect(endpoint.socket()).unwrap();
    endpoint.serve(Arc::new(EndedPod));
    assert!(is_disconnected(&caller));
    assert!(!endpoint.shim.had_shim(), "a shim was launched");
    endpoint.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_container_gets_the_reason_why_no_shim_came() {
    let dir = tempfile::tempdir().unwrap();
    let (_shims, endpoint) = make_endpoint_with(dir.path(), "/no/such/shim".into());
    endpoint.listen().await.unwrap();
    endpoint.serve(Arc::new(NoPod));
    endpoint.prepare().await.unwrap();
    until("the launch has failed", || endpoint.state().failure.is_some());
    for _ in 0..2 {
        let reason = endpoint.prepare().await.unwrap_err();
        assert!(reason.to_string().contains("/no/such/shim"), "{reason}");
    }
    let last = endpoint.state().failure.clone().unwrap();
    let next = tokio::spawn({
        let endpoint = endpoint.clone();
        async move { endpoint.next_launch(last).await }
    });
    tokio::task::yield_now().await;
    endpoint.launched(None);
    timeout(Duration::from_secs(10), next).await.unwrap().unwrap().unwrap();
    endpoint.prepare().await.unwrap();
    endpoint.close().await.unwrap();
}

/// The limit is that of the whole process: the test has one of its own.
#[test]
fn callers_are_disconnected_without_a_free_descriptor() {
    if std::env::var_os(ALONE).is_none() {
        let name = "shim::endpoint::tests::callers::\
                    callers_are_disconnected_without_a_free_descriptor";
        let alone = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--test-threads=1"])
            .env(ALONE, "1")
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&alone.stdout);
        assert!(alone.status.success() && output.contains("1 passed"), "{output}");
        return;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let dir = tempfile::tempdir().unwrap();
        let (_shims, endpoint) = make_endpoint(dir.path());
        endpoint.listen().await.unwrap();
        let callers = [0; 3].map(|_| UnixStream::connect(endpoint.socket()).unwrap());
        setrlimit(Resource::RLIMIT_NOFILE, 64, 64).unwrap();
        let full: Vec<fs::File> = std::iter::from_fn(|| fs::File::open("/dev/null").ok()).collect();
        timeout(Duration::from_secs(10), endpoint.disconnect_callers()).await.unwrap();
        assert!(callers.iter().all(is_disconnected));
        // The descriptor is reserved again.
        let caller = UnixStream::connect(endpoint.socket());
        assert_eq!(caller.unwrap_err().raw_os_error(), Some(libc::EMFILE));
        drop(full);
        endpoint.close().await.unwrap();
    });
}
