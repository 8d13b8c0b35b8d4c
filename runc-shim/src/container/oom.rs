//! Announces OOM kills in the cgroups of containers.

use containerd_shim_protos::events::task::TaskOOM;

use crate::cgroup::oom_watch::OomWatch;
use crate::log;
use crate::reactor::Source;
use crate::shim::Shim;

impl Shim {
    /// Watches a container's cgroup for OOM kills. A failure is logged, and the container runs.
    pub fn watch_oom_kills(&mut self, id: &str) {
        let cgroup = self.containers.get(id).and_then(|container| container.cgroup.as_ref());
        let Some(watch) = cgroup.map(|cgroup| OomWatch::new(id, cgroup)) else { return };
        let watch_id = self.new_id();
        let added = watch.and_then(|watch| {
            let Some(watch) = watch else { return Ok(()) };
            watch.add_to(&self.reactor, Source::OomWatch(watch_id))?;
            self.oom_watches.insert(watch_id, watch);
            Ok(())
        });
        if let Err(e) = added {
            log::warn(format_args!("container {id}: failed to watch for OOM kills: {e}"));
        }
    }

    /// Handles a notification of the kernel: sends TaskOOM if a process was killed.
    pub fn oom_event(&mut self, watch_id: u32) {
        let Some(watch) = self.oom_watches.get_mut(&watch_id) else { return };
        if watch.has_killed() {
            let mut event = TaskOOM::new();
            event.container_id.clone_from(&watch.id);
            self.events.send_oom(&event, &self.reactor);
        }
    }

    /// Ends the watch of a container, after a last check, so that a kill is announced before the
    /// exit.
    pub fn unwatch_oom_kills(&mut self, id: &str) {
        let watch_id = self.oom_watches.iter().find(|(_, watch)| watch.id == id).map(|(n, _)| *n);
        if let Some(watch_id) = watch_id {
            self.oom_event(watch_id);
            self.oom_watches.remove(&watch_id);
        }
    }
}
