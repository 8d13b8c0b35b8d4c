//! The manual page, in the language of man(7).

use crate::config::{Config, DEFAULT_FILE, SETTINGS};

use super::{COMMANDS, Opt, STATUSES, synopsis};

/// The page.
pub fn page() -> String {
    let mut page = format!(
        ".TH PAUSE\\-SANDBOXER 8 \"\" \"pause\\-sandboxer {}\" \"System administration\"\n",
        env!("CARGO_PKG_VERSION")
    );
    page += ".SH NAME\npause\\-sandboxer \\- pod sandboxes for containerd 2.x\n.SH SYNOPSIS\n.nf\n";
    for command in COMMANDS {
        page += &format!("\\fBpause\\-sandboxer\\fR {}\n", escaped(&synopsis(command)));
    }
    page += ".fi\n.SH DESCRIPTION\n";
    page += &paragraph(&[
        "containerd keeps a sandbox for every Kubernetes pod: a pause process that holds the pod's namespaces, and the files, cgroup and \
         status around it. pause-sandboxer makes these sandboxes in place of containerd's built-in controller, for the runtime handlers that \
         name it by `sandboxer`. It needs no config file, and pods outlive it: it may be restarted or upgraded at any time.",
    ]);
    page += ".SH COMMANDS\n";
    for command in COMMANDS {
        page += &format!(".TP\n.B {}\n", escaped(&synopsis(command)));
        page += &paragraph(command.meaning);
        if !command.options.is_empty() {
            page += ".RS\n";
            for option in command.options {
                page += &format!(".TP\n{}\n{}\n", option_line(option), escaped(option.meaning));
            }
            page += ".RE\n";
        }
    }
    page += ".SH SETTINGS\n";
    page += &paragraph(&[
        "Each is a key of the config file and an option of the same name, which goes before the file.",
    ]);
    page += &format!(
        ".TP\n\\fB\\-\\-config\\fR \\fIFILE\\fR\nThe config file (default {}, which need not exist).\n",
        escaped(DEFAULT_FILE)
    );
    let default = Config::default();
    for setting in SETTINGS {
        page += &format!(".TP\n\\fB{}\\fR\n", escaped(&setting.flag()));
        page += &paragraph(setting.meaning);
        page += &format!(
            "Must be {}; default {}.\n",
            escaped(setting.kind),
            escaped(&setting.show(&default))
        );
    }
    page += ".SH EXIT STATUS\n";
    for (status, meaning) in STATUSES {
        page += &format!(".TP\n.B {status}\n{}\n", escaped(meaning));
    }
    page += ".SH ENVIRONMENT\n.TP\n.B PAUSE_SANDBOXER_LOG\n";
    page += &paragraph(&[
        "Overrides log_level: LEVEL, or LEVEL,TARGET=LEVEL,… with crate or module paths as targets.",
    ]);
    page += ".SH FILES\n";
    for (path, meaning) in [
        (DEFAULT_FILE, "Settings."),
        (
            "/etc/containerd/conf.d/pause-sandboxer.toml",
            "Names the sandboxer and the runtime handler runc-pause to containerd.",
        ),
        ("/run/pause-sandboxer", "Sockets, records and private mounts; gone with a reboot."),
        ("/usr/share/doc/pause-sandboxer", "How to install, configure and operate it."),
    ] {
        page += &format!(".TP\n.I {}\n{}\n", escaped(path), escaped(meaning));
    }
    page += ".SH SEE ALSO\n.BR containerd (8),\n.BR ctr (8),\n.BR systemctl (1)\n";
    page
}

fn option_line(option: &Opt) -> String {
    let short = option.short.map_or_else(String::new, |short| format!("\\fB\\-{short}\\fR, "));
    let value =
        if option.value.is_empty() { String::new() } else { format!(" \\fI{}\\fR", option.value) };
    format!("{short}\\fB\\-\\-{}\\fR{value}", escaped(option.long))
}

fn paragraph(lines: &[&str]) -> String {
    lines.iter().map(|line| format!("{}\n", escaped(line.trim()))).collect()
}

/// Text that stands for itself: no escapes, no requests at the beginning of a line, no hyphens that
/// are typographic.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    if text.starts_with(['.', '\'']) { format!("\\&{text}") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_has_every_command_option_and_setting() {
        let page = page();
        for command in COMMANDS {
            assert!(
                page.contains(&format!("\n.B {}\n", escaped(&synopsis(command)))),
                "{}",
                command.name
            );
            for option in command.options {
                assert!(page.contains(&option_line(option)), "{}", option.long);
            }
        }
        for setting in SETTINGS {
            assert!(
                page.contains(&format!("\n\\fB{}\\fR\n", escaped(&setting.flag()))),
                "{}",
                setting.name
            );
        }
    }

    #[test]
    fn text_stands_for_itself() {
        assert_eq!(escaped("a\\b"), "a\\eb");
        assert_eq!(escaped(".x"), "\\&.x");
        assert_eq!(escaped("--x"), "\\-\\-x");
    }
}
