//! The memory and the processor time of a shim.

use std::fs;
use std::time::Duration;

use containerd_shim_protos::api::ConnectRequest;

use super::{Pod, context};

#[allow(dead_code, reason = "not every program of tests measures")]
impl Pod {
    /// The memory of the shim that it shares with no other, kB.
    pub fn memory(&self) -> u64 {
        // With its answer it has begun: before, its process is that of a shell, or has a program of
        // which nothing was executed yet and which has hardly any memory.
        self.client.connect(context(), &ConnectRequest::new()).unwrap();
        let text = fs::read_to_string(format!("/proc/{}/status", self.shim.id())).unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    /// The processor time of the shim's main thread.
    pub fn time(&self) -> Duration {
        let stat = fs::read_to_string(format!("/proc/{}/schedstat", self.shim.id())).unwrap();
        stat.split(' ').next().unwrap().parse().map(Duration::from_nanos).unwrap()
    }
}
