//! The daemon's own numbers, in the text that Prometheus reads (OpenMetrics 1.0).
//!
//! Whoever does something counts it here; nothing here waits, and counting costs an atomic
//! addition. What is so rather than what happened, such as how many sandboxes there are, is looked
//! at when somebody asks for the text.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

mod process;

/// What every metric's name but those of the process begins with.
const PREFIX: &str = "pause_sandboxer";

/// Type of the text, for HTTP.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Call {
    method: &'static str,
    code: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Method {
    method: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct Kind {
    state: &'static str,
    driver: String,
}

/// What is so when somebody asks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// State and driver of every sandbox.
    pub sandboxes: Vec<(&'static str, String)>,
    /// Every state there is, so that one without sandboxes is shown as 0.
    pub states: Vec<&'static str>,
    /// Sandboxes whose cleanup has failed and is tried again.
    pub cleanups_pending: usize,
}

/// Counters of a daemon.
#[derive(Debug)]
pub struct Telemetry {
    registry: Registry,
    calls: Family<Call, Counter>,
    durations: Family<Method, Histogram, fn() -> Histogram>,
    in_flight: Family<Method, Gauge>,
    ended: Counter,
    cleanup_failures: Counter,
    cleanups_pending: Gauge,
    healed: Counter,
    healing_failures: Counter,
    recovery: Gauge<f64, std::sync::atomic::AtomicU64>,
    recovered: Gauge,
    aside: Gauge,
    sandboxes: Family<Kind, Gauge>,
    process: process::Numbers,
    /// Those who ask take turns: the census is written into gauges that all of them read.
    turn: Mutex<()>,
}

impl Default for Telemetry {
    fn default() -> Self {
        let mut registry = Registry::default();
        let process = process::Numbers::register(&mut registry);
        let own = registry.sub_registry_with_prefix(PREFIX);
        // From 250 us, within which a Start may end, to 8 s.
        let durations: fn() -> Histogram = || Histogram::new(exponential_buckets(0.00025, 2.0, 16));
        let version = Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]);
        own.register("build", "The daemon that runs", version);
        let this = Self {
            calls: Family::default(),
            durations: Family::new_with_constructor(durations),
            in_flight: Family::default(),
            ended: Counter::default(),
            cleanup_failures: Counter::default(),
            cleanups_pending: Gauge::default(),
            healed: Counter::default(),
            healing_failures: Counter::default(),
            recovery: Gauge::default(),
            recovered: Gauge::default(),
            aside: Gauge::default(),
            sandboxes: Family::default(),
            process,
            registry: Registry::default(),
            turn: Mutex::new(()),
        };
        own.register(
            "calls",
            "Calls that have ended, by method and gRPC code; CANCELLED: the caller gave up",
            this.calls.clone(),
        );
        own.register_with_unit(
            "call_duration",
            "Time from a call's request to its answer, but of Wait, which lasts as long as its sandbox",
            Unit::Seconds,
            this.durations.clone(),
        );
        own.register("calls_in_flight", "Calls that are being answered", this.in_flight.clone());
        own.register("sandboxes", "Sandboxes by state and driver", this.sandboxes.clone());
        own.register(
            "pause_exits",
            "Pauses that have ended, for whatever reason",
            this.ended.clone(),
        );
        own.register(
            "cleanup_failures",
            "Cleanups that have failed and are tried again",
            this.cleanup_failures.clone(),
        );
        own.register(
            "cleanups_pending",
            "Sandboxes whose last cleanup has failed",
            this.cleanups_pending.clone(),
        );
        own.register(
            "healed_files",
            "Times that a pod's deleted files were put back",
            this.healed.clone(),
        );
        own.register(
            "healing_failures",
            "Tries to put a pod's deleted files back that have failed and are repeated",
            this.healing_failures.clone(),
        );
        own.register_with_unit(
            "recovery_duration",
            "Time that it took to take over the sandboxes of the daemon before",
            Unit::Seconds,
            this.recovery.clone(),
        );
        own.register(
            "recovered_sandboxes",
            "Sandboxes that were taken over at the start",
            this.recovered.clone(),
        );
        own.register(
            "records_kept_aside",
            "Records that could not be taken over at the start",
            this.aside.clone(),
        );
        Self { registry, ..this }
    }
}

impl Telemetry {
    /// A call of `method` begins. It counts as CANCELLED if what is answered is dropped before its
    /// end.
    pub fn call(self: &Arc<Self>, method: &'static str) -> Running {
        self.in_flight.get_or_create(&Method { method }).inc();
        Running { of: Some(Arc::clone(self)), method, begun: Instant::now() }
    }

    fn called(&self, method: &'static str, code: &'static str, took: Duration) {
        self.calls.get_or_create(&Call { method, code }).inc();
        self.in_flight.get_or_create(&Method { method }).dec();
        if !method.starts_with("Wait") {
            self.durations.get_or_create(&Method { method }).observe(took.as_secs_f64());
        }
    }

    /// A pause has ended.
    pub fn pause_ended(&self) {
        self.ended.inc();
    }

    /// A cleanup has failed and will be tried again.
    pub fn cleanup_failed(&self) {
        self.cleanup_failures.inc();
    }

    /// A pod's deleted files were put back.
    pub fn files_healed(&self) {
        self.healed.inc();
    }

    /// A pod's deleted files could not be put back, which is tried again.
    pub fn healing_failed(&self) {
        self.healing_failures.inc();
    }

    /// Recovery took this long, took over so many sandboxes and kept so many records aside.
    pub fn recovered(&self, took: Duration, sandboxes: usize, aside: usize) {
        self.recovery.set(took.as_secs_f64());
        self.recovered.set(sandboxes.try_into().unwrap_or(i64::MAX));
        self.aside.set(aside.try_into().unwrap_or(i64::MAX));
    }

    /// All numbers as text. Blocks: reads of `/proc`.
    pub fn text(&self, census: &Census) -> String {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.sandboxes.clear();
        for (_, driver) in &census.sandboxes {
            for state in &census.states {
                drop(self.sandboxes.get_or_create(&Kind { state, driver: driver.clone() }));
            }
        }
        for (state, driver) in &census.sandboxes {
            self.sandboxes.get_or_create(&Kind { state, driver: driver.clone() }).inc();
        }
        self.cleanups_pending.set(census.cleanups_pending.try_into().unwrap_or(i64::MAX));
        self.process.read();
        let mut text = String::new();
        // Writing to a String does not fail.
        let _ = text::encode(&mut text, &self.registry);
        text
    }
}

/// A call that is being answered.
#[derive(Debug)]
pub struct Running {
    /// Until it is counted.
    of: Option<Arc<Telemetry>>,
    method: &'static str,
    begun: Instant,
}

impl Running {
    /// The method's name.
    pub fn method(&self) -> &'static str {
        self.method
    }

    /// It was answered with this code.
    pub fn ended(&mut self, code: &'static str) {
        if let Some(of) = self.of.take() {
            of.called(self.method, code, self.begun.elapsed());
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.ended("CANCELLED");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_happened_is_counted() {
        let telemetry = Arc::new(Telemetry::default());
        telemetry.call("Start").ended("OK");
        telemetry.call("Start").ended("INTERNAL");
        drop(telemetry.call("Start"));
        telemetry.call("Wait").ended("OK");
        let mut running = telemetry.call("Stop");
        telemetry.cleanup_failed();
        telemetry.recovered(Duration::from_millis(250), 3, 1);
        let census = Census {
            sandboxes: vec![("ready", "native".to_owned()), ("ready", "native".to_owned())],
            states: vec!["ready", "created"],
            cleanups_pending: 1,
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
            "pause_sandboxer_recovery_duration_seconds 0.25",
            "pause_sandboxer_sandboxes{state=\"ready\",driver=\"native\"} 2",
            "pause_sandboxer_sandboxes{state=\"created\",driver=\"native\"} 0",
        ] {
            assert!(text.lines().any(|of| of == line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("call_duration_seconds_count{method=\"Wait\"}"), "{text}");
        assert!(text.ends_with("# EOF\n"));
        let memory = text
            .lines()
            .find_map(|line| line.strip_prefix("process_resident_memory_bytes "))
            .unwrap();
        assert!(memory.parse::<u64>().unwrap() > 4096);
        // What is no more is not shown as it was.
        running.ended("OK");
        assert!(!telemetry.text(&Census::default()).contains("pause_sandboxer_sandboxes{"));
    }
}
