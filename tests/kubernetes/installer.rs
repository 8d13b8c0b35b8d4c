//! The Helm chart, which installs and removes the sandboxer, with the image that
//! `packaging/kubernetes/installer-image` builds, which INSTALLER_IMAGE names, and with the helm
//! that HELM names.
//! The node has no systemd: what the script and `enable` ask of `systemctl` is answered here.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use serde_json::{Value, json};

use crate::Run;
use crate::cluster::{Cluster, NODE, output, until};
use crate::known::INSTALLER;
use crate::side::{Facts, LIMIT, Side, at, sleeping};

pub(crate) const CASES: &[(&str, Run)] = &[(INSTALLER, Run::Both(installer))];

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
/// The question of `check` about the units, and the answer of a node that starts them at boot.
const SHOW: &str = "show --property=LoadState,UnitFileState,ActiveState,Before \
                    pause-sandboxer.socket pause-sandboxer.service";
const SHOWN: &str = "LoadState=loaded\\nUnitFileState=enabled\\nActiveState=active\\n\
                     Before=containerd.service\\n\\nLoadState=loaded\\nUnitFileState=enabled\\n\
                     ActiveState=active\\nBefore=containerd.service";
const SOCKET: &str = "/run/pause-sandboxer/pause-sandboxer.sock.ttrpc";
const RELEASE: &str = "pause-sandboxer";
/// Of the coordinator, its Jobs, and the pods of both.
const LABEL: &str = "app.kubernetes.io/instance=pause-sandboxer";

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
             [ -z \"$words\" ] || printf '%b\\n' \"$words\"\nexit \"$code\"\n",
            requests.display(),
            answers.display()
        );
        let program = Path::new("/usr/local/bin/systemctl");
        kit::write_program(program, script.as_bytes())?;
        let (seen, done) = (Mutex::default(), AtomicBool::new(false));
        Ok(Self { cluster, requests, answers, seen, done })
    }

    /// Answers until [`Systemctl::end`], also after a request that cannot be answered: who asks
    /// waits for the answer.
    fn serve(&self) -> Result<()> {
        let mut served = Ok(());
        loop {
            let mut request = String::new();
            BufReader::new(fs::File::open(&self.requests)?).read_line(&mut request)?;
            if self.done.load(Ordering::Relaxed) {
                return served;
            }
            let request = request.trim();
            self.seen.lock().expect("no panic").push(request.to_owned());
            let answer = self.answer(request);
            let words = answer.as_ref().map_or_else(|_| "1\n".into(), |say| format!("0 {say}\n"));
            fs::write(&self.answers, words)?;
            served = served.and(answer.map(drop).with_context(|| format!("systemctl {request}")));
        }
    }

    /// Does what is requested, and says what systemctl prints, with `\n` for the end of a line.
    fn answer(&self, request: &str) -> Result<&'static str> {
        match request {
            "daemon-reload"
            | "enable --now pause-sandboxer.socket"
            | "enable pause-sandboxer.service"
            | "start pause-sandboxer.service"
            | "--quiet is-active pause-sandboxer.service" => {}
            "is-active pause-sandboxer.socket" => return Ok("active"),
            SHOW => return Ok(SHOWN),
            "restart pause-sandboxer.service" => {
                // It may not run yet.
                let _ = self.cluster.end_program("pause-sandboxer", Signal::SIGTERM);
                self.cluster.start_program_as("pause-sandboxer", Path::new(PLACED[0]))?;
                // The unit is of `Type=notify`: systemctl waits until the daemon is ready.
                until("the daemon listens", LIMIT, || Ok(UnixStream::connect(SOCKET)?))?;
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
    let chart = in_packaging("kubernetes/chart");
    helm(cluster, &["install", RELEASE, &chart]).with_context(|| logs(cluster))?;
    rolled_out(cluster, "installed")?;
    facts.expect("label", label(cluster)?, "true")?;
    nothing_stays(cluster)?;
    for path in PLACED {
        ensure!(Path::new(path).exists(), "{path} is not there");
    }
    facts.expect("imports", fs::read_to_string(CONFIG)?.starts_with(IMPORTS), "true")?;
    ours.run("installed", json!({ "containers": [sleeping("main")] }))?;
    facts.expect("pod of the class", ours.sh("installed", "hostname")?, "installed")?;

    // A node that fails is reported and keeps what it has, until the values change again.
    let settings = "config.log_level=debug";
    helm(cluster, &["upgrade", RELEASE, &chart, "--set", settings])?;
    let failed = rolled_out(cluster, "failed")?;
    ensure!(failed.contains("config.toml is not the installer's"), "{failed}");
    facts.expect("label after a failure", label(cluster)?, "true")?;
    helm(cluster, &["upgrade", RELEASE, &chart, "--reset-values"])?;
    rolled_out(cluster, "installed")?;
    facts.expect("pod after the upgrades", ours.sh("installed", "echo runs")?, "runs")?;

    // It refuses while the pod needs the sandboxer, and changes nothing.
    let refused = helm(cluster, &["uninstall", RELEASE, "--timeout=180s"]);
    ensure!(refused.is_err(), "helm uninstall succeeds: {}", logs(cluster));
    let said = logs(cluster);
    ensure!(said.contains("need the sandboxer: ") && said.contains("/installed"), "{said}");
    facts.expect("pod while it is refused", ours.sh("installed", "echo runs")?, "runs")?;
    // helm keeps the release as uninstalling, which it does not upgrade.
    ensure!(helm(cluster, &["upgrade", RELEASE, &chart]).is_err(), "docs/kubernetes.md is wrong");
    helm(cluster, &["rollback", RELEASE, "3"])?;
    rolled_out(cluster, "installed")?;
    ours.delete(&["pod/installed"])?;
    // kubelet has not removed the pod's sandbox yet.
    helm(cluster, &["uninstall", RELEASE, "--timeout=300s"]).with_context(|| logs(cluster))?;
    let left: Vec<&str> = PLACED.into_iter().filter(|path| Path::new(path).exists()).collect();
    facts.expect("left", left.join(" "), "")?;
    facts.expect("state", Path::new("/run/pause-sandboxer").exists(), "false")?;
    let node = node(cluster)?;
    for key in ["labels", "annotations"] {
        ensure!(!node["metadata"][key].to_string().contains("pause-sandboxer/"), "{node}");
    }
    cluster.kubelet_answers()?;
    ensure!(before == alive()?, "the built-in's pod was restarted");
    builtin.delete(&["pod/lives"])?;
    facts.add("systemctl", systemctl.seen.lock().expect("no panic").join("; "));
    Ok(facts)
}

/// Waits until the last rollout is complete, with this result on the node. Returns its message.
fn rolled_out(cluster: &Cluster, result: &str) -> Result<String> {
    until("the rollout is complete", LIMIT * 2, || {
        let jobs = objects(cluster, "jobs")?;
        let complete = jobs.iter().any(|job| {
            name(job).starts_with("pause-sandboxer-install-")
                && job["status"]["succeeded"].as_u64() == Some(1)
        });
        ensure!(complete, "{}", logs(cluster));
        Ok(())
    })?;
    let node = node(cluster)?;
    let record = node["metadata"]["annotations"]["pause-sandboxer/installer"].as_str();
    let record: Value = serde_json::from_str(record.context("no annotation")?)?;
    ensure!(record["result"] == result, "{record}: {}", logs(cluster));
    Ok(at(&record, "message"))
}

fn label(cluster: &Cluster) -> Result<String> {
    let label = &node(cluster)?["metadata"]["labels"]["pause-sandboxer/ready"];
    Ok(label.as_str().unwrap_or("none").to_owned())
}

/// No pod of the chart runs: neither one with privileges nor one with the coordinator's account.
fn nothing_stays(cluster: &Cluster) -> Result<()> {
    until("no pod of the chart runs", LIMIT, || {
        for pod in objects(cluster, "pods")? {
            let phase = pod["status"]["phase"].as_str().unwrap_or_default();
            ensure!(phase != "Running" && phase != "Pending", "{}: {phase}", name(&pod));
        }
        Ok(())
    })
}

fn node(cluster: &Cluster) -> Result<Value> {
    Ok(serde_json::from_str(&cluster.kubectl(&["get", "node", NODE, "-o", "json"])?)?)
}

fn name(object: &Value) -> &str {
    object["metadata"]["name"].as_str().unwrap_or_default()
}

/// The objects of this kind of the release.
fn objects(cluster: &Cluster, kind: &str) -> Result<Vec<Value>> {
    let list = cluster.kubectl(&["get", kind, "-n", "kube-system", "-l", LABEL, "-o", "json"])?;
    let mut list: Value = serde_json::from_str(&list)?;
    Ok(list["items"].as_array_mut().map(std::mem::take).unwrap_or_default())
}

fn helm(cluster: &Cluster, arguments: &[&str]) -> Result<String> {
    let helm =
        std::env::var_os("HELM").context("HELM is not set; `make test-kubernetes` sets it")?;
    let mut command = Command::new(helm);
    command.args(["-n", "kube-system"]).args(arguments);
    for variable in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
        command.env(variable, cluster.file("helm"));
    }
    command.env("KUBECONFIG", cluster.file("kubeconfig"));
    output(command, b"")
}

/// The logs of the release's pods.
fn logs(cluster: &Cluster) -> String {
    let logs = ["logs", "-n", "kube-system", "-l", LABEL, "--tail=100", "--prefix"];
    cluster.kubectl(&logs).unwrap_or_else(|e| format!("{e:#}"))
}
