//! The command line: commands, their options and the exit statuses.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum, value_parser};

use crate::config::{Config, ConfigError, Flags, absolute_path};

pub mod colour;
pub mod table;

/// Exit status: the daemon cannot be reached.
pub const DOWN: u8 = 3;
/// Exit status of `check --strict` whose worst finding is a warning.
pub const WARNED: u8 = 4;
/// Exit status of `disable --check` if pods need the sandboxer, or new ones would (EX_TEMPFAIL).
pub const NEEDED: u8 = 75;

/// The meanings of all exit statuses; clap exits with 2.
const STATUSES: &str = "\
Exit status:
  0  success
  1  failure, with the reason on standard error; check: pods cannot run
  2  invalid command line
  3  list: the daemon cannot be reached
  4  check --strict: pods can run, but there are warnings
  75 disable --check: pods need the sandboxer, or new ones would";

/// External sandboxer for containerd 2.x: creates and removes the sandboxes of Kubernetes pods.
#[derive(Debug, Parser)]
#[command(name = "pause-sandboxer", version, after_help = STATUSES, args_override_self = true)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// A command with its options.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the daemon in the foreground; SIGTERM stops it, SIGHUP reloads the log level
    Serve(ServeOptions),
    /// List the sandboxes of the running daemon
    List {
        /// Output format
        #[arg(short, long, default_value = "text")]
        output: Format,
        /// Where the daemon is.
        #[command(flatten)]
        settings: SettingsSource,
    },
    /// Diagnose the node and print a remedy for each problem
    ///
    /// Changes no file and no service. Starts and kills one pause process, in cgroups of its own,
    /// to test what the kernel and its security modules permit.
    Check(Check),
    /// Add this sandboxer to containerd's config, with a runtime handler that pods select by name
    ///
    /// Declarative: an option of an earlier run that is omitted now, such as --default or
    /// --offline, is undone. Repeating the command changes nothing. Pods keep running.
    Enable(Enable),
    /// Remove what `enable` has added to containerd's config; fails while pods use its handlers
    ///
    /// With --check it changes nothing and prints a line for each thing that needs the sandboxer.
    /// A line begins with its kind: `default` (its handler is containerd's default), `unread`
    /// (containerd has not read a change of its config), `pod`, and `config` (what `disable` would
    /// remove, which no pod needs). The exit status is 75 for `default` and `pod`.
    Disable(Disable),
    /// Run a test pod with this handler, and remove it
    ///
    /// Prints the duration of each step. Fails if a step fails, or if the test pod leaves resources
    /// behind on the node. Does not affect other pods, and needs no registry.
    Selftest(SelftestOptions),
    /// Print settings as a config file
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Print the version
    Version,
}

/// The node that a command examines or changes.
#[derive(Args, Debug)]
pub struct NodeOptions {
    /// containerd's config file [default: the one that the running containerd was started with, or
    /// /etc/containerd/config.toml if none runs]
    #[arg(long, value_name = "FILE")]
    pub containerd_config: Option<PathBuf>,
    /// containerd's executable [default: the running containerd's, or containerd of PATH]
    #[arg(long, value_name = "PROGRAM")]
    pub containerd: Option<PathBuf>,
    /// The daemon's settings.
    #[command(flatten)]
    pub settings: SettingsSource,
}

/// Options of `check`.
#[derive(Args, Debug)]
pub struct Check {
    /// Output format
    #[arg(short, long, default_value = "text")]
    pub output: Format,
    /// Exit with 4 if pods can run, but there are warnings
    #[arg(long)]
    pub strict: bool,
    /// The node.
    #[command(flatten)]
    pub node: NodeOptions,
}

/// The containerd to change, and the command that restarts it.
#[derive(Args, Debug)]
pub struct Change {
    /// Print the changes as a diff without applying them
    #[arg(long)]
    pub dry_run: bool,
    /// Restart containerd and wait until CRI responds; if it does not, roll back all changes
    #[arg(long)]
    pub restart: bool,
    /// Shell command that restarts containerd [default: systemctl restart of its unit]
    #[arg(long, value_name = "COMMAND", requires = "restart")]
    pub restart_command: Option<String>,
    /// Timeout of the restart in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60")]
    #[arg(value_parser = value_parser!(u32).range(1..))]
    pub timeout: u32,
    /// containerd's gRPC socket [default: containerd_address of the config file, or that of the
    /// containerd that runs]
    #[arg(long, value_name = "PATH", value_parser = absolute_path)]
    pub containerd_address: Option<PathBuf>,
    /// The node.
    #[command(flatten)]
    pub node: NodeOptions,
}

/// Options of `enable`.
#[derive(Args, Debug)]
pub struct Enable {
    /// Add a handler with containerd's built-in controller and this project's shim, the program
    /// pause-sandboxer-runc-shim next to this one: its pods need no daemon. A node can have both
    #[arg(long)]
    pub shim_only: bool,
    /// Name of the runtime handler [default: runc-pause, or runc-small with --shim-only]
    #[arg(long, value_name = "NAME", value_parser = handler_name)]
    pub handler: Option<String>,
    /// Runtime handler to copy settings from, such as SystemdCgroup [default: the default handler
    /// if its runtime is runc, or else the handler runc]
    #[arg(long, value_name = "NAME")]
    pub options_of: Option<String>,
    /// Make this the default handler, which pods without a RuntimeClass use
    #[arg(long)]
    pub default: bool,
    /// Import the bundled pause image and set it as `pinned_images.sandbox` of containerd's config
    /// (version 2: `sandbox_image`), for nodes without a registry
    #[arg(long)]
    pub offline: bool,
    /// The change of the node.
    #[command(flatten)]
    pub change: Change,
}

/// Options of `disable`.
#[derive(Args, Debug)]
pub struct Disable {
    /// Remove only this runtime handler [default: all that `enable` has added]
    #[arg(long, value_name = "NAME")]
    pub handler: Option<String>,
    /// Print what needs the sandboxer, and change nothing: exit status 75 if pods need it, or its
    /// handler is containerd's default
    #[arg(long, conflicts_with_all = ["restart", "dry_run", "handler"])]
    pub check: bool,
    /// The change of the node.
    #[command(flatten)]
    pub change: Change,
}

/// Options of `selftest`.
#[derive(Args, Debug)]
pub struct SelftestOptions {
    /// Runtime handler to test [default: the first one of this sandboxer, or else of its shim]
    #[arg(long, value_name = "NAME")]
    pub handler: Option<String>,
    /// Use host networking for the test pod, for CNI plugins that look up the Pod object, such as
    /// Calico: the test creates no Pod object
    #[arg(long)]
    pub host_network: bool,
    /// Restart the daemon while the test pod runs; all pods keep running
    #[arg(long)]
    pub restart_sandboxer: bool,
    /// Shell command that restarts the daemon
    #[arg(long, value_name = "COMMAND", requires = "restart_sandboxer")]
    #[arg(default_value = "systemctl restart pause-sandboxer.service")]
    pub restart_command: String,
    /// Overall timeout in seconds
    #[arg(long, value_name = "SECONDS", default_value = "120")]
    #[arg(value_parser = value_parser!(u32).range(1..))]
    pub timeout: u32,
    /// The node.
    #[command(flatten)]
    pub node: NodeOptions,
}

/// Parses the name of a runtime handler: a DNS label, as Kubernetes requires.
fn handler_name(text: &str) -> Result<String, String> {
    let word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let ends = text.starts_with('-') || text.ends_with('-');
    if text.is_empty() || text.len() > 63 || ends || !text.chars().all(word) {
        return Err("must be a DNS label: at most 63 of a-z, 0-9 and -".to_owned());
    }
    Ok(text.to_owned())
}

/// A command of `config`.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Print every setting with its meaning and its default
    Default,
    /// Print the settings in effect
    Show(SettingsSource),
}

/// Format of a command's output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Human-readable text.
    #[default]
    Text,
    /// JSON, for scripts.
    Json,
}

/// Where the daemon's settings come from.
#[derive(Args, Clone, Debug)]
pub struct ServeOptions {
    /// Config file [default: /etc/pause-sandboxer/config.toml, if it exists]
    #[arg(long = "config", value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// The settings that are given as options.
    #[command(flatten)]
    pub flags: Flags,
}

impl ServeOptions {
    /// Loads the settings.
    ///
    /// # Errors
    /// See [`Config::load`].
    pub fn load(&self) -> Result<Config, ConfigError> {
        Config::load(self.file.as_deref(), &self.flags)
    }
}

/// Where the settings of other commands come from.
#[derive(Args, Clone, Debug)]
pub struct SettingsSource {
    /// Config file of the daemon [default: /etc/pause-sandboxer/config.toml, if it exists]
    #[arg(long = "config", value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// gRPC socket of the daemon, which overrides the config file's
    #[arg(long, value_name = "PATH", value_parser = absolute_path)]
    pub socket: Option<PathBuf>,
}

impl SettingsSource {
    /// Loads the settings.
    ///
    /// # Errors
    /// See [`Config::load`].
    pub fn load(&self) -> Result<Config, ConfigError> {
        Config::load(self.file.as_deref(), &Flags::Socket(self.socket.clone()))
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    fn parsed(line: &str) -> clap::error::Result<Command> {
        let words = ["pause-sandboxer"].into_iter().chain(line.split_whitespace());
        Cli::try_parse_from(words).map(|cli| cli.command)
    }

    fn served(line: &str) -> Config {
        match parsed(line).unwrap() {
            Command::Serve(options) => options.load().unwrap(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn settings_are_options_of_serve() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let line = format!(
            "serve --config {} --socket=/a/b --log-level debug --restrict-oom-score-adj \
             --enable-unprivileged-icmp=false --log-level off --shim-env A=b --shim-env=C=d",
            file.path().display()
        );
        let config = served(&line);
        let expected = Config {
            socket: "/a/b".into(),
            log_level: log::LevelFilter::Off,
            restrict_oom_score_adj: true,
            enable_unprivileged_icmp: false,
            shim_env: ["A=b", "C=d"].map(|variable| variable.parse().unwrap()).into(),
            ..Config::default()
        };
        assert_eq!(config, expected);
    }

    /// A socket of another daemon is all that the other commands need.
    #[test]
    fn the_help_of_other_commands_fits_a_screen() {
        let mut command = Cli::command();
        command.build();
        for name in ["list", "check", "enable", "disable", "selftest"] {
            let options = command.find_subcommand(name).unwrap().get_opts();
            let names: Vec<_> = options.filter_map(clap::Arg::get_long).collect();
            assert!(names.len() <= 12, "{name}: {names:?}");
            assert!(names.contains(&"config") && names.contains(&"socket"), "{name}: {names:?}");
            assert!(!names.contains(&"state-dir"), "{name}: {names:?}");
        }
    }

    #[test]
    fn options_of_a_command_and_its_operand() {
        let line = "check --containerd-config /x --socket /s -o json";
        let Ok(Command::Check(check)) = parsed(line) else { panic!("{line}") };
        assert_eq!(check.node.settings.socket, Some("/s".into()));
        assert_eq!((check.node.containerd_config, check.output), (Some("/x".into()), Format::Json));
        assert_eq!(check.node.containerd, None);
        assert!(parsed("config default --socket /x").is_err() && parsed("config").is_err());
    }

    #[test]
    fn errors_name_what_is_wrong() {
        for (line, part) in [
            ("dance", "'dance'"),
            ("lits", "similar subcommand exists: 'list'"),
            ("serve --sockt /x", "similar argument exists: '--socket'"),
            ("serve --state_dir /x", "similar argument exists: '--state-dir'"),
            ("serve --state-dir x", "'x' for '--state-dir <PATH>': must be an absolute path"),
            ("serve --log-level loud", "possible values: off, error, warn, info, debug, trace"),
            ("serve --forgotten-interval 0", "0 is not in 1.."),
            ("list --state-dir /x", "--state-dir"),
            ("serve --containerd-config /x", "--containerd-config"),
            ("serve --socket", "--socket"),
            ("serve now", "'now'"),
            ("serve -x", "'-x'"),
            ("config make", "'make'"),
            ("version now", "'now'"),
            ("list -o yaml", "possible values: text, json"),
            ("list --interval 1", "--interval"),
            ("enable --timeout 0", "0 is not in 1.."),
            ("disable -o json", "unexpected argument '-o'"),
        ] {
            let error = parsed(line).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{line}");
            assert!(error.to_string().contains(part), "{line}: {error}");
        }
        for line in ["help", "--help", "-h", "serve --help", "--version", "-V"] {
            assert_eq!(parsed(line).unwrap_err().exit_code(), 0, "{line}");
        }
    }
}
