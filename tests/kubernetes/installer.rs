//! The DaemonSets that install and remove the sandboxer, with the image that
//! `packaging/kubernetes/installer-image` builds, which INSTALLER_IMAGE names. The node has no
//! systemd: what the script and `enable` ask of `systemctl` is answered here.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use serde_json::json;

use crate::Run;
use crate::cluster::{Cluster, NODE, output, until};
use crate::side::{Facts, LIMIT, Side, at, sleeping};

pub(crate) const CASES: &[(&str, Run)] = &[("installer_and_uninstaller", Run::Both(installer))];

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
/// The files that are placed on the node.
const PLACED: [&str; 5] = [
    "/usr/local/bin/pause-sandboxer",
    "/etc/systemd/system/pause-sandboxer.service",
    "/etc/systemd/system/pause-sandboxer.socket",
    "/etc/containerd/conf.d/pause-sandboxer.toml",
    "/usr/local/bin/pause-sandboxer-runc-shim",
];
const CONFIG: &str = "/etc/containerd/config.toml";
/// Where systemd runs, this is there (sd_booted(3)).
const BOOTED: &str = "/run/systemd/system";
const IMPORTS: &str = "imports = [\"/etc/containerd/conf.d/*.toml\"]\n";
const LEASE: &str = "pause-sandboxer-rollout";
/// Of the pods of the DaemonSet.
const LABEL: &str = "app.kubernetes.io/component=installer";

fn in_packaging(file: &str) -> String {
    format!("{ROOT}/packaging/{file}")
}

/// The node's systemd, as far as the script uses it: requests come by one pipe, answers go back by
/// another.
struct Systemctl<'a> {
    cluster: &'a Cluster,
    requests: PathBuf,
    answers: PathBuf,
    seen: Mutex<Vec<String>>,
    done: AtomicBool,
}

impl<'a> Systemctl<'a> {
    fn new(cluster: &'a Cluster) -> Result<Self> {
        let (requests, answers) = (cluster.file("requests"), cluster.file("answers"));
        for pipe in [&requests, &answers] {
            nix::unistd::mkfifo(pipe, Mode::S_IRWXU)?;
        }
        let script = format!(
            "#!/bin/sh\necho \"$*\" >{}\nread -r code words <{}\n\
             [ -z \"$words\" ] || echo \"$words\"\nexit \"$code\"\n",
            requests.display(),
            answers.display()
        );
        let program = Path::new("/usr/local/bin/systemctl");
        kit::write_program(program, script.as_bytes())?;
        let (seen, done) = (Mutex::default(), AtomicBool::new(false));
        Ok(Self { cluster, requests, answers, seen, done })
    }

    fn serve(&self) -> Result<()> {
        loop {
            let mut request = String::new();
            BufReader::new(fs::File::open(&self.requests)?).read_line(&mut request)?;
            if self.done.load(Ordering::Relaxed) {
                return Ok(());
            }
            let request = request.trim();
            self.seen.lock().expect("no panic").push(request.to_owned());
            let answer = self.answer(request);
            let words = answer.as_ref().map_or_else(|_| "1\n".into(), |say| format!("0 {say}\n"));
            fs::write(&self.answers, words)?;
            answer.with_context(|| format!("systemctl {request}"))?;
        }
    }

    /// Does what is requested, and says what systemctl prints.
    fn answer(&self, request: &str) -> Result<&'static str> {
        match request {
            "daemon-reload"
            | "enable --now pause-sandboxer.socket"
            | "enable pause-sandboxer.service"
            | "start pause-sandboxer.service"
            | "--quiet is-active pause-sandboxer.service" => {}
            "is-enabled pause-sandboxer.socket" | "is-enabled pause-sandboxer.service" => {
                return Ok("enabled");
            }
            "is-active pause-sandboxer.socket" | "is-active pause-sandboxer.service" => {
                return Ok("active");
            }
            "restart pause-sandboxer.service" => {
                // It may not run yet.
                let _ = self.cluster.end_program("pause-sandboxer", Signal::SIGTERM);
                self.cluster.start_program_as("pause-sandboxer", Path::new(PLACED[0]))?;
            }
            "restart containerd.service" => {
                self.cluster.end_program("containerd", Signal::SIGTERM)?;
                self.cluster.start_program("containerd")?;
            }
            "disable --now pause-sandboxer.socket pause-sandboxer.service" => {
                self.cluster.end_program("pause-sandboxer", Signal::SIGTERM)?;
            }
            other => bail!("{other:?} is not what the script or `enable` asks"),
        }
        Ok("")
    }

    /// Ends [`Systemctl::serve`].
    fn end(&self) -> Result<()> {
        self.done.store(true, Ordering::Relaxed);
        Ok(fs::write(&self.requests, "\n")?)
    }
}

fn installer(sides: &[Side; 2]) -> Result<[Facts; 2]> {
    let cluster = sides[0].cluster;
    let archive = std::env::var_os("INSTALLER_IMAGE")
        .context("INSTALLER_IMAGE is not set; `make test-kubernetes` sets it")?;
    cluster.import(Path::new(&archive))?;
    symlink(cluster.parts().program("containerd"), "/usr/local/bin/containerd")?;
    let config = fs::read_to_string(CONFIG)?;
    let drop_in = fs::read(PLACED[3])?;
    without_the_sandboxer(cluster, &config)?;
    let systemctl = Systemctl::new(cluster)?;
    fs::create_dir_all(BOOTED)?;
    let facts = std::thread::scope(|scope| {
        let serving = scope.spawn(|| systemctl.serve());
        let facts = from_installation_to_removal(sides, &systemctl);
        systemctl.end()?;
        serving.join().expect("systemctl panicked")?;
        facts
    })?;
    // As it was before.
    fs::remove_dir(BOOTED)?;
    fs::write(CONFIG, &config)?;
    fs::write(PLACED[3], drop_in)?;
    cluster.start_program("pause-sandboxer")?;
    cluster.end_program("containerd", Signal::SIGTERM)?;
    cluster.start_program("containerd")?;
    let class = fs::read(in_packaging("kubernetes/runtimeclass.yaml"))?;
    output(cluster.kubectl_command(&["apply", "-f", "-"]), &class)?;
    cluster.kubectl(&["label", "node", NODE, "pause-sandboxer/ready=true"])?;
    cluster.kubelet_answers()?;
    // There is nothing to compare: it must hold with pods of both.
    Ok([facts.clone(), facts])
}

/// Takes away what the cluster has begun with.
fn without_the_sandboxer(cluster: &Cluster, config: &str) -> Result<()> {
    cluster.kubectl(&["label", "node", NODE, "pause-sandboxer/ready-"])?;
    cluster.kubectl(&["delete", "runtimeclass", "runc-pause"])?;
    cluster.end_program("pause-sandboxer", Signal::SIGTERM)?;
    fs::remove_file(PLACED[3])?;
    fs::write(CONFIG, config.replace(IMPORTS, ""))?;
    cluster.end_program("containerd", Signal::SIGTERM)?;
    cluster.start_program("containerd")?;
    cluster.kubelet_answers()
}

fn from_installation_to_removal(sides: &[Side; 2], systemctl: &Systemctl) -> Result<Facts> {
    let ([builtin, ours], cluster) = (sides, sides[0].cluster);
    let mut facts = Facts::default();
    builtin.run("lives", json!({ "containers": [sleeping("main")] }))?;
    let alive = || -> Result<String> {
        Ok(at(&builtin.get("pod/lives")?, "status.containerStatuses.0.containerID"))
    };
    let before = alive()?;
    // Of another node: the installer waits for it.
    cluster.apply(&json!({
        "apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
        "metadata": { "name": LEASE, "namespace": "kube-system" },
        "spec": { "holderIdentity": "another" },
    }))?;
    cluster.kubectl(&["apply", "-k", &in_packaging("kubernetes")])?;
    until("the installer waits for the Lease", LIMIT, || {
        let logs = logs(cluster);
        ensure!(logs.contains("waiting for node another"), "{logs}");
        Ok(())
    })?;
    cluster.kubectl(&["delete", "lease", "-n", "kube-system", LEASE])?;
    let set = "daemonset/pause-sandboxer-installer";
    let rolled = ["rollout", "status", "-n", "kube-system", set, "--timeout=180s"];
    cluster.kubectl(&rolled).with_context(|| logs(cluster))?;
    until("the node has the label", LIMIT, || {
        let node: serde_json::Value =
            serde_json::from_str(&cluster.kubectl(&["get", "node", NODE, "-o", "json"])?)?;
        let label = &node["metadata"]["labels"]["pause-sandboxer/ready"];
        ensure!(*label == "true", "{label}: {}", logs(cluster));
        Ok(())
    })?;
    facts.add("label", "true");
    let lease = ["get", "lease", "-n", "kube-system", "--ignore-not-found", "-o", "name"];
    let lease = cluster.kubectl(&[&lease[..], &[LEASE]].concat())?;
    facts.expect("lease after the rollout", lease.trim(), "")?;
    // A command that the image lacks ends a script, which kubelet starts again.
    facts.expect("restarts of the installer", restarts(cluster)?, "0")?;
    for path in PLACED {
        ensure!(Path::new(path).exists(), "{path} is not there");
    }
    facts.expect("imports", fs::read_to_string(CONFIG)?.starts_with(IMPORTS), "true")?;
    ours.run("installed", json!({ "containers": [sleeping("main")] }))?;
    facts.expect("pod of the class", ours.sh("installed", "hostname")?, "installed")?;

    cluster.kubectl(&["delete", "runtimeclass", "runc-pause"])?;
    cluster.kubectl(&["apply", "-k", &in_packaging("kubernetes/uninstaller")])?;
    until("the uninstaller waits for the pod", LIMIT, || {
        let logs = logs(cluster);
        ensure!(logs.contains("waiting for what needs the sandboxer"), "{logs}");
        Ok(())
    })?;
    facts.expect("pod while it waits", ours.sh("installed", "echo runs")?, "runs")?;
    ours.delete(&["pod/installed"])?;
    until("the uninstaller is done", LIMIT, || {
        let logs = logs(cluster);
        ensure!(logs.contains("install.sh: done"), "{logs}");
        Ok(())
    })?;
    cluster.kubectl(&rolled).with_context(|| logs(cluster))?;
    facts.expect("restarts of the uninstaller", restarts(cluster)?, "0")?;
    let left: Vec<&str> = PLACED.into_iter().filter(|path| Path::new(path).exists()).collect();
    facts.expect("left", left.join(" "), "")?;
    facts
        .expect("state", Path::new("/run/pause-sandboxer").exists(), "false")
        .with_context(|| logs(cluster))?;
    cluster.kubelet_answers()?;
    cluster.kubectl(&["delete", "-k", &in_packaging("kubernetes/uninstaller")])?;
    ensure!(before == alive()?, "the built-in's pod was restarted");
    builtin.delete(&["pod/lives"])?;
    facts.add("systemctl", systemctl.seen.lock().expect("no panic").join("; "));
    Ok(facts)
}

/// The log of the DaemonSet's pods.
fn logs(cluster: &Cluster) -> String {
    let logs = ["logs", "-n", "kube-system", "-l", LABEL, "--tail=100"];
    cluster.kubectl(&logs).unwrap_or_else(|e| format!("{e:#}"))
}

/// How often their containers have been restarted.
fn restarts(cluster: &Cluster) -> Result<String> {
    let path = "jsonpath={.items[*].status.containerStatuses[*].restartCount}";
    cluster.kubectl(&["get", "pods", "-n", "kube-system", "-l", LABEL, "-o", path])
}
