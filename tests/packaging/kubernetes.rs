//! The manifests and the pages about them: every name leads somewhere.

use clap::CommandFactory as _;
use pause_sandboxer::config::Config;
use serde::Deserialize as _;
use serde_json::Value;

use super::file;

pub(super) const DIR: &str = "packaging/kubernetes";

/// The documents of a manifest.
fn documents(path: &str) -> Vec<Value> {
    let text = file(&format!("{DIR}/{path}"));
    serde_yaml_ng::Deserializer::from_str(&text)
        .map(|document| Value::deserialize(document).unwrap_or_else(|e| panic!("{path}: {e}")))
        .collect()
}

fn one(path: &str) -> Value {
    let mut documents = documents(path);
    assert_eq!(documents.len(), 1, "{path}");
    documents.remove(0)
}

pub(super) fn drop_in() -> toml::Table {
    toml::from_str(&file("packaging/containerd/pause-sandboxer.toml")).unwrap()
}

#[test]
fn the_runtime_class_names_the_handler_and_the_label() {
    let class = one("runtimeclass.yaml");
    let handler = class["handler"].as_str().unwrap();
    assert!(
        drop_in()["plugins"]["io.containerd.cri.v1.runtime"]["containerd"]["runtimes"]
            .get(handler)
            .is_some()
    );
    let labels = class["scheduling"]["nodeSelector"].as_object().unwrap();
    let values = values();
    assert_eq!(values["runtimeClass"]["handler"], handler);
    for label in labels.keys() {
        assert_eq!(values["nodeLabel"], **label, "the chart sets another");
        // On nodes with the package an administrator sets it, as documented.
        let by_hand =
            format!("kubectl label node NODE {label}={}", labels[label].as_str().unwrap());
        for page in ["README.md", "docs/install.md", "docs/kubernetes.md"] {
            assert!(file(page).contains(&by_hand), "{page} does not contain {by_hand}");
        }
    }
}

fn values() -> Value {
    one("chart/values.yaml")
}

/// Those of the daemon, except what the installer decides: its units have the socket, and its
/// removal the state directory.
#[test]
fn the_chart_has_every_setting_of_the_daemon() {
    let schema: Value =
        serde_json::from_str(&file(&format!("{DIR}/chart/values.schema.json"))).unwrap();
    let config = &schema["properties"]["config"];
    assert_eq!(config["additionalProperties"], false);
    let known = config["properties"].as_object().unwrap();
    let settings = Config::default().values();
    let mut wanted: Vec<&str> = settings.keys().map(String::as_str).collect();
    wanted.retain(|key| !["socket", "state_dir"].contains(key));
    wanted.sort_unstable();
    let mut found: Vec<&str> = known.keys().map(String::as_str).collect();
    found.sort_unstable();
    assert_eq!(found, wanted);
    for (key, schema) in known {
        let kind = match &settings[key] {
            toml::Value::Boolean(_) => "boolean",
            toml::Value::Integer(_) => "integer",
            toml::Value::Array(_) => "array",
            _ => "string",
        };
        assert!(schema["type"] == kind || schema["enum"][0].is_string(), "{key}: {schema}");
    }
}

/// A pod that is killed before that leaves its node half changed: `enable` and the restoration of
/// its files after a failure take as long as `--timeout` each.
#[test]
fn a_pod_has_the_time_to_complete_what_it_has_begun() {
    let timeout = pause_sandboxer::cli::Cli::command();
    let enable = timeout.find_subcommand("enable").unwrap();
    let within = enable.get_arguments().find(|arg| arg.get_long() == Some("timeout")).unwrap();
    let seconds: u64 =
        within.get_default_values()[0].to_str().unwrap().trim_end_matches('s').parse().unwrap();
    let template = file(&format!("{DIR}/chart/templates/_helpers.tpl"));
    let number = |key: &str| -> u64 {
        let (_, rest) = template.split_once(&format!("{key}: ")).expect(key);
        rest.lines().next().unwrap().parse().unwrap()
    };
    assert!(number("terminationGracePeriodSeconds") > 2 * seconds);
    assert!(number("activeDeadlineSeconds") > 4 * seconds);
}

/// The account of the coordinator may do what the script asks, and the statuses of one script are
/// those that the other and the Job know.
#[test]
fn the_parts_of_the_installer_fit_together() {
    let template = file(&format!("{DIR}/chart/templates/_helpers.tpl"));
    let (rollout, install) =
        (file(&format!("{DIR}/rollout.sh")), file(&format!("{DIR}/install.sh")));
    for (name, status) in [("needed", 75), ("unfit", 76), ("has_package", 77)] {
        assert!(install.contains(&format!("\n{name}={status}\n")), "{name}");
        assert!(rollout.contains(&format!("-{status})")), "{status}");
    }
    assert!(template.contains("values: [1, 75, 76, 77]"));
    assert!(template.contains("values: [3]") && rollout.contains("exit 3"));
    for name in ["DIRECTORY", "SETTINGS", "ENABLE_OPTIONS", "SELFTEST_OPTIONS"] {
        assert!(install.contains(&format!("${{{name}")), "{name}");
        assert!(template.contains(&format!("- name: {name}\n")), "{name}");
    }
    for name in ["RELEASE", "NAMESPACE", "REVISION", "NODES", "LABEL", "CLASS", "PARALLEL"] {
        assert!(rollout.contains(&format!("\"${name}")) || rollout.contains(&format!("${name}")));
        assert!(template.contains(&format!("- name: {name}\n")), "{name}");
    }
}

/// Without the class the API server rejects the replacements of pods that name it.
#[test]
fn a_removal_keeps_the_class() {
    let template = file(&format!("{DIR}/chart/templates/runtimeclass.yaml"));
    assert!(!template.contains(".mode"), "{template}");
}
