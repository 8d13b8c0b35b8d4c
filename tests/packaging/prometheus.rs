//! Alert rules and dashboard name only metrics and labels that the daemon exports.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use pause_sandboxer::telemetry::{Census, Telemetry};
use serde_json::{Value, json};

use super::file;

/// Prometheus adds these labels to all series.
const SCRAPE_LABELS: [&str; 2] = ["instance", "job"];

/// Prometheus makes these metrics itself.
const PROMETHEUS_METRICS: [&str; 1] = ["up"];

/// Returns every series that the daemon exports, with its labels.
fn exported() -> BTreeMap<String, BTreeSet<String>> {
    let telemetry = Arc::new(Telemetry::default());
    telemetry.call("Start").ended("OK");
    telemetry.pause_exited("stopped");
    telemetry.cleanup_failures.inc();
    telemetry.restored_files.inc();
    telemetry.restore_failures.inc();
    telemetry.recovered(Duration::from_secs(1), 1, 1);
    let census = Census {
        sandboxes: vec!["ready"],
        states: vec!["ready"],
        cleanups_pending: 1,
        shim_memory: 4096,
    };
    let mut series: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in telemetry.text(&census).lines().filter(|line| !line.starts_with('#')) {
        let name = line.split(['{', ' ']).next().unwrap();
        let labels = line.split_once('{').map_or("", |(_, rest)| rest.split_once('}').unwrap().0);
        let labels = labels
            .split(',')
            .filter(|label| !label.is_empty())
            .map(|label| label.split('=').next().unwrap().to_owned());
        series.entry(name.to_owned()).or_default().extend(labels);
    }
    series
}

/// Returns the metrics in an expression, each with the labels that select it.
fn named(expression: &str) -> Vec<(String, Vec<String>)> {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut found = Vec::new();
    let mut rest = expression;
    while let Some(at) = rest.find(|c: char| c.is_ascii_alphabetic()) {
        let name: String = rest[at..].chars().take_while(|c| word(*c)).collect();
        rest = &rest[at + name.len()..];
        let ours = name.starts_with("pause_sandboxer_")
            || name.starts_with("process_")
            || PROMETHEUS_METRICS.contains(&&*name);
        if !ours {
            // A string has no names of metrics.
            if let Some(text) = rest
                .strip_prefix("=\"")
                .or_else(|| rest.strip_prefix("=~\""))
                .or_else(|| rest.strip_prefix("!=\""))
            {
                rest = text.split_once('"').unwrap().1;
            }
            continue;
        }
        let labels = rest.strip_prefix('{').map_or("", |rest| rest.split_once('}').unwrap().0);
        let labels = labels.split(',').filter(|label| !label.is_empty());
        found.push((
            name,
            labels.map(|label| label.split(['=', '!']).next().unwrap().trim().to_owned()).collect(),
        ));
    }
    found
}

/// Compares an expression with the exported series, and returns how many metrics it names.
fn check(place: &str, expression: &str, exported: &BTreeMap<String, BTreeSet<String>>) -> usize {
    let named = named(expression);
    for (name, labels) in &named {
        if PROMETHEUS_METRICS.contains(&&**name) {
            continue;
        }
        let known =
            exported.get(name).unwrap_or_else(|| panic!("{place}: the daemon has no {name}"));
        for label in labels {
            assert!(
                known.contains(label) || SCRAPE_LABELS.contains(&&**label),
                "{place}: {name} has no label {label}"
            );
        }
    }
    named.len()
}

#[test]
fn alerts_use_exported_metrics() {
    let (exported, rules) = (exported(), file("packaging/prometheus/alerts.yaml"));
    let rules: Value = serde_yaml_ng::from_str(&rules).unwrap();
    let metrics = file("docs/metrics.md");
    let mut names = BTreeSet::new();
    for group in rules["groups"].as_array().unwrap() {
        for rule in group["rules"].as_array().unwrap() {
            let name = rule["alert"].as_str().unwrap();
            assert!(names.insert(name.to_owned()), "{name} twice");
            assert!(
                check(name, rule["expr"].as_str().unwrap(), &exported) > 0,
                "{name} names no metric"
            );
            assert!(
                ["critical", "warning", "info"]
                    .contains(&rule["labels"]["severity"].as_str().unwrap()),
                "{name}"
            );
            for text in ["summary", "description"] {
                assert!(rule["annotations"][text].is_string(), "{name} has no {text}");
            }
            assert!(
                metrics.contains(&format!("`{name}`")),
                "docs/metrics.md does not say what to do about {name}"
            );
        }
    }
}

#[test]
fn the_dashboard_uses_exported_metrics() {
    let (exported, dashboard) = (exported(), file("packaging/prometheus/dashboard.json"));
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    let mut ids = BTreeSet::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        let title = panel["title"].as_str().unwrap();
        assert!(ids.insert(panel["id"].as_u64().unwrap()), "{title}: its id is another's");
        for target in panel["targets"].as_array().unwrap() {
            assert!(
                check(title, target["expr"].as_str().unwrap(), &exported) > 0,
                "{title} names no metric"
            );
        }
    }
    for annotation in dashboard["annotations"]["list"].as_array().unwrap() {
        check("annotation", annotation["expr"].as_str().unwrap(), &exported);
    }
}

#[test]
fn every_metric_is_described() {
    let metrics = file("docs/metrics.md");
    for name in exported().keys() {
        let name = ["_bucket", "_count", "_sum"]
            .iter()
            .find_map(|end| name.strip_suffix(end))
            .unwrap_or(name);
        assert!(metrics.contains(&format!("`{name}`")), "docs/metrics.md does not describe {name}");
    }
}

/// Runs Prometheus' own checker in the repository.
fn promtool(arguments: &[&str]) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let fetched = root.join("target/tools/bin/promtool");
    let promtool = if fetched.exists() { fetched.into_os_string() } else { "promtool".into() };
    let output = Command::new(promtool).args(arguments).current_dir(root).output();
    let output = output.unwrap_or_else(|e| {
        panic!("promtool: {e}; `make parts` fetches it from Debian's package prometheus")
    });
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{text}\nIf a rule has changed, adapt tests/packaging/alerts.yaml."
    );
}

/// The queries become rules, with values for the variables of Grafana.
#[test]
fn promtool_accepts_the_queries_of_the_dashboard() {
    let dashboard: Value =
        serde_json::from_str(&file("packaging/prometheus/dashboard.json")).unwrap();
    let panels = list(&dashboard["panels"]);
    let targets = panels.iter().flat_map(|panel| list(&panel["targets"]));
    let queries = targets.chain(list(&dashboard["annotations"]["list"]));
    let rules: Vec<Value> = queries
        .filter_map(|query| query["expr"].as_str().map(str::to_owned))
        .map(|query| query.replace("$__rate_interval", "5m").replace("$node", ".*"))
        .enumerate()
        .map(|(number, expr)| json!({ "record": format!("query{number}"), "expr": expr }))
        .collect();
    assert!(rules.len() > 20, "{rules:?}");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rules.yaml");
    let groups = json!({ "groups": [{ "name": "dashboard", "rules": rules }] });
    std::fs::write(&path, groups.to_string()).unwrap();
    promtool(&["check", "rules", path.to_str().unwrap()]);
}

/// promtool's tests of the alerts.
const ALERTS: &str = "tests/packaging/alerts.yaml";

fn list(value: &Value) -> Vec<Value> {
    value.as_array().cloned().unwrap_or_default()
}

#[test]
fn promtool_accepts_the_tests_of_the_alerts() {
    promtool(&["test", "rules", ALERTS]);
}

/// Promise: alerts_fire_on_their_failure.
#[test]
fn each_alert_is_quiet_and_then_fires() {
    let rules: Value = serde_yaml_ng::from_str(&file("packaging/prometheus/alerts.yaml")).unwrap();
    let tests: Value = serde_yaml_ng::from_str(&file(ALERTS)).unwrap();
    let tests = list(&tests["tests"]);
    let cases: Vec<Value> = tests.iter().flat_map(|test| list(&test["alert_rule_test"])).collect();
    for rule in list(&rules["groups"]).iter().flat_map(|group| list(&group["rules"])) {
        for fires in [false, true] {
            let has = cases.iter().any(|case| {
                case["alertname"] == rule["alert"] && list(&case["exp_alerts"]).is_empty() != fires
            });
            assert!(has, "{ALERTS} lacks a case of {}, firing: {fires}", rule["alert"]);
        }
    }
    let exported = exported();
    for series in tests.iter().flat_map(|test| list(&test["input_series"])) {
        check(ALERTS, series["series"].as_str().unwrap(), &exported);
    }
}
