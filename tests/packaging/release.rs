//! The files of a release beside the packages: the installer's image, and one version everywhere.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::file;
use super::kubernetes::DIR;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

fn script(path: &str, arguments: &[&Path]) -> Output {
    let output = Command::new(Path::new(ROOT).join(path))
        .args(arguments)
        .env("SOURCE_DATE_EPOCH", "86400")
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    output
}

/// The files of a tar, all of which are of root and of the commit's time.
fn files(archive: &[u8]) -> BTreeMap<String, Vec<u8>> {
    let mut archive = tar::Archive::new(archive);
    let mut files = BTreeMap::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        assert_eq!(entry.header().mtime().unwrap(), 86400);
        assert_eq!((entry.header().uid().unwrap(), entry.header().gid().unwrap()), (0, 0));
        let (mut bytes, name) = (Vec::new(), entry.path().unwrap().display().to_string());
        entry.read_to_end(&mut bytes).unwrap();
        files.insert(name, bytes);
    }
    files
}

fn json(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap()
}

/// The archive of two architectures, with two layers each.
fn archive(directory: &Path, name: &str) -> Vec<u8> {
    for layer in ["amd64", "arm64", "ours"] {
        fs::write(directory.join(layer), layer.repeat(100)).unwrap();
    }
    let [amd64, arm64, ours] = ["amd64", "arm64", "ours"].map(|layer| directory.join(layer));
    let path = directory.join(name);
    script(
        &format!("{DIR}/oci-archive"),
        &[
            &path,
            Path::new("registry.example/image:1.2"),
            Path::new("/usr/bin/run"),
            Path::new("amd64"),
            &amd64,
            &ours,
            Path::new("--"),
            Path::new("arm64"),
            &arm64,
            &ours,
        ],
    );
    fs::read(path).unwrap()
}

#[test]
fn every_descriptor_of_the_installers_image_fits_its_blob() {
    let directory = tempfile::tempdir().unwrap();
    let bytes = archive(directory.path(), "one.tar");
    assert_eq!(bytes, archive(directory.path(), "two.tar"), "it is the same every time");
    let files = files(&bytes);
    let blob = |descriptor: &Value| {
        let digest = descriptor["digest"].as_str().unwrap();
        let bytes = &files[&format!("blobs/{}", digest.replace(':', "/"))];
        let sum: String = Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(digest, format!("sha256:{sum}"));
        assert_eq!(descriptor["size"], bytes.len());
        bytes.clone()
    };
    assert_eq!(json(&files["oci-layout"])["imageLayoutVersion"], "1.0.0");
    let top = json(&files["index.json"]);
    let image = &top["manifests"][0];
    assert_eq!(image["annotations"]["io.containerd.image.name"], "registry.example/image:1.2");
    assert_eq!(image["annotations"]["org.opencontainers.image.ref.name"], "1.2");
    let index = json(&blob(image));
    let manifests = index["manifests"].as_array().unwrap();
    assert_eq!(manifests.len(), 2);
    for (entry, architecture) in manifests.iter().zip(["amd64", "arm64"]) {
        assert_eq!(entry["platform"]["architecture"], architecture);
        let manifest = json(&blob(entry));
        let config = json(&blob(&manifest["config"]));
        assert_eq!(config["architecture"], architecture);
        assert_eq!(config["created"], "1970-01-02T00:00:00Z");
        assert_eq!(config["config"]["Entrypoint"][0], "/usr/bin/run");
        let layers = manifest["layers"].as_array().unwrap();
        let diffs = config["rootfs"]["diff_ids"].as_array().unwrap();
        assert_eq!((layers.len(), diffs.len()), (2, 2));
        for ((layer, diff), content) in layers.iter().zip(diffs).zip([architecture, "ours"]) {
            // gzip's own magic number: compressed, and named so.
            assert_eq!(blob(layer)[..2], [0x1f, 0x8b]);
            assert_eq!(layer["mediaType"], "application/vnd.oci.image.layer.v1.tar+gzip");
            let sum = Sha256::digest(content.repeat(100));
            let sum: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(*diff, format!("sha256:{sum}"), "the digest before the compression");
        }
    }
}

/// The image has each file that the scripts place or run, and nothing that does not exist.
#[test]
fn the_image_has_what_the_scripts_need() {
    let image = file(&format!("{DIR}/installer-image")).replace("\\\n", " ");
    let sources: BTreeSet<&str> = image
        .split_whitespace()
        .filter(|word| word.starts_with("packaging/") && word.contains('.'))
        .inspect(|path| assert!(Path::new(ROOT).join(path).is_file(), "{path}"))
        .collect();
    let installer = file(&format!("{DIR}/install.sh"));
    for (source, placed) in [
        ("packaging/systemd/pause-sandboxer.service", true),
        ("packaging/systemd/pause-sandboxer.socket", true),
        ("packaging/kubernetes/install.sh", false),
        ("packaging/kubernetes/rollout.sh", false),
        ("packaging/kubernetes/plan.jq", false),
    ] {
        assert!(sources.contains(source), "{source}");
        let name = source.rsplit('/').next().unwrap();
        assert!(!placed || installer.contains(name), "{name}");
    }
    for program in ["/pause-sandboxer ", "/pause-sandboxer-runc-shim "] {
        assert!(image.contains(&format!("target/programs/\"$1\"{program}")), "{program}");
    }
}

#[test]
fn one_version_everywhere() {
    let version = env!("CARGO_PKG_VERSION");
    let changes = file("CHANGELOG.md");
    let newest = changes.lines().find_map(|line| line.strip_prefix("## ")).unwrap();
    assert!(newest == version || newest == "Unreleased", "CHANGELOG.md begins with {newest}");
    assert!(changes.contains(&format!("\n## {version}\n")), "CHANGELOG.md has no {version}");
    let chart: BTreeMap<String, Value> =
        serde_yaml_ng::from_str(&file(&format!("{DIR}/chart/Chart.yaml"))).unwrap();
    assert_eq!((&chart["version"], &chart["appVersion"]), (&version.into(), &version.into()));
    let shim: toml::Table = toml::from_str(&file("runc-shim/Cargo.toml")).unwrap();
    assert_eq!(shim["package"]["version"].as_str(), Some(version));
}
