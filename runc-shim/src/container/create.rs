//! The container of a Create, before its first step.

use std::fs;
use std::path::PathBuf;

use containerd_shim_protos::api;
use containerd_shim_protos::events::task as task_events;

use super::Container;
use super::config::Config;
use crate::error::{Code, Error};
use crate::io::{Owner, Stdio};
use crate::process::ProcessStreams;
use crate::process_key::{self, ProcessKey};
use crate::runtime::options::{self, BundleOptions};

/// Suffix of the note of a creation; `src/shim/bundle.rs` has the same one.
const CREATING: &str = ".creating";

impl Container {
    /// The container of a Create, which must be created next. Writes the options into its bundle.
    ///
    /// # Errors
    /// The request is malformed, or the runtime has a container with this id.
    pub fn new(request: &api::CreateTaskRequest, namespace: &str) -> Result<Self, Error> {
        process_key::check_id(&request.id)?;
        let options = options::parse(request.options.as_ref())?;
        let bundle = PathBuf::from(&request.bundle);
        if !bundle.is_absolute() {
            let message = format!("bundle path is not absolute: {}", request.bundle);
            return Err(Error::new(Code::INVALID_ARGUMENT, message));
        }
        let runtime = BundleOptions::new(&options).runtime(namespace);
        // A failure after this point deletes the runtime's container and the mounts of the bundle.
        runtime.check_unknown(&request.id)?;
        BundleOptions::new(&options).write(&bundle)?;
        let stdio = Stdio {
            stdin: request.stdin.clone(),
            stdout: request.stdout.clone(),
            stderr: request.stderr.clone(),
            terminal: request.terminal,
        };
        Ok(Self {
            key: ProcessKey::new(&request.id, ""),
            runtime,
            owner: Owner { uid: options.io_uid, gid: options.io_gid },
            process: ProcessStreams::new(stdio),
            config: Config::read(&bundle),
            no_pivot_root: options.no_pivot_root,
            no_new_keyring: options.no_new_keyring,
            restore: options::restore_arguments(request, &options, &bundle),
            bundle,
            create_event: Some(Box::new(create_event(request))),
            ..Self::default()
        })
    }

    /// Notes in the working directory, which is the daemon's, that the container is being created:
    /// if the shim dies, containerd removes the bundle at once, and the runtime, which dies as
    /// well, may have made a cgroup and no state yet. The note has the part of the config that
    /// names the cgroup.
    pub fn note_creation(&mut self) {
        self.is_noted = true;
        let path = &self.config.cgroups_path;
        let config = serde_json::json!({ "linux": { "cgroupsPath": path } });
        // A file system without space for the note must delay no container.
        let _ = fs::write(self.note(), config.to_string());
    }

    /// Removes the note: the creation has succeeded, or has left nothing.
    pub(super) fn forget_creation(&mut self) {
        if std::mem::take(&mut self.is_noted) {
            let _ = fs::remove_file(self.note());
        }
    }

    fn note(&self) -> PathBuf {
        format!("{}{CREATING}", self.key.id).into()
    }
}

/// The TaskCreate event of a Create.
pub fn create_event(request: &api::CreateTaskRequest) -> task_events::TaskCreate {
    let mut event = task_events::TaskCreate::new();
    event.container_id.clone_from(&request.id);
    event.bundle.clone_from(&request.bundle);
    event.rootfs.clone_from(&request.rootfs);
    event.checkpoint.clone_from(&request.checkpoint);
    let io = event.io.mut_or_insert_default();
    io.stdin.clone_from(&request.stdin);
    io.stdout.clone_from(&request.stdout);
    io.stderr.clone_from(&request.stderr);
    io.terminal = request.terminal;
    event
}
