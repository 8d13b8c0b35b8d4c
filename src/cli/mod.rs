//! The command line: what was asked for, and the help.
#![allow(missing_docs, reason = "the names say it")]

use std::ffi::OsString;
use std::path::PathBuf;

use crate::config::{Config, DEFAULT_FILE, SETTINGS};
use lexopt::{Arg, Parser, ValueExt as _};

pub mod commands;
pub mod completion;
pub mod man;
pub mod table;

pub use commands::{COMMANDS, Command, DOWN, Opt, STATUSES, USAGE_ERROR, WARNED, What};

/// Where the settings come from.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Settings {
    pub file: Option<PathBuf>,
    /// Name and value, in their order.
    pub flags: Vec<(String, String)>,
}

impl Settings {
    pub fn load(&self) -> Result<Config, String> {
        Config::load(self.file.as_deref(), &self.flags).map_err(|e| e.to_string())
    }
}

/// What was asked for.
#[derive(Debug, PartialEq, Eq)]
pub struct Asked {
    pub what: What,
    pub settings: Settings,
    /// The operand, where the command has one.
    pub operand: String,
    /// The command's own options by their long name; of those without a value it is empty.
    options: Vec<(&'static str, String)>,
}

impl Asked {
    fn nothing_but(what: What) -> Self {
        Self { what, settings: Settings::default(), operand: String::new(), options: Vec::new() }
    }

    /// The value of an option of the command's own; the last one counts.
    pub fn option(&self, long: &str) -> Option<&str> {
        self.options.iter().rev().find(|(name, _)| *name == long).map(|(_, value)| value.as_str())
    }
}

/// Understands the arguments after the program's name.
///
/// # Errors
/// What was not understood.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Asked, String> {
    let mut parser = Parser::from_args(args);
    let Some(first) = parser.next().map_err(text)? else {
        return Err("a command is missing".to_owned());
    };
    let word = match first {
        Arg::Short('h') | Arg::Long("help") => return Ok(Asked::nothing_but(What::Help)),
        Arg::Short('V') | Arg::Long("version") => return Ok(Asked::nothing_but(What::Version)),
        Arg::Value(word) => word.string().map_err(text)?,
        other => return Err(other.unexpected().to_string()),
    };
    let command = find(&word, &mut parser)?;
    let mut asked = Asked::nothing_but(command.what);
    while let Some(arg) = parser.next().map_err(text)? {
        match arg {
            Arg::Long("help") | Arg::Short('h') => return Ok(Asked::nothing_but(What::Help)),
            Arg::Long(long) => {
                let long = long.to_owned();
                take_long(command, &long, &mut parser, &mut asked)?;
            }
            Arg::Short(short) => {
                match command.options.iter().find(|option| option.short == Some(short)) {
                    Some(option) => take(command, option, &mut parser, &mut asked)?,
                    None => return Err(Arg::Short(short).unexpected().to_string()),
                }
            }
            Arg::Value(word) if !command.operand.is_empty() && asked.operand.is_empty() => {
                asked.operand = word.string().map_err(text)?;
                among(command.operand, &asked.operand, command.operands)?;
            }
            Arg::Value(_) => return Err(arg.unexpected().to_string()),
        }
    }
    if !command.operand.is_empty() && asked.operand.is_empty() {
        return Err(format!("{}: {} is missing", command.name, command.operand));
    }
    Ok(asked)
}

/// The command of a first word, which may take a second.
fn find(word: &str, parser: &mut Parser) -> Result<&'static Command, String> {
    if let Some(command) = COMMANDS.iter().find(|command| command.name == word) {
        return Ok(command);
    }
    let second = |command: &'static Command| {
        command.name.strip_prefix(word)?.strip_prefix(' ').map(|second| (second, command))
    };
    let pairs: Vec<_> = COMMANDS.iter().filter_map(second).collect();
    if pairs.is_empty() {
        return Err(format!("unknown command {word:?}"));
    }
    let given = match parser.next().map_err(text)? {
        Some(Arg::Value(given)) => given.string().map_err(text)?,
        _ => {
            let all: Vec<String> = pairs.iter().map(|(second, _)| format!("`{second}`")).collect();
            return Err(format!("{word}: {} is missing", all.join(" or ")));
        }
    };
    match pairs.iter().find(|(second, _)| *second == given) {
        Some((_, command)) => Ok(command),
        None => Err(format!("{word}: unknown command {given:?}")),
    }
}

fn take_long(
    command: &'static Command,
    long: &str,
    parser: &mut Parser,
    asked: &mut Asked,
) -> Result<(), String> {
    if let Some(option) = command.options.iter().find(|option| option.long == long) {
        return take(command, option, parser, asked);
    }
    if !command.settings {
        return Err(format!("{} knows no option --{long}", command.name));
    }
    if long == "config" {
        asked.settings.file = Some(parser.value().map_err(text)?.into());
        return Ok(());
    }
    let Some(setting) = SETTINGS.iter().find(|setting| setting.flag() == format!("--{long}"))
    else {
        return Err(format!("unknown option --{long}"));
    };
    // A switch may stand alone; its value, if any, follows an equals sign or is the next word.
    let value = match parser.optional_value() {
        Some(value) => value,
        None if setting.is_switch() => {
            let mut words = parser.try_raw_args();
            let given = words
                .as_mut()
                .and_then(|words| words.next_if(|word| word == "true" || word == "false"));
            given.unwrap_or_else(|| "true".into())
        }
        None => parser.value().map_err(text)?,
    };
    asked.settings.flags.push((setting.name.to_owned(), value.string().map_err(text)?));
    Ok(())
}

fn take(
    command: &Command,
    option: &'static Opt,
    parser: &mut Parser,
    asked: &mut Asked,
) -> Result<(), String> {
    let value = if option.value.is_empty() {
        String::new()
    } else {
        parser.value().map_err(text)?.string().map_err(text)?
    };
    among(&format!("{} --{}", command.name, option.long), &value, option.values)?;
    asked.options.push((option.long, value));
    Ok(())
}

fn among(of: &str, value: &str, values: &[&str]) -> Result<(), String> {
    if values.is_empty() || values.contains(&value) {
        return Ok(());
    }
    Err(format!("{of}: must be one of {}, is {value:?}", values.join(", ")))
}

fn text(error: lexopt::Error) -> String {
    error.to_string()
}

/// How a command is called, with its own options.
pub fn synopsis(command: &Command) -> String {
    let mut line = command.name.to_owned();
    for option in command.options {
        let name =
            option.short.map_or_else(|| format!("--{}", option.long), |short| format!("-{short}"));
        line += &match option.value {
            "" => format!(" [{name}]"),
            value => format!(" [{name} {value}]"),
        };
    }
    if command.settings {
        line += " [SETTINGS]";
    }
    if !command.operand.is_empty() {
        line += &format!(" {}", command.operand);
    }
    line
}

/// What `help` prints.
pub fn help() -> String {
    let mut help = format!(
        "pause-sandboxer {}: an external sandboxer for containerd 2.x\n",
        env!("CARGO_PKG_VERSION")
    );
    for command in COMMANDS {
        help += &format!("\n  pause-sandboxer {}\n", synopsis(command));
        for line in command.meaning {
            help += &format!("      {line}\n");
        }
        for option in command.options {
            help += &format!("      {:24} {}\n", option_names(option), option.meaning);
        }
    }
    help += &format!(
        "\nSETTINGS: --config FILE (default {DEFAULT_FILE}, which need not exist) and, going before the file:\n"
    );
    for setting in SETTINGS {
        help += &format!("  {:30} {}\n", setting.flag(), setting.kind);
    }
    help
}

/// `-o, --output FORM`
pub fn option_names(option: &Opt) -> String {
    let short = option.short.map_or_else(String::new, |short| format!("-{short}, "));
    format!("{short}--{} {}", option.long, option.value).trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Asked, String> {
        parse(line.split_whitespace().map(OsString::from))
    }

    fn flags(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn commands() {
        for (line, what) in [
            ("version", What::Version),
            ("--version", What::Version),
            ("-h", What::Help),
            ("help", What::Help),
            ("list --help", What::Help),
            ("config default", What::ConfigDefault),
            ("config show", What::ConfigShow),
            ("serve", What::Serve),
            ("list", What::List),
            ("man", What::Man),
        ] {
            assert_eq!(parsed(line).map(|asked| asked.what), Ok(what), "{line}");
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
        assert_eq!(parsed(line).unwrap().settings, Settings { file: Some("/c".into()), flags });
        let parsed = parsed(
            "serve --restrict-oom-score-adj true --enable-unprivileged-icmp false --socket /s",
        )
        .unwrap();
        let pairs = [
            ("restrict_oom_score_adj", "true"),
            ("enable_unprivileged_icmp", "false"),
            ("socket", "/s"),
        ];
        assert_eq!(parsed.settings.flags, self::flags(&pairs));
    }

    #[test]
    fn options_of_a_command_and_its_operand() {
        let asked = parsed("check --containerd-config /x --state-dir /s -o json").unwrap();
        assert_eq!(asked.settings, Settings { file: None, flags: flags(&[("state_dir", "/s")]) });
        assert_eq!(
            (asked.option("containerd-config"), asked.option("containerd")),
            (Some("/x"), None)
        );
        assert_eq!(asked.option("output"), Some("json"));
        let asked = parsed("inspect -ojson abc --socket /s").unwrap();
        assert_eq!((asked.operand.as_str(), asked.option("output")), ("abc", Some("json")));
        assert_eq!(parsed("stats --once").unwrap().option("once"), Some(""));
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
            ("config", "`default` or `show`"),
            ("config make", "\"make\""),
            ("config default --socket /x", "config default knows no option --socket"),
            ("version now", "now"),
            ("--loud", "--loud"),
            ("inspect", "ID is missing"),
            ("inspect a b", "b"),
            ("list -o yaml", "must be one of text, json, is \"yaml\""),
            ("completions tcsh", "must be one of bash, zsh, fish"),
        ] {
            let reason = parsed(line).unwrap_err();
            assert!(reason.contains(part), "{line}: {reason}");
        }
    }

    #[test]
    fn help_shows_every_command_option_and_flag() {
        let help = help();
        for command in COMMANDS {
            assert!(
                help.contains(&format!("\n  pause-sandboxer {}\n", synopsis(command))),
                "{}",
                command.name
            );
            for option in command.options {
                assert!(
                    help.contains(&format!("      {} ", option_names(option))),
                    "{}",
                    option.long
                );
            }
        }
        for setting in SETTINGS {
            assert!(help.contains(&format!("  {} ", setting.flag())), "{}", setting.name);
        }
    }

    #[test]
    fn no_option_hides_a_setting() {
        for command in COMMANDS.iter().filter(|command| command.settings) {
            for option in command.options {
                assert!(
                    SETTINGS.iter().all(|setting| setting.flag() != format!("--{}", option.long))
                );
            }
        }
    }
}
