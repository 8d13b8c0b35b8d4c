//! What an event has done to one handler's pods: a cell of the table.

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::Result;
use kit::grpc::{NOT_FOUND, Status};
use kit::{Kind, Left, Pod};

/// How long a removal is tried again, as kubelet does, before it counts as failed.
pub(crate) const REMOVAL: Duration = Duration::from_secs(90);

/// The facts of one event, and those of them that are a loss.
#[derive(Debug, Default)]
pub(crate) struct Cell {
    facts: Vec<String>,
    losses: Vec<String>,
    left: Left,
}

impl Cell {
    /// Adds a fact.
    pub(crate) fn fact(&mut self, text: impl Into<String>) {
        self.facts.push(text.into());
    }

    /// Adds a fact that an operator has to deal with.
    pub(crate) fn loss(&mut self, text: impl Into<String>) {
        self.losses.push(text.into());
    }

    /// Adds a fact that is a loss unless `good`.
    pub(crate) fn check(&mut self, good: bool, text: impl Into<String>) {
        if good { self.fact(text) } else { self.loss(text) }
    }

    /// Adds what is left after the event.
    pub(crate) fn leave(&mut self, left: Left) {
        self.left = left;
    }

    /// Each leftover.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.left.lines()
    }

    /// Whether nothing is lost and nothing is left but things of these kinds.
    pub(crate) fn is_clean_but_for(&self, excused: &[Kind]) -> bool {
        self.losses.is_empty() && self.left.is_empty_but_for(excused)
    }

    /// Stops and removes a pod as kubelet does: once more after each failure, for [`REMOVAL`].
    /// Answers whether it is removed.
    pub(crate) async fn remove(&mut self, pod: &Pod) -> Result<bool> {
        self.remove_within(pod, REMOVAL).await
    }

    /// The same for another time.
    pub(crate) async fn remove_within(&mut self, pod: &Pod, limit: Duration) -> Result<bool> {
        let cri = pod.node().cri();
        let done = self.call("stop", limit, async || cri.stop_pod_sandbox(pod.id()).await).await
            && self.call("remove", limit, async || cri.remove_pod_sandbox(pod.id()).await).await;
        if done {
            // What stays of the pod's cgroup is among the leftovers.
            let _ = pod.clear().await;
        }
        Ok(done)
    }

    async fn call(
        &mut self,
        name: &str,
        limit: Duration,
        mut call: impl AsyncFnMut() -> Result<(), Status>,
    ) -> bool {
        let begun = Instant::now();
        for attempt in 1.. {
            match call().await {
                Err(status) if status.code != NOT_FOUND => {
                    if begun.elapsed() >= limit {
                        let seconds = begun.elapsed().as_secs();
                        self.loss(format!("{name} fails for {seconds} s"));
                        eprintln!("compare: {name} fails: {status}");
                        return false;
                    }
                    tokio::time::sleep(Duration::from_millis(500)).await;
                }
                _ => {
                    let again = match attempt {
                        1 => String::new(),
                        _ => format!(" with attempt {attempt}"),
                    };
                    self.fact(format!("{name} {}{again}", seconds(begun.elapsed())));
                    return true;
                }
            }
        }
        false
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bold = |text: &str| format!("**{text}**");
        let mut parts: Vec<String> = self.losses.iter().map(|text| bold(text)).collect();
        parts.extend(self.facts.iter().cloned());
        let left = self.left.to_string();
        parts.push(if self.left.is_empty() { left } else { bold(&left) });
        f.write_str(&parts.join("; "))
    }
}

/// A time in words.
pub(crate) fn seconds(time: Duration) -> String {
    if time < Duration::from_millis(9950) {
        format!("{:.1} s", time.as_secs_f32())
    } else {
        format!("{:.0} s", time.as_secs_f32())
    }
}
