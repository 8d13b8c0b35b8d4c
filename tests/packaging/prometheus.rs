//! Alert rules and dashboard: every metric and label that they name is one that the daemon has.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use pause_sandboxer::telemetry::{Census, Telemetry};
use serde_json::{Value, json};

use super::file;

/// Labels that Prometheus gives to all that it scrapes.
const OF_THE_SCRAPE: [&str; 2] = ["instance", "job"];

/// Metrics of Prometheus' own making.
const OF_PROMETHEUS: [&str; 1] = ["up"];

/// What a daemon tells that has seen everything once: every series, with its labels.
fn exported() -> BTreeMap<String, BTreeSet<String>> {
    let telemetry = Arc::new(Telemetry::default());
    telemetry.call("Start").ended("OK");
    telemetry.pause_exits.inc();
    telemetry.cleanup_failures.inc();
    telemetry.restored_files.inc();
    telemetry.restore_failures.inc();
    telemetry.recovered(Duration::from_secs(1), 1, 1);
    let census = Census {
        sandboxes: vec![("ready", "native".to_owned())],
        states: vec!["ready"],
        driver: "native",
        cleanups_pending: 1,
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

/// Names of metrics in an expression, each with the labels that are selected by.
fn named(expression: &str) -> Vec<(String, Vec<String>)> {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut found = Vec::new();
    let mut rest = expression;
    while let Some(at) = rest.find(|c: char| c.is_ascii_alphabetic()) {
        let name: String = rest[at..].chars().take_while(|c| word(*c)).collect();
        rest = &rest[at + name.len()..];
        let ours = name.starts_with("pause_sandboxer_")
            || name.starts_with("process_")
            || OF_PROMETHEUS.contains(&&*name);
        if !ours {
            // What a string holds is no name.
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

/// Checks an expression against what is exported; how many metrics it names.
fn check(place: &str, expression: &str, exported: &BTreeMap<String, BTreeSet<String>>) -> usize {
    let pairs = [('(', ')'), ('{', '}'), ('[', ']')];
    for (open, close) in pairs {
        assert_eq!(
            expression.matches(open).count(),
            expression.matches(close).count(),
            "{place}: {expression}"
        );
    }
    let named = named(expression);
    for (name, labels) in &named {
        if OF_PROMETHEUS.contains(&&**name) {
            continue;
        }
        let known =
            exported.get(name).unwrap_or_else(|| panic!("{place}: the daemon has no {name}"));
        for label in labels {
            assert!(
                known.contains(label) || OF_THE_SCRAPE.contains(&&**label),
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
    let operate = file("docs/operate.md");
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
                operate.contains(&format!("`{name}`")),
                "docs/operate.md does not say what to do about {name}"
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
    let operate = file("docs/operate.md");
    for name in exported().keys() {
        let name = ["_bucket", "_count", "_sum"]
            .iter()
            .find_map(|end| name.strip_suffix(end))
            .unwrap_or(name);
        assert!(operate.contains(&format!("`{name}`")), "docs/operate.md does not describe {name}");
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
        "{text}\nIf the daemon's metrics have changed, record them again (CONTRIBUTING.md); if a \
         rule has changed, adapt the expectations."
    );
}

#[test]
fn promtool_accepts_the_rules() {
    promtool(&["check", "rules", "packaging/prometheus/alerts.yaml"]);
}

/// As rules, with values for the variables of Grafana.
#[test]
fn promtool_accepts_the_queries_of_the_dashboard() {
    let dashboard: Value =
        serde_json::from_str(&file("packaging/prometheus/dashboard.json")).unwrap();
    let of = |list: &Value| list.as_array().cloned().unwrap_or_default();
    let targets = of(&dashboard["panels"]).into_iter().flat_map(|panel| of(&panel["targets"]));
    let queries = targets.chain(of(&dashboard["annotations"]["list"]));
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

/// promtool's tests of the alerts: on metrics of real daemons, recorded by
/// `tests/faults/alert_metrics.rs`, and a few that are written by hand.
const ALERTS: &str = "tests/packaging/alerts";

/// The file of the series that are written by hand.
const WRITTEN: &str = "tests/packaging/alerts/written.yaml";

/// The files in [`ALERTS`], by path, each with its tests.
fn alert_tests() -> Vec<(String, Vec<Value>)> {
    let entries = std::fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(ALERTS)).unwrap();
    entries
        .map(|entry| format!("{ALERTS}/{}", entry.unwrap().file_name().to_str().unwrap()))
        .map(|path| {
            let parsed: Value = serde_yaml_ng::from_str(&file(&path)).unwrap();
            (path, list(&parsed["tests"]))
        })
        .collect()
}

fn list(value: &Value) -> Vec<Value> {
    value.as_array().cloned().unwrap_or_default()
}

#[test]
fn promtool_accepts_the_tests_of_the_alerts() {
    let tests = alert_tests();
    let paths = tests.iter().map(|(path, _)| path.as_str());
    promtool(&["test", "rules"].into_iter().chain(paths).collect::<Vec<_>>());
}

#[test]
fn each_alert_is_quiet_and_then_fires() {
    let rules: Value = serde_yaml_ng::from_str(&file("packaging/prometheus/alerts.yaml")).unwrap();
    let tests = alert_tests();
    let cases: Vec<(&String, Value)> = tests
        .iter()
        .flat_map(|(path, tests)| tests.iter().map(move |test| (path, test)))
        .flat_map(|(path, test)| list(&test["alert_rule_test"]).into_iter().map(move |c| (path, c)))
        .collect();
    for (path, case) in &cases {
        let name = case["alertname"].as_str().unwrap();
        assert!(
            *path != WRITTEN || file(path).contains(&format!("# - {name}")),
            "{path}: list {name} in the first comment, with the reason why it is not recorded"
        );
    }
    for rule in list(&rules["groups"]).iter().flat_map(|group| list(&group["rules"])) {
        for fires in [false, true] {
            let has = cases.iter().any(|(_, case)| {
                case["alertname"] == rule["alert"] && list(&case["exp_alerts"]).is_empty() != fires
            });
            assert!(has, "{ALERTS} lacks a case of {}, firing: {fires}", rule["alert"]);
        }
    }
}

/// In a recording no other alert fires, and without a failure none.
#[test]
fn each_recording_lists_all_alerts() {
    for (path, tests) in alert_tests().iter().filter(|(path, _)| path != WRITTEN) {
        let queries = tests.iter().flat_map(|test| list(&test["promql_expr_test"]));
        let expressions: Vec<String> =
            queries.map(|query| query["expr"].as_str().unwrap().to_owned()).collect();
        assert!(
            expressions.iter().any(|expression| expression.contains("(ALERTS")),
            "{path}: add a promql_expr_test that counts ALERTS, as in down.yaml"
        );
    }
}

/// A daemon still exports what was recorded, or written.
#[test]
fn each_series_of_the_alert_tests_is_exported() {
    let exported = exported();
    for (path, tests) in alert_tests() {
        for series in tests.iter().flat_map(|test| list(&test["input_series"])) {
            check(&path, series["series"].as_str().unwrap(), &exported);
        }
    }
}

#[test]
fn metric_names_are_read_from_expressions() {
    let seen = |text: &str| {
        named(text)
            .into_iter()
            .map(|(name, labels)| format!("{name}[{}]", labels.join(",")))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        seen(
            "sum by (le) (rate(pause_sandboxer_x_bucket{method=\"Start\",instance=\
             ~\"$node\"}[5m])) \
             > 0 and up{job=\"a\"} == 0"
        ),
        ["pause_sandboxer_x_bucket[method,instance]", "up[job]"]
    );
    assert_eq!(seen("process_x / process_y"), ["process_x[]", "process_y[]"]);
}
