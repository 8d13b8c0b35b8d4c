//! Metrics of the daemon's process, under the names common to Prometheus clients.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use nix::sys::resource::{Resource, UsageWho, getrlimit, getrusage};
use nix::unistd::{SysconfVar, sysconf};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

metrics! {
    /// The metrics of the process.
    Metrics {
        /// Resident memory of the daemon
        resident: Gauge = "resident_memory" [Bytes];
        /// Open file descriptors of the daemon
        open: Gauge = "open_fds";
        /// Maximum number of open file descriptors of the daemon
        most: Gauge = "max_fds";
        /// CPU time of the daemon
        cpu: Counter<f64, AtomicU64> = "cpu" [Seconds];
        /// Start time of the daemon since the epoch
        start: Gauge<f64, AtomicU64> = "start_time" [Seconds];
    }
}

impl Metrics {
    /// Registers them. Sets the start time to now, as this is one of the daemon's first steps.
    pub(super) fn start(registry: &mut Registry) -> Self {
        let this = Self::register(registry);
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        this.start.set(since.as_secs_f64());
        this
    }

    /// Reads them; one that cannot be read keeps its value.
    pub(super) fn refresh(&self) {
        let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().unwrap_or(4096);
        // Pages: size, resident, … (proc_pid_statm(5)).
        let statm = fs::read_to_string("/proc/self/statm").unwrap_or_default();
        if let Some(pages) = statm.split(' ').nth(1).and_then(|pages| pages.parse::<i64>().ok()) {
            self.resident.set(pages.saturating_mul(page));
        }
        if let Ok(entries) = fs::read_dir("/proc/self/fd") {
            // One of the descriptors is that of the directory itself.
            self.open.set(i64::try_from(entries.count()).unwrap_or(i64::MAX).saturating_sub(1));
        }
        if let Ok((soft, _)) = getrlimit(Resource::RLIMIT_NOFILE) {
            self.most.set(i64::try_from(soft).unwrap_or(i64::MAX));
        }
        if let Ok(usage) = getrusage(UsageWho::RUSAGE_SELF) {
            let (user, system) = (usage.user_time(), usage.system_time());
            let micros =
                (user.tv_sec() + system.tv_sec()) * 1_000_000 + user.tv_usec() + system.tv_usec();
            self.cpu.inner().store((micros as f64 / 1e6).to_bits(), Ordering::Relaxed);
        }
    }
}
