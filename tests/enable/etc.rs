//! The config directory of a node's containerd, and the commands that change it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use kit::Node;
use toml::{Table, Value};

const RUNTIME: &str = "io.containerd.cri.v1.runtime";
const IMAGES: &str = "io.containerd.cri.v1.images";
const CRI_OF_2: &str = "io.containerd.grpc.v1.cri";

/// The operator's text, which must stay.
const HEAD: &str = "# The operator's own words.\n\t# A tab, and no order.\n";

/// Files below a directory with their contents.
pub(crate) type Files = BTreeMap<PathBuf, Vec<u8>>;

/// A node whose containerd does not know the sandboxer.
pub(crate) struct Etc {
    pub(crate) node: Arc<Node>,
}

/// The output of a command, and whether it succeeded.
pub(crate) struct Ran {
    pub(crate) success: bool,
    pub(crate) text: String,
}

impl Etc {
    /// Starts the daemon, if it does not run. Gives the node's containerd a config file of this
    /// version without the sandboxer, in a directory of its own, and restarts it. `head` are the
    /// first lines.
    pub(crate) async fn new(node: Arc<Node>, version: i64, head: &str) -> Result<Self> {
        // The kit finds it through containerd, which is to lose it.
        if node.sandboxer_pid().is_err() {
            node.start_sandboxer().await?;
        }
        let etc = Self { node };
        let path = etc.node.layout().containerd_config();
        let table = of_version(fs::read_to_string(&path)?.parse()?, version);
        fs::create_dir(etc.directory())?;
        fs::write(etc.file(), format!("{HEAD}{head}{table}"))?;
        // The kit starts containerd with this path.
        fs::remove_file(&path)?;
        std::os::unix::fs::symlink(etc.file(), &path)?;
        etc.restart().await?;
        Ok(etc)
    }

    pub(crate) fn directory(&self) -> PathBuf {
        self.node.layout().top.join("etc")
    }

    pub(crate) fn file(&self) -> PathBuf {
        self.directory().join("config.toml")
    }

    /// Where the drop-in is: beside the path that containerd was given.
    pub(crate) fn drop_in(&self) -> PathBuf {
        self.node.layout().top.join("conf.d/pause-sandboxer.toml")
    }

    pub(crate) async fn restart(&self) -> Result<()> {
        self.node.stop_containerd().await?;
        self.node.start_containerd().await
    }

    /// All files that the commands may change.
    pub(crate) fn files(&self) -> Files {
        let mut files = Files::new();
        for directory in [self.directory(), self.node.layout().top.join("conf.d")] {
            for entry in fs::read_dir(directory).into_iter().flatten() {
                let path = entry.unwrap().path();
                files.insert(path.clone(), fs::read(&path).unwrap());
            }
        }
        let settings = self.node.layout().sandboxer_config();
        files.insert(settings.clone(), fs::read(settings).unwrap());
        if let Ok(adopted) = fs::read(self.adopted()) {
            files.insert(self.adopted(), adopted);
        }
        files
    }

    /// The sandboxer's settings that it has adopted.
    pub(crate) fn adopted(&self) -> PathBuf {
        self.node.layout().sandboxer_config().with_extension("adopted.toml")
    }

    /// A command that changes nothing of containerd's process.
    pub(crate) fn run(&self, words: &[&str]) -> Ran {
        let output = self.command(words).output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        Ran { success: output.status.success(), text: String::from_utf8(text).unwrap() }
    }

    /// A command beside which the runtime has other work.
    pub(crate) async fn run_beside(&self, words: &[&str]) -> Result<Ran> {
        let mut command = self.command(words);
        #[allow(clippy::disallowed_methods, reason = "a test's own thread")]
        let output = tokio::task::spawn_blocking(move || command.output()).await??;
        let text = String::from_utf8([output.stdout, output.stderr].concat())?;
        Ok(Ran { success: output.status.success(), text })
    }

    /// Where a test can have programs of the sandboxer, which the commands are of then.
    pub(crate) fn programs(&self) -> PathBuf {
        self.node.layout().top.join("programs")
    }

    pub(crate) fn command(&self, words: &[&str]) -> Command {
        let own = self.programs().join("pause-sandboxer");
        let built = PathBuf::from(env!("CARGO_BIN_EXE_pause-sandboxer"));
        let mut command = Command::new(if own.exists() { own } else { built });
        command.args(words).arg("--config").arg(self.node.layout().sandboxer_config());
        command
    }

    /// A command with `--restart`, whose restarts this test makes: `starts` says whether containerd
    /// comes up with the files as they are then.
    pub(crate) async fn with_restart(
        &self,
        words: &[&str],
        starts: impl Fn(&Self) -> bool,
    ) -> Result<Ran> {
        let restart = async || {
            if self.node.containerd_pid().is_ok() {
                self.node.stop_containerd().await?;
            }
            if starts(self) { self.node.start_containerd().await } else { Ok(()) }
        };
        restarted(&self.node, self.command(words), restart).await
    }

    /// containerd's merged config.
    pub(crate) fn dump(&self) -> Result<Table> {
        let dump = Command::new(self.node.parts().program("containerd"))
            .arg("--config")
            .arg(self.node.layout().containerd_config())
            .args(["config", "dump"])
            .output()?;
        ensure!(dump.status.success(), "{}", String::from_utf8_lossy(&dump.stderr));
        Ok(String::from_utf8(dump.stdout)?.parse()?)
    }

    /// A runtime handler of the merged config.
    pub(crate) fn handler(&self, name: &str) -> Result<Option<Value>> {
        let dump = self.dump()?;
        Ok(dump["plugins"][RUNTIME]["containerd"]["runtimes"].get(name).cloned())
    }
}

/// Runs a command with `--restart`, whose restarts of containerd this test makes.
pub(crate) async fn restarted(
    node: &Node,
    mut command: Command,
    restart: impl AsyncFn() -> Result<()>,
) -> Result<Ran> {
    let asked = node.layout().top.join("asked");
    let script = format!("touch {0} && while [ -e {0} ]; do sleep 0.05; done", asked.display());
    let mut child = command
        .args(["--restart", "--timeout", "20", "--restart-command", &script])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let ended = async {
        loop {
            if child.try_wait()?.is_some() {
                return anyhow::Ok(());
            }
            if asked.exists() {
                restart().await?;
                fs::remove_file(&asked)?;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let limit = kit::patient(Duration::from_secs(120));
    tokio::time::timeout(limit, ended).await.context("the command does not end")??;
    let output = child.wait_with_output()?;
    let text = String::from_utf8([output.stdout, output.stderr].concat())?;
    Ok(Ran { success: output.status.success(), text })
}

impl Ran {
    /// Fails with the output unless the command has succeeded.
    pub(crate) fn well(self) -> Result<String> {
        ensure!(self.success, "the command failed: {}", self.text);
        Ok(self.text)
    }

    /// Fails unless the command has failed with these words.
    pub(crate) fn refused(self, words: &str) -> Result<String> {
        ensure!(!self.success && self.text.contains(words), "not refused: {}", self.text);
        Ok(self.text)
    }
}

/// The kit's config without the sandboxer, as another version has it.
pub(crate) fn of_version(mut table: Table, version: i64) -> Table {
    table.remove("proxy_plugins");
    table.insert("version".to_owned(), version.into());
    let plugins = table["plugins"].as_table_mut().unwrap();
    let runtimes = &mut plugins[RUNTIME]["containerd"]["runtimes"];
    let runtimes = runtimes.as_table_mut().unwrap();
    runtimes.retain(|name, _| !name.starts_with("runc-pause"));
    // Settings that the new handler must copy.
    let runc = runtimes["runc"].as_table_mut().unwrap();
    runc.insert("pod_annotations".to_owned(), vec!["io.test/*"].into());
    runc.insert("privileged_without_host_devices".to_owned(), true.into());
    match version {
        2 => {
            let mut cri = plugins.remove(RUNTIME).unwrap();
            let images = plugins.remove(IMAGES).unwrap();
            let cri_table = cri.as_table_mut().unwrap();
            cri_table
                .insert("sandbox_image".to_owned(), images["pinned_images"]["sandbox"].clone());
            let containerd = cri_table["containerd"].as_table_mut().unwrap();
            containerd.insert("snapshotter".to_owned(), images["snapshotter"].clone());
            let cni = cri_table["cni"].as_table_mut().unwrap();
            if let Some(directories) = cni.remove("bin_dirs") {
                cni.insert("bin_dir".to_owned(), directories[0].clone());
            }
            plugins.insert(CRI_OF_2.to_owned(), cri);
        }
        4 => {
            let grpc = table.remove("grpc").unwrap();
            let address = grpc["address"].as_str().unwrap().to_owned();
            let server = |address: String| {
                Value::Table(Table::from_iter([("address".to_owned(), address.into())]))
            };
            let plugins = table["plugins"].as_table_mut().unwrap();
            let ttrpc = server(format!("{address}.ttrpc"));
            plugins.insert("io.containerd.server.v1.grpc".to_owned(), server(address));
            plugins.insert("io.containerd.server.v1.ttrpc".to_owned(), ttrpc);
        }
        _ => {}
    }
    table
}

/// Files that others can see by a directory's listing.
pub(crate) fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
