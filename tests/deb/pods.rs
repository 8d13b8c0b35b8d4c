//! kubelet's part: pods and containers, with crictl as at a terminal.

use std::fs;

use super::{eventually, quiet, run, typed};

/// The node has no pod network.
const NAMESPACES: &str = r#"{"namespace_options": {"network": 2, "pid": 1}}"#;

/// crictl on the node.
pub struct Pods;

impl Pods {
    /// Installs crictl.
    pub fn new() -> Self {
        fs::copy("crictl", "/usr/local/bin/crictl").unwrap();
        // The machine may be a slow one.
        let settings = "runtime-endpoint: unix:///run/containerd/containerd.sock\n\
                        image-endpoint: unix:///run/containerd/containerd.sock\ntimeout: 60\n";
        fs::write("/etc/crictl.yaml", settings).unwrap();
        Self
    }

    /// Runs a pod, of the default handler if none is named; its id, or the error.
    pub fn run(&self, name: &str, handler: &str) -> Result<String, String> {
        self.run_below(&format!("/kubepods/{name}"), name, handler)
    }

    /// The same with this parent of its cgroup.
    pub fn run_below(&self, parent: &str, name: &str, handler: &str) -> Result<String, String> {
        let config = format!(
            r#"{{"metadata": {{"name": "{name}", "namespace": "default", "uid": "uid-{name}"}},
 "linux": {{"cgroup_parent": "{parent}", "security_context": {NAMESPACES}}}}}
"#
        );
        fs::write(format!("{name}.json"), config).unwrap();
        let option =
            if handler.is_empty() { String::new() } else { format!("--runtime {handler} ") };
        let (code, text) = typed(&format!("crictl runp {option}{name}.json"));
        let text = text.trim().to_owned();
        if code == 0 { Ok(text) } else { Err(text) }
    }

    /// A container that does nothing; its id.
    pub fn container(&self, pod: &str, id: &str, name: &str) -> String {
        // It ends when the node goes down, as kubelet has containers end: a sleep that is process 1
        // would hold the reboot up.
        let config = format!(
            r#"{{"metadata": {{"name": "{name}"}}, "image": {{"image": "{}"}},
 "command": ["sh", "-c", "trap 'exit 0' TERM; while :; do sleep 1; done"],
 "linux": {{"security_context": {NAMESPACES}}}}}
"#,
            kit::TEST_IMAGE
        );
        fs::write(format!("{name}.json"), config).unwrap();
        let made = run(&format!("crictl create {} {name}.json {pod}.json", short(id)));
        run(&format!("crictl start {}", short(&made)));
        made
    }

    pub fn exec(&self, container: &str, command: &[&str]) -> String {
        quiet(&format!("crictl exec -s {container} {}", command.join(" ")))
    }

    /// Names and states of all pods.
    pub fn list(&self) -> Vec<(String, bool)> {
        run("crictl pods");
        let all: serde_json::Value = serde_json::from_str(&quiet("crictl pods -o json")).unwrap();
        let pods = all["items"].as_array().unwrap().iter().map(|pod| {
            let name = pod["metadata"]["name"].as_str().unwrap().to_owned();
            (name, pod["state"] == "SANDBOX_READY")
        });
        let mut pods: Vec<_> = pods.collect();
        pods.sort();
        pods
    }

    pub fn ready(&self, name: &str) {
        eventually(&format!("{name} is ready"), || {
            let ready = quiet(&format!("crictl pods -q --name {name} --state ready 2>&1"));
            if ready.lines().count() == 1 { Ok(()) } else { Err(ready) }
        });
    }

    pub fn remove(&self, _name: &str, id: &str) {
        // containerd may still wait before it connects to a new daemon; kubelet repeats its calls.
        eventually("containerd answers for the pod", || {
            let asked = quiet(&format!("crictl inspectp {} 2>&1 >/dev/null || echo no", short(id)));
            if asked.is_empty() { Ok(()) } else { Err(asked) }
        });
        run(&format!("crictl rmp --force {}", short(id)));
    }

    /// containerd answers.
    pub fn up(&self) {
        eventually("containerd answers", || {
            let answer = quiet("crictl version 2>&1");
            if answer.contains("RuntimeVersion") { Ok(()) } else { Err(answer) }
        });
    }
}

/// An id as crictl's tables show it.
fn short(id: &str) -> &str {
    &id[..13]
}
