//! A cluster of one node: etcd, the control plane, kubelet, containerd and the sandboxer, each at
//! its usual place. What they write to /etc, /opt, /usr/local and /var ends with the machine that
//! they run on ([`Machine`]).

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kit::machine::cgroup_driver::CgroupDriver;
use kit::{Parts, patient};
use serde_json::{Value, json};

use crate::machine::Machine;
use crate::side::limit;

/// The node's address, on its loopback interface. An address of 127.0.0.0/8 cannot be an endpoint
/// of a service.
const ADDRESS: &str = "10.200.0.1";
/// The first address of the services, which is that of the API.
const API: &str = "10.96.0.1";
const TOKEN: &str = "of-these-tests";
/// The programs' logs of the last run.
const LOGS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/target/kubernetes");
pub(crate) const NODE: &str = "node";
/// Where a program listens when it is ready.
const READY: Duration = Duration::from_secs(120);

/// The programs, in the order in which they start.
const PROGRAMS: [&str; 7] = [
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "pause-sandboxer",
    "containerd",
    "kubelet",
];

pub(crate) struct Cluster {
    top: PathBuf,
    kubernetes: PathBuf,
    parts: Parts,
    machine: Machine,
    /// The programs that were started and not ended.
    started: Mutex<BTreeSet<&'static str>>,
}

/// Asks until the answer is `Ok`, for a time that a slow machine makes longer.
pub(crate) fn until<T>(
    what: &str,
    limit: Duration,
    mut probe: impl FnMut() -> Result<T>,
) -> Result<T> {
    let (begun, limit) = (Instant::now(), patient(limit));
    loop {
        match probe() {
            Ok(found) => return Ok(found),
            Err(e) if begun.elapsed() > limit => {
                return Err(e.context(format!("{what}: not so after {} s", limit.as_secs())));
            }
            Err(_) => std::thread::sleep(patient(Duration::from_millis(200))),
        }
    }
}

/// Runs a program to its end, with these bytes as its input.
pub(crate) fn output(mut command: Command, input: &[u8]) -> Result<String> {
    let program = Path::new(command.get_program()).file_name().unwrap_or_default();
    let words = std::iter::once(program).chain(command.get_args());
    let shown = words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| shown.clone())?;
    let mut stdin = child.stdin.take().context("no stdin")?;
    // A program that does not read all input reports the reason itself.
    let _ = stdin.write_all(input);
    drop(stdin);
    let done = child.wait_with_output()?;
    let said = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "{shown}: {}: {}", done.status, said.trim());
    Ok(String::from_utf8_lossy(&done.stdout).into_owned())
}

pub(crate) fn run(program: &str, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new(program);
    command.args(arguments);
    output(command, b"")
}

impl Cluster {
    /// Starts everything and waits until the node is ready.
    pub(crate) fn start(kubernetes: &Path) -> Result<Self> {
        let machine = Machine::get()?;
        let top = PathBuf::from("/run/cluster");
        fs::create_dir_all(&top)?;
        let cluster = Self {
            top,
            kubernetes: kubernetes.canonicalize()?,
            parts: Parts::get()?,
            machine,
            started: Mutex::default(),
        };
        if Path::new(LOGS).exists() {
            fs::remove_dir_all(LOGS)?;
        }
        fs::create_dir_all(LOGS)?;
        cluster.prepare()?;
        for program in PROGRAMS {
            cluster.start_program(program)?;
            match program {
                "kube-apiserver" => cluster.wait_for_the_api()?,
                "containerd" => cluster.import_images()?,
                _ => {}
            }
        }
        cluster.kubectl(&["wait", "--for=create", "node/node", &limit()])?;
        cluster.kubelet_answers()?;
        Ok(cluster)
    }

    /// Files, mounts and addresses.
    fn prepare(&self) -> Result<()> {
        run("ip", &["address", "add", &format!("{ADDRESS}/32"), "dev", "lo"])?;
        run("ip", &["address", "add", &format!("{API}/32"), "dev", "lo"])?;
        self.machine.prepare(&self.top)?;
        for directory in [
            "/etc/cni/net.d",
            "/opt/cni/bin",
            "/etc/kubernetes/manifests",
            "/etc/containerd/conf.d",
            "/etc/pause-sandboxer",
            "/run/pause-sandboxer",
            "/run/cluster/bin",
            "/run/cluster/pki",
        ] {
            fs::create_dir_all(directory)?;
        }
        for plugin in ["bridge", "host-local", "loopback", "portmap"] {
            let from = self.parts.cni_plugins().join(plugin);
            fs::copy(&from, Path::new("/opt/cni/bin").join(plugin))
                .with_context(|| from.display().to_string())?;
        }
        std::os::unix::fs::symlink(self.parts.runc().canonicalize()?, self.top.join("bin/runc"))?;
        self.write_configs()
    }

    fn write_configs(&self) -> Result<()> {
        let network = json!({
            "cniVersion": "1.0.0", "name": "pods",
            "plugins": [{
                "type": "bridge", "bridge": "cni0", "isGateway": true,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{ "subnet": "10.100.0.0/20" }]],
                    "routes": [{ "dst": "0.0.0.0/0" }],
                },
            }, { "type": "portmap", "capabilities": { "portMappings": true } }],
        });
        fs::write("/etc/cni/net.d/10-pods.conflist", network.to_string())?;
        let drop_in =
            concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/containerd/pause-sandboxer.toml");
        let mut handler = fs::read_to_string(drop_in).context(drop_in)?;
        let mut config = CONTAINERD.replace("{PAUSE}", kit::PAUSE_IMAGE);
        if self.machine.is_node() {
            // As kubeadm's documents have it; for the other handler as the drop-in says.
            config += SYSTEMD_CGROUP;
            handler = handler.replace(&commented(OURS_SYSTEMD), OURS_SYSTEMD);
            ensure!(handler.contains(&format!("\n{OURS_SYSTEMD}")), "{drop_in} lacks these lines");
        } else {
            // As the sandboxer: a test machine may lack CAP_SYS_RESOURCE.
            config += RESTRICTED;
            fs::write("/etc/pause-sandboxer/config.toml", "restrict_oom_score_adj = true\n")?;
        }
        fs::write("/etc/containerd/config.toml", config)?;
        fs::write("/etc/containerd/conf.d/pause-sandboxer.toml", handler)?;
        fs::write(self.file("resolv.conf"), "search node.example\nnameserver 192.0.2.53\n")?;
        fs::write(self.file("tokens.csv"), format!("{TOKEN},tests,1,system:masters\n"))?;
        let key = self.file("pki/sa.key");
        run("openssl", &["genrsa", "-out", &key.to_string_lossy(), "2048"])?;
        fs::write(self.file("kubeconfig"), kubeconfig().to_string())?;
        fs::write(self.file("kubelet.yaml"), self.kubelet_config().to_string())?;
        Ok(())
    }

    fn kubelet_config(&self) -> Value {
        let mut config = json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "authentication": { "anonymous": { "enabled": true }, "webhook": { "enabled": false } },
            "authorization": { "mode": "AlwaysAllow" },
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "staticPodPath": "/etc/kubernetes/manifests",
            "clusterDNS": ["10.96.0.10"],
            "clusterDomain": "cluster.local",
            "resolvConf": self.file("resolv.conf"),
            "maxPods": 250,
            "allowedUnsafeSysctls": ["kernel.msg*", "net.core.*"],
            "syncFrequency": "10s",
            "cgroupDriver": match Machine::cgroup_driver() {
                CgroupDriver::Systemd => "systemd",
                CgroupDriver::Cgroupfs => "cgroupfs",
            },
        });
        if !self.machine.is_node() {
            config["failCgroupV1"] = false.into();
            config["failSwapOn"] = false.into();
            config["oomScoreAdj"] = 0.into();
            config["makeIPTablesUtilChains"] = false.into();
            // The machine's disk is not these tests' concern.
            config["evictionHard"] = json!({ "memory.available": "10Mi" });
            config["imageGCHighThresholdPercent"] = 100.into();
        }
        config
    }

    /// A file of the cluster itself.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.top.join(name)
    }

    pub(crate) fn is_node(&self) -> bool {
        self.machine.is_node()
    }

    pub(crate) fn parts(&self) -> &Parts {
        &self.parts
    }

    /// Outside of the cluster's directory: they stay.
    fn log(program: &str) -> PathBuf {
        Path::new(LOGS).join(format!("{program}.log"))
    }

    /// Starts one of the programs. It need not be ready yet.
    pub(crate) fn start_program(&self, name: &'static str) -> Result<()> {
        let path = match name {
            "containerd" => self.parts.program(name),
            "pause-sandboxer" => PathBuf::from(env!("CARGO_BIN_EXE_pause-sandboxer")),
            _ => self.kubernetes.join("bin").join(name),
        };
        self.start_program_as(name, &path)
    }

    /// The same, from another file.
    pub(crate) fn start_program_as(&self, name: &'static str, path: &Path) -> Result<()> {
        let mut command = Command::new(path);
        let top = self.top.to_string_lossy();
        command.args(arguments(name).into_iter().map(|argument| argument.replace("{top}", &top)));
        let path = std::env::var("PATH").unwrap_or_default();
        let own = self.parts.bin().display();
        command.env("PATH", format!("{top}/bin:{own}:{path}:/usr/sbin:/sbin")).env("HOME", "/root");
        self.machine.start(name, command, &Self::log(name))?;
        self.started().insert(name);
        Ok(())
    }

    fn started(&self) -> MutexGuard<'_, BTreeSet<&'static str>> {
        self.started.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends one of the programs with a signal, and waits for its end.
    pub(crate) fn end_program(
        &self,
        name: &'static str,
        signal: nix::sys::signal::Signal,
    ) -> Result<()> {
        self.started().remove(name);
        self.machine.end(name, signal)
    }

    /// Fails if a program has ended by itself.
    pub(crate) fn check_programs(&self) -> Result<()> {
        let started: Vec<_> = self.started().iter().copied().collect();
        self.machine.check(&started)?;
        // Else pods silently have the shim of the built-in controller. Before its first start the
        // daemon has no log.
        let log = fs::read_to_string(Self::log("pause-sandboxer")).unwrap_or_default();
        ensure!(!log.contains("own shim is not available"), "the pods have the runtime's shim");
        Ok(())
    }

    /// Waits for something that the programs do. Fails at once when one of them has ended.
    fn until_it(&self, what: &str, mut probe: impl FnMut() -> Result<()>) -> Result<()> {
        until(what, READY, || match self.check_programs() {
            Ok(()) => probe().map(Ok),
            Err(ended) => Ok(Err(ended)),
        })?
    }

    fn wait_for_the_api(&self) -> Result<()> {
        self.until_it("the API is ready", || self.kubectl(&["get", "--raw", "/readyz"]).map(drop))
    }

    /// Waits until kubelet serves, and the node is ready again if it was not.
    pub(crate) fn kubelet_answers(&self) -> Result<()> {
        self.until_it("kubelet answers", || {
            self.kubectl(&["get", "--raw", "/api/v1/nodes/node/proxy/healthz"]).map(drop)
        })?;
        self.machine.kubelet_runs()?;
        self.kubectl(&["wait", "--for=condition=Ready", "node/node", &limit()]).map(drop)
    }

    fn import_images(&self) -> Result<()> {
        let archive = self.file("images.tar");
        kit::write_images(&archive)?;
        self.import(&archive)?;
        fs::remove_file(archive)?;
        Ok(())
    }

    /// Gives an archive of images to containerd, which may be starting.
    pub(crate) fn import(&self, archive: &Path) -> Result<()> {
        self.until_it("containerd takes the images", || {
            let mut command = Command::new(self.parts.program("ctr"));
            command.args(["-n", "k8s.io", "images", "import", "--local"]).arg(archive);
            output(command, b"").map(drop)
        })
    }

    pub(crate) fn kubectl_command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(self.kubernetes.join("bin/kubectl"));
        command
            .args(arguments)
            .env("KUBECONFIG", self.file("kubeconfig"))
            .env("KUBECACHEDIR", self.file("kubectl"));
        command
    }

    pub(crate) fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        output(self.kubectl_command(arguments), b"")
    }

    /// `kubectl apply` of one object.
    pub(crate) fn apply(&self, object: &Value) -> Result<()> {
        let arguments = ["apply", "-f", "-"];
        output(self.kubectl_command(&arguments), object.to_string().as_bytes()).map(drop)
    }

    /// Versions of Kubernetes and of containerd.
    pub(crate) fn versions(&self) -> Result<[String; 2]> {
        let version: Value = serde_json::from_str(&self.kubectl(&["get", "--raw", "/version"])?)?;
        let Some(kubernetes) = version["gitVersion"].as_str() else {
            bail!("no version: {version}");
        };
        Ok([kubernetes.trim_start_matches('v').to_owned(), self.parts.version()])
    }
}

impl Drop for Cluster {
    /// In the opposite order; what is left ends with the lane.
    fn drop(&mut self) {
        self.machine.end_all(PROGRAMS.iter().rev());
    }
}

fn kubeconfig() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "tests",
        "clusters": [{
            "name": "tests",
            "cluster": { "server": "https://127.0.0.1:443", "insecure-skip-tls-verify": true },
        }],
        "users": [{ "name": "tests", "user": { "token": TOKEN } }],
        "contexts": [{ "name": "tests", "context": { "cluster": "tests", "user": "tests" } }],
    })
}

/// `{top}` stands for the cluster's directory.
fn arguments(program: &str) -> Vec<String> {
    let words: &[&str] = match program {
        "etcd" => &[
            "--data-dir={top}/etcd",
            "--unsafe-no-fsync",
            "--listen-client-urls=http://127.0.0.1:2379",
            "--advertise-client-urls=http://127.0.0.1:2379",
            "--listen-peer-urls=http://127.0.0.1:2380",
            "--log-level=warn",
        ],
        "kube-apiserver" => &[
            "--etcd-servers=http://127.0.0.1:2379",
            "--secure-port=443",
            "--bind-address=0.0.0.0",
            "--advertise-address=10.200.0.1",
            "--cert-dir={top}/pki",
            "--service-cluster-ip-range=10.96.0.0/24",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-account-key-file={top}/pki/sa.key",
            "--service-account-signing-key-file={top}/pki/sa.key",
            "--token-auth-file={top}/tokens.csv",
            "--authorization-mode=RBAC",
            "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP",
        ],
        "kube-controller-manager" => &[
            "--kubeconfig={top}/kubeconfig",
            "--leader-elect=false",
            "--service-account-private-key-file={top}/pki/sa.key",
            "--root-ca-file={top}/pki/apiserver.crt",
        ],
        "kube-scheduler" => &["--kubeconfig={top}/kubeconfig", "--leader-elect=false"],
        "pause-sandboxer" => &["serve"],
        "kubelet" => &[
            "--config={top}/kubelet.yaml",
            "--kubeconfig={top}/kubeconfig",
            "--hostname-override=node",
            "--node-ip=10.200.0.1",
            // A restarted container that is not started yet counts as a dead one: with the usual 1
            // the garbage collection may then remove the one before, with its exit code.
            "--maximum-dead-containers-per-container=2",
            "--v=2",
        ],
        _ => &[],
    };
    words.iter().map(|word| (*word).to_owned()).collect()
}

const CONTAINERD: &str = r#"version = 3
imports = ["/etc/containerd/conf.d/*.toml"]

[debug]
level = "debug"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{PAUSE}"
"#;

const RESTRICTED: &str = r#"
[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true
"#;

const SYSTEMD_CGROUP: &str = r#"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
SystemdCgroup = true
"#;

/// In the drop-in these lines are comments.
const OURS_SYSTEMD: &str = r#"[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc-pause.options]
SystemdCgroup = true
"#;

fn commented(lines: &str) -> String {
    lines.lines().map(|line| format!("#{line}\n")).collect()
}
