//! The daemon as a process, under the names that Prometheus' clients agree on.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use nix::sys::resource::{Resource, UsageWho, getrlimit, getrusage};
use nix::unistd::{SysconfVar, sysconf};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

/// Numbers of the process.
#[derive(Debug, Default)]
pub(super) struct Numbers {
    resident: Gauge,
    open: Gauge,
    most: Gauge,
    cpu: Counter<f64, AtomicU64>,
    start: Gauge<f64, AtomicU64>,
}

impl Numbers {
    pub(super) fn register(registry: &mut Registry) -> Self {
        let this = Self::default();
        let process = registry.sub_registry_with_prefix("process");
        let bytes = "Resident memory of the daemon";
        process.register_with_unit("resident_memory", bytes, Unit::Bytes, this.resident.clone());
        process.register("open_fds", "Open file descriptors of the daemon", this.open.clone());
        process.register("max_fds", "File descriptors that the daemon may open", this.most.clone());
        process.register_with_unit(
            "cpu",
            "Processor time of the daemon",
            Unit::Seconds,
            this.cpu.clone(),
        );
        process.register_with_unit(
            "start_time",
            "When the daemon was started, after the epoch",
            Unit::Seconds,
            this.start.clone(),
        );
        // About now: it is one of the first things that a daemon does.
        this.start
            .set(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64());
        this
    }

    /// Reads them; one that cannot be read stays as it was.
    pub(super) fn read(&self) {
        let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten().unwrap_or(4096);
        // Pages: size, resident, … (proc_pid_statm(5)).
        let statm = fs::read_to_string("/proc/self/statm").unwrap_or_default();
        if let Some(pages) = statm.split(' ').nth(1).and_then(|pages| pages.parse::<i64>().ok()) {
            self.resident.set(pages.saturating_mul(page));
        }
        if let Ok(entries) = fs::read_dir("/proc/self/fd") {
            // One of them is the directory's own.
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
