//! The command line: commands, their options and the exit statuses.

use std::path::PathBuf;

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser, ValueParser};
use clap::error::Result;
use clap::{Arg, ArgAction, ArgMatches, Args, FromArgMatches, Parser, Subcommand, ValueEnum};
use clap::{ValueHint, value_parser};

use crate::config::{self, Config, SETTINGS, Setting};
use crate::enable;

pub mod table;
pub mod watch;

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
  3  list, inspect, stats: the daemon cannot be reached
  4  check --strict: pods can run, but there are warnings
  75 disable --check: pods need the sandboxer, or new ones would";

/// External sandboxer for containerd 2.x: creates and removes the sandboxes of Kubernetes pods.
#[derive(Debug, Parser)]
#[command(name = "pause-sandboxer", version, after_help = STATUSES, args_override_self = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// A command with its options.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the daemon in the foreground; SIGTERM stops it, SIGHUP reloads the log level
    Serve(SettingsSource),
    /// List the sandboxes of the running daemon
    List {
        /// Output format
        #[arg(short, long, default_value = "text")]
        output: Format,
        /// After the list, poll every second and print a line for each sandbox whose state or pid
        /// has changed, until interrupted or the daemon exits
        #[arg(short, long, conflicts_with = "output")]
        watch: bool,
        /// Where the daemon is.
        #[command(flatten)]
        settings: SettingsSource,
    },
    /// Show the details of a sandbox
    Inspect {
        /// Sandbox id, a unique prefix of it, or NAMESPACE/POD
        id: String,
        /// Output format
        #[arg(short, long, default_value = "text")]
        output: Format,
        /// Where the daemon is.
        #[command(flatten)]
        settings: SettingsSource,
    },
    /// Show the resource usage of the pods, refreshed every few seconds
    Stats {
        /// Print one table and exit; the default without a terminal
        #[arg(long)]
        once: bool,
        /// Refresh interval in seconds
        #[arg(long, value_name = "SECONDS", default_value = "2")]
        #[arg(value_parser = value_parser!(u32).range(1..))]
        interval: u32,
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
    /// Remove this sandboxer from containerd's config; fails while pods use its handler
    ///
    /// With --dry-run --output json it prints an object for scripts: containerd_config, drop_in
    /// (the file of `enable`, which need not exist), changes (the files that it would write or
    /// remove), handlers (of this sandboxer in containerd's config), stale_handlers (those that
    /// containerd has loaded and that its config no longer defines; null if CRI does not respond),
    /// unread_files (files of the config that were written after containerd's start) and diff.
    Disable(Disable),
    /// Run a test pod with this handler and one with the default handler; remove both
    ///
    /// Prints the duration of each step. Fails if a step fails, or if a test pod leaves resources
    /// behind on the node. Does not affect other pods, and needs no registry.
    Selftest(SelftestOptions),
    /// Print settings as a config file
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Write the pause program as an OCI image archive, for nodes without a registry
    ///
    /// Import with: pause-sandboxer image | ctr -n k8s.io images import -
    Image {
        /// File to write [default: standard output]
        #[arg(short, long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Print the version
    Version,
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
    /// containerd's config file [default: the one that the running containerd was started with, or
    /// /etc/containerd/config.toml]
    #[arg(long, value_name = "FILE")]
    pub containerd_config: Option<PathBuf>,
    /// containerd's executable [default: the running containerd's, or containerd of PATH]
    #[arg(long, value_name = "PROGRAM")]
    pub containerd: Option<PathBuf>,
    /// The daemon's settings.
    #[command(flatten)]
    pub settings: SettingsSource,
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
    /// containerd's config file [default: the one that the running containerd was started with, or
    /// without --restart also /etc/containerd/config.toml]
    #[arg(long, value_name = "FILE")]
    pub containerd_config: Option<PathBuf>,
    /// containerd's executable [default: the running containerd's, or containerd of PATH]
    #[arg(long, value_name = "PROGRAM")]
    pub containerd: Option<PathBuf>,
    /// The daemon's settings.
    #[command(flatten)]
    pub settings: SettingsSource,
}

/// Options of `enable`.
#[derive(Args, Debug)]
pub struct Enable {
    /// Name of the runtime handler
    #[arg(long, value_name = "NAME", default_value = enable::HANDLER)]
    #[arg(value_parser = handler_name)]
    pub handler: String,
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
    /// What to change.
    #[command(flatten)]
    pub change: Change,
}

/// Options of `disable`.
#[derive(Args, Debug)]
pub struct Disable {
    /// Wait until no pod uses the handler
    #[arg(long)]
    pub wait: bool,
    /// Print what needs the sandboxer, and change nothing: exit status 75 if pods need it, or its
    /// handler is containerd's default
    #[arg(long, conflicts_with_all = ["wait", "restart", "dry_run"])]
    pub check: bool,
    /// What to change.
    #[command(flatten)]
    pub change: Change,
}

/// Options of `selftest`.
#[derive(Args, Debug)]
pub struct SelftestOptions {
    /// Runtime handler to test [default: the first one of this sandboxer]
    #[arg(long, value_name = "NAME")]
    pub handler: Option<String>,
    /// Use host networking for the test pods, for CNI plugins that look up the Pod object, such as
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
    /// containerd's config file [default: the one that the running containerd was started with, or
    /// /etc/containerd/config.toml]
    #[arg(long, value_name = "FILE")]
    pub containerd_config: Option<PathBuf>,
    /// containerd's executable [default: the running containerd's, or containerd of PATH]
    #[arg(long, value_name = "PROGRAM")]
    pub containerd: Option<PathBuf>,
    /// The daemon's settings.
    #[command(flatten)]
    pub settings: SettingsSource,
}

/// Parses the name of a runtime handler: a DNS label, as Kubernetes requires.
fn handler_name(text: &str) -> std::result::Result<String, String> {
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

/// Where the settings come from: `--config` and an option for each setting of the table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SettingsSource {
    /// The config file, if one is named.
    pub file: Option<PathBuf>,
    /// Names and values of the settings that are given as options.
    pub flags: Vec<(String, String)>,
}

impl SettingsSource {
    /// Loads the settings.
    ///
    /// # Errors
    /// See [`Config::load`].
    pub fn load(&self) -> std::result::Result<Config, config::ConfigError> {
        Config::load(self.file.as_deref(), &self.flags)
    }
}

/// Accepts any text, so that [`Config::load`] reports all invalid values in the same way. Lists the
/// choices of a setting for help and completions.
#[derive(Clone)]
struct SettingParser(Vec<&'static str>);

impl TypedValueParser for SettingParser {
    type Value = String;

    fn parse_ref(
        &self,
        command: &clap::Command,
        arg: Option<&Arg>,
        value: &std::ffi::OsStr,
    ) -> Result<String> {
        StringValueParser::new().parse_ref(command, arg, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        let values = self.0.iter().map(PossibleValue::new);
        (!self.0.is_empty()).then(|| Box::new(values) as Box<dyn Iterator<Item = PossibleValue>>)
    }
}

/// The option of a setting.
fn option(setting: &'static Setting) -> Arg {
    let choices = setting.kind.strip_prefix("one of ").map(|words| words.split(", ").collect());
    let meaning: Vec<&str> = setting.lines().collect();
    let arg = Arg::new(setting.name)
        .long(setting.flag().trim_start_matches('-').to_owned())
        .value_name("VALUE")
        .help(setting.kind)
        .long_help(format!("{}\n({})", meaning.join("\n"), setting.kind))
        .help_heading("Settings, which override the config file")
        .hide_possible_values(true)
        .allow_hyphen_values(true);
    let arg = if setting.is_switch() {
        arg.num_args(0..=1).default_missing_value("true").require_equals(true)
    } else if setting.kind.contains("path") {
        arg.value_hint(ValueHint::AnyPath)
    } else {
        arg
    };
    arg.value_parser(ValueParser::new(SettingParser(choices.unwrap_or_default())))
}

impl Args for SettingsSource {
    fn augment_args(command: clap::Command) -> clap::Command {
        let file = Arg::new("config")
            .long("config")
            .value_name("FILE")
            .action(ArgAction::Set)
            .value_parser(value_parser!(PathBuf))
            .value_hint(ValueHint::FilePath)
            .help(format!("Config file [default: {}, if it exists]", config::DEFAULT_FILE));
        command.args_override_self(true).arg(file).args(SETTINGS.iter().map(option))
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for SettingsSource {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self> {
        let given = |setting: &Setting| {
            let value = matches.get_one::<String>(setting.name)?;
            Some((setting.name.to_owned(), value.clone()))
        };
        let file = matches.get_one::<PathBuf>("config").cloned();
        Ok(Self { file, flags: SETTINGS.iter().filter_map(given).collect() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<()> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// Parses the process's arguments, the first of which is the program's name.
///
/// # Errors
/// An invalid command line, or the help or version that it asks for.
pub fn parse(args: impl IntoIterator<Item = std::ffi::OsString>) -> Result<Cli> {
    let mut joined: Vec<std::ffi::OsString> = Vec::new();
    for arg in args {
        // A switch takes its value as the next word too; any other word is not its value.
        let switch = joined.last().and_then(|last| last.to_str()).is_some_and(|last| {
            SETTINGS.iter().any(|setting| setting.is_switch() && setting.flag() == last)
        });
        match joined.last_mut() {
            Some(last) if switch && (arg == "true" || arg == "false") => {
                last.push("=");
                last.push(arg);
            }
            _ => joined.push(arg),
        }
    }
    Cli::try_parse_from(joined)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    fn parsed(line: &str) -> Result<Command> {
        let words = ["pause-sandboxer"].into_iter().chain(line.split_whitespace());
        parse(words.map(Into::into)).map(|cli| cli.command)
    }

    fn settings(line: &str) -> SettingsSource {
        match parsed(line).unwrap() {
            Command::Serve(settings) => settings,
            Command::Check(check) => check.settings,
            Command::Inspect { settings, .. } => settings,
            other => panic!("{other:?}"),
        }
    }

    fn flags(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn settings_are_taken_in_both_forms() {
        let line = "serve --config /c --socket=/a/b --log-level debug --restrict-oom-score-adj \
                    --enable-unprivileged-icmp=false --log-level off --abandoned-after -1";
        let expected = flags(&[
            ("socket", "/a/b"),
            ("restrict_oom_score_adj", "true"),
            ("enable_unprivileged_icmp", "false"),
            ("abandoned_after", "-1"),
            ("log_level", "off"),
        ]);
        assert_eq!(settings(line), SettingsSource { file: Some("/c".into()), flags: expected });
        let line =
            "serve --restrict-oom-score-adj true --enable-unprivileged-icmp false --socket /s";
        let expected = flags(&[
            ("socket", "/s"),
            ("restrict_oom_score_adj", "true"),
            ("enable_unprivileged_icmp", "false"),
        ]);
        assert_eq!(settings(line).flags, expected);
        let line = "inspect --restrict-oom-score-adj abc";
        assert_eq!(settings(line).flags, flags(&[("restrict_oom_score_adj", "true")]));
    }

    #[test]
    fn options_of_a_command_and_its_operand() {
        let line = "check --containerd-config /x --state-dir /s -o json";
        let Ok(Command::Check(check)) = parsed(line) else { panic!("{line}") };
        assert_eq!(check.settings.flags, flags(&[("state_dir", "/s")]));
        assert_eq!((check.containerd_config, check.output), (Some("/x".into()), Format::Json));
        assert_eq!(check.containerd, None);
        let inspect = parsed("inspect -ojson abc --socket /s").unwrap();
        assert!(matches!(inspect, Command::Inspect { id, .. } if id == "abc"));
        assert!(matches!(parsed("stats --once").unwrap(), Command::Stats { once: true, .. }));
        assert!(parsed("config default --socket /x").is_err() && parsed("config").is_err());
    }

    #[test]
    fn errors_name_what_is_wrong() {
        for (line, part) in [
            ("dance", "'dance'"),
            ("serve --sockt /x", "--sockt"),
            ("serve --state_dir /x", "--state_dir"),
            ("serve --containerd-config /x", "--containerd-config"),
            ("serve --socket", "--socket"),
            ("serve now", "'now'"),
            ("serve -x", "'-x'"),
            ("config make", "'make'"),
            ("version now", "'now'"),
            ("inspect", "<ID>"),
            ("inspect a b", "'b'"),
            ("list -o yaml", "possible values: text, json"),
            ("stats --interval 0", "0 is not in 1.."),
            ("disable -o json", "--dry-run"),
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
