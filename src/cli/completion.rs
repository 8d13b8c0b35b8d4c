//! Completions for shells. Each knows commands, their options and the options' values; ids are
//! asked of the daemon.

use crate::config::SETTINGS;

use super::{COMMANDS, Command};

/// What completes an operand that is a sandbox: their ids, or nothing where no daemon answers.
const IDS: &str = "pause-sandboxer list 2>/dev/null | awk 'NR > 1 { print $1 }'";

/// An option as shells complete it.
struct Completed {
    long: String,
    short: Option<char>,
    /// What its value may be; `None`: it takes none.
    value: Option<Vec<&'static str>>,
    meaning: String,
}

fn options(command: &Command) -> Vec<Completed> {
    let own = command.options.iter().map(|option| Completed {
        long: format!("--{}", option.long),
        short: option.short,
        value: (!option.value.is_empty()).then(|| option.values.to_vec()),
        meaning: option.meaning.to_owned(),
    });
    let file = Completed {
        long: "--config".to_owned(),
        short: None,
        value: Some(Vec::new()),
        meaning: "the config file".to_owned(),
    };
    let settings = SETTINGS.iter().map(|setting| Completed {
        long: setting.flag(),
        short: None,
        value: (!setting.is_switch()).then(|| choices(setting.kind)),
        meaning: setting.kind.to_owned(),
    });
    let settings = [file].into_iter().chain(settings).filter(|_| command.settings);
    own.chain(settings).collect()
}

/// The words of a kind that is a list of words.
fn choices(kind: &'static str) -> Vec<&'static str> {
    kind.strip_prefix("one of ").map(|words| words.split(", ").collect()).unwrap_or_default()
}

/// The first words of commands, each once, and the second words of those that have one.
fn words() -> Vec<(&'static str, Vec<&'static str>)> {
    let mut words: Vec<(&str, Vec<&str>)> = Vec::new();
    for command in COMMANDS {
        let (first, second) = command
            .name
            .split_once(' ')
            .map_or((command.name, None), |(first, second)| (first, Some(second)));
        match words.iter_mut().find(|(word, _)| *word == first) {
            Some((_, seconds)) => seconds.extend(second),
            None => words.push((first, second.into_iter().collect())),
        }
    }
    words
}

fn firsts() -> String {
    words().iter().map(|(first, _)| *first).collect::<Vec<_>>().join(" ")
}

/// For bash.
pub fn bash() -> String {
    let mut script = format!(
        "\
# Completion of pause-sandboxer for bash.
_pause_sandboxer() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD - 1]}} command=${{COMP_WORDS[1]}}
    COMPREPLY=()
    if [ \"$COMP_CWORD\" -eq 1 ]; then
        mapfile -t COMPREPLY < <(compgen -W '{}' -- \"$word\")
        return
    fi
    case $command in
",
        firsts()
    );
    for (first, seconds) in words() {
        if !seconds.is_empty() {
            script += &format!(
                "    {first})\n        if [ \"$COMP_CWORD\" -eq 2 ]; then\n            mapfile -t COMPREPLY < <(compgen -W '{}' -- \"$word\")\n            return\n        fi\n        command=\"$command ${{COMP_WORDS[2]}}\" ;;\n",
                seconds.join(" ")
            );
        }
    }
    script += "    esac\n    case $command/$previous in\n";
    for command in COMMANDS {
        for option in options(command) {
            let Some(values) = &option.value else { continue };
            let short = option
                .short
                .map_or_else(String::new, |short| format!(" | '{}'/-{short}", command.name));
            let pattern = format!("'{}'/{}{short}", command.name, option.long);
            script += &if values.is_empty() {
                format!(
                    "    {pattern}) mapfile -t COMPREPLY < <(compgen -f -- \"$word\") && return ;;\n"
                )
            } else {
                format!(
                    "    {pattern}) mapfile -t COMPREPLY < <(compgen -W '{}' -- \"$word\") && return ;;\n",
                    values.join(" ")
                )
            };
        }
    }
    script += "    esac\n    case $command in\n";
    for command in COMMANDS {
        let mut all: Vec<String> = options(command).into_iter().map(|option| option.long).collect();
        all.extend(command.operands.iter().map(|operand| (*operand).to_owned()));
        let ids = if command.operand == "ID" { format!(" $({IDS})") } else { String::new() };
        if !all.is_empty() || !ids.is_empty() {
            script += &format!(
                "    '{}') mapfile -t COMPREPLY < <(compgen -W \"{}{ids}\" -- \"$word\") ;;\n",
                command.name,
                all.join(" ")
            );
        }
    }
    script + "    esac\n}\ncomplete -F _pause_sandboxer pause-sandboxer\n"
}

/// For zsh.
pub fn zsh() -> String {
    let mut script =
        "#compdef pause-sandboxer\n# Completion of pause-sandboxer for zsh.\n".to_owned();
    script += "local command=${words[2]}\nif (( CURRENT == 2 )); then\n    compadd -- ";
    script += &firsts();
    script += "\n    return\nfi\ncase $command in\n";
    for (first, seconds) in words() {
        if !seconds.is_empty() {
            script += &format!(
                "({first})\n    if (( CURRENT == 3 )); then\n        compadd -- {}\n        return\n    fi\n    command=\"$command ${{words[3]}}\" ;;\n",
                seconds.join(" ")
            );
        }
    }
    script += "esac\ncase $command in\n";
    for command in COMMANDS {
        let mut arguments = Vec::new();
        for option in options(command) {
            let meaning = option.meaning.replace(['[', ']', '\'', ':'], "");
            let value = option.value.map_or_else(String::new, |values| {
                if values.is_empty() {
                    ":value:_files".to_owned()
                } else {
                    format!(":value:({})", values.join(" "))
                }
            });
            arguments.push(format!("'{}[{meaning}]{value}'", option.long));
            arguments.extend(option.short.map(|short| format!("'-{short}[{meaning}]{value}'")));
        }
        if !command.operands.is_empty() {
            arguments.push(format!("'1:{}:({})'", command.operand, command.operands.join(" ")));
        } else if command.operand == "ID" {
            // Within $( ) quoting begins anew.
            arguments.push(format!("\"1:{}:($({IDS}))\"", command.operand));
        }
        if !arguments.is_empty() {
            let words = command.name.split(' ').count();
            script += &format!(
                "('{}')\n    shift {words} words; (( CURRENT -= {words} ))\n    _arguments \\\n        {} ;;\n",
                command.name,
                arguments.join(" \\\n        ")
            );
        }
    }
    script + "esac\n"
}

/// For fish.
pub fn fish() -> String {
    let mut script =
        "# Completion of pause-sandboxer for fish.\ncomplete -c pause-sandboxer -f\n".to_owned();
    let quoted = |text: &str| format!("'{}'", text.replace('\\', "\\\\").replace('\'', "\\'"));
    for (first, seconds) in words() {
        script += &format!("complete -c pause-sandboxer -n __fish_use_subcommand -a {first}\n");
        for second in seconds {
            let condition = format!(
                "__fish_seen_subcommand_from {first}; and not __fish_seen_subcommand_from {second}"
            );
            script +=
                &format!("complete -c pause-sandboxer -n {} -a {second}\n", quoted(&condition));
        }
    }
    for command in COMMANDS {
        let condition: Vec<String> = command
            .name
            .split(' ')
            .map(|word| format!("__fish_seen_subcommand_from {word}"))
            .collect();
        let of = format!("complete -c pause-sandboxer -n {}", quoted(&condition.join("; and ")));
        for option in options(command) {
            let short = option.short.map_or_else(String::new, |short| format!(" -s {short}"));
            let value = option.value.map_or_else(String::new, |values| {
                if values.is_empty() {
                    " -r -F".to_owned()
                } else {
                    format!(" -x -a {}", quoted(&values.join(" ")))
                }
            });
            let long = option.long.trim_start_matches('-');
            script += &format!("{of} -l {long}{short}{value} -d {}\n", quoted(&option.meaning));
        }
        if !command.operands.is_empty() {
            script += &format!("{of} -a {}\n", quoted(&command.operands.join(" ")));
        } else if command.operand == "ID" {
            script += &format!("{of} -a {}\n", quoted(&format!("({IDS})")));
        }
    }
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_knows_every_command_and_option() {
        for (shell, script) in [("bash", bash()), ("zsh", zsh()), ("fish", fish())] {
            for command in COMMANDS {
                for word in command.name.split(' ') {
                    assert!(script.contains(word), "{shell}: {word}");
                }
                for option in options(command) {
                    let long = if shell == "fish" {
                        format!(" -l {} ", option.long.trim_start_matches('-'))
                    } else {
                        option.long
                    };
                    assert!(script.contains(&long), "{shell}: {}: {long}", command.name);
                }
            }
        }
    }
    /// What is in the script's `( )` that asks for ids puts out, run by `sh`, with a `list` that
    /// shows two.
    fn ids(script: &str) -> String {
        let (begin, end) = ("(pause-sandboxer list", "}')");
        let from = script.find(begin).unwrap() + 1;
        let command = &script[from..from + script[from..].find(end).unwrap() + end.len() - 1];
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("pause-sandboxer");
        std::fs::write(&program, "#!/bin/sh\nprintf 'SANDBOX POD\\nabc web\\ndef db\\n'\n")
            .unwrap();
        std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .unwrap();
        let path = format!("{}:/usr/bin:/bin", dir.path().display());
        let output = std::process::Command::new("sh")
            .args(["-c", command])
            .env("PATH", path)
            .output()
            .unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{command}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    #[test]
    fn ids_are_those_that_list_prints() {
        // Of fish the whole is a string in quotes.
        for (shell, script) in
            [("bash", bash()), ("zsh", zsh()), ("fish", fish().replace("\\'", "'"))]
        {
            assert_eq!(ids(&script), "abc\ndef\n", "{shell}");
        }
    }
}
