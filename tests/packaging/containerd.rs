//! The drop-in, merged by containerd itself into what nodes have for a config.

use std::fs;
use std::process::Command;

use toml::{Table, Value};

/// Returns `main` merged with the drop-in, as `containerd config dump` prints it.
fn merged(main: &str) -> Table {
    merged_with("pause-sandboxer", main)
}

fn merged_with(drop_in: &str, main: &str) -> Table {
    let root = env!("CARGO_MANIFEST_DIR");
    let parts = kit::Parts::get().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("config.toml");
    fs::write(&path, format!("imports = [\"{root}/packaging/containerd/{drop_in}.toml\"]\n{main}"))
        .unwrap();
    let dump = Command::new(parts.program("containerd"))
        .arg("--config")
        .arg(&path)
        .args(["config", "dump"])
        .output()
        .unwrap();
    assert!(dump.status.success(), "{}", String::from_utf8_lossy(&dump.stderr));
    toml::from_str(std::str::from_utf8(&dump.stdout).unwrap()).unwrap()
}

fn runtime(merged: &Table) -> &Value {
    &merged["plugins"]["io.containerd.cri.v1.runtime"]
}

fn has_our_handler(merged: &Table) {
    let handler = &runtime(merged)["containerd"]["runtimes"]["runc-pause"];
    assert_eq!(handler["sandboxer"].as_str(), Some("pause-sandboxer"));
    assert_eq!(handler["runtime_type"].as_str(), Some("io.containerd.runc.v2"));
    let proxy = &merged["proxy_plugins"]["pause-sandboxer"];
    assert_eq!(proxy["type"].as_str(), Some("sandbox"));
    assert_eq!(
        proxy["address"].as_str(),
        pause_sandboxer::config::Config::default().socket.to_str()
    );
}

#[test]
fn into_a_config_of_version_3() {
    let cri = "[plugins.\"io.containerd.cri.v1.runtime\"";
    let merged = merged(&format!(
        "version = 3\n{cri}.cni]\nconf_dir = \"/x\"\n{cri}.containerd.runtimes.runc]\n\
         runtime_type = \"io.containerd.runc.v2\"\n{cri}.containerd.runtimes.runc.options]\n\
         SystemdCgroup = true\n"
    ));
    has_our_handler(&merged);
    assert_eq!(runtime(&merged)["cni"]["conf_dir"].as_str(), Some("/x"));
    // The default handler is as it was.
    assert_eq!(runtime(&merged)["containerd"]["default_runtime_name"].as_str(), Some("runc"));
    let runc = &runtime(&merged)["containerd"]["runtimes"]["runc"];
    assert_eq!(runc["options"]["SystemdCgroup"].as_bool(), Some(true));
    assert_ne!(runc["sandboxer"].as_str(), Some("pause-sandboxer"));
}

/// The config file is that of Debian's package.
#[test]
fn into_a_config_of_version_2_without_handlers() {
    let merged = merged(
        "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = \"/usr/lib/cni\"\n\
         conf_dir = \"/etc/cni/net.d\"\n",
    );
    has_our_handler(&merged);
    assert_eq!(runtime(&merged)["cni"]["bin_dirs"][0].as_str(), Some("/usr/lib/cni"));
    assert!(runtime(&merged)["containerd"]["runtimes"].get("runc").is_some());
}

/// `check` warns of this. If containerd merges it one day, the warning can go.
#[test]
fn into_a_config_of_version_2_with_handlers_it_would_hide_them() {
    let merged = merged(
        "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.other]\n\
         runtime_type = \"io.containerd.runc.v2\"\n",
    );
    has_our_handler(&merged);
    let hidden = runtime(&merged)["containerd"]["runtimes"].get("other").is_none();
    let version = Command::new(kit::Parts::get().unwrap().program("containerd"))
        .arg("--version")
        .output()
        .unwrap();
    let version = String::from_utf8(version.stdout).unwrap();
    let old = ["2.0.", "2.1.", "2.2."]
        .iter()
        .any(|begin| version.split(' ').nth(2).unwrap().trim_start_matches('v').starts_with(begin));
    assert_eq!(hidden, old, "{version}");
}

/// The drop-in of the shim alone.
#[test]
fn the_shim_alone_has_the_built_in_controller() {
    let page = super::file("docs/shim.md");
    for main in ["version = 3\n", "version = 2\n"] {
        let merged = merged_with("runc-small", main);
        let handler = &runtime(&merged)["containerd"]["runtimes"]["runc-small"];
        assert_eq!(handler["runtime_type"].as_str(), Some("io.containerd.runc.v2"));
        let path = handler["runtime_path"].as_str().unwrap();
        assert!(path.starts_with("/usr/bin/") && page.contains(&format!("`{path}`")), "{path}");
        let sandboxer = handler.get("sandboxer").and_then(Value::as_str).unwrap_or_default();
        assert!(["", "podsandbox"].contains(&sandboxer), "{sandboxer}");
        assert!(runtime(&merged)["containerd"]["runtimes"].get("runc").is_some());
    }
}
