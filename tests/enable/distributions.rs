//! `enable` without options on the nodes of Kubernetes distributions: a real containerd with the
//! paths, the config file, the options and the unit of each. Each case runs in a mount namespace of
//! its own, whose `/etc`, `/run` and `/var` are copies.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use kit::{ContainerSpec, Handler, Node, PodSpec, Process};
use libtest_mimic::{Failed, Trial};
use nix::mount::{MsFlags, mount};
use tokio::runtime::Runtime;
use toml::{Table, Value};

mod table;

use table::{ALL, DEFAULT, DOCKER, Distribution};

use crate::etc::{Ran, of_version, restarted};
use crate::run_on_node;

/// The variable of the process that is in a case's namespace.
const INSIDE: &str = "ENABLE_DISTRIBUTION";

const UNITS: &str = "/etc/systemd/system";
const SETTINGS: &str = "/etc/pause-sandboxer/config.toml";
const ADOPTED: &str = "/etc/pause-sandboxer/config.adopted.toml";

/// A trial for each distribution, which runs this program again in a namespace.
pub(crate) fn trials(runtime: &Arc<Runtime>) -> impl Iterator<Item = Trial> {
    let runtime = runtime.clone();
    ALL.iter().map(move |distribution| {
        let (name, runtime) = (format!("node_of_{}", distribution.name), runtime.clone());
        let test = name.clone();
        Trial::test(name, move || {
            if std::env::var_os(INSIDE).is_none() {
                return run_inside(&test);
            }
            copy_directories().map_err(|e| Failed::from(format!("{e:#}")))?;
            run_on_node(&runtime, async |node| NodeOf { node, distribution }.case().await)
        })
    })
}

fn run_inside(test: &str) -> Result<(), Failed> {
    let output = Command::new("unshare")
        .args(["--mount", "--propagation", "private"])
        .arg(std::env::current_exe()?)
        .args(["--exact", test])
        .env(INSIDE, "1")
        .output()?;
    let text = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    if output.status.success() && text.contains("1 passed") { Ok(()) } else { Err(text.into()) }
}

/// Mounts an overlay on each directory that a node's programs write.
fn copy_directories() -> Result<()> {
    let top = Path::new("/mnt");
    mount(Some("copies"), top, Some("tmpfs"), MsFlags::empty(), None::<&str>)?;
    for directory in ["etc", "run", "var"] {
        let [upper, work] = ["upper", "work"].map(|name| top.join(directory).join(name));
        for made in [&upper, &work] {
            fs::create_dir_all(made)?;
        }
        let options = format!(
            "lowerdir=/{directory},upperdir={},workdir={}",
            upper.display(),
            work.display()
        );
        let target = Path::new("/").join(directory);
        mount(Some("overlay"), &target, Some("overlay"), MsFlags::empty(), Some(options.as_str()))
            .with_context(|| format!("mount an overlay on {}", target.display()))?;
    }
    // The machine's own containerd must not be found, nor its settings be read.
    for directory in ["/etc/containerd", "/run/containerd", "/var/lib/containerd"] {
        let _ = fs::remove_dir_all(directory);
        fs::create_dir_all(directory)?;
    }
    Ok(())
}

struct NodeOf<'a> {
    node: Arc<Node>,
    distribution: &'a Distribution,
}

impl NodeOf<'_> {
    /// Promise: enable_finds_containerd.
    /// Promise: enable_is_undone.
    async fn case(&self) -> Result<()> {
        let Distribution { name, refused, paths, .. } = self.distribution;
        self.prepare().await?;
        let daemon = self.start_daemon().await?;
        if let Some((head, reason)) = refused {
            self.write(head)?;
            self.start(head).await?;
            let before = self.files();
            for words in [&["enable", "--dry-run"][..], &["enable"]] {
                self.run(words)?.refused(reason)?;
            }
            ensure!(self.files() == before, "{name}: it has written");
            self.node.stop_containerd().await?;
        }
        self.write(self.distribution.head)?;
        self.start(self.distribution.head).await?;
        let before = self.files();
        self.chooses_between_two()?;
        if *name == "k3s" {
            self.has_the_shim_alone().await?;
            ensure!(self.files() == before, "left: {:?}", self.files().keys());
        }
        let dry = self.run(&["enable", "--dry-run"])?.well()?;
        ensure!(self.files() == before && dry.contains(".runtimes.runc-pause]"), "{dry}");
        let said = self.run_with_restart(&["enable"]).await?.well()?;
        ensure!(said.contains("it has loaded runtime handler runc-pause"), "{said}");
        let drop_in = Path::new(self.distribution.drop_in).join("pause-sandboxer.toml");
        ensure!(drop_in.exists(), "no {}: {said}", drop_in.display());
        self.has_settings()?;
        self.has_order()?;

        drop(daemon);
        let daemon = self.start_daemon().await?;
        let again = self.run_with_restart(&["enable"]).await?.well()?;
        ensure!(again.contains("no file needs a change"), "{again}");
        self.keeps_what_the_process_has_shown().await?;
        self.pod_runs().await?;
        let checked = self.run(&["check"])?.text;
        ensure!(!checked.contains("FAIL  containerd"), "{checked}");
        ensure!(checked.contains(paths[2]), "{checked}");

        let dry = self.run(&["disable", "--dry-run"])?.well()?;
        ensure!(dry.contains("pause-sandboxer.toml\n+++ /dev/null\n"), "{dry}");
        let said = self.run_with_restart(&["disable"]).await?.well()?;
        ensure!(said.contains("it no longer has runtime handler runc-pause"), "{said}");
        let after = self.files();
        ensure!(after == before, "{name}: {:?}, before: {:?}", after.keys(), before.keys());
        for unit in ["service", "socket"] {
            ensure!(!Path::new(UNITS).join(format!("pause-sandboxer.{unit}.d")).exists(), "{unit}");
        }
        // It finds containerd without the settings.
        let again = self.run_with_restart(&["disable"]).await?.well()?;
        ensure!(again.contains("does not name this sandboxer"), "{again}");
        drop(daemon);
        Ok(())
    }

    /// Another process listens where the containerd of another distribution does.
    fn chooses_between_two(&self) -> Result<()> {
        let (own, k0s) = (self.distribution.paths[2], Path::new("/run/k0s/containerd.sock"));
        if Path::new(own) == k0s {
            return Ok(());
        }
        fs::create_dir_all("/run/k0s")?;
        let _listener = UnixListener::bind(k0s)?;
        let unit = self.distribution.unit;
        let said = self.run(&["enable"])?.refused("2 containerds run: ")?;
        for part in [&format!("{own} (process "), &format!(" of {unit})"), "/run/k0s/"] {
            ensure!(said.contains(part), "{part} is missing: {said}");
        }
        ensure!(said.contains("with --containerd-address ADDRESS"), "{said}");
        self.run(&["enable", "--dry-run", "--containerd-address", own])?.well()?;
        Ok(fs::remove_file(k0s)?)
    }

    /// Gives containerd's images to the distribution's directory, and the node's sockets names at
    /// which the kit finds them.
    async fn prepare(&self) -> Result<()> {
        self.node.stop_containerd().await?;
        let layout = self.node.layout();
        let [root, _, address] = self.distribution.paths;
        fs::create_dir_all(root)?;
        mount(Some(&layout.root()), root, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
        let daemon = Path::new("/run/pause-sandboxer/pause-sandboxer.sock");
        for (name, target) in
            [(layout.containerd_socket(), Path::new(address)), (layout.sandboxer_socket(), daemon)]
        {
            let _ = fs::remove_file(&name);
            std::os::unix::fs::symlink(target, name)?;
        }
        fs::create_dir_all("/etc/pause-sandboxer")?;
        Ok(fs::write(SETTINGS, "# Settings of pause-sandboxer.\n")?)
    }

    /// Writes the config file, as the distribution has it.
    fn write(&self, head: &str) -> Result<()> {
        let file = Path::new(self.distribution.config);
        fs::create_dir_all(file.parent().context("no directory")?)?;
        Ok(fs::write(file, self.config(head)?)?)
    }

    /// Starts containerd as the distribution does.
    async fn start(&self, head: &str) -> Result<()> {
        let cgroup = self.cgroup()?;
        let containerd = self.node.containerd_command();
        let mut command = Command::new("sh");
        // As a child of the unit's process.
        let script = "echo 0 >\"$0/cgroup.procs\" && exec \"$@\"";
        command.args(["-c", script]).arg(cgroup).arg(containerd.get_program());
        command.args(containerd.get_args());
        command.envs(containerd.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.args(self.distribution.arguments);
        let started = self.node.start_containerd_as(command);
        if head != DOCKER {
            return started.await;
        }
        // It listens, and never serves CRI.
        let listens = kit::until("containerd listens", Duration::from_secs(60), async || {
            Ok(UnixStream::connect(self.distribution.paths[2]).map(drop)?)
        });
        tokio::select! {
            started = started => bail!("CRI is not disabled: {started:?}"),
            listens = listens => listens,
        }
    }

    fn config(&self, head: &str) -> Result<String> {
        if head == DOCKER {
            return Ok(head.to_owned());
        }
        let kit = fs::read_to_string(self.node.layout().containerd_config())?;
        let mut table = of_version(kit.parse()?, self.distribution.version);
        let [root, state, address] = self.distribution.paths;
        for key in ["root", "state", "grpc"] {
            table.remove(key);
        }
        let is_address = |argument: &&str| argument.ends_with(address);
        if self.distribution.paths != DEFAULT && !self.distribution.arguments.iter().any(is_address)
        {
            let text = format!("root = '{root}'\nstate = '{state}'\ngrpc.address = '{address}'");
            table.extend(text.parse::<Table>()?);
        }
        Ok(format!("{head}{table}"))
    }

    /// The cgroup of the unit, in a hierarchy of systemd: its own one of version 1, or version 2.
    fn cgroup(&self) -> Result<PathBuf> {
        let mounts = fs::read_to_string("/proc/mounts")?;
        let fields = |line: &str| line.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let mounts: Vec<Vec<String>> = mounts.lines().map(fields).collect();
        let own = mounts.iter().find(|fields| fields[3].contains("name=systemd"));
        let hierarchy = own.or_else(|| mounts.iter().find(|fields| fields[2] == "cgroup2"));
        let hierarchy = &hierarchy.context("no hierarchy of systemd is mounted")?[1];
        let cgroup = format!("{}/{}", self.node.layout().cgroup(), self.distribution.unit);
        let path = PathBuf::from(format!("{hierarchy}{cgroup}"));
        fs::create_dir_all(&path)?;
        Ok(path)
    }

    /// Starts the daemon as its unit does.
    async fn start_daemon(&self) -> Result<Process> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pause-sandboxer"));
        command.arg("serve");
        let mut daemon = Process::spawn(command, &self.node.layout().sandboxer_log())?;
        kit::until("the daemon answers", Duration::from_secs(30), async || {
            self.run(&["list"])?.well()
        })
        .await?;
        daemon.check()?;
        Ok(daemon)
    }

    /// No setting names its containerd then, which all commands find.
    async fn has_the_shim_alone(&self) -> Result<()> {
        let built = Path::new(env!("CARGO_BIN_EXE_pause-sandboxer"));
        // In a directory of root, wherever the tests are.
        let programs = Path::new("/mnt/programs");
        fs::create_dir(programs)?;
        for name in ["pause-sandboxer", kit::shim::NAME] {
            fs::copy(built.with_file_name(name), programs.join(name))?;
        }
        self.run_with_restart(&["enable", "--shim-only"]).await?.well()?;
        ensure!(!Path::new(ADOPTED).exists(), "the daemon has settings");
        let checked = self.run(&["check"])?.text;
        let found = checked.contains("without the sandboxer: \"runc-small\"");
        ensure!(found && !checked.contains("daemon"), "{checked}");
        for part in ["OCI runtime", "containerd config", "containerd"] {
            ensure!(!checked.contains(&format!("FAIL  {part}: ")), "{checked}");
        }
        self.run(&["selftest"])?.well()?;
        self.run_with_restart(&["disable"]).await?.well()?;
        Ok(fs::remove_dir_all(programs)?)
    }

    fn command(&self, words: &[&str]) -> Command {
        let own = PathBuf::from("/mnt/programs/pause-sandboxer");
        let built = PathBuf::from(env!("CARGO_BIN_EXE_pause-sandboxer"));
        let mut command = Command::new(if own.exists() { own } else { built });
        command.args(words);
        command
    }

    fn run(&self, words: &[&str]) -> Result<Ran> {
        let output = self.command(words).output()?;
        let text = String::from_utf8([output.stdout, output.stderr].concat())?;
        Ok(Ran { success: output.status.success(), text })
    }

    async fn run_with_restart(&self, words: &[&str]) -> Result<Ran> {
        let restart = async || {
            self.node.stop_containerd().await?;
            if self.distribution.generates {
                self.write(self.distribution.head)?;
            }
            self.start(self.distribution.head).await
        };
        restarted(&self.node, self.command(words), restart).await
    }

    /// All files that the commands may change, with their contents.
    fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let config = Path::new(self.distribution.config).parent().unwrap();
        let mut left: Vec<PathBuf> =
            ["/etc/pause-sandboxer", UNITS, self.distribution.drop_in].map(PathBuf::from).into();
        left.push(config.to_owned());
        let mut files = BTreeMap::new();
        while let Some(directory) = left.pop() {
            for entry in fs::read_dir(&directory).into_iter().flatten() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    left.push(path);
                } else {
                    files.insert(path.clone(), fs::read(&path).unwrap_or_default());
                }
            }
        }
        files
    }

    /// The daemon has the paths that are not its defaults.
    fn has_settings(&self) -> Result<()> {
        let text = fs::read_to_string(ADOPTED)?;
        let table: Table = text.parse()?;
        let keys = ["containerd_root", "containerd_state", "containerd_address"];
        for ((key, path), default) in keys.into_iter().zip(self.distribution.paths).zip(DEFAULT) {
            let expected = (path != default).then(|| Value::from(path));
            ensure!(table.get(key) == expected.as_ref(), "{key}: {text}");
        }
        ensure!(
            fs::read_to_string(SETTINGS)? == "# Settings of pause-sandboxer.\n",
            "it is edited"
        );
        Ok(())
    }

    /// systemd starts the daemon before containerd's unit.
    fn has_order(&self) -> Result<()> {
        let unit = self.distribution.unit;
        for own in ["pause-sandboxer.service", "pause-sandboxer.socket"] {
            let file = Path::new(UNITS).join(format!("{own}.d/before-containerd.conf"));
            let text = fs::read_to_string(&file).unwrap_or_default();
            let is_expected = match unit {
                "containerd.service" => text.is_empty(),
                _ => text.ends_with(&format!("\n[Unit]\nBefore={unit}\n")),
            };
            ensure!(is_expected, "{}: {text}", file.display());
        }
        Ok(())
    }

    /// The options of a stopped containerd are unknown.
    async fn keeps_what_the_process_has_shown(&self) -> Result<()> {
        let before = self.files();
        self.node.stop_containerd().await?;
        let program = self.node.parts().program("containerd").display().to_string();
        self.run(&["enable", "--containerd", &program])?.refused("no containerd listens at ")?;
        let named = ["--containerd", &program, "--containerd-config", self.distribution.config];
        self.run(&[&["enable"], &named[..]].concat())?.well()?;
        ensure!(self.files() == before, "it has written: {:?}", self.files().keys());
        self.start(self.distribution.head).await
    }

    async fn pod_runs(&self) -> Result<()> {
        let pod = self.node.run(Handler::Ours, PodSpec::new("web")).await?;
        let container = pod.run(ContainerSpec::sleeping("main")).await?;
        // containerd mounts the file of the daemon, from below its root.
        ensure!(container.sh("cat /etc/hostname").await? == "web\n", "another hostname");
        let listed = self.run(&["list"])?.well()?;
        ensure!(listed.contains("default") && listed.contains("web"), "{listed}");
        let said = self.run(&["disable"])?.refused("1 pod: default/web (")?;
        ensure!(said.contains("they need runtime handler runc-pause"), "{said}");
        pod.remove().await
    }
}
