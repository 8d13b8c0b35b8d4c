//! The command line: which command with which settings, and the exit status.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;

use lexopt::{Arg, Parser, ValueExt as _};
use pause_sandboxer::check::{self, Level};
use pause_sandboxer::config::{Config, DEFAULT_FILE, SETTINGS};

mod serve;

/// A command that could not be understood; sysexits are not used, 2 is what shells and getopt programs answer.
const USAGE_ERROR: u8 = 2;

/// What was asked for.
#[derive(Debug, PartialEq, Eq)]
enum Command {
    Serve(Settings),
    ConfigDefault,
    ConfigShow(Settings),
    Check { settings: Settings, containerd_config: PathBuf, containerd: PathBuf },
    Version,
    Help,
}

/// Where the settings come from.
#[derive(Debug, Default, PartialEq, Eq)]
struct Settings {
    file: Option<PathBuf>,
    /// Name and value, in their order.
    flags: Vec<(String, String)>,
}

impl Settings {
    fn load(&self) -> Result<Config, String> {
        Config::load(self.file.as_deref(), &self.flags).map_err(|e| e.to_string())
    }
}

fn main() -> ExitCode {
    let command = match parse(std::env::args_os().skip(1)) {
        Ok(command) => command,
        Err(reason) => {
            complain(&format!("{reason} (`pause-sandboxer help` shows the usage)"));
            return USAGE_ERROR.into();
        }
    };
    run(command).unwrap_or_else(|reason| {
        complain(&reason);
        ExitCode::FAILURE
    })
}

fn run(command: Command) -> Result<ExitCode, String> {
    match command {
        Command::Serve(settings) => {
            let config = settings.load()?;
            serve::serve(config, settings.file, settings.flags).map_err(|e| e.to_string())?;
        }
        Command::ConfigDefault => print(&Config::default().to_toml())?,
        Command::ConfigShow(settings) => print(&settings.load()?.to_toml())?,
        Command::Check { settings, containerd_config, containerd } => {
            let subject =
                check::Subject { config: settings.load()?, containerd_config, containerd_program: containerd };
            let findings = check::run(&subject);
            print(&findings.iter().map(|finding| format!("{finding}\n")).collect::<String>())?;
            if check::worst(&findings) == Level::Fail {
                return Ok(ExitCode::FAILURE);
            }
        }
        Command::Version => print(&format!("pause-sandboxer {}\n", env!("CARGO_PKG_VERSION")))?,
        Command::Help => print(&help())?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Writes to standard output; a reader that has gone away, such as `head`, is no error worth a panic.
fn print(text: &str) -> Result<(), String> {
    std::io::stdout().lock().write_all(text.as_bytes()).map_err(|e| format!("write to standard output: {e}"))
}

fn complain(reason: &str) {
    // Nobody is left to tell when standard error is gone.
    let _ = writeln!(std::io::stderr().lock(), "pause-sandboxer: {reason}");
}

/// Understands the arguments after the program's name.
fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Command, String> {
    let mut parser = Parser::from_args(args);
    let Some(first) = parser.next().map_err(text)? else { return Err("a command is missing".to_owned()) };
    let command = match first {
        Arg::Short('h') | Arg::Long("help") => return Ok(Command::Help),
        Arg::Short('V') | Arg::Long("version") => return Ok(Command::Version),
        Arg::Value(word) => word.string().map_err(text)?,
        other => return Err(other.unexpected().to_string()),
    };
    match command.as_str() {
        "serve" => Ok(Command::Serve(settings(&mut parser, &mut |_, _| Ok(false))?)),
        "check" => parse_check(&mut parser),
        "config" => parse_config(&mut parser),
        "version" | "help" => match parser.next().map_err(text)? {
            None if command == "version" => Ok(Command::Version),
            None => Ok(Command::Help),
            Some(other) => Err(other.unexpected().to_string()),
        },
        other => Err(format!("unknown command {other:?}")),
    }
}

fn parse_config(parser: &mut Parser) -> Result<Command, String> {
    let word = match parser.next().map_err(text)? {
        Some(Arg::Value(word)) => word.string().map_err(text)?,
        _ => return Err("config: `default` or `show` is missing".to_owned()),
    };
    let settings = settings(parser, &mut |_, _| Ok(false))?;
    match word.as_str() {
        "default" if settings == Settings::default() => Ok(Command::ConfigDefault),
        "default" => Err("config default takes no options".to_owned()),
        "show" => Ok(Command::ConfigShow(settings)),
        other => Err(format!("config: unknown command {other:?}")),
    }
}

fn parse_check(parser: &mut Parser) -> Result<Command, String> {
    let (mut containerd_config, mut containerd) = ("/etc/containerd/config.toml".into(), "containerd".into());
    let settings = settings(parser, &mut |name, parser| {
        let target: &mut PathBuf = match name {
            "containerd-config" => &mut containerd_config,
            "containerd" => &mut containerd,
            _ => return Ok(false),
        };
        *target = parser.value().map_err(text)?.into();
        Ok(true)
    })?;
    Ok(Command::Check { settings, containerd_config, containerd })
}

/// Takes the rest of the arguments as `--config` and flags of settings. `own` takes a flag of the command's own and
/// says whether it did.
fn settings(
    parser: &mut Parser,
    own: &mut dyn FnMut(&str, &mut Parser) -> Result<bool, String>,
) -> Result<Settings, String> {
    let mut settings = Settings::default();
    while let Some(arg) = parser.next().map_err(text)? {
        let Arg::Long(flag) = arg else { return Err(arg.unexpected().to_string()) };
        let flag = flag.to_owned();
        if flag == "config" {
            settings.file = Some(parser.value().map_err(text)?.into());
        } else if let Some(setting) = SETTINGS.iter().find(|setting| setting.flag() == format!("--{flag}")) {
            // A switch may stand alone; its value, if any, follows an equals sign.
            let value = match parser.optional_value() {
                Some(value) => value,
                None if setting.is_switch() => "true".into(),
                None => parser.value().map_err(text)?,
            };
            settings.flags.push((setting.name.to_owned(), value.string().map_err(text)?));
        } else if !own(&flag, parser)? {
            return Err(format!("unknown option --{flag}"));
        }
    }
    Ok(settings)
}

fn text(error: lexopt::Error) -> String {
    error.to_string()
}

fn help() -> String {
    let mut help = format!(
        "\
pause-sandboxer {version}: an external sandboxer for containerd 2.x

  pause-sandboxer serve [SETTINGS]     answers containerd until SIGTERM; SIGHUP reads the log level again
  pause-sandboxer check [SETTINGS] [--containerd-config FILE] [--containerd PROGRAM]
                                       looks at the node, says what is wrong and what to do; 1 if pods will not run
  pause-sandboxer config default       prints every setting with its meaning and its default
  pause-sandboxer config show [SETTINGS]
                                       prints the settings in effect, or says what is wrong with them
  pause-sandboxer version
  pause-sandboxer help

SETTINGS: --config FILE (default {DEFAULT_FILE}, which need not exist) and, going before the file:
",
        version = env!("CARGO_PKG_VERSION")
    );
    for setting in SETTINGS {
        help.push_str(&format!("  {:30} {}\n", setting.flag(), setting.kind));
    }
    help
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Command, String> {
        parse(line.split_whitespace().map(OsString::from))
    }

    fn flags(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn commands() {
        for (line, command) in [
            ("version", Command::Version),
            ("--version", Command::Version),
            ("-h", Command::Help),
            ("help", Command::Help),
            ("config default", Command::ConfigDefault),
            ("serve", Command::Serve(Settings::default())),
        ] {
            assert_eq!(parsed(line), Ok(command), "{line}");
        }
    }

    #[test]
    fn settings_are_taken_in_both_forms() {
        let line = "serve --config /c --socket=/a/b --log-level debug --restrict-oom-score-adj --enable-unprivileged-icmp=false";
        let flags = flags(&[
            ("socket", "/a/b"),
            ("log_level", "debug"),
            ("restrict_oom_score_adj", "true"),
            ("enable_unprivileged_icmp", "false"),
        ]);
        assert_eq!(parsed(line), Ok(Command::Serve(Settings { file: Some("/c".into()), flags })));
    }

    #[test]
    fn check_has_flags_of_its_own() {
        let command = parsed("check --containerd-config /x --state-dir /s").unwrap();
        let settings = Settings { file: None, flags: flags(&[("state_dir", "/s")]) };
        assert_eq!(
            command,
            Command::Check { settings, containerd_config: "/x".into(), containerd: "containerd".into() }
        );
    }

    #[test]
    fn what_is_not_understood_is_named() {
        for (line, part) in [
            ("", "command is missing"),
            ("dance", "\"dance\""),
            ("serve --sockt /x", "--sockt"),
            ("serve --state_dir /x", "--state_dir"),
            ("serve --containerd-config /x", "--containerd-config"),
            ("serve --socket", "--socket"),
            ("serve now", "now"),
            ("serve -x", "-x"),
            ("config", "default"),
            ("config make", "\"make\""),
            ("config default --socket /x", "no options"),
            ("version now", "now"),
            ("--loud", "--loud"),
        ] {
            let reason = parsed(line).unwrap_err();
            assert!(reason.contains(part), "{line}: {reason}");
        }
    }

    #[test]
    fn help_shows_every_flag() {
        for setting in SETTINGS {
            assert!(help().contains(&format!("  {} ", setting.flag())), "{}", setting.name);
        }
    }
}
