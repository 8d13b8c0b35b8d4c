//! The daemon's own metrics, in the text format that Prometheus reads (OpenMetrics 1.0).
//!
//! Each metric is one entry of a table below. Counting an event costs an atomic addition. The
//! current state, such as the number of sandboxes, is read when the text is requested.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

/// A set of metrics: help, field and type, name, unit and initial value where it has one.
macro_rules! metrics {
    (
        $(#[$attr:meta])*
        $set:ident {
            $($(#[doc = $help:literal])+
            $field:ident: $type:ty = $name:literal $([$unit:ident])? $(from $init:expr)?;)+
        }
    ) => {
        $(#[$attr])*
        #[derive(Debug)]
        pub struct $set {
            $($(#[doc = $help])+ pub $field: $type,)+
        }

        impl $set {
            /// All of them, registered under the prefix of `registry`.
            fn register(registry: &mut Registry) -> Self {
                $(
                    let $field = metrics!(@init $type $(, $init)?);
                    let help = concat!($($help),+).trim_start();
                    metrics!(@register registry, $name, help, $field.clone() $(, $unit)?);
                )+
                Self { $($field,)+ }
            }
        }
    };
    (@init $type:ty) => { <$type>::default() };
    (@init $type:ty, $init:expr) => { $init };
    (@register $registry:ident, $name:literal, $help:ident, $metric:expr) => {
        $registry.register($name, $help, $metric)
    };
    (@register $registry:ident, $name:literal, $help:ident, $metric:expr, $unit:ident) => {
        $registry.register_with_unit($name, $help, Unit::$unit, $metric)
    };
}

mod process;

/// Prefix of the names of all metrics but those of the process.
const PREFIX: &str = "pause_sandboxer";

/// Content type of the text, for HTTP.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

metrics! {
    /// The metrics of a daemon.
    Metrics {
        /// Completed calls, by method and gRPC code; CANCELLED: the caller gave up
        calls: Family<CallLabels, Counter> = "calls";
        /// Time from the request of a call to its response, without Wait, which lasts as long as
        /// its sandbox
        durations: Family<MethodLabels, Histogram, fn() -> Histogram> = "call_duration" [Seconds]
            from Family::new_with_constructor(latency as fn() -> Histogram);
        /// Calls in progress
        in_flight: Family<MethodLabels, Gauge> = "calls_in_flight";
        /// Sandboxes by state
        sandboxes: Family<StateLabel, Gauge> = "sandboxes";
        /// Sandboxes that run although CRI lists their pods as NotReady
        not_ready_in_cri: Gauge = "sandboxes_not_ready_in_cri";
        /// Pause processes that exited, by reason
        pause_exits: Family<ReasonLabel, Counter> = "pause_exits";
        /// Failed cleanups, each of which is retried
        cleanup_failures: Counter = "cleanup_failures";
        /// Sandboxes whose last cleanup failed
        cleanups_pending: Gauge = "cleanups_pending";
        /// Anonymous memory of the shims of all pods
        shim_memory: Gauge = "shim_memory" [Bytes];
        /// Times that deleted files of a pod were restored
        restored_files: Counter = "healed_files";
        /// Failed attempts to restore deleted files of a pod, each of which is retried
        restore_failures: Counter = "healing_failures";
        /// Duration of the recovery at startup
        recovery: Gauge<f64, AtomicU64> = "recovery_duration" [Seconds];
        /// Sandboxes recovered since startup, including those of records that were quarantined at
        /// first
        recovered: Gauge = "recovered_sandboxes";
        /// Quarantined records: those that could not be recovered at startup, until they are
        /// recovered or removed
        quarantined: Gauge = "records_kept_aside";
    }
}

/// From 250 us, the time of a fast Start, to 8 s.
fn latency() -> Histogram {
    Histogram::new(exponential_buckets(0.00025, 2.0, 16))
}

/// Labels of a completed call.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct CallLabels {
    method: &'static str,
    code: &'static str,
}

/// Label of a method.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct MethodLabels {
    method: &'static str,
}

/// Label of exited pause processes.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ReasonLabel {
    reason: &'static str,
}

/// Label of sandboxes.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct StateLabel {
    state: &'static str,
}

/// The current state of the daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// The state of every sandbox.
    pub sandboxes: Vec<&'static str>,
    /// All states, so that one without sandboxes is shown as 0.
    pub states: Vec<&'static str>,
    /// Sandboxes whose cleanup failed and is retried.
    pub cleanups_pending: usize,
    /// Memory that the shims of all pods have for themselves, bytes.
    pub shim_memory: u64,
}

/// The metrics of a daemon.
#[derive(Debug)]
pub struct Telemetry {
    registry: Registry,
    metrics: Metrics,
    process: process::Metrics,
    /// Serializes the writers of text: each sets the gauges of the current state.
    render_lock: Mutex<()>,
}

impl Default for Telemetry {
    fn default() -> Self {
        let mut registry = Registry::default();
        let process = process::Metrics::start(registry.sub_registry_with_prefix("process"));
        let own = registry.sub_registry_with_prefix(PREFIX);
        let version = Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]);
        own.register("build", "The running daemon", version);
        let metrics = Metrics::register(own);
        Self { registry, metrics, process, render_lock: Mutex::new(()) }
    }
}

impl std::ops::Deref for Telemetry {
    type Target = Metrics;

    fn deref(&self) -> &Metrics {
        &self.metrics
    }
}

impl Telemetry {
    /// Counts a call of `method` as started; dropping the result counts it as CANCELLED.
    pub fn call(self: &Arc<Self>, method: &'static str) -> CallInProgress {
        self.in_flight.get_or_create(&MethodLabels { method }).inc();
        CallInProgress { telemetry: Some(Arc::clone(self)), method, begun: Instant::now() }
    }

    fn called(&self, method: &'static str, code: &'static str, took: Duration) {
        self.calls.get_or_create(&CallLabels { method, code }).inc();
        self.in_flight.get_or_create(&MethodLabels { method }).dec();
        if !method.starts_with("Wait") {
            self.durations.get_or_create(&MethodLabels { method }).observe(took.as_secs_f64());
        }
    }

    /// Counts the exit of a pause process.
    pub fn pause_exited(&self, reason: &'static str) {
        self.pause_exits.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// Sets the outcome of the recovery.
    pub fn recovered(&self, took: Duration, sandboxes: usize, quarantined: usize) {
        self.recovery.set(took.as_secs_f64());
        self.recovered.set(sandboxes.try_into().unwrap_or(i64::MAX));
        self.quarantined.set(quarantined.try_into().unwrap_or(i64::MAX));
    }

    /// A record is no longer quarantined: it was adopted, or it is gone.
    pub fn quarantine_ended(&self, adopted: bool) {
        self.quarantined.dec();
        if adopted {
            self.recovered.inc();
        }
    }

    /// All metrics as text. Blocks: reads `/proc`.
    pub fn text(&self, census: &Census) -> String {
        let _guard = self.render_lock.lock();
        self.sandboxes.clear();
        for state in &census.states {
            drop(self.sandboxes.get_or_create(&StateLabel { state }));
        }
        for state in &census.sandboxes {
            self.sandboxes.get_or_create(&StateLabel { state }).inc();
        }
        self.cleanups_pending.set(census.cleanups_pending.try_into().unwrap_or(i64::MAX));
        self.shim_memory.set(census.shim_memory.try_into().unwrap_or(i64::MAX));
        self.process.refresh();
        let mut text = String::new();
        // Writing to a String does not fail.
        let _ = text::encode(&mut text, &self.registry);
        text
    }
}

/// A call in progress.
#[derive(Debug)]
pub struct CallInProgress {
    /// `None` once it is counted.
    telemetry: Option<Arc<Telemetry>>,
    method: &'static str,
    begun: Instant,
}

impl CallInProgress {
    /// The method's name.
    pub fn method(&self) -> &'static str {
        self.method
    }

    /// Counts it as completed with this code.
    pub fn ended(&mut self, code: &'static str) {
        if let Some(telemetry) = self.telemetry.take() {
            telemetry.called(self.method, code, self.begun.elapsed());
        }
    }
}

impl Drop for CallInProgress {
    fn drop(&mut self) {
        self.ended("CANCELLED");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_counted() {
        let telemetry = Arc::new(Telemetry::default());
        telemetry.call("Start").ended("OK");
        telemetry.call("Start").ended("INTERNAL");
        drop(telemetry.call("Start"));
        telemetry.call("Wait").ended("OK");
        let mut running = telemetry.call("Stop");
        telemetry.cleanup_failures.inc();
        telemetry.pause_exited("signal");
        telemetry.recovered(Duration::from_millis(250), 3, 1);
        let census = Census {
            sandboxes: vec!["ready", "ready"],
            states: vec!["ready", "created"],
            cleanups_pending: 1,
            shim_memory: 4096,
        };
        let text = telemetry.text(&census);
        for line in [
            "pause_sandboxer_calls_total{method=\"Start\",code=\"OK\"} 1",
            "pause_sandboxer_calls_total{method=\"Start\",code=\"INTERNAL\"} 1",
            "pause_sandboxer_calls_total{method=\"Start\",code=\"CANCELLED\"} 1",
            "pause_sandboxer_call_duration_seconds_count{method=\"Start\"} 3",
            "pause_sandboxer_calls_in_flight{method=\"Stop\"} 1",
            "pause_sandboxer_calls_in_flight{method=\"Start\"} 0",
            "pause_sandboxer_cleanup_failures_total 1",
            "pause_sandboxer_cleanups_pending 1",
            "pause_sandboxer_shim_memory_bytes 4096",
            "pause_sandboxer_pause_exits_total{reason=\"signal\"} 1",
            "pause_sandboxer_recovery_duration_seconds 0.25",
            "pause_sandboxer_sandboxes{state=\"ready\"} 2",
            "pause_sandboxer_sandboxes{state=\"created\"} 0",
        ] {
            assert!(text.lines().any(|printed| printed == line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("call_duration_seconds_count{method=\"Wait\"}"), "{text}");
        assert!(text.ends_with("# EOF\n"));
        let memory = text
            .lines()
            .find_map(|line| line.strip_prefix("process_resident_memory_bytes "))
            .unwrap();
        assert!(memory.parse::<u64>().unwrap() > 4096);
        running.ended("OK");
        let empty = telemetry.text(&Census { sandboxes: Vec::new(), ..census });
        let none = "pause_sandboxer_sandboxes{state=\"ready\"} 0\n";
        assert!(empty.contains(none), "{empty}");
    }
}
