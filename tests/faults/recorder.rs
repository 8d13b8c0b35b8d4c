//! Scrapes a daemon's metrics as Prometheus does, and writes them as a test of promtool: with
//! `RECORD=1` every 15 s into `tests/packaging/alerts`, otherwise a few, which are dropped.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::task::JoinHandle;

use crate::harness::lock;

/// Between two scrapes of a recording.
const SCRAPE_INTERVAL: Duration = Duration::from_secs(15);
/// The same without a recording: longer than the daemon reuses a text.
const SHORT_INTERVAL: Duration = Duration::from_millis(250);
/// Prometheus' default `scrape_timeout`.
const SCRAPE_TIMEOUT: Duration = Duration::from_secs(10);
/// The last line that a recording writes.
const HAND_WRITTEN: &str = "    # Written by hand; a new recording keeps what follows.\n";
/// The labels of the target, which Prometheus adds to each series.
const TARGET_LABELS: &str = "instance=\"node\",job=\"pause-sandboxer\"";

/// One recording. Dropping it ends the scrapes.
#[derive(Debug)]
pub(crate) struct Recorder {
    name: &'static str,
    what: &'static str,
    socket: PathBuf,
    /// The text of each scrape; `None` if it failed.
    taken: Arc<Mutex<Vec<Option<String>>>>,
    task: JoinHandle<()>,
}

/// Whether this run is a recording.
pub(crate) fn is_recording() -> bool {
    std::env::var_os("RECORD").is_some()
}

/// All metrics of the daemon that serves them at `socket`.
pub(crate) async fn scrape(socket: &Path) -> Result<String> {
    let mut stream = UnixStream::connect(socket).await?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: node\r\n\r\n").await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    ensure!(text.starts_with("HTTP/1.1 200 "), "{text}");
    Ok(text)
}

/// Series and value of each line.
fn samples(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    body.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.rsplit_once(' '))
}

/// The sum of all series with this name and these labels, such as `calls_total{method="Start"`.
pub(crate) async fn value(socket: &Path, series: &str) -> Result<f64> {
    let text = scrape(socket).await?;
    let found = samples(&text).filter(|(name, _)| name.starts_with(series));
    let values = found.map(|(_, value)| value.parse()).collect::<Result<Vec<f64>, _>>()?;
    ensure!(!values.is_empty(), "no {series} in {text}");
    Ok(values.iter().sum())
}

impl Recorder {
    /// Scrapes `socket` from now on. `what` completes "Scrapes of a real daemon: ".
    pub(crate) fn begin(name: &'static str, what: &'static str, socket: PathBuf) -> Self {
        let taken = Arc::new(Mutex::new(Vec::new()));
        let task = tokio::spawn({
            let (taken, socket) = (Arc::clone(&taken), socket.clone());
            async move {
                let interval = if is_recording() { SCRAPE_INTERVAL } else { SHORT_INTERVAL };
                let mut interval = tokio::time::interval(interval);
                loop {
                    interval.tick().await;
                    let scraped = tokio::time::timeout(SCRAPE_TIMEOUT, scrape(&socket)).await;
                    lock(&taken).push(scraped.ok().and_then(Result::ok));
                }
            }
        });
        Self { name, what, socket, taken, task }
    }

    /// Waits for that many scrapes; without a recording for one.
    pub(crate) async fn scrapes(&self, count: usize) {
        let taken = || lock(&self.taken).len();
        let enough = taken() + if is_recording() { count } else { 1 };
        while taken() < enough {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// The same for minutes.
    pub(crate) async fn minutes(&self, count: usize) {
        self.scrapes(count * 4).await;
    }

    /// Polls the daemon until the series has a wanted value. The recording has it from its next
    /// scrape on.
    pub(crate) async fn wait_for_value(
        &self,
        series: &str,
        wanted: impl Fn(f64) -> bool,
    ) -> Result<()> {
        // The daemon retries at least every 5 minutes. Below the limit of the case, whose error
        // has no reason.
        let limit = Duration::from_secs(if is_recording() { 330 } else { 60 });
        kit::until(&format!("{}: {series}", self.name), limit, async || {
            let value = value(&self.socket, series).await?;
            ensure!(wanted(value), "it is {value}");
            Ok(())
        })
        .await
    }

    /// Ends the scrapes, and writes those of a recording.
    pub(crate) fn end(self) -> Result<()> {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR"));
        let rules = fs::read_to_string(directory.join("packaging/prometheus/alerts.yaml"))?;
        let written = promtool_test(self.what, &lock(&self.taken), &rules);
        ensure!(written.contains("- series: 'process_start_time_seconds{"), "{written}");
        if !is_recording() {
            return Ok(());
        }
        let path = directory.join("tests/packaging/alerts").join(self.name).with_extension("yaml");
        let old = fs::read_to_string(&path).unwrap_or_default();
        let kept = old.split_once(HAND_WRITTEN).map_or("", |(_, kept)| kept);
        fs::write(&path, written + kept).with_context(|| path.display().to_string())
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The file, up to what is written by hand: the series that the rules use.
fn promtool_test(what: &str, scrapes: &[Option<String>], rules: &str) -> String {
    let used = |series: &str| {
        let name = series.split('{').next().unwrap_or_default();
        // The buckets of the other methods are many.
        rules.contains(name) && (!name.ends_with("_bucket") || series.contains("method=\"Start\""))
    };
    let scraped: Vec<BTreeMap<&str, &str>> = scrapes
        .iter()
        .map(|text| samples(text.as_deref().unwrap_or("")).filter(|(name, _)| used(name)).collect())
        .collect();
    let names: BTreeSet<&str> = scraped.iter().flat_map(|of| of.keys().copied()).collect();
    let up: Vec<_> = scrapes.iter().map(|text| Some(text.as_ref().map_or("0", |_| "1"))).collect();
    let mut text = format!(
        "# Scrapes of a real daemon, 15 s apart: {what}.\n# `RECORD=1 cargo test --test faults -- \
         alert_metrics` records the series anew.\nrule_files: \
         [../../../packaging/prometheus/alerts.yaml]\nevaluation_interval: 1m\ntests:\n  - \
         interval: 15s\n    input_series:\n"
    );
    let mut add = |series: &str, values: &[Option<&str>]| {
        text += &format!(
            "      - series: '{series}'\n        values: '{}'\n",
            expanding_notation(values)
        );
    };
    add(&format!("up{{{TARGET_LABELS}}}"), &up);
    for name in names {
        let values: Vec<_> = scraped.iter().map(|of| of.get(name).copied()).collect();
        let (name, labels) = name.split_once('{').unwrap_or((name, "}"));
        let comma = if labels == "}" { "" } else { "," };
        add(&format!("{name}{{{TARGET_LABELS}{comma}{labels}"), &values);
    }
    text + HAND_WRITTEN
}

/// In promtool's expanding notation: `5x3` is 5 and three more, `_x3` three missing. Prometheus
/// marks a series that a scrape lacks as stale.
fn expanding_notation(values: &[Option<&str>]) -> String {
    let repeated = |value: &str, more: usize| {
        if more == 0 { value.to_owned() } else { format!("{value}x{more}") }
    };
    let words = values.chunk_by(|a, b| a == b).enumerate().flat_map(|(at, run)| match run[0] {
        Some(value) => vec![repeated(value, run.len() - 1)],
        None if at == 0 => vec![format!("_x{}", run.len())],
        None if run.len() == 1 => vec!["stale".to_owned()],
        None => vec!["stale".to_owned(), format!("_x{}", run.len() - 1)],
    });
    words.collect::<Vec<_>>().join(" ")
}

/// Every form that [`expanding_notation`] writes.
pub(crate) async fn recorded_values_are_shortened() -> Result<()> {
    for (values, short) in [
        ("1 1 1", "1x2"),
        ("_ _ 5 5 _ _ 7 _", "_x2 5x1 stale _x1 7 stale"),
        ("0 3 6 9 9", "0 3 6 9x1"),
        ("1 2 1.5 1.5", "1 2 1.5x1"),
    ] {
        let values: Vec<_> = values.split(' ').map(|v| (v != "_").then_some(v)).collect();
        let found = expanding_notation(&values);
        ensure!(found == short, "{values:?} became {found}, not {short}");
    }
    Ok(())
}
