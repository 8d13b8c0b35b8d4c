//! systemd as the manager of cgroups: transient scopes, requested over D-Bus
//! (org.freedesktop.systemd1(5)).
//!
//! One connection to the system bus, made when a pod first needs it and made anew when it is lost.
//! It has a thread of its own, as drivers are called from threads that may wait and a node without
//! slices shall not pay for it. Every answer is waited for within bounds.

use std::future::Future;
use std::io;
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use parking_lot::Mutex;
use tokio::runtime::{Builder, Handle, Runtime};
use zbus::message::Type;
use zbus::{Connection, DynamicType, MatchRule, MessageStream, OwnedObjectPath, Variant};

use super::slice::Scope;
use crate::error::StepError;

const SYSTEMD: &str = "org.freedesktop.systemd1";
const OBJECT: &str = "/org/freedesktop/systemd1";
const MANAGER: &str = "org.freedesktop.systemd1.Manager";

/// How long a unit may take to start, connecting to the bus included: as long as runc gives the
/// scopes of containers. systemd answers late while it reloads or the node boots.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a removal waits for the scope to stop before it removes the cgroup itself.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a unit of the same name may still be known after its end, and how often that is looked
/// at.
const FORGOTTEN: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(20);

/// Fails rather than to replace a job that is in progress, such as the end of the slice.
const MODE_FAIL: &str = "fail";
/// Replaces a job that is in progress.
const MODE_REPLACE: &str = "replace";

/// The error of systemd for a unit that it does not know.
const NO_SUCH_UNIT: &str = "org.freedesktop.systemd1.NoSuchUnit";
/// The error of systemd for a unit that exists already.
const UNIT_EXISTS: &str = "org.freedesktop.systemd1.UnitExists";

/// The node's systemd.
#[derive(Debug, Default)]
pub(super) struct Systemd {
    runtime: Mutex<Option<Runtime>>,
    connection: tokio::sync::Mutex<Option<Connection>>,
}

/// Why systemd did not do what it was asked for.
#[derive(Debug)]
enum Fault {
    /// The bus, or systemd's refusal.
    Bus(zbus::Error),
    /// The result of the job (`failed`, `timeout`, `dependency`…).
    Job(String),
    /// The bus went away before the job was done.
    Lost,
}

impl From<zbus::Error> for Fault {
    fn from(e: zbus::Error) -> Self {
        Self::Bus(e)
    }
}

impl Fault {
    /// Whether it is systemd's error of this name.
    fn is(&self, name: &str) -> bool {
        matches!(self, Self::Bus(zbus::Error::MethodError(error, ..)) if error.as_str() == name)
    }
}

impl From<Fault> for io::Error {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Bus(zbus::Error::InputOutput(e)) => match e.raw_os_error() {
                Some(errno) => Self::from_raw_os_error(errno),
                None => Self::new(e.kind(), e.to_string()),
            },
            Fault::Bus(e) => Self::other(format!("D-Bus: {e}")),
            Fault::Job(result) => Self::other(format!("systemd's job ended with {result:?}")),
            Fault::Lost => {
                Self::new(io::ErrorKind::ConnectionReset, "the connection to D-Bus was lost")
            }
        }
    }
}

impl Systemd {
    /// Makes a scope around process `pid` and waits until it is there. The process may already be
    /// in the scope's cgroup. `weight` is the property, and its value, that gives the scope its
    /// share of CPU time.
    ///
    /// # Errors
    /// The bus cannot be reached, or what systemd answers.
    pub(super) fn start_scope(
        &self,
        scope: &Scope,
        pid: u32,
        weight: (&str, u64),
    ) -> Result<(), StepError> {
        let description = format!("pause process of pod sandbox {}", scope.unit);
        // runc sets the same properties for the scopes of a pod's containers.
        let properties: Vec<(&str, Variant<'_>)> = vec![
            ("Description", description.as_str().into()),
            ("Slice", scope.slice.as_str().into()),
            ("PIDs", vec![pid].into()),
            ("Delegate", true.into()),
            ("DefaultDependencies", false.into()),
            ("CPUAccounting", true.into()),
            (weight.0, weight.1.into()),
            ("MemoryAccounting", true.into()),
            ("IOAccounting", true.into()),
            ("TasksAccounting", true.into()),
            // systemd forgets a failed scope like one that has ended.
            ("CollectMode", "inactive-or-failed".into()),
        ];
        let unit = scope.unit.as_str();
        let none: Vec<(&str, Vec<(&str, Variant<'_>)>)> = Vec::new();
        let body = (unit, MODE_FAIL, properties, none);
        self.call_manager("start scope", unit, START_TIMEOUT, async {
            let connection = self.connection().await?;
            let begun = Instant::now();
            loop {
                match job(&connection, unit, "StartTransientUnit", &body).await {
                    // An earlier one that has ended, but is not yet forgotten.
                    Err(e) if e.is(UNIT_EXISTS) && begun.elapsed() < FORGOTTEN => {
                        let _ = call(&connection, "ResetFailedUnit", &(unit,)).await;
                        tokio::time::sleep(LOOK).await;
                    }
                    done => return done,
                }
            }
        })
    }

    /// Starts a slice, and with it those that it is within.
    ///
    /// # Errors
    /// The bus cannot be reached, or what systemd answers.
    pub(super) fn start_slice(&self, slice: &str) -> Result<(), StepError> {
        self.call_manager("start slice", slice, START_TIMEOUT, async {
            job(&self.connection().await?, slice, "StartUnit", &(slice, MODE_FAIL)).await
        })
    }

    /// Stops a scope and waits until it has ended. A missing scope is success.
    ///
    /// # Errors
    /// The bus cannot be reached, or what systemd answers.
    pub(super) fn stop(&self, unit: &str) -> Result<(), StepError> {
        self.call_manager("stop scope", unit, STOP_TIMEOUT, async {
            match job(&self.connection().await?, unit, "StopUnit", &(unit, MODE_REPLACE)).await {
                Err(e) if e.is(NO_SUCH_UNIT) => Ok(()),
                done => done,
            }
        })
    }

    /// Runs one exchange within bounds.
    #[expect(
        clippy::disallowed_methods,
        reason = "its runtime is its own, and needs none of the threads that wait here"
    )]
    fn call_manager(
        &self,
        what: &'static str,
        unit: &str,
        timeout: Duration,
        exchange: impl Future<Output = Result<(), Fault>>,
    ) -> Result<(), StepError> {
        let late = || {
            let reason = format!("not done within {} s", timeout.as_secs());
            io::Error::new(io::ErrorKind::TimedOut, reason)
        };
        let done = self.handle().and_then(|handle| {
            let bounded = async { tokio::time::timeout(timeout, exchange).await };
            handle.block_on(bounded).map_err(|_| late())?.map_err(io::Error::from)
        });
        done.map_err(|e| StepError::at(what, unit, e))
    }

    fn handle(&self) -> io::Result<Handle> {
        let mut runtime = self.runtime.lock();
        if let Some(runtime) = &*runtime {
            return Ok(runtime.handle().clone());
        }
        let made = Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("systemd")
            .enable_all()
            .build()?;
        Ok(runtime.insert(made).handle().clone())
    }

    async fn connection(&self) -> Result<Connection, Fault> {
        let mut kept = self.connection.lock().await;
        if let Some(connection) = &*kept
            && !connection.is_closed()
        {
            return Ok(connection.clone());
        }
        let connection = Connection::system().await?;
        // Without it systemd sends no job results.
        call(&connection, "Subscribe", &()).await?;
        Ok(kept.insert(connection).clone())
    }
}

impl Drop for Systemd {
    fn drop(&mut self) {
        // Waiting for its thread is not allowed on a thread that runs tasks, where a driver may be
        // dropped.
        if let Some(runtime) = self.runtime.get_mut().take() {
            runtime.shutdown_background();
        }
    }
}

async fn call(
    connection: &Connection,
    method: &str,
    body: &(impl serde::Serialize + DynamicType),
) -> Result<zbus::Message, Fault> {
    Ok(connection.call_method(Some(SYSTEMD), OBJECT, Some(MANAGER), method, body).await?)
}

/// Calls a method that queues a job for `unit`, and waits for the end of that job.
async fn job(
    connection: &Connection,
    unit: &str,
    method: &str,
    body: &(impl serde::Serialize + DynamicType),
) -> Result<(), Fault> {
    // Listened for before it can happen.
    let rule = MatchRule::builder()
        .msg_type(Type::Signal)
        .sender(SYSTEMD)
        .path(OBJECT)
        .interface(MANAGER)
        .member("JobRemoved")
        .arg(2, unit)
        .build()?;
    let mut removed = MessageStream::for_match_rule(rule, connection, None).await?;
    let answer = call(connection, method, body).await?;
    let queued: OwnedObjectPath = answer.body().deserialize()?;
    while let Some(signal) = removed.next().await {
        if let Some(result) = end_of(&queued, &answer, &signal?)? {
            return if result == "done" { Ok(()) } else { Err(Fault::Job(result)) };
        }
    }
    Err(Fault::Lost)
}

/// The result of a job that systemd has queued, if a signal reports its end. Any connection of the
/// bus can send such a signal to ours, and the match rule cannot tell whose name its `sender` is;
/// but the bus itself writes down who sent a message.
fn end_of(
    queued: &OwnedObjectPath,
    answer: &zbus::Message,
    signal: &zbus::Message,
) -> Result<Option<String>, Fault> {
    if signal.header().sender() != answer.header().sender() {
        return Ok(None);
    }
    let (_, job, _, result): (u32, OwnedObjectPath, String, String) =
        signal.body().deserialize()?;
    Ok((job == *queued).then_some(result))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_step_and_unit() {
        let systemd = Systemd::default();
        let unit = "x.scope";
        let fail = |fault: Fault| {
            let called =
                systemd.call_manager("stop scope", unit, STOP_TIMEOUT, async { Err(fault) });
            called.unwrap_err().to_string()
        };
        assert_eq!(
            fail(Fault::Job("dependency".to_owned())),
            "stop scope x.scope: systemd's job ended with \"dependency\""
        );
        assert_eq!(fail(Fault::Lost), "stop scope x.scope: the connection to D-Bus was lost");
        let refused =
            zbus::Error::InputOutput(io::Error::from_raw_os_error(libc::ECONNREFUSED).into());
        assert_eq!(fail(refused.into()), "stop scope x.scope: Connection refused (os error 111)");
    }

    /// Promise: foreign_process_survives.
    #[test]
    fn a_forged_end_of_a_job_is_passed_over() {
        let path =
            |number: u32| OwnedObjectPath::try_from(format!("{OBJECT}/job/{number}")).unwrap();
        let asked = zbus::Message::method_call(OBJECT, "StopUnit").build(&()).unwrap();
        let answer =
            zbus::Message::method_return(&asked.header()).sender(":1.1").build(&path(7)).unwrap();
        let result_of = |sender: &'static str, number: u32| {
            let signal = zbus::Message::signal(OBJECT, MANAGER, "JobRemoved").sender(sender);
            let signal = signal.build(&(number, path(number), "x.scope", "failed")).unwrap();
            end_of(&path(7), &answer, &signal).map_err(io::Error::from).unwrap()
        };
        assert_eq!(result_of(":1.66", 7), None, "another connection's");
        assert_eq!(result_of(":1.1", 8), None, "another job's");
        assert_eq!(result_of(":1.1", 7).as_deref(), Some("failed"));
        let rubbish = zbus::Message::signal(OBJECT, MANAGER, "JobRemoved")
            .sender(":1.66")
            .build(&("x",))
            .unwrap();
        assert!(
            end_of(&path(7), &answer, &rubbish).is_ok_and(|end| end.is_none()),
            "nor does it end the call"
        );
    }

    #[tokio::test]
    async fn may_be_dropped_on_a_thread_that_runs_tasks() {
        let systemd = Systemd::default();
        systemd.handle().unwrap();
        drop(systemd);
    }
}
