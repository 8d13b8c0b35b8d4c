//! One real containerd with everything of its own, and the sandboxer beside it.

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use nix::mount::MsFlags;

use crate::config::{self, Layout};
use crate::controller::Controller;
use crate::cri::Cri;
use crate::events::Events;
use crate::image::{self, PAUSE_IMAGE, TEST_IMAGE};
use crate::machine::cgroup;
use crate::parts::Parts;
use crate::pod::{Pod, PodHome, PodSpec};
use crate::process::{Process, tail};
use crate::shim;
use crate::teardown::{self, Owner};
use crate::{grpc, patient, until};
pub(crate) use snapshotter::Snapshotter;

mod leftovers;
mod snapshotter;

/// How long a daemon may take to answer after its start, and to end after SIGTERM.
const DAEMON: Duration = Duration::from_secs(30);

/// A CRI runtime handler of the node. They differ in the sandboxer alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Handler {
    /// containerd's built-in controller, `podsandbox`.
    Builtin,
    /// This project's sandboxer.
    Ours,
}

impl Handler {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Builtin, Self::Ours];

    /// The name that CRI knows it by.
    pub fn name(self) -> &'static str {
        match self {
            Self::Builtin => "runc",
            Self::Ours => "runc-pause",
        }
    }

    /// The name of a handler with the same sandboxer, whose pod network hands containerd a netns
    /// path that is no namespace.
    pub fn with_bad_netns(self) -> &'static str {
        match self {
            Self::Builtin => "runc-badnet",
            Self::Ours => "runc-pause-badnet",
        }
    }

    /// The name of its sandboxer in containerd.
    pub fn sandboxer(self) -> &'static str {
        match self {
            Self::Builtin => "podsandbox",
            Self::Ours => config::SANDBOXER,
        }
    }
}

/// The options of a node.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The sandboxer's binary. Without one, [`Node::start_sandboxer`] fails.
    pub sandboxer: Option<PathBuf>,
    /// Other programs than the fetched ones.
    pub parts: Option<Parts>,
    /// Text at the head of containerd's config file, such as `imports`, whose files go before it.
    pub containerd_config_head: String,
    /// Text that is appended to containerd's config file; `{top}` stands for the node's directory.
    pub containerd_config: String,
    /// The shim of the built-in controller's pods in place of containerd's, by its path.
    pub builtin_shim: Option<PathBuf>,
    /// Settings of CRI's runtime plugin in containerd's config file, beside the kit's own.
    pub cri_config: String,
    /// Text that is appended to the sandboxer's config file.
    pub sandboxer_config: String,
    /// Keep the node's directory, with its logs, when the node ends.
    pub keep: bool,
    /// As a node that is measured and not examined: containerd logs what nodes log, and its state
    /// is in memory, as /run is.
    pub lean: bool,
}

/// One running node. Ends, and takes everything of it along, when it is dropped or the process is
/// ended by SIGINT, SIGTERM or SIGHUP; what a killed process leaves is removed by the next one that
/// starts a node.
#[derive(Debug)]
pub struct Node {
    layout: Layout,
    options: Options,
    parts: Parts,
    cri: Cri,
    containerd: Mutex<Option<Process>>,
    sandboxer: Mutex<Option<Process>>,
    snapshotter: Mutex<Option<Process>>,
    snapshotter_name: OnceLock<&'static str>,
}

impl Node {
    /// Starts containerd in a new scratch directory, imports the images and waits until CRI is
    /// ready. The sandboxer is not started; see [`Node::start_sandboxer`].
    ///
    /// # Errors
    /// A part cannot be fetched, or containerd does not come up; the message ends with its last
    /// lines.
    pub async fn start(options: Options) -> Result<Arc<Self>> {
        ensure!(nix::unistd::geteuid().is_root(), "a node needs root");
        teardown::orphans();
        let parts = match &options.parts {
            Some(parts) => parts.clone(),
            None => Parts::get()?,
        };
        let top = tempfile::Builder::new()
            .prefix(teardown::PREFIX)
            .tempdir()
            .context("make the node's directory")?
            .keep();
        let name = top.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let layout = Layout { top, name };
        Owner::ourselves().write(&layout)?;
        teardown::on_signals();
        // From here on, dropping the node removes what there is.
        let node = Arc::new(Self {
            cri: Cri::new(layout.containerd_socket()),
            containerd: Mutex::new(None),
            sandboxer: Mutex::new(None),
            snapshotter: Mutex::new(None),
            snapshotter_name: OnceLock::new(),
            layout,
            options,
            parts,
        });
        node.set_up().await?;
        Ok(node)
    }

    async fn set_up(&self) -> Result<()> {
        if let Some(sandboxer) = &self.options.sandboxer
            && shim::setting_with(&self.options.sandboxer_config) == "own"
        {
            shim::prepare(sandboxer)?;
        }
        // The snapshotter needs them before there is a config.
        for directory in ["root", "logs"] {
            std::fs::create_dir_all(self.layout.top.join(directory))?;
        }
        let snapshotter = Snapshotter::start(&self.layout).await?;
        config::write(&self.layout, &self.parts, &snapshotter, &self.options)?;
        *lock(&self.snapshotter) = snapshotter.process;
        let _ = self.snapshotter_name.set(snapshotter.name);
        if self.options.lean {
            let (state, none) = (self.layout.state(), None::<&str>);
            nix::mount::mount(Some("state"), &state, Some("tmpfs"), MsFlags::empty(), none)
                .with_context(|| format!("mount a tmpfs on {}", state.display()))?;
        }
        if !self.options.sandboxer_config.is_empty() {
            let path = self.layout.sandboxer_config();
            std::fs::write(
                &path,
                std::fs::read_to_string(&path)? + &self.options.sandboxer_config,
            )?;
        }
        cgroup::make(&self.layout.cgroup())?;
        image::write_archive(&self.layout.images())?;
        self.start_containerd().await?;
        self.import_images().await
    }

    /// Imports the images of the tests, and waits until CRI knows them.
    ///
    /// # Errors
    /// ctr failed, or CRI does not know them in time.
    pub async fn import_images(&self) -> Result<()> {
        let snapshotter = self.snapshotter()?;
        let imported = Command::new(self.parts.program("ctr"))
            .arg("--address")
            .arg(self.layout.containerd_socket())
            .args([
                "-n",
                config::NAMESPACE,
                "images",
                "import",
                "--local",
                "--snapshotter",
                snapshotter,
            ])
            .arg(self.layout.images())
            .output()
            .context("run ctr")?;
        ensure!(
            imported.status.success(),
            "import the images: {}",
            String::from_utf8_lossy(&imported.stderr)
        );
        for image in [TEST_IMAGE, PAUSE_IMAGE] {
            until(&format!("image {image} known to CRI"), DAEMON, async || {
                self.cri.image_id(image).await?.context("CRI does not know it")
            })
            .await?;
        }
        Ok(())
    }

    /// Where everything of the node is.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The programs that the node runs.
    pub fn parts(&self) -> &Parts {
        &self.parts
    }

    /// containerd's CRI.
    pub fn cri(&self) -> &Cri {
        &self.cri
    }

    /// The sandbox controller of a handler, asked through containerd.
    pub fn controller(&self, handler: Handler) -> Controller {
        Controller::new(self.layout.containerd_socket(), handler.sandboxer())
    }

    /// The sandboxer, asked directly at its own socket.
    pub fn sandboxer(&self) -> Controller {
        Controller::new(self.layout.sandboxer_socket(), "")
    }

    /// Events from now on.
    ///
    /// # Errors
    /// CRI does not open the stream.
    pub async fn events(&self) -> Result<Events> {
        Events::open(&self.cri).await
    }

    // ---- pods ----

    /// Makes what kubelet makes before a pod: its cgroup and its log directory.
    ///
    /// # Errors
    /// They cannot be made.
    pub fn prepare(&self, spec: PodSpec) -> Result<PodHome> {
        PodHome::make(&self.layout, spec)
    }

    /// Prepares and runs a pod. When it fails, the pod's home is removed again, as far as the
    /// failed pod has left it empty.
    ///
    /// # Errors
    /// Holds a [`grpc::Status`] when it is containerd's.
    pub async fn run(self: &Arc<Self>, handler: Handler, spec: PodSpec) -> Result<Pod> {
        let home = self.prepare(spec)?;
        match self.cri.run_pod_sandbox(home.config(), handler.name()).await {
            Ok(id) => Ok(Pod::new(self, handler, home, id)),
            Err(status) => {
                // A remaining entry shows in the next snapshot.
                let _ = home.clear();
                Err(anyhow::Error::new(status).context("RunPodSandbox"))
            }
        }
    }

    // ---- containerd ----

    /// Starts containerd, which must not be running, and waits until CRI is ready.
    ///
    /// # Errors
    /// It does not come up; the message ends with its last lines.
    pub async fn start_containerd(&self) -> Result<()> {
        let mut command = self.containerd_command();
        command.arg("--config").arg(self.layout.containerd_config());
        self.start_containerd_as(command).await
    }

    /// The command that runs containerd, without its options.
    pub fn containerd_command(&self) -> Command {
        let path = std::env::var("PATH").unwrap_or_default();
        // systemd's soft limit of open files is below the hard one, and containerd raises its own.
        let mut command = Command::new("prlimit");
        command
            .arg("--nofile=4096:")
            .arg(self.parts.program("containerd"))
            // Its shim, and runc, which may live in /usr/sbin.
            .env("PATH", format!("{}:{path}:/usr/sbin:/sbin", self.parts.bin().display()))
            // Another one in each containerd.
            .env("KIT_OF_CONTAINERD", format!("{:?}", SystemTime::now()));
        command
    }

    /// Starts containerd by a command of the caller's, such as one with other options.
    ///
    /// # Errors
    /// It does not come up; the message ends with its last lines.
    pub async fn start_containerd_as(&self, command: Command) -> Result<()> {
        {
            let mut slot = lock(&self.containerd);
            ensure!(slot.is_none(), "containerd is running");
            *slot = Some(Process::spawn(command, &self.layout.containerd_log())?);
        }
        until("containerd's CRI ready", DAEMON, async || {
            running(&self.containerd, "containerd")?;
            let conditions = self.cri.runtime_conditions().await?;
            for needed in ["RuntimeReady", "NetworkReady"] {
                match conditions.iter().find(|condition| condition.type_ == needed) {
                    Some(condition) if condition.status => {}
                    other => bail!("{needed}: {other:?}"),
                }
            }
            Ok(())
        })
        .await
        .map_err(|e| {
            e.context(format!(
                "containerd's log ends:\n{}",
                tail(&self.layout.containerd_log(), 20)
            ))
        })
    }

    /// Ends containerd with SIGTERM. Pods keep running.
    ///
    /// # Errors
    /// It does not end.
    pub async fn stop_containerd(&self) -> Result<()> {
        end(&self.containerd, "containerd").await
    }

    /// Ends containerd with SIGKILL. Pods keep running.
    ///
    /// # Errors
    /// It is not running.
    pub fn kill_containerd(&self) -> Result<()> {
        take(&self.containerd, "containerd")?.kill().map(drop)
    }

    /// Process id of containerd.
    ///
    /// # Errors
    /// It is not running.
    pub fn containerd_pid(&self) -> Result<u32> {
        running(&self.containerd, "containerd")
    }

    // ---- the sandboxer ----

    /// The command that runs the sandboxer on this node; the one place that knows its arguments.
    ///
    /// # Errors
    /// The node was made without one.
    pub fn sandboxer_command(&self) -> Result<Command> {
        let binary =
            self.options.sandboxer.as_ref().context("this node was made without a sandboxer")?;
        let mut command = Command::new(binary);
        command
            .arg("serve")
            .arg("--config")
            .arg(self.layout.sandboxer_config())
            // Shims have the environment of containerd.
            .env("KIT_OF_SANDBOXER", "a secret");
        Ok(command)
    }

    /// Starts the sandboxer, which must not be running, and waits until it answers, directly and
    /// through containerd.
    ///
    /// # Errors
    /// It does not come up; the message ends with its last lines.
    pub async fn start_sandboxer(&self) -> Result<()> {
        let command = self.sandboxer_command()?;
        self.start_sandboxer_as(command).await
    }

    /// Starts the sandboxer by a command of the caller's, such as one under strace.
    ///
    /// # Errors
    /// It does not come up; the message ends with its last lines.
    pub async fn start_sandboxer_as(&self, command: Command) -> Result<()> {
        {
            let mut slot = lock(&self.sandboxer);
            ensure!(slot.is_none(), "the sandboxer is running");
            *slot = Some(Process::spawn(command, &self.layout.sandboxer_log())?);
        }
        // No sandbox has this id, and only a controller that can be reached says so.
        let through = self.controller(Handler::Ours);
        for controller in [self.sandboxer(), through] {
            until("the sandboxer answers", DAEMON, async || {
                running(&self.sandboxer, "the sandboxer")?;
                match controller.status("unknown", false).await {
                    Err(status) if status.code == grpc::NOT_FOUND => Ok(()),
                    other => bail!("status of an unknown id: {other:?}"),
                }
            })
            .await
            .map_err(|e| {
                e.context(format!(
                    "the sandboxer's log ends:\n{}",
                    tail(&self.layout.sandboxer_log(), 20)
                ))
            })?;
        }
        Ok(())
    }

    /// Ends the sandboxer with SIGTERM. Pods keep running.
    ///
    /// # Errors
    /// It does not end.
    pub async fn stop_sandboxer(&self) -> Result<()> {
        end(&self.sandboxer, "the sandboxer").await
    }

    /// Ends the sandboxer with SIGKILL. Pods keep running.
    ///
    /// # Errors
    /// It is not running.
    pub fn kill_sandboxer(&self) -> Result<()> {
        take(&self.sandboxer, "the sandboxer")?.kill().map(drop)
    }

    /// Process id of the sandboxer.
    ///
    /// # Errors
    /// It is not running.
    pub fn sandboxer_pid(&self) -> Result<u32> {
        running(&self.sandboxer, "the sandboxer")
    }

    /// The last lines of both daemons' logs.
    pub fn log_tails(&self, lines: usize) -> String {
        let (containerd, sandboxer) = (self.layout.containerd_log(), self.layout.sandboxer_log());
        let mut text = format!("---- {}\n{}\n", containerd.display(), tail(&containerd, lines));
        if sandboxer.exists() {
            text += &format!("---- {}\n{}\n", sandboxer.display(), tail(&sandboxer, lines));
        }
        text
    }

    /// Process ids of the daemons that run.
    fn daemons(&self) -> Vec<u32> {
        [&self.containerd, &self.sandboxer, &self.snapshotter]
            .iter()
            .filter_map(|slot| lock(slot).as_ref().map(Process::pid))
            .collect()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        drop(lock(&self.sandboxer).take());
        drop(lock(&self.containerd).take());
        drop(lock(&self.snapshotter).take());
        let failed = teardown::tear_down(&self.layout, self.options.keep);
        for failure in failed {
            eprintln!("kit: {failure}");
        }
        if self.options.keep {
            eprintln!("kit: kept {}", self.layout.top.display());
        }
    }
}

type Slot = Mutex<Option<Process>>;

fn lock(slot: &Slot) -> std::sync::MutexGuard<'_, Option<Process>> {
    slot.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn running(slot: &Slot, name: &str) -> Result<u32> {
    let mut slot = lock(slot);
    let process = slot.as_mut().with_context(|| format!("{name} is not running"))?;
    process.check()?;
    Ok(process.pid())
}

fn take(slot: &Slot, name: &str) -> Result<Process> {
    lock(slot).take().with_context(|| format!("{name} is not running"))
}

async fn end(slot: &Slot, name: &str) -> Result<()> {
    let mut process = take(slot, name)?;
    let status = process.stop(patient(DAEMON)).await?;
    ensure!(
        status.success(),
        "{name} ended with {status} after SIGTERM\n{}",
        tail(process.log(), 20)
    );
    Ok(())
}
