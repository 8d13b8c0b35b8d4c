//! The manifests and the pages about them: every name leads somewhere.

use std::path::Path;

use clap::CommandFactory as _;
use serde::Deserialize as _;
use serde_json::{Value, json};

use super::file;

pub(super) const DIR: &str = "packaging/kubernetes";

const IMAGE: &str =
    concat!("registry.example/pause-sandboxer-installer:", env!("CARGO_PKG_VERSION"));

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
    let script = file(&format!("{DIR}/install.sh"));
    for label in labels.keys() {
        assert!(script.contains(&format!("\nlabel={label}\n")), "no script sets {label}");
        // On nodes with the package an administrator sets it, as documented.
        let by_hand =
            format!("kubectl label node NODE {label}={}", labels[label].as_str().unwrap());
        for page in ["README.md", "docs/install.md", "docs/kubernetes.md"] {
            assert!(file(page).contains(&by_hand), "{page} does not contain {by_hand}");
        }
    }
}

#[test]
fn kustomizations_name_existing_files() {
    for dir in ["", "installer/", "uninstaller/", "rbac/"] {
        let kustomization = one(&format!("{dir}kustomization.yaml"));
        for resource in kustomization["resources"].as_array().unwrap() {
            let path = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join(DIR)
                .join(dir)
                .join(resource.as_str().unwrap());
            let path = if path.is_dir() { path.join("kustomization.yaml") } else { path };
            assert!(path.is_file(), "{}", path.display());
        }
    }
}

#[test]
fn the_parts_of_the_installer_fit_together() {
    let (rbac, script) = (documents("rbac/rbac.yaml"), file(&format!("{DIR}/rollout.sh")));
    for dir in ["installer", "uninstaller"] {
        let set = one(&format!("{dir}/daemonset.yaml"));
        let spec = &set["spec"]["template"]["spec"];
        assert_eq!(set["metadata"]["name"], "pause-sandboxer-installer", "one replaces the other");
        assert_eq!(
            set["spec"]["selector"]["matchLabels"],
            set["spec"]["template"]["metadata"]["labels"]
        );
        let container = &spec["containers"][0];
        assert_eq!(container["image"], IMAGE);
        assert_eq!(
            (&spec["hostPID"], &container["securityContext"]["privileged"]),
            (&true.into(), &true.into())
        );
        assert_eq!(container["volumeMounts"][0]["name"], spec["volumes"][0]["name"]);
        let command = container["args"][0].as_str().unwrap();
        assert!(script.contains(&format!("\n{command})\n")), "rollout.sh has no {command}");
        assert_eq!(container["readinessProbe"]["exec"]["command"][0], "rollout.sh");
        let account = &spec["serviceAccountName"];
        let of_account = |kind: &str, pointer: &str| {
            rbac.iter().any(|one| one["kind"] == kind && one.pointer(pointer) == Some(account))
        };
        assert!(of_account("ServiceAccount", "/metadata/name"));
        assert!(of_account("ClusterRoleBinding", "/subjects/0/name"));
        assert!(of_account("RoleBinding", "/subjects/0/name"));
    }
}

/// The service account may do what the scripts ask of the API server, and nothing else.
#[test]
fn the_account_may_do_what_the_scripts_do() {
    let rbac = documents("rbac/rbac.yaml");
    let rules = |kind: &str| {
        let role = rbac.iter().find(|object| object["kind"] == kind).unwrap();
        role["rules"].as_array().unwrap().clone()
    };
    assert_eq!(
        rules("ClusterRole"),
        [json!({ "apiGroups": [""], "resources": ["nodes"], "verbs": ["patch"] })]
    );
    let group = json!(["coordination.k8s.io"]);
    let leases = json!(["leases"]);
    let name = env_of("installer", "LEASE").unwrap()["value"].clone();
    assert_eq!(
        rules("Role"),
        [
            json!({ "apiGroups": group, "resources": leases, "verbs": ["create"] }),
            json!({ "apiGroups": group, "resources": leases, "resourceNames": [name],
                "verbs": ["get", "delete"] }),
        ]
    );
}

/// Returns a variable of the container of `dir`.
fn env_of(dir: &str, name: &str) -> Option<Value> {
    let set = one(&format!("{dir}/daemonset.yaml"));
    let env = set.pointer("/spec/template/spec/containers/0/env").unwrap().as_array().unwrap();
    env.iter().find(|variable| variable["name"] == name).cloned()
}

/// A variable that a script needs and the pod does not set would end it, or change what it does.
#[test]
fn the_pod_sets_the_variables_of_the_rollout() {
    let script = file(&format!("{DIR}/rollout.sh"));
    for name in ["LEASE", "NAMESPACE", "POD_NAME", "POD_UID", "NODE_NAME"] {
        assert!(script.contains(&format!("${name}")) || script.contains(&format!("${{{name}-}}")));
        assert!(env_of("installer", name).is_some(), "{name}");
        assert_eq!(env_of("uninstaller", name), env_of("installer", name), "{name}");
    }
}

#[test]
fn a_node_that_fails_stops_an_update_and_one_whose_pods_stay_no_removal() {
    for (dir, unavailable) in [("installer", json!(1)), ("uninstaller", json!("100%"))] {
        let set = one(&format!("{dir}/daemonset.yaml"));
        let strategy = &set["spec"]["updateStrategy"];
        assert_eq!(strategy["type"], "RollingUpdate");
        assert_eq!(strategy["rollingUpdate"]["maxUnavailable"], unavailable);
        assert!(set["spec"]["minReadySeconds"].as_u64().unwrap() > 0);
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
    for dir in ["installer", "uninstaller"] {
        let spec = &one(&format!("{dir}/daemonset.yaml"))["spec"]["template"]["spec"];
        let period = spec["terminationGracePeriodSeconds"].as_u64().expect("30 s by default");
        assert!(period > 2 * seconds, "{dir}: {period} s for {seconds} s twice");
    }
}

/// With `serial: false` there is no Lease, and all nodes change at once.
#[test]
fn the_notes_of_the_chart_name_the_lease_only_where_there_is_one() {
    const SERIAL: &str = "{{- if .Values.serial }}";
    let notes = file(&format!("{DIR}/chart/templates/NOTES.txt"));
    let (mut conditions, mut seen) = (Vec::new(), 0);
    for line in notes.lines() {
        if line.starts_with("{{- if ") {
            conditions.push((line, true));
        } else if line.starts_with("{{- else ") {
            conditions.last_mut().unwrap().1 = false;
        } else if line.starts_with("{{- end ") {
            conditions.pop();
        } else if ["Lease", " lease ", "one node at a time"].iter().any(|part| line.contains(part))
        {
            assert!(conditions.contains(&(SERIAL, true)), "{line}");
            seen += 1;
        }
    }
    assert!(seen >= 5 && conditions.is_empty(), "{seen} {conditions:?}");
}

/// Without the class the API server rejects the replacements of pods that name it.
#[test]
fn a_removal_keeps_the_class_until_no_workload_names_it() {
    let template = file(&format!("{DIR}/chart/templates/runtimeclass.yaml"));
    assert!(!template.contains(".mode"), "{template}");
    let page = file("docs/kubernetes.md");
    let (_, page) = page.split_once("\n## Uninstall\n").unwrap();
    let at = |part: &str| page.find(part).unwrap_or_else(|| panic!("no {part} in\n{page}"));
    let first = at("Remove `runtimeClassName: runc-pause` from all workloads");
    for later in ["--set mode=uninstall", "apply -k remove"] {
        assert!(first < at(later), "{later}");
        assert!(at(later) < page.rfind("runtimeclass.yaml").unwrap(), "{later}");
    }
}

/// kustomize refuses absolute paths, also in overlays.
#[test]
fn the_page_names_resources_by_relative_paths() {
    let page = file("docs/kubernetes.md");
    let named: Vec<&str> =
        page.lines().filter_map(|line| line.trim().strip_prefix("resources: [")).collect();
    assert!(!named.is_empty());
    assert!(named.iter().all(|rest| rest.starts_with("../")), "{named:?}");
}

#[test]
fn the_pages_warn_of_kubelet_on_a_node_without_the_label() {
    for page in ["docs/install.md", "docs/kubernetes.md"] {
        let text = file(page).split_whitespace().collect::<Vec<_>>().join(" ");
        let warning = "terminates the running pods of the class** (reason `NodeAffinity`)";
        assert!(text.contains(warning), "{page}");
    }
}
