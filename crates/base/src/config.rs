//! Settings of the daemon: one checked [`Config`] from the config file, the settings that `enable`
//! adopts from containerd in a file beside it, and the flags.
//!
//! Every setting is written once, as a field of [`Config`]: serde reads it from the file, clap from
//! the flag of the same name, with dashes. The field's comment is its text in the help, in the
//! manual page, in `config default` and in `docs/configure.md`.

use std::path::{Path, PathBuf};

use clap::builder::{ArgAction, PossibleValuesParser, TypedValueParser as _};
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Args, Command, FromArgMatches, value_parser};
use log::LevelFilter;
use serde::{Deserialize, Serialize};
use toml::de::DeTable;

mod check;
mod error;
mod pattern;
mod value;

pub use error::ConfigError;
pub use pattern::Pattern;
pub use value::{ContainerLimit, LogFormat, Metrics, ShimOwner, Size, Sysctl, Variable};

use error::line_of;
pub use value::absolute_path;
use value::{lower_case, path};

/// The config file that is read when none is named; it need not exist.
pub const DEFAULT_FILE: &str = "/etc/pause-sandboxer/config.toml";

/// The extension of the file beside a config file with the settings that `enable` adopts.
const ADOPTED: &str = "adopted.toml";

/// The containerd namespace of CRI. Calls of another namespace are rejected.
pub const CONTAINERD_NAMESPACE: &str = "k8s.io";

/// Suffix of the ttrpc socket's path, by containerd's convention.
pub const TTRPC_SUFFIX: &str = ".ttrpc";

/// Size of what follows the state directory in the path of a shim's socket, bytes; equal to
/// `crate::shim::SOCKET_SUFFIX`.
pub const SHIM_SOCKET_SUFFIX: usize = 43;

/// Directory of CRI's pod files below containerd's `root` and `state`. At a restart containerd
/// deletes unknown entries there.
pub const CRI_PLUGIN_DIR: &str = "io.containerd.grpc.v1.cri";

/// The number of MCS categories in SELinux's policies, and containerd's default.
const CATEGORIES: u32 = 1024;

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// Every setting of the daemon.
#[derive(Args, Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[command(next_help_heading = "Settings, which override the config file")]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// gRPC socket that containerd dials (`address` under `proxy_plugins`); the ttrpc socket has
    /// `.ttrpc` appended.
    #[arg(long, value_name = "PATH", value_parser = absolute_path, verbatim_doc_comment)]
    #[serde(deserialize_with = "path")]
    pub socket: PathBuf,
    /// Directory of the records and private mounts, created with mode 0700. One daemon per
    /// directory. Must be on a tmpfs: records must not survive a reboot.
    #[arg(long, value_name = "PATH", value_parser = absolute_path, verbatim_doc_comment)]
    #[serde(deserialize_with = "path")]
    pub state_dir: PathBuf,
    /// containerd's `root`, where CRI looks for a pod's hostname, hosts and resolv.conf.
    #[arg(long, value_name = "PATH", value_parser = absolute_path, verbatim_doc_comment)]
    #[serde(deserialize_with = "path")]
    pub containerd_root: PathBuf,
    /// containerd's `state`, where CRI looks for a pod's shm.
    #[arg(long, value_name = "PATH", value_parser = absolute_path, verbatim_doc_comment)]
    #[serde(deserialize_with = "path")]
    pub containerd_state: PathBuf,
    /// containerd's gRPC socket (`address` under `grpc`).
    #[arg(long, value_name = "PATH", value_parser = absolute_path, verbatim_doc_comment)]
    #[serde(deserialize_with = "path")]
    pub containerd_address: PathBuf,
    /// Which shim serves a pod's containers. The sandboxer starts it before the first container,
    /// supervises it and stops it with the pod.
    ///
    /// - `own`: the sandboxer's own, smaller shim, which replaces `containerd-shim-runc-v2`. The
    ///   program `pause-sandboxer-runc-shim` is in the directory of the daemon's program. `runtime`
    ///   applies instead to pods of other runtimes or with other runtime options, and to all pods
    ///   if the program is missing or unusable.
    /// - `runtime`: the runtime's shim.
    ///
    /// Applies to pods created after the change.
    #[arg(long, value_name = "SHIM", verbatim_doc_comment)]
    pub shim: ShimOwner,
    /// Environment variables for the shims that the sandboxer starts, for example
    /// `shim_env = ["SCHED_CORE=1"]`. The counterpart of containerd's `env` under
    /// `plugins."io.containerd.shim.v1.manager"`. Shims, with the programs that they run and
    /// their hooks, get these besides the environment of containerd and what containerd sets for
    /// shims, and none of the daemon's. With SCHED_CORE each shim and its containers are in a
    /// separate core scheduling domain; on a kernel without support no shim starts.
    #[arg(long, value_name = "NAME=VALUE", verbatim_doc_comment)]
    pub shim_env: Vec<Variable>,
    /// Record each sandbox in containerd as a container, and as a task while the pod's shim runs:
    /// `ctr` lists them, and cAdvisor looks for a pod's network there. Only for pods that the
    /// sandboxer's own shim serves (`shim`). When it is turned off, existing pods keep their
    /// records; when it is turned on, they get theirs with their shim.
    #[arg(long, verbatim_doc_comment, action = ArgAction::Set, value_name = "BOOL")]
    #[arg(num_args = 0..=1, default_missing_value = "true")]
    pub container_record: bool,
    /// Do not lower `oom_score_adj` below the daemon's own. Same as containerd's setting of this
    /// name; required if the daemon lacks CAP_SYS_RESOURCE.
    #[arg(long, verbatim_doc_comment, action = ArgAction::Set, value_name = "BOOL")]
    #[arg(num_args = 0..=1, default_missing_value = "true")]
    pub restrict_oom_score_adj: bool,
    /// Pods with their own network namespace can bind ports below 1024 without a capability. Same
    /// as containerd's setting of this name.
    #[arg(long, verbatim_doc_comment, action = ArgAction::Set, value_name = "BOOL")]
    #[arg(num_args = 0..=1, default_missing_value = "true")]
    pub enable_unprivileged_ports: bool,
    /// Pods with their own network namespace can send ICMP echo requests without a capability. Same
    /// as containerd's setting of this name.
    #[arg(long, verbatim_doc_comment, action = ArgAction::Set, value_name = "BOOL")]
    #[arg(num_args = 0..=1, default_missing_value = "true")]
    pub enable_unprivileged_icmp: bool,
    /// Set SELinux labels on pods, if SELinux is enabled. Same as containerd's setting of this
    /// name.
    #[arg(long, verbatim_doc_comment, action = ArgAction::Set, value_name = "BOOL")]
    #[arg(num_args = 0..=1, default_missing_value = "true")]
    pub enable_selinux: bool,
    /// The MCS levels of pods use categories below this number, from 2 to 1024. Same as
    /// containerd's setting of this name.
    #[arg(long, value_name = "NUMBER", verbatim_doc_comment)]
    #[arg(value_parser = value_parser!(u32).range(2..=i64::from(CATEGORIES)))]
    pub selinux_category_range: u32,
    /// Patterns of the pod annotations that are copied to the OCI spec of the sandbox; `*` matches
    /// anything but a slash. The counterpart of containerd's setting of this name, which is for the
    /// pod's containers.
    #[arg(long, value_name = "PATTERN", value_delimiter = ',', verbatim_doc_comment)]
    pub pod_annotations: Vec<Pattern>,
    /// Size of the /dev/shm of a pod with its own IPC namespace: a number of bytes, or one with the
    /// suffix Ki, Mi, Gi or Ti. What is in it counts to the memory of the container that wrote it.
    /// Applies to pods created after the change.
    #[arg(long, value_name = "SIZE", verbatim_doc_comment)]
    pub shm_size: Size,
    /// Largest size that a pod can choose for its /dev/shm by the annotation
    /// `pause-sandboxer/shm-size`, for example `shm_size_max = "1Gi"`; `shm_size` if that is
    /// larger. A pod that asks for more is refused.
    #[arg(long, value_name = "SIZE", verbatim_doc_comment)]
    pub shm_size_max: Size,
    /// Sysctls that pods get if they do not set them themselves, for example
    /// `sysctls = ["net.core.somaxconn=4096", "net.ipv4.tcp_keepalive_time=600"]`. Only sysctls of
    /// a pod's namespaces; a pod that uses the node's network or IPC does not get those of it. A
    /// pod does not start if the kernel refuses the value. Applies to pods created after the
    /// change.
    #[arg(long, value_name = "NAME=VALUE", verbatim_doc_comment)]
    pub sysctls: Vec<Sysctl>,
    /// Resource limits of the processes of containers, for example
    /// `container_limits = ["nofile=1024:524288", "core=0", "memlock=unlimited"]`: a name with the
    /// soft and the hard limit, or with one for both, in the kernel's units (setrlimit(2)). The
    /// names are core, memlock, msgqueue, nofile, nproc, rtprio and sigpending. Other limits are
    /// those of containerd's children. Applies to pods whose shim starts after the change; the
    /// shim and the runtime have the same limits.
    #[arg(long, value_name = "NAME=SOFT:HARD", verbatim_doc_comment)]
    pub container_limits: Vec<ContainerLimit>,
    /// Highest limits that a pod can choose for its containers by the annotation
    /// `pause-sandboxer/limits`, in the form of `container_limits`, for example
    /// `container_limits_max = ["nofile=1048576", "memlock=unlimited"]`. A pod that asks for more,
    /// or for a limit that is not listed, is refused. Applies to pods created after the change.
    #[arg(long, value_name = "NAME=SOFT:HARD", verbatim_doc_comment)]
    pub container_limits_max: Vec<ContainerLimit>,
    /// The own shim mounts the overlays of containers' root file systems with the option
    /// `volatile`: their unmount does not sync the node's disk. In these file systems, but not in
    /// volumes, fsync(2) then has no effect. Needs Linux 5.10: on an older kernel no container
    /// starts. Applies to pods whose shim starts after the change.
    #[arg(long, verbatim_doc_comment, action = ArgAction::Set, value_name = "BOOL")]
    #[arg(num_args = 0..=1, default_missing_value = "true")]
    pub volatile_rootfs: bool,
    /// Interval of the garbage collection in seconds, at least 1. It removes sandboxes that are
    /// older, that containerd does not know, and that were never started or got no call since.
    #[arg(long, value_name = "SECONDS", verbatim_doc_comment)]
    #[arg(value_parser = value_parser!(u32).range(1..))]
    pub forgotten_interval: u32,
    /// Address of the daemon's metrics for Prometheus: `off`, a unix socket that only root can use,
    /// such as `unix:///run/pause-sandboxer/metrics.sock`, or a loopback port, such as
    /// `127.0.0.1:9477` or `[::1]:9477`.
    #[arg(long, value_name = "ADDRESS", verbatim_doc_comment)]
    pub metrics: Metrics,
    /// Minimum level of log messages; those of libraries are shown from `warn` on.
    #[arg(long, value_name = "LEVEL", verbatim_doc_comment)]
    #[arg(value_parser =
        PossibleValuesParser::new(LEVELS).try_map(|text| text.parse::<LevelFilter>()))]
    #[serde(serialize_with = "lower_case")]
    pub log_level: LevelFilter,
    /// Format of log lines, which are written to standard error.
    #[arg(long, value_name = "FORMAT", verbatim_doc_comment)]
    pub log_format: LogFormat,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            socket: "/run/pause-sandboxer/pause-sandboxer.sock".into(),
            state_dir: "/run/pause-sandboxer".into(),
            containerd_root: "/var/lib/containerd".into(),
            containerd_state: "/run/containerd".into(),
            containerd_address: "/run/containerd/containerd.sock".into(),
            shim: ShimOwner::Own,
            shim_env: Vec::new(),
            container_record: true,
            restrict_oom_score_adj: false,
            enable_unprivileged_ports: true,
            enable_unprivileged_icmp: true,
            enable_selinux: false,
            selinux_category_range: CATEGORIES,
            pod_annotations: Vec::new(),
            shm_size: Size::SHM,
            shm_size_max: Size::SHM,
            sysctls: Vec::new(),
            container_limits: Vec::new(),
            container_limits_max: Vec::new(),
            volatile_rootfs: false,
            forgotten_interval: 60,
            metrics: Metrics::Off,
            log_level: LevelFilter::Info,
            log_format: LogFormat::Text,
        }
    }
}

/// Settings on the command line.
#[derive(Clone, Debug)]
pub enum Flags {
    /// Every setting is an option.
    All(ArgMatches),
    /// Only the socket is one.
    Socket(Option<PathBuf>),
}

impl Default for Flags {
    fn default() -> Self {
        Self::Socket(None)
    }
}

impl Args for Flags {
    fn augment_args(command: Command) -> Command {
        // For an update, as no setting is required.
        Config::augment_args_for_update(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Flags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self::All(matches.clone()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::All(matches.clone());
        Ok(())
    }
}

impl Flags {
    fn apply(&self, config: &mut Config) -> Result<(), clap::Error> {
        match self {
            Self::All(matches) => config.update_from_arg_matches(matches)?,
            Self::Socket(Some(socket)) => config.socket.clone_from(socket),
            Self::Socket(None) => {}
        }
        Ok(())
    }

    /// Whether the setting is given.
    fn has(&self, name: &str) -> bool {
        match self {
            Self::All(matches) => matches.value_source(name) == Some(ValueSource::CommandLine),
            Self::Socket(socket) => name == "socket" && socket.is_some(),
        }
    }
}

/// The directory of the sandboxes' records below a state directory.
pub fn records_below(state_dir: &Path) -> PathBuf {
    state_dir.join("sandboxes")
}

/// The file with the settings that `enable` adopts from containerd, for this config file.
pub fn adopted_file(file: &Path) -> PathBuf {
    file.with_extension(ADOPTED)
}

/// The text of a config file; empty if it is not there and need not be.
fn read(file: &Path, optional: bool) -> Result<String, ConfigError> {
    match std::fs::read_to_string(file) {
        Err(e) if optional && e.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        text => {
            text.map_err(|e| ConfigError::Read { file: file.to_owned(), reason: e.to_string() })
        }
    }
}

impl Config {
    /// Reads the adopted settings of `file`, lets `file` and then `flags` override them, and checks
    /// the whole. Without a `file` [`DEFAULT_FILE`] is read if it exists.
    ///
    /// # Errors
    /// A file that cannot be read or is not TOML; the first setting that is unknown or wrong.
    pub fn load(file: Option<&Path>, flags: &Flags) -> Result<Self, ConfigError> {
        let path = file.unwrap_or(Path::new(DEFAULT_FILE));
        let adopted = adopted_file(path);
        let texts = [read(&adopted, true)?, read(path, file.is_none())?];
        Self::parse_all(&[(&adopted, &texts[0]), (path, &texts[1])], flags)
    }

    /// The settings of the file at `path`, with its content.
    ///
    /// # Errors
    /// The text is not TOML; the first setting that is unknown or wrong.
    pub fn parse(path: &Path, text: &str, flags: &Flags) -> Result<Self, ConfigError> {
        Self::parse_all(&[(path, text)], flags)
    }

    /// As [`Config::parse`] for several files, of which a later one overrides an earlier one.
    ///
    /// # Errors
    /// As [`Config::parse`].
    pub fn parse_all(files: &[(&Path, &str)], flags: &Flags) -> Result<Self, ConfigError> {
        let (mut config, mut values) = (Self::default(), toml::Table::new());
        for (path, text) in files {
            let in_file = |e: toml::de::Error| ConfigError::in_file(path, text, &e);
            // An error has the line of its own file.
            let _: Self = toml::from_str(text).map_err(in_file)?;
            values.extend(toml::from_str::<toml::Table>(text).map_err(in_file)?);
            config = values.clone().try_into().map_err(in_file)?;
        }
        flags.apply(&mut config)?;
        let Err((name, reason)) = config.check() else { return Ok(config) };
        if flags.has(name) {
            return Err(ConfigError::Flag { name, reason });
        }
        for (path, text) in files.iter().rev() {
            let table = DeTable::parse(text).map_err(|e| ConfigError::in_file(path, text, &e))?;
            let key = table.get_ref().keys().find(|key| key.get_ref() == name);
            if let Some(line) = key.map(|key| line_of(text, key.span().start)) {
                let reason = format!("{name}: {reason}");
                return Err(ConfigError::File { file: path.to_path_buf(), line, reason });
            }
        }
        Err(ConfigError::Default { name, reason })
    }

    /// All settings, in the order of `config default`, as options.
    pub fn options() -> Vec<Arg> {
        Self::augment_args(Command::new("settings")).get_arguments().cloned().collect()
    }

    /// The value of each setting, by its name.
    pub fn values(&self) -> toml::Table {
        // All keys are strings and all paths are UTF-8, so that nothing fails.
        toml::Table::try_from(self).unwrap_or_default()
    }

    /// The settings as a config file, each under its meaning.
    pub fn to_toml(&self) -> String {
        let values = self.values();
        let mut text = String::from(
            "# Settings of pause-sandboxer. An option of `serve` with the same name overrides \
             each.\n",
        );
        for option in Self::options() {
            text.push('\n');
            for line in meaning(&option).lines() {
                text.push_str(format!("# {line}").trim_end());
                text.push('\n');
            }
            let name = option.get_id().as_str();
            if let Some(value) = values.get(name) {
                text.push_str(&format!("{name} = {value}\n"));
            }
        }
        text
    }

    /// The directory of the sandboxes' records.
    pub fn records(&self) -> PathBuf {
        records_below(&self.state_dir)
    }

    /// The ttrpc socket: [`Config::socket`] with `.ttrpc` appended.
    pub fn ttrpc_socket(&self) -> PathBuf {
        let mut path = self.socket.clone().into_os_string();
        path.push(TTRPC_SUFFIX);
        path.into()
    }
}

/// The meaning of a setting, in lines; the last names its values if it has a choice.
pub fn meaning(option: &Arg) -> String {
    let text = option.get_long_help().or(option.get_help());
    let text = text.map(ToString::to_string).unwrap_or_default();
    let values: Vec<String> =
        option.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect();
    match values.is_empty() {
        true => text,
        false => format!("{text}\n\nValues: {}", values.join(", ")),
    }
}

#[cfg(test)]
mod tests;
