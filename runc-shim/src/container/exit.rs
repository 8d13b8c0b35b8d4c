//! Exits of the processes of a container, the ends of their streams, and OOM kills.

use containerd_shim_protos::events::task as task_events;

use super::Container;
use super::step::{Pending, Step};
use crate::cgroup::oom_watch::OomWatch;
use crate::exec;
use crate::exits::{Exit, KILLED};
use crate::log;
use crate::process_key::ProcessKey;
use crate::reactor::Source;
use crate::services::Services;
use crate::ttrpc::events::{self, About};
use crate::ttrpc::response;

impl Container {
    /// Handles the exit of a process.
    pub fn process_exited(&mut self, services: &mut Services, key: &ProcessKey, exit: Exit) {
        if *key == self.key {
            self.unwatch_oom_kills(services, exit.status == KILLED);
            self.state.note_exit(exit);
            self.thaw();
            self.kill_remaining(services);
        } else if let Ok(exec) = self.exec(key) {
            let pid = exec.state.pid();
            exec.state = exec::State::Stopped(pid, exit);
            self.announce_exit(services, key, pid, exit);
            self.announce_exit_if_done(services);
        }
    }

    /// Announces the exit of the container, unless its start, an exec or the kill of remaining
    /// processes comes first.
    pub(super) fn announce_exit_if_done(&mut self, services: &mut Services) {
        let comes_first = |it: &Pending| matches!(it.step, Step::Start | Step::KillRemaining);
        let must_wait = self.pending.iter().any(comes_first)
            || self.execs.values().any(|exec| exec.state.is_live());
        if (self.is_deleting() || !must_wait)
            && let Some(exit) = self.state.take_exit()
        {
            self.announce_exit(services, &self.key.clone(), self.pid, exit);
        }
    }

    /// Announces the exit of a process, and answers the calls that wait for it.
    fn announce_exit(&mut self, services: &mut Services, key: &ProcessKey, pid: i32, exit: Exit) {
        let event = events::exit(key, response::unsigned(pid), exit);
        services.send_of(events::EXIT, &event, key);
        if let Ok(process) = self.process(key) {
            process.exited(&mut services.copiers, key);
            process.waiters.answer(services, exit);
        }
    }

    /// Handles the end of an output stream: hangs up the terminal of its process, and continues a
    /// deletion that waits for the last output.
    pub fn output_ended(&mut self, services: &mut Services, key: &ProcessKey) {
        if let Ok(process) = self.process(key) {
            process.exited(&mut services.copiers, key);
        }
        self.check_drained(services, key);
    }

    /// Forgets a logging program that has exited, and continues a deletion that waits for it.
    pub fn logger_ended(&mut self, services: &mut Services, key: &ProcessKey, pid: i32) {
        if self.process(key).is_ok_and(|process| process.logger_ended(pid)) {
            self.check_drained(services, key);
        }
    }

    /// Watches the cgroup of the container, whose first process has this pid, for OOM kills. A
    /// failure is logged, and the container runs.
    pub(super) fn watch_oom_kills(&mut self, services: &Services, pid: i32) {
        let Some(cgroup) = &self.cgroup else { return };
        let source = Source::Child(response::unsigned(pid));
        match OomWatch::new(cgroup, services.oom_kills, &services.reactor, source) {
            Ok(watch) => self.oom_watch = watch,
            Err(e) => {
                let id = &self.key.id;
                log::warn(format_args!("container {id}: failed to watch for OOM kills: {e}"));
            }
        }
    }

    /// Whether the cgroup of the container, whose first process has this pid, is watched.
    pub fn watches_oom_kills(&self, pid: i32) -> bool {
        self.pid == pid && self.oom_watch.is_some()
    }

    /// Handles a notification of the kernel: sends TaskOOM if a process was killed.
    pub fn oom_event(&mut self, services: &mut Services) {
        let watch = self.oom_watch.as_mut();
        if watch.is_some_and(|watch| watch.has_killed(&mut services.oom_kills)) {
            self.announce_oom_kill(services);
        }
    }

    /// Ends the watch, after a last check, so that a kill is announced before the exit.
    pub(super) fn unwatch_oom_kills(&mut self, services: &mut Services, was_killed: bool) {
        let Some(mut watch) = self.oom_watch.take() else { return };
        let announced = &mut services.oom_kills;
        let was_counted = watch.has_killed(announced);
        // Also of a container that was not killed itself: the kill is not that of a later one.
        let was_lost = watch.has_lost_kill(announced);
        if was_counted || was_killed && was_lost {
            self.announce_oom_kill(services);
        }
    }

    fn announce_oom_kill(&self, services: &mut Services) {
        let mut event = task_events::TaskOOM::new();
        event.container_id.clone_from(&self.key.id);
        services.send_about(events::OOM, &event, About::OomOf(self.key.id.clone()));
    }
}
