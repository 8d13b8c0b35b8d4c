//! Settings of the daemon: one checked [`Config`] from the config file and the flags.
//!
//! Every setting is written once, in the table below: its name (also that of its flag, with
//! dashes), its meaning, its type and its default. The struct, the file, the flags and `config
//! default` come from that table.

use std::path::{Path, PathBuf};
use std::time::Duration;

use log::LevelFilter;

mod environment;
mod file;
mod pattern;
mod value;

pub use environment::Variables;
pub use pattern::Pattern;
pub use value::{Categories, CgroupDriver, LogFormat, Metrics, ShimBinaries, ShimOwner};

use toml::Spanned;
use toml::de::DeValue;

use crate::id::{IDENTIFIER_MAX, check_identifier};
use value::SettingValue;

/// The config file that is read when none is named; it need not exist.
pub const DEFAULT_FILE: &str = "/etc/pause-sandboxer/config.toml";

/// Suffix of the ttrpc socket's path, by containerd's convention.
pub const TTRPC_SUFFIX: &str = ".ttrpc";

/// Longest path of a unix socket, bytes: `sun_path` less its closing NUL (unix(7)).
const SOCKET_PATH_MAX: usize = 107;

/// Size of the suffix of a socket's path until it listens (`.new`), bytes.
const SOCKET_PATH_SPARE: usize = 4;

/// Size of what follows the state directory in the path of a shim's socket, bytes; equal to
/// `crate::shim::SOCKET_SUFFIX`.
pub const SHIM_SOCKET_SUFFIX: usize = 43;

/// Maximum length of an invalid value in an error, characters.
const SHOWN_MAX: usize = 200;

/// Directory of CRI's pod files below containerd's `root` and `state`. At a restart containerd
/// deletes unknown entries there.
pub const CRI_PLUGIN_DIR: &str = "io.containerd.grpc.v1.cri";

/// One setting: its name, its meaning and how it is set and shown.
#[derive(Debug)]
pub struct Setting {
    /// Its key in the config file.
    pub name: &'static str,
    /// Its description, one string per line.
    pub meaning: &'static [&'static str],
    /// The kind of its values.
    pub kind: &'static str,
    set: fn(&mut Config, Spanned<DeValue<'_>>) -> Result<(), String>,
    set_text: fn(&mut Config, &str) -> Result<(), String>,
    show: fn(&Config) -> String,
}

impl Setting {
    /// The lines of its meaning, without the space that a doc comment begins with.
    pub fn lines(&self) -> impl Iterator<Item = &'static str> {
        self.meaning.iter().map(|line| line.strip_prefix(' ').unwrap_or(line))
    }

    /// Its flag: the name with dashes.
    pub fn flag(&self) -> String {
        format!("--{}", self.name.replace('_', "-"))
    }

    /// Whether its flag may be given without a value, which then means true.
    pub fn is_switch(&self) -> bool {
        self.kind == bool::KIND
    }

    /// Its value in `config`, as TOML.
    pub fn show(&self, config: &Config) -> String {
        (self.show)(config)
    }

    fn named(name: &str) -> Option<&'static Self> {
        SETTINGS.iter().find(|s| s.name == name)
    }
}

macro_rules! settings {
    ($($(#[doc = $meaning:literal])+ $name:ident: $type:ty = $default:expr;)+) => {
        /// Every setting of the daemon, checked.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct Config {
            $($(#[doc = $meaning])+ pub $name: $type,)+
        }

        impl Default for Config {
            fn default() -> Self {
                Self { $($name: $default,)+ }
            }
        }

        /// All settings, in the order of `config default`.
        pub const SETTINGS: &[Setting] = &[$(Setting {
            name: stringify!($name),
            meaning: &[$($meaning),+],
            kind: <$type as SettingValue>::KIND,
            set: |config, value| {
                config.$name = <$type as SettingValue>::parse(value)?;
                Ok(())
            },
            set_text: |config, text| {
                config.$name = <$type as SettingValue>::from_flag(text)?;
                Ok(())
            },
            show: |config| config.$name.to_toml(),
        },)+];
    };
}

settings! {
    /// gRPC socket that containerd dials (`address` under `proxy_plugins`); the ttrpc socket has
    /// `.ttrpc` appended.
    socket: PathBuf = "/run/pause-sandboxer/pause-sandboxer.sock".into();
    /// Directory of the records and private mounts, created with mode 0700. One daemon per
    /// directory. Must be on a tmpfs: records must not survive a reboot.
    state_dir: PathBuf = "/run/pause-sandboxer".into();
    /// containerd's `root`, where CRI looks for a pod's hostname, hosts and resolv.conf.
    containerd_root: PathBuf = "/var/lib/containerd".into();
    /// containerd's `state`, where CRI looks for a pod's shm.
    containerd_state: PathBuf = "/run/containerd".into();
    /// containerd's gRPC socket (`address` under `grpc`).
    containerd_address: PathBuf = "/run/containerd/containerd.sock".into();
    /// containerd namespace that CRI uses. Calls with another namespace are rejected.
    containerd_namespace: String = "k8s.io".to_owned();
    /// How the pods' cgroups are created: as directories (`cgroupfs`), or as systemd scopes
    /// (`systemd`), which requires slices as parents. `auto` depends on the parent cgroup that
    /// kubelet sets: `systemd` for a slice (`….slice`) if systemd is the init system, else
    /// `cgroupfs`.
    cgroup_driver: CgroupDriver = CgroupDriver::Auto;
    /// Which shim serves a pod's containers. The sandboxer starts it before the first container,
    /// supervises it and stops it with the pod:
    ///
    /// - `own`: its own, smaller shim. The shim `pause-sandboxer-runc-shim` is in the directory of
    ///   the daemon's program and replaces `containerd-shim-runc-v2`. `runtime` applies instead to
    ///   pods of other runtimes, with other runtime options or of runtimes in `shims`, and to all
    ///   pods if the program is missing or unusable.
    /// - `runtime`: the runtime's shim.
    ///
    /// Applies to pods created after the change.
    shim: ShimOwner = ShimOwner::Own;
    /// Path of the shim binary per runtime name, in place of the one that containerd would find,
    /// for example
    /// `shims = { "io.containerd.runc.v2" = "/usr/local/bin/containerd-shim-other-v2" }`.
    shims: ShimBinaries = ShimBinaries::default();
    /// Environment variables for the shims that the sandboxer starts, for example
    /// `shim_env = ["SCHED_CORE=1"]`. The counterpart of containerd's `env` under
    /// `plugins."io.containerd.shim.v1.manager"`. The own shim, with the programs that it runs and
    /// their hooks, gets these, PATH and what containerd sets for shims; other shims also get the
    /// daemon's environment. With SCHED_CORE each shim and its containers are in a separate core
    /// scheduling domain; on a kernel without support no shim starts.
    shim_env: Variables = Variables::default();
    /// Record each sandbox in containerd as a container, and as a task while the pod's shim runs:
    /// `ctr` lists them, and cAdvisor looks for a pod's network there. Only for pods that the
    /// sandboxer's own shim serves (`shim`). When it is turned off, existing pods keep their
    /// records; when it is turned on, they get theirs with their shim.
    container_record: bool = true;
    /// Do not lower `oom_score_adj` below the daemon's own. Same as containerd's setting of this
    /// name; required if the daemon lacks CAP_SYS_RESOURCE.
    restrict_oom_score_adj: bool = false;
    /// Pods with their own network namespace can bind ports below 1024 without a capability. Same
    /// as containerd's setting of this name.
    enable_unprivileged_ports: bool = true;
    /// Pods with their own network namespace can send ICMP echo requests without a capability. Same
    /// as containerd's setting of this name.
    enable_unprivileged_icmp: bool = true;
    /// Set SELinux labels on pods, if SELinux is enabled. Same as containerd's setting of this
    /// name.
    enable_selinux: bool = false;
    /// The MCS levels of pods use categories below this number. Same as containerd's setting of
    /// this name.
    selinux_category_range: Categories = Categories::default();
    /// Patterns of the pod annotations that are copied to the OCI spec of the sandbox; `*` matches
    /// anything but a slash. The counterpart of containerd's setting of this name, which is for the
    /// pod's containers.
    pod_annotations: Vec<Pattern> = Vec::new();
    /// Seconds after which a sandbox that was created but not started is removed. containerd leaves
    /// such a sandbox behind if it fails to pull the pause image.
    abandoned_after: Duration = Duration::from_secs(3600);
    /// Interval of the garbage collection in seconds. It removes sandboxes that got no call since
    /// their start and that containerd does not know.
    forgotten_interval: Duration = Duration::from_secs(60);
    /// Address of the daemon's metrics for Prometheus: a unix socket that only root can use, such
    /// as `unix:///run/pause-sandboxer/metrics.sock`, or a loopback port, such as `127.0.0.1:9477`
    /// or `[::1]:9477`.
    metrics: Metrics = Metrics::Off;
    /// Minimum level of log messages. The environment variable PAUSE_SANDBOXER_LOG overrides it.
    log_level: LevelFilter = LevelFilter::Info;
    /// Format of log lines, which are written to standard error.
    log_format: LogFormat = LogFormat::Text;
}

/// Invalid settings: the place, the setting and the reason.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The config file could not be read.
    #[error("read config file {}: {reason}", .file.display())]
    Read {
        /// The config file.
        file: PathBuf,
        /// The system's answer.
        reason: String,
    },
    /// The config file is not TOML.
    #[error("{}:{line}: {reason}", .file.display())]
    Syntax {
        /// The config file.
        file: PathBuf,
        /// Its line, from 1.
        line: usize,
        /// The error of the parser.
        reason: String,
    },
    /// A setting is unknown or its value is invalid.
    #[error("{}{reason}", prefix(.origin, .name))]
    Setting {
        /// File and line, flag with its dashes, or `default`.
        origin: String,
        /// The setting.
        name: String,
        /// Why it is invalid.
        reason: String,
    },
}

/// The prefix of the reason in an error. A flag is not followed by the name of its setting.
fn prefix(origin: &str, name: &str) -> String {
    if origin.starts_with("--") { format!("{origin}: ") } else { format!("{origin}: {name}: ") }
}

/// Settings under construction, with the last origin of each.
struct Gathered {
    config: Config,
    origins: Vec<(&'static str, String)>,
}

impl Gathered {
    /// Sets what `set` reads from the text `shown`.
    fn set(
        &mut self,
        name: &str,
        shown: &str,
        origin: String,
        set: impl FnOnce(&Setting, &mut Config) -> Result<(), String>,
    ) -> Result<(), ConfigError> {
        let unknown = || "unknown setting (`pause-sandboxer config default` prints all)".to_owned();
        let set = Setting::named(name).ok_or_else(unknown).and_then(|setting| {
            set(setting, &mut self.config).map(|()| setting.name).map_err(|reason| {
                match reason.as_str() {
                    "" => {
                        let line = shown.lines().next().unwrap_or_default();
                        let shown: String = line.chars().take(SHOWN_MAX).collect();
                        format!("invalid value {shown}: must be {}", setting.kind)
                    }
                    _ => reason,
                }
            })
        });
        match set {
            Ok(name) => {
                self.origins.push((name, origin));
                Ok(())
            }
            Err(reason) => Err(ConfigError::Setting { origin, name: name.to_owned(), reason }),
        }
    }

    /// Sets what the text of a flag says: a TOML list or table, another TOML value that fits, or
    /// else a string.
    fn set_flag(&mut self, name: &str, text: &str) -> Result<(), ConfigError> {
        let origin = format!("--{}", name.replace('_', "-"));
        let shown = format!("{text:?}");
        if let Ok(value) = DeValue::parse(text) {
            let whole = matches!(value.get_ref(), DeValue::Array(_) | DeValue::Table(_));
            let set =
                self.set(name, &shown, origin.clone(), |setting, config| match value.get_ref() {
                    DeValue::String(text) => (setting.set_text)(config, text),
                    _ => (setting.set)(config, value),
                });
            if whole || set.is_ok() {
                return set;
            }
        }
        self.set(name, &shown, origin, |setting, config| (setting.set_text)(config, text))
    }

    fn checked(self) -> Result<Config, ConfigError> {
        match self.config.fault() {
            None => Ok(self.config),
            Some((name, reason)) => {
                let origin = self
                    .origins
                    .iter()
                    .rev()
                    .find(|(n, _)| *n == name)
                    .map_or("default", |(_, o)| o);
                Err(ConfigError::Setting {
                    origin: origin.to_owned(),
                    name: name.to_owned(),
                    reason,
                })
            }
        }
    }
}

/// The directory of the sandboxes' records below a state directory.
pub fn records_below(state_dir: &Path) -> PathBuf {
    state_dir.join("sandboxes")
}

impl Config {
    /// Reads `file`, lets `flags` (setting name and value) override it, and checks the whole.
    /// Without a `file` [`DEFAULT_FILE`] is read if it exists.
    ///
    /// # Errors
    /// A file that cannot be read or is not TOML; the first setting that is unknown or wrong.
    pub fn load(file: Option<&Path>, flags: &[(String, String)]) -> Result<Self, ConfigError> {
        let (path, optional) = (file.unwrap_or(Path::new(DEFAULT_FILE)), file.is_none());
        match std::fs::read_to_string(path) {
            Ok(text) => Self::parse(path, &text, flags),
            Err(e) if optional && e.kind() == std::io::ErrorKind::NotFound => {
                Self::parse(path, "", flags)
            }
            Err(e) => Err(ConfigError::Read { file: path.to_owned(), reason: e.to_string() }),
        }
    }

    /// As [`Config::load`] with the content of the file at `path`.
    ///
    /// # Errors
    /// The text is not TOML; the first setting that is unknown or wrong.
    pub fn parse(path: &Path, text: &str, flags: &[(String, String)]) -> Result<Self, ConfigError> {
        let mut gathered = Gathered { config: Self::default(), origins: Vec::new() };
        file::gather(path, text, &mut gathered)?;
        for (name, text) in flags {
            gathered.set_flag(name, text)?;
        }
        gathered.checked()
    }

    /// The settings as a config file, each under its meaning.
    pub fn to_toml(&self) -> String {
        file::write(self)
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

    /// The first setting that does not fit the others, and why.
    fn fault(&self) -> Option<(&'static str, String)> {
        let most = SOCKET_PATH_MAX - SOCKET_PATH_SPARE - TTRPC_SUFFIX.len();
        let length = self.socket.as_os_str().len();
        if length > most {
            return Some((
                "socket",
                format!(
                    "must be at most {most} bytes long, to leave room for the ttrpc socket's name; \
                     has {length}"
                ),
            ));
        }
        if self.containerd_address.as_os_str().len() > SOCKET_PATH_MAX {
            return Some((
                "containerd_address",
                format!("must be at most {SOCKET_PATH_MAX} bytes long"),
            ));
        }
        let most = SOCKET_PATH_MAX - SHIM_SOCKET_SUFFIX;
        if self.state_dir.as_os_str().len() > most {
            return Some((
                "state_dir",
                format!("must be at most {most} bytes long, to leave room for the shims' sockets"),
            ));
        }
        if self.socket.parent() == Some(Path::new("/")) {
            return Some(("socket", "must be in a directory below /".to_owned()));
        }
        for (name, dir) in [
            ("containerd_root", &self.containerd_root),
            ("containerd_state", &self.containerd_state),
        ] {
            let cri = dir.join(CRI_PLUGIN_DIR);
            if self.state_dir == *dir || self.state_dir.starts_with(&cri) {
                return Some((
                    "state_dir",
                    format!(
                        "must not be {name} nor below {}: that is containerd's own",
                        cri.display()
                    ),
                ));
            }
        }
        if self.state_dir == Path::new("/") {
            return Some(("state_dir", "must be a directory of the daemon's own".to_owned()));
        }
        if let Metrics::Unix(path) = &self.metrics {
            let most = SOCKET_PATH_MAX - SOCKET_PATH_SPARE;
            if path.as_os_str().len() > most {
                return Some(("metrics", format!("must have a path of at most {most} bytes")));
            }
            if [&self.socket, &self.ttrpc_socket(), &self.containerd_address].contains(&path) {
                return Some(("metrics", "must be a socket of its own".to_owned()));
            }
        }
        if self.socket == self.containerd_address {
            return Some(("socket", "must not be containerd's own socket".to_owned()));
        }
        check_identifier(&self.containerd_namespace).err().map(|_| {
            let reason = format!(
                "must be a containerd identifier (letters and digits joined by single . _ -, at \
                 most {IDENTIFIER_MAX} bytes)"
            );
            ("containerd_namespace", reason)
        })
    }
}

#[cfg(test)]
mod tests;
