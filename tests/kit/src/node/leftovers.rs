//! Leftovers of pods on the machine.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::Node;
use crate::config::NAMESPACE;
use crate::cri::api;
use crate::patient;
use crate::records;
use crate::snapshot::{Snapshot, Thing};
use crate::teardown;

impl Node {
    /// The name of its snapshotter.
    ///
    /// # Errors
    /// The node has not started.
    pub fn snapshotter(&self) -> Result<&'static str> {
        self.snapshotter_name.get().copied().context("the node has not started")
    }

    /// Everything of this node that is on the machine now.
    ///
    /// # Errors
    /// The machine does not tell.
    pub fn snapshot(&self) -> Result<Snapshot> {
        Snapshot::take(&self.layout, &self.daemons())
    }

    /// containerd's own records of pods and their containers.
    ///
    /// # Errors
    /// containerd does not answer.
    pub async fn records(&self) -> Result<Vec<Thing>> {
        records::all(&self.layout, self.snapshotter()?).await.context("list containerd's records")
    }

    /// Waits until nothing is on the machine that was not there `before`; some things end a little
    /// after SIGTERM.
    ///
    /// # Errors
    /// Names all that is left after a few seconds.
    pub async fn settles_to(&self, before: &Snapshot) -> Result<()> {
        /// More than a shim takes to end on a busy machine.
        const SETTLE: Duration = Duration::from_secs(10);
        let left = self.left_since(before, SETTLE).await?;
        let lines: Vec<String> = left.iter().map(ToString::to_string).collect();
        ensure!(left.is_empty(), "left behind:\n  {}", lines.join("\n  "));
        Ok(())
    }

    /// Objects on the machine that were not there `before`, pods that CRI lists and records in
    /// containerd's own store that do not go within `limit`, made [`patient`].
    ///
    /// # Errors
    /// The machine or containerd does not tell.
    pub async fn left_since(&self, before: &Snapshot, limit: Duration) -> Result<Vec<Thing>> {
        /// The longest time between two looks.
        const SELDOM: Duration = Duration::from_millis(160);
        let (begun, limit) = (Instant::now(), patient(limit));
        let mut pace = patient(Duration::from_millis(20));
        loop {
            let mut left = self.snapshot()?.beyond(before);
            for pod in self.cri.list_pod_sandbox(api::PodSandboxFilter::new()).await? {
                left.push(Thing::Pod(pod.id, format!("{:?}", pod.state)));
            }
            left.extend(self.records().await?);
            if left.is_empty() || begun.elapsed() > limit {
                return Ok(left);
            }
            // A look reads the whole machine: what stays is not to keep it busy.
            tokio::time::sleep(pace).await;
            pace = (pace * 2).min(patient(SELDOM));
        }
    }

    /// Removes what was left: pods and records by containerd, everything else by force.
    ///
    /// # Errors
    /// Names what could not be removed. A record that cannot be removed is still seen afterwards.
    pub async fn remove_left(&self, left: &[Thing]) -> Result<()> {
        for thing in left {
            match thing {
                Thing::Pod(id, _) => {
                    let stopped = self.cri.stop_pod_sandbox(id).await;
                    stopped
                        .and(self.cri.remove_pod_sandbox(id).await)
                        .with_context(|| thing.to_string())?;
                }
                Thing::Record(id, kind) => self.remove_record(id, kind)?,
                _ => {}
            }
        }
        teardown::remove(left)
    }

    /// Removes a record, which may have gone with another one.
    fn remove_record(&self, id: &str, kind: &str) -> Result<()> {
        let words: &[&str] = match kind {
            "task" => &["tasks", "delete", "--force"],
            "container" => &["containers", "delete"],
            "sandbox" => &["sandboxes", "remove", "--force"],
            "lease" => &["leases", "delete"],
            _ => &["snapshots", "--snapshotter", self.snapshotter()?, "remove"],
        };
        let mut ctr = Command::new(self.parts().program("ctr"));
        ctr.arg("--address").arg(self.layout.containerd_socket()).args(["-n", NAMESPACE]);
        ctr.args(words).arg(id).output().context("run ctr").map(drop)
    }
}
