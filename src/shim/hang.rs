//! Finds pods' own shims that hang, and kills them: the pod of such a shim cannot be stopped, and
//! containerd's lists of stats, which ask every shim, hang for the whole node.
//!
//! A shim hangs if a call of this daemon has no answer and the shim's main thread has been stopped
//! (`T`), or has slept (`S`), at every look and without any work in between. It is killed at the
//! fourth look, 30 s after the first. A shim that works answers such a call, or has at least run.
//! So no shim is killed because it is slow, or because the machine is:
//!
//! - Without CPU time, on a busy node or by a limit, it is runnable (`R`), and so is one that
//!   computes.
//! - In `D` it waits for the kernel, such as for a disk, and no time bounds that wait. A
//!   runtime whose file system never answers its execution holds the shim there.
//! - A debugger that holds it is its tracer.
//! - In a frozen cgroup it cannot run; the kernel shows that as `D` or `S`.
//! - Looks are counted, and not time: while the machine is suspended the daemon does not look.
//!
//! A shim at rest waits for events in epoll. It is not called, and so it does not wake up.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval};

use super::Endpoint;
use super::containers::cgroup;
use crate::cgroup::mounts::ROOT;
use crate::error::StepError;
use crate::pool::{self, Class};

/// Time between two looks at all shims: two files of `/proc` and 20 µs of a CPU for each.
const INTERVAL: Duration = Duration::from_secs(10);

/// How many looks after the first find a shim that is killed as it was then.
const LOOKS: u32 = 3;

/// Timeout of the call: longer than all looks.
const CALL_TIMEOUT: Duration = Duration::from_secs(60);

/// System calls in which the main thread of a shim at rest waits.
#[cfg(target_arch = "x86_64")]
const WAITS: [i64; 3] = [libc::SYS_epoll_wait, libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2];
#[cfg(not(target_arch = "x86_64"))]
const WAITS: [i64; 2] = [libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2];

/// The main thread of a process that does nothing, although a call may wait for it.
#[derive(Debug, PartialEq, Eq)]
struct Stillness {
    pid: u32,
    /// A signal such as SIGSTOP has stopped it; otherwise it sleeps.
    is_stopped: bool,
    /// How often it has gone to sleep in its life.
    sleeps: u64,
}

impl Stillness {
    /// Looks at a process. `None`: it works, waits for events, is held by another program or the
    /// kernel, or has exited.
    fn of_process(pid: u32) -> Option<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.into());
        let is_stopped = match field("State:").map(str::trim_start)?.chars().next()? {
            'T' => true,
            'S' => false,
            _ => return None,
        };
        let is_traced = field("TracerPid:")?.trim() != "0";
        if is_traced || !is_stopped && waits_for_events(pid) {
            return None;
        }
        let cgroups = cgroup::of_process(&pid.to_string()).ok().flatten()?;
        if cgroup::is_frozen(Path::new(ROOT), &cgroups) {
            return None;
        }
        let sleeps = field("voluntary_ctxt_switches:")?.trim().parse().ok()?;
        Some(Self { pid, is_stopped, sleeps })
    }
}

/// Whether the main thread waits for events. Where the kernel does not say, it is called instead.
fn waits_for_events(pid: u32) -> bool {
    let call = fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap_or_default();
    let number = call.split_whitespace().next().and_then(|number| number.parse().ok());
    number.is_some_and(|number: i64| WAITS.contains(&number))
}

/// A shim that was found still, and the call that it has not answered yet.
#[derive(Debug)]
struct Suspect {
    stillness: Stillness,
    call: JoinHandle<Result<(), StepError>>,
    /// Further looks that have found the same.
    looks: u32,
}

/// The shims that may hang, by the ids of their sandboxes.
#[derive(Debug, Default)]
struct Suspects(HashMap<String, Suspect>);

impl Suspects {
    /// Looks at the shims of these endpoints, and kills those that hang.
    async fn look(&mut self, endpoints: Vec<Arc<Endpoint>>) {
        let find = move || {
            let still = |endpoint: Arc<Endpoint>| {
                let process = endpoint.own_process()?;
                let stillness = Stillness::of_process(process.identity().pid)?;
                Some((endpoint, process, stillness))
            };
            endpoints.into_iter().filter_map(still).collect::<Vec<_>>()
        };
        // The next look is a first one, if this one fails.
        let mut before = std::mem::take(&mut self.0);
        for (endpoint, process, stillness) in pool::run(Class::Shim, find).await.unwrap_or_default()
        {
            let id = endpoint.id().to_owned();
            let Some(mut suspect) =
                before.remove(&id).filter(|suspect| suspect.stillness == stillness)
            else {
                let call = tokio::spawn(async move { endpoint.call(CALL_TIMEOUT).await });
                self.0.insert(id, Suspect { stillness, call, looks: 0 });
                continue;
            };
            suspect.looks += 1;
            if suspect.looks < LOOKS {
                self.0.insert(id, suspect);
                continue;
            }
            if suspect.call.is_finished() {
                let is_answered = matches!(suspect.call.await, Ok(Ok(())));
                // A call that the daemon could not make says nothing about a shim that sleeps.
                if is_answered || !stillness.is_stopped {
                    continue;
                }
            }
            let state = if stillness.is_stopped { "stopped" } else { "asleep" };
            log::error!(sandbox = id.as_str(), pid = stillness.pid, state = state;
                "killing shim that hangs: it did not answer a call for {} s",
                (INTERVAL * LOOKS).as_secs());
            drop(tokio::spawn(endpoint.end_hung(process)));
        }
    }
}

/// Ends the shims of these endpoints that hang, forever.
pub async fn end_hung_shims(endpoints: impl Fn() -> Vec<Arc<Endpoint>>) {
    let mut suspects = Suspects::default();
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        suspects.look(endpoints()).await;
    }
}

#[cfg(test)]
mod tests;
