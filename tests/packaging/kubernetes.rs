//! The manifests and the pages about them: every name leads somewhere.

use std::collections::BTreeSet;
use std::path::Path;

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
    let default: toml::Table =
        toml::from_str(&file(&format!("{DIR}/default-handler.toml"))).unwrap();
    let default =
        &default["plugins"]["io.containerd.cri.v1.runtime"]["containerd"]["default_runtime_name"];
    assert_eq!(default.as_str(), Some(handler));
}

#[test]
fn kustomizations_name_existing_files() {
    for dir in ["", "installer/", "uninstaller/"] {
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
    let set = one("installer/daemonset.yaml");
    let (name, spec) = (&set["metadata"]["name"], &set["spec"]["template"]["spec"]);
    assert_eq!(
        set["spec"]["selector"]["matchLabels"],
        set["spec"]["template"]["metadata"]["labels"]
    );
    let container = &spec["containers"][0];
    let images = one("installer/kustomization.yaml");
    assert_eq!(container["image"], images["images"][0]["name"]);
    assert_eq!(images["images"][0]["newTag"], env!("CARGO_PKG_VERSION"));
    assert_eq!(
        (&spec["hostPID"], &container["securityContext"]["privileged"]),
        (&true.into(), &true.into())
    );
    assert_eq!(container["volumeMounts"][0]["name"], spec["volumes"][0]["name"]);
    // The account that it runs as is made, and may do what the script does.
    let rbac = documents("installer/rbac.yaml");
    let account = &spec["serviceAccountName"];
    assert!(
        rbac.iter().any(|of| of["kind"] == "ServiceAccount" && of["metadata"]["name"] == *account)
    );
    assert!(
        rbac.iter()
            .any(|of| of["kind"] == "ClusterRoleBinding" && of["subjects"][0]["name"] == *account)
    );
    assert!(
        rbac.iter()
            .any(|of| of["kind"] == "ClusterRole" && of["rules"][0]["resources"][0] == "nodes")
    );
    // What the patch of the uninstaller replaces is there.
    let patch = &one("uninstaller/kustomization.yaml")["patches"][0];
    assert_eq!(patch["target"]["name"], *name);
    let operations: Vec<Value> = serde_yaml_ng::from_str(patch["patch"].as_str().unwrap()).unwrap();
    for operation in operations {
        let path = operation["path"].as_str().unwrap();
        assert!(set.pointer(path).is_some(), "{path}");
    }
}

#[test]
fn the_image_holds_what_the_script_installs() {
    let (image, script) = (file(&format!("{DIR}/Dockerfile")), file(&format!("{DIR}/install.sh")));
    let copied: BTreeSet<&str> = image
        .lines()
        .filter_map(|line| line.strip_prefix("COPY "))
        .flat_map(|line| line.split(' ').rev().skip(1))
        .inspect(|source| {
            let built = source.starts_with("target/");
            assert!(
                built || Path::new(env!("CARGO_MANIFEST_DIR")).join(source).is_file(),
                "{source}"
            );
        })
        .map(|source| source.rsplit('/').next().unwrap())
        .collect();
    for name in [
        "pause-sandboxer",
        "pause-sandboxer-runc-shim",
        "pause-sandboxer.service",
        "pause-sandboxer.socket",
        "pause-sandboxer.toml",
        "install.sh",
    ] {
        assert!(copied.contains(name) && script.contains(name), "{name}");
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
