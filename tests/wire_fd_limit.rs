//! A daemon without file descriptors waits for some, without spinning, and then works. A process of
//! its own: the limit is the process's.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::resource::{Resource, UsageWho, getrusage, setrlimit};
use pause_sandboxer::controller::SandboxService;
use pause_sandboxer::podsandbox::{
    CreateRequest, Error, Exit, Metric, Platform, SandboxInfo, SandboxSummary, StartResponse,
    StatusReport,
};
use pause_sandboxer::protos::controller::ControllerPlatformRequest;
use pause_sandboxer::protos::controller_ttrpc::ControllerClient;
use pause_sandboxer::wire;
use tokio::sync::watch;
use ttrpc::r#async::Client;

/// Knows the platform and nothing else.
struct Node;

fn unknown<T>(id: &str) -> Result<T, Error> {
    Err(Error::NotFound { id: id.to_owned() })
}

impl SandboxService for Node {
    async fn create(&self, request: CreateRequest) -> Result<(), Error> {
        unknown(&request.id)
    }
    async fn start(&self, id: &str) -> Result<StartResponse, Error> {
        unknown(id)
    }
    async fn platform(&self, _: &str) -> Result<Platform, Error> {
        Ok(Platform { os: "linux", architecture: "amd64", variant: "" })
    }
    async fn stop(&self, id: &str) -> Result<(), Error> {
        unknown(id)
    }
    fn wait(&self, id: &str) -> impl Future<Output = Result<Exit, Error>> + Send + use<> {
        std::future::ready(unknown(id))
    }
    async fn status(&self, id: &str, _: bool) -> Result<StatusReport, Error> {
        unknown(id)
    }
    async fn shutdown(&self, id: &str) -> Result<(), Error> {
        unknown(id)
    }
    async fn metrics(&self, id: &str) -> Result<Metric, Error> {
        unknown(id)
    }
    async fn update(&self, id: &str, _: SandboxInfo, _: Vec<String>) -> Result<(), Error> {
        unknown(id)
    }
    async fn list(&self, _: &str, _: usize, _: bool) -> Result<(Vec<SandboxSummary>, bool), Error> {
        Ok((Vec::new(), false))
    }
    async fn inspect(&self, id: &str) -> Result<serde_json::Value, Error> {
        unknown(id)
    }
}

/// CPU time of this process.
fn cpu() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_SELF).unwrap();
    let part = |time: nix::sys::time::TimeVal| {
        Duration::new(time.tv_sec() as u64, time.tv_usec() as u32 * 1000)
    };
    part(usage.user_time()) + part(usage.system_time())
}

async fn connect(socket: &Path) -> Client {
    Client::connect(&format!("unix://{}", socket.display())).await.unwrap()
}

async fn ask(client: Client) {
    let context = ttrpc::context::with_duration(Duration::from_secs(20));
    let answer = ControllerClient::new(client)
        .platform(context, &ControllerPlatformRequest::default())
        .await
        .unwrap();
    assert_eq!(answer.platform.os, "linux");
}

/// Promise: caller_harms_only_itself.
#[tokio::test]
async fn without_descriptors_the_server_waits_and_resumes() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("a.sock.ttrpc");
    let (grpc, ttrpc) =
        (wire::bind(&dir.path().join("a.sock")).unwrap(), wire::bind(&socket).unwrap());
    let (stop, stopped) = watch::channel(false);
    let running = tokio::spawn(wire::Server::new(Arc::new(Node), grpc, ttrpc).run(stopped));
    // Kept, so that its end does not free a descriptor in the middle.
    let first = connect(&socket).await;
    ask(first.clone()).await;

    setrlimit(Resource::RLIMIT_NOFILE, 128, 128).unwrap();
    let mut hoard = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        hoard.push(file);
    }
    // One descriptor for the caller; its connection waits in the backlog, and the listener stays
    // readable.
    hoard.pop();
    let client = connect(&socket).await;
    let before = cpu();
    let begun = std::time::Instant::now();
    let asked = tokio::spawn(ask(client));
    tokio::time::sleep(Duration::from_secs(1)).await;
    let (used, passed) = (cpu() - before, begun.elapsed());
    assert!(!asked.is_finished(), "nothing kept the server from accepting");
    assert!(used < passed / 5, "{used:?} of CPU time in {passed:?}");

    drop(hoard);
    asked.await.unwrap();
    ask(first).await;
    stop.send_replace(true);
    running.await.unwrap().unwrap();
}
