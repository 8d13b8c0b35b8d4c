//! Shims that end, or are asked to, and what follows from it.

use super::*;

/// A shim that hangs up on a caller of Shutdown, and ends a moment later.
#[tokio::test]
async fn a_shim_that_hangs_up_is_not_killed() {
    let dir = tempfile::tempdir().unwrap();
    let (shims, endpoint) = make_endpoint(dir.path());
    let socket = dir.path().join("shim.sock");
    let listener = tokio::net::UnixListener::bind(&socket).unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", "read line; exit 5"]).stdin(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    let shim = shims.launcher.open(child.id()).unwrap().unwrap();
    let input = child.stdin.take().unwrap();
    let hangs_up = tokio::spawn(async move {
        drop(listener.accept().await.unwrap());
        drop(input);
    });
    endpoint.shim.end_process(&*shim, &socket).await.unwrap();
    assert_eq!(shim.exited().await.status, 5);
    hangs_up.await.unwrap();
    // Its end was seen, which takes a child away.
    assert!(child.try_wait().is_err());
}

/// The shim has answered, and waits until containerd has received its events. A containerd that
/// starts calls it first.
#[tokio::test]
async fn callers_do_not_wait_for_the_exit_of_an_empty_shim() {
    let dir = tempfile::tempdir().unwrap();
    let (shims, endpoint) = make_endpoint(dir.path());
    let mut command = Command::new("sh");
    let mut child = command.args(["-c", "read line"]).stdin(Stdio::piped()).spawn().unwrap();
    record(&shims, &endpoint, &child);
    endpoint.try_recover().await.unwrap();
    endpoint.listen().await.unwrap();
    let listener = endpoint.state().listener.clone().unwrap().try_clone().unwrap();
    let listener = tokio::net::UnixListener::from_std(UnixListener::from(listener)).unwrap();
    let dismissal = tokio::spawn(endpoint.clone().shut_down_empty());
    drop(listener.accept().await.unwrap());
    drop(listener);
    let mut caller = tokio::net::UnixStream::connect(endpoint.socket()).await.unwrap();
    let read = tokio::io::AsyncReadExt::read_u8(&mut caller);
    let end = timeout(Duration::from_secs(3), read).await.expect("the caller waits");
    assert_eq!(end.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
    assert!(!dismissal.is_finished());
    drop(child.stdin.take());
    timeout(Duration::from_secs(20), dismissal).await.unwrap().unwrap();
    // Its exit was seen, which takes a child away.
    assert!(child.try_wait().is_err());
    endpoint.close().await.unwrap();
}

/// containerd deletes the last container of a pod that has ended when it is up again.
#[tokio::test(start_paused = true)]
async fn a_shim_with_containers_is_asked_to_exit_until_it_is_empty() {
    const DOWN: Duration = Duration::from_secs(3600);
    let dir = tempfile::tempdir().unwrap();
    let (shims, endpoint) = make_endpoint(dir.path());
    let mut command = Command::new("sh");
    let mut child = command.args(["-c", "read line"]).stdin(Stdio::piped()).spawn().unwrap();
    record(&shims, &endpoint, &child);
    endpoint.try_recover().await.unwrap();
    // Whether it is empty cannot be seen.
    let tasks = endpoint.shim.settings().tasks();
    std::fs::create_dir_all(tasks.parent().unwrap()).unwrap();
    std::fs::write(&tasks, "").unwrap();
    endpoint.dismiss();
    endpoint.dismiss();
    tokio::time::sleep(DOWN).await;
    let dismissal = endpoint.state().dismissal.clone().unwrap();
    assert!(!dismissal.is_finished(), "it has given up");
    std::fs::remove_file(&tasks).unwrap();
    drop(child.stdin.take());
    let begun = std::time::Instant::now();
    while !dismissal.is_finished() {
        assert!(begun.elapsed() < Duration::from_secs(20), "it does not end");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(child.try_wait().is_err());
}

/// A pod whose namespaces cannot be opened at first.
#[derive(Default)]
struct PodWithFailingNamespaces(std::sync::atomic::AtomicU32);

impl Pod for PodWithFailingNamespaces {
    fn namespaces(&self) -> Result<Vec<NamespaceHandle>, StepError> {
        match self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed) {
            // More often than the search has different delays.
            0..10 => {
                Err(StepError::new("open namespace", io::Error::from_raw_os_error(libc::EMFILE)))
            }
            _ => Ok(Vec::new()),
        }
    }

    fn cgroup_parent(&self) -> &str {
        ""
    }

    fn lives(&self) -> bool {
        true
    }

    fn fail(&self) {}
}

#[tokio::test(start_paused = true)]
async fn a_search_for_remaining_containers_is_retried() {
    let dir = tempfile::tempdir().unwrap();
    let (_shims, endpoint) = make_endpoint(dir.path());
    let pod = Arc::new(PodWithFailingNamespaces::default());
    let exit = Exit { status: 0, at: std::time::SystemTime::now() };
    endpoint.handle_exit(exit, &(pod.clone() as Arc<dyn Pod>)).await;
    assert_eq!(pod.0.load(std::sync::atomic::Ordering::Relaxed), 11);
}

/// Sees whether the shim is on record while its containers are looked for.
struct PodThatLooksAtRecord {
    record: std::path::PathBuf,
    seen: std::sync::atomic::AtomicBool,
}

impl Pod for PodThatLooksAtRecord {
    fn namespaces(&self) -> Result<Vec<NamespaceHandle>, StepError> {
        self.seen.store(self.record.exists(), std::sync::atomic::Ordering::Relaxed);
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

/// A daemon that is killed meanwhile leaves the rest to the next, which knows the shim by its
/// record.
#[tokio::test]
async fn a_shim_is_on_record_until_its_exit_is_handled() {
    let dir = tempfile::tempdir().unwrap();
    let (shims, endpoint) = make_endpoint(dir.path());
    let mut child = recorded(&shims, &endpoint);
    endpoint.try_recover().await.unwrap();
    let record = endpoint.shim.bundle().dir().join("shim.json");
    assert!(record.exists());
    let pod = Arc::new(PodThatLooksAtRecord { record: record.clone(), seen: Default::default() });
    endpoint.serve(pod.clone());
    child.kill().unwrap();
    let gone = async {
        while record.exists() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(20), gone).await.unwrap();
    assert!(pod.seen.load(std::sync::atomic::Ordering::Relaxed), "the record is removed first");
    assert!(child.try_wait().is_err(), "its end was not seen");
    endpoint.close().await.unwrap();
}
