//! Many connections at a time.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use pause_sandboxer::protos::controller as c;
use tokio::time::timeout;

use crate::{Node, SOON, begin_waits, status, until_waiting};

/// No number of connections ends a Wait: containerd would take the end for the exit of the sandbox.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_of_many_connections_keeps_its_wait_and_the_next_is_served() {
    const CONNECTIONS: usize = 300;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    let node = Node::start();
    let mut waits = Vec::new();
    for _ in 0..CONNECTIONS {
        let clients = timeout(SOON, node.clients()).await.unwrap();
        waits.extend(clients.iter().map(|client| begin_waits(client, 1)));
    }
    until_waiting(&node.sandboxes, 2 * CONNECTIONS).await;
    for client in timeout(SOON, node.clients()).await.unwrap() {
        let call = client.call::<c::ControllerStatusResponse>("Status", status("a", false));
        timeout(SOON, call).await.unwrap().unwrap();
    }
    assert!(waits.iter_mut().all(|waits| waits.try_join_next().is_none()), "a Wait has ended");
    node.sandboxes.end.notify_waiters();
    for waits in &mut waits {
        assert_eq!(waits.join_next().await.unwrap().unwrap().unwrap().exit_status, 137);
    }
}
