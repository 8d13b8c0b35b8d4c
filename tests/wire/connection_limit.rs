//! More connections than are served.

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use pause_sandboxer::protos::controller as c;
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::client::Client;
use crate::{Node, SOON, begin_waits, status, until_waiting};

/// The connection with a pending Wait stays, and later callers are served.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connections_make_room() {
    const CONNECTIONS: usize = 2000;
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
    let node = Node::start();
    let clients = node.clients().await;
    let mut waits: Vec<_> = clients.iter().map(|client| begin_waits(client, 1)).collect();
    until_waiting(&node.sandboxes, 2).await;
    let mut connections = Vec::new();
    for socket in [node.grpc_socket(), node.ttrpc_socket()] {
        for _ in 0..CONNECTIONS {
            connections.push(UnixStream::connect(&socket).await.unwrap());
        }
    }
    // Others make one call and then nothing.
    let mut idle = Vec::new();
    for _ in 0..300 {
        let client = timeout(SOON, Client::grpc(&node.grpc_socket())).await.unwrap();
        timeout(SOON, client.call::<c::ControllerStatusResponse>("Status", status("a", false)))
            .await
            .unwrap()
            .unwrap();
        idle.push(client);
    }
    for client in timeout(SOON, node.clients()).await.unwrap().iter().chain(&clients) {
        let call = client.call::<c::ControllerStatusResponse>("Status", status("a", false));
        timeout(SOON, call).await.unwrap().unwrap();
    }
    assert!(waits.iter_mut().all(|waits| waits.try_join_next().is_none()), "a Wait has ended");
    node.sandboxes.end.notify_waiters();
    for waits in &mut waits {
        assert_eq!(waits.join_next().await.unwrap().unwrap().unwrap().exit_status, 137);
    }
    drop((connections, idle));
}
