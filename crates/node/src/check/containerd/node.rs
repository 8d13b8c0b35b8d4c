//! The containerd of the node: which program, with which config file and options.

use std::mem;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use toml::Table;

use super::super::Subject;
use super::config;
use super::enabled;
use super::files::Main;
use super::running::{ContainerdProgram, Flags, Running};
use super::{Mode, Release, same_file};

/// The program to examine if none runs.
const CONTAINERD: &str = "containerd";

/// Its config file, unless its options name another.
const CONFIG_FILE: &str = "/etc/containerd/config.toml";

/// The unit that most nodes start it by.
const UNIT: &str = "containerd.service";

/// The containerd that listens at the node's socket, or the default one if none does.
#[derive(Debug)]
pub(crate) struct NodeContainerd {
    pub(super) program: ContainerdProgram,
    /// Its config file, which need not exist.
    pub(crate) file: PathBuf,
    /// Whether it runs, and with that file. `--containerd-config` can name another one.
    pub(super) runs_with_file: bool,
    flags: Flags,
    /// When it was started, if it runs.
    pub(super) started: Option<SystemTime>,
    /// Its process id, if it runs.
    pub(crate) pid: Option<i32>,
    /// The unit of systemd that starts it, as a word of the shell.
    pub(crate) unit: String,
}

impl NodeContainerd {
    /// Finds it at its socket.
    pub(crate) fn find(subject: &Subject) -> Self {
        let running = Running::find(&subject.config.containerd_address);
        let pid = running.as_ref().ok().map(|running| running.pid);
        let (program, flags, started, unit) = match running {
            Ok(mut running) => {
                let (flags, started) = (mem::take(&mut running.flags), Some(running.started));
                let unit = running.unit.take();
                (ContainerdProgram::Running(running), flags, started, unit)
            }
            Err(_) => (ContainerdProgram::File(CONTAINERD.into()), Flags::default(), None, None),
        };
        let program = subject.containerd_program.clone().map_or(program, ContainerdProgram::File);
        let its_file = flags.config.as_deref().unwrap_or(Path::new(CONFIG_FILE));
        let file = subject.containerd_config.as_deref().unwrap_or(its_file).to_owned();
        let runs_with_file = pid.is_some() && same_file(&file, its_file);
        let unit = unit.unwrap_or_else(|| UNIT.to_owned());
        Self { program, file, runs_with_file, flags, started, pid, unit }
    }

    /// The config file of the running containerd, if it is not `file`.
    pub(crate) fn file_of_running(&self) -> Option<&Path> {
        let its_file = self.flags.config.as_deref().unwrap_or(Path::new(CONFIG_FILE));
        (self.pid.is_some() && !self.runs_with_file).then_some(its_file)
    }

    /// Whether there is a containerd: one runs, or its program is there.
    pub(crate) fn is_installed(&self) -> bool {
        let ContainerdProgram::File(path) = &self.program else { return true };
        let listed = std::env::var_os("PATH").unwrap_or_default();
        // A path with a directory is not searched.
        path.is_file()
            || path.components().count() == 1
                && std::env::split_paths(&listed).any(|directory| directory.join(path).is_file())
    }

    /// The command that repeats the last `enable` of that mode.
    pub(crate) fn enable_command(&self, mode: Mode) -> String {
        enabled::last_command(&self.file, mode)
    }

    /// Whether a drop-in of that mode is at its place.
    pub(super) fn has_drop_in(&self, mode: Mode) -> bool {
        Main::read(&self.file).is_ok_and(|main| main.drop_in(mode).exists())
    }

    /// The config that the program merges from its files and options, in the newest version.
    /// Without a config file these are its defaults.
    ///
    /// # Errors
    /// The command that fails, and why.
    pub(crate) async fn dump(&self) -> Result<Table, String> {
        let shown = self.file.display();
        let mut table = config::dump(&self.program, &self.file).await.map_err(|reason| {
            let program = self.program.path().display();
            format!("`{program} --config {shown} config dump` fails: {reason}")
        })?;
        config::apply(&self.flags, &mut table);
        Ok(table)
    }

    /// Fails if its config file imports a file that does not exist, other than `written`, which are
    /// about to be written. [`NodeContainerd::dump`] does not show that.
    ///
    /// # Errors
    /// The finding of `check`.
    pub(crate) fn has_imports(&self, written: &[&Path]) -> Result<(), String> {
        // The caller that needs the file reports that it cannot be read.
        let Ok(main) = Main::read(&self.file) else { return Ok(()) };
        let missing = main.missing_imports(written);
        match missing.first() {
            Some(finding) => Err(format!("{}; {}", finding.fact, finding.advice)),
            None => Ok(()),
        }
    }

    /// Its files that were written after its start.
    pub(crate) fn unread_files(&self) -> Vec<PathBuf> {
        let main = Main::read(&self.file).ok();
        let newer = self.started.zip(main).map(|(started, main)| main.newer(started));
        newer.unwrap_or_default()
    }

    /// Whether there are such files.
    pub(crate) fn has_unread_files(&self) -> bool {
        !self.unread_files().is_empty()
    }

    /// Whether it was started before that moment.
    pub(crate) fn is_older_than(&self, moment: SystemTime) -> bool {
        self.started.is_some_and(|started| started < moment)
    }

    /// The release of the program.
    ///
    /// # Errors
    /// It is no containerd that supports external sandboxers: the version, or why, and the remedy.
    pub(crate) async fn release(&self) -> Result<Release, String> {
        let (finding, release) = super::examine_program(&self.program).await;
        release.ok_or_else(|| format!("containerd: {}; {}", finding.fact, finding.advice))
    }
}
