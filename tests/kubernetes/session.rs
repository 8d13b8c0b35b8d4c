//! kubectl and `pause-sandboxer` as at a terminal of the node. What was typed and what came is
//! written down; `docs/session.md` has it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::Run;
use crate::cluster::{Cluster, until};
use crate::side::{Facts, LIMIT, Side, limit};

pub(crate) const CASES: &[(&str, Run)] = &[("session", Run::Both(session))];

const SANDBOXER: &str = env!("CARGO_BIN_EXE_pause-sandboxer");

/// A pod of the handler. The other one, `plain`, names no class.
const WEB: &str = r#"apiVersion: v1
kind: Pod
metadata:
  name: web
spec:
  runtimeClassName: runc-pause
  containers:
  - name: main
    image: IMAGE
    command: ["sh", "-c", "echo ready; trap 'exit 0' TERM; sleep 100000 & wait"]
"#;

struct Terminal<'a> {
    cluster: &'a Cluster,
    directory: PathBuf,
    shown: String,
}

impl Terminal<'_> {
    /// Runs a line of shell; its output.
    fn quiet(&self, line: &str) -> Result<String> {
        let kubectl = self.cluster.kubectl_command(&[]);
        let mut path = std::env::var("PATH").unwrap_or_default();
        for program in [Path::new(kubectl.get_program()), Path::new(SANDBOXER)] {
            path = format!("{}:{path}", program.parent().context("a path")?.display());
        }
        let mut shell = Command::new("sh");
        for (name, value) in kubectl.get_envs() {
            shell.env(name, value.unwrap_or_default());
        }
        let shell = shell
            .current_dir(&self.directory)
            .args(["-c", &format!("exec 2>&1; {line}")])
            .env("PATH", path);
        let done = shell.output()?;
        let text = String::from_utf8_lossy(&done.stdout).into_owned();
        ensure!(done.status.success(), "{line}: {}: {text}", done.status);
        Ok(text)
    }

    /// The same, shown.
    fn run(&mut self, line: &str) -> Result<String> {
        let text = self.quiet(line)?;
        self.shown += &format!("# {line}\n{text}");
        Ok(text)
    }
}

fn session(sides: &[Side; 2]) -> Result<[Facts; 2]> {
    let cluster = sides[0].cluster;
    let directory = cluster.file("terminal");
    fs::create_dir_all(&directory)?;
    let web = WEB.replace("IMAGE", kit::TEST_IMAGE);
    let plain =
        web.replace("name: web", "name: plain").replace("  runtimeClassName: runc-pause\n", "");
    fs::write(directory.join("web.yaml"), web)?;
    fs::write(directory.join("plain.yaml"), plain)?;
    let [kubernetes, containerd] = cluster.versions()?;
    let shown = format!("Kubernetes {kubernetes} with containerd {containerd}\n");
    let mut terminal = Terminal { cluster, directory, shown };
    terminal.run("kubectl get runtimeclass")?;
    terminal.run("cat web.yaml")?;
    terminal.run("kubectl apply -f web.yaml -f plain.yaml")?;
    let ready = "kubectl wait --for=condition=Ready pod/web pod/plain";
    terminal.quiet(&format!("{ready} {}", limit()))?;
    let pods = terminal.run("kubectl get pods")?;
    ensure!(pods.matches("1/1").count() == 2, "{pods}");
    let list = terminal.run("pause-sandboxer list")?;
    ensure!(list.contains("web") && !list.contains("plain"), "{list}");
    let events = terminal.run("kubectl describe pod web | sed -n '/^Events:/,$p'")?;
    ensure!(events.contains("Started"), "{events}");
    let hostname = terminal.run("kubectl exec web -- hostname")?;
    ensure!(hostname.trim() == "web", "{hostname}");
    let logs = terminal.run("kubectl logs web")?;
    ensure!(logs.trim() == "ready", "{logs}");
    if cluster.is_node() {
        terminal.run("systemctl restart pause-sandboxer containerd")?;
        cluster.kubelet_answers()?;
        until("containerd answers for the pods", LIMIT, || {
            terminal.quiet("kubectl exec web -- true").map(drop)
        })?;
        terminal.run("kubectl get pods")?;
        let after = terminal.run("pause-sandboxer list")?;
        let pause = |list: &str| {
            let row = list.lines().find(|line| line.contains(" web ")).unwrap_or_default();
            row.split_whitespace().take(5).map(str::to_owned).collect::<Vec<_>>()
        };
        ensure!(pause(&list) == pause(&after), "{list}\n{after}");
    }
    terminal.run("kubectl delete pod web plain")?;
    until("the sandbox is gone", LIMIT, || {
        let list = terminal.quiet("pause-sandboxer list")?;
        ensure!(!list.contains("web"), "{list}");
        Ok(())
    })?;
    terminal.run("pause-sandboxer list")?;
    if let Some(results) = std::env::var_os("RESULTS_DIR").map(PathBuf::from) {
        fs::create_dir_all(&results)?;
        fs::write(results.join("kubernetes-session.txt"), &terminal.shown)?;
    }
    let mut facts = Facts::default();
    facts.add("pods", 2);
    Ok([facts.clone(), facts])
}
