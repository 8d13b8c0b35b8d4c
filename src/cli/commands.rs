//! The one table of commands, their options and exit statuses. Arguments are understood by it;
//! help, manual page and completions are made from it.

/// What a command does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    Serve,
    List,
    Inspect,
    Stats,
    Check,
    ConfigDefault,
    ConfigShow,
    Image,
    Completions,
    Man,
    Version,
    Help,
}

/// A command.
#[derive(Debug)]
pub struct Command {
    pub what: What,
    /// One word or two.
    pub name: &'static str,
    /// What must follow, and what it may be; empty: nothing follows.
    pub operand: &'static str,
    pub operands: &'static [&'static str],
    pub options: &'static [Opt],
    /// It takes the options of the settings as well.
    pub settings: bool,
    /// What it does, a line or more.
    pub meaning: &'static [&'static str],
}

/// An option of a command's own.
#[derive(Debug)]
pub struct Opt {
    pub long: &'static str,
    pub short: Option<char>,
    /// What its value is; empty: it has none.
    pub value: &'static str,
    /// Values that it may have; empty: any.
    pub values: &'static [&'static str],
    pub meaning: &'static str,
}

const OUTPUT: Opt = Opt {
    long: "output",
    short: Some('o'),
    value: "FORM",
    values: &["text", "json"],
    meaning: "form of what is printed: text (the default) or json",
};

/// Every command, in the order of the help.
pub const COMMANDS: &[Command] = &[
    Command {
        what: What::Serve,
        name: "serve",
        operand: "",
        operands: &[],
        options: &[],
        settings: true,
        meaning: &["Answers containerd until SIGTERM. SIGHUP reads the log level again."],
    },
    Command {
        what: What::List,
        name: "list",
        operand: "",
        operands: &[],
        options: &[OUTPUT],
        settings: true,
        meaning: &["Lists the sandboxes of the daemon that runs."],
    },
    Command {
        what: What::Inspect,
        name: "inspect",
        operand: "ID",
        operands: &[],
        options: &[OUTPUT],
        settings: true,
        meaning: &[
            "Tells all that is known of a sandbox: by its id, the beginning of it, or NAMESPACE/POD.",
        ],
    },
    Command {
        what: What::Stats,
        name: "stats",
        operand: "",
        operands: &[],
        options: &[
            Opt {
                long: "once",
                short: None,
                value: "",
                values: &[],
                meaning: "print one table and end; as without a terminal",
            },
            Opt {
                long: "interval",
                short: None,
                value: "SECONDS",
                values: &[],
                meaning: "how long a table stands (default 2)",
            },
        ],
        settings: true,
        meaning: &["Shows what the pods use of the node, anew every few seconds."],
    },
    Command {
        what: What::Check,
        name: "check",
        operand: "",
        operands: &[],
        options: &[
            OUTPUT,
            Opt {
                long: "strict",
                short: None,
                value: "",
                values: &[],
                meaning: "end with 4 if pods will run, but something should be looked at",
            },
            Opt {
                long: "containerd-config",
                short: None,
                value: "FILE",
                values: &[],
                meaning: "containerd's config file (default /etc/containerd/config.toml)",
            },
            Opt {
                long: "containerd",
                short: None,
                value: "PROGRAM",
                values: &[],
                meaning: "containerd's program (default: the one in PATH)",
            },
        ],
        settings: true,
        meaning: &[
            "Looks at the whole node: says what is wrong, what it means and the command that mends it.",
            "Ends with 1 if pods will not run.",
        ],
    },
    Command {
        what: What::ConfigDefault,
        name: "config default",
        operand: "",
        operands: &[],
        options: &[],
        settings: false,
        meaning: &["Prints every setting with its meaning and its default, as a config file."],
    },
    Command {
        what: What::ConfigShow,
        name: "config show",
        operand: "",
        operands: &[],
        options: &[],
        settings: true,
        meaning: &["Prints the settings in effect, or says what is wrong with them."],
    },
    Command {
        what: What::Image,
        name: "image",
        operand: "",
        operands: &[],
        options: &[Opt {
            long: "output",
            short: Some('o'),
            value: "FILE",
            values: &[],
            meaning: "where to write it (default: standard output)",
        }],
        settings: false,
        meaning: &[
            "Writes the pause program as an OCI image archive, for nodes without a registry:",
            "pause-sandboxer image | ctr -n k8s.io images import -",
        ],
    },
    Command {
        what: What::Completions,
        name: "completions",
        operand: "SHELL",
        operands: &["bash", "zsh", "fish"],
        options: &[],
        settings: false,
        meaning: &["Prints what a shell needs to complete this command's arguments."],
    },
    Command {
        what: What::Man,
        name: "man",
        operand: "",
        operands: &[],
        options: &[],
        settings: false,
        meaning: &["Prints the manual page."],
    },
    Command {
        what: What::Version,
        name: "version",
        operand: "",
        operands: &[],
        options: &[],
        settings: false,
        meaning: &["Prints the version."],
    },
    Command {
        what: What::Help,
        name: "help",
        operand: "",
        operands: &[],
        options: &[],
        settings: false,
        meaning: &["Prints this."],
    },
];

/// Exit statuses and what they mean, for the manual.
pub const STATUSES: &[(u8, &str)] = &[
    (0, "Done."),
    (1, "Failed; the reason is on standard error. Of check: pods will not run."),
    (USAGE_ERROR, "The command line was not understood."),
    (DOWN, "list, inspect, stats: no daemon answers."),
    (WARNED, "check --strict: pods will run, but something should be looked at."),
];

/// A command that could not be understood; sysexits are not used, 2 is what shells and getopt
/// programs answer.
pub const USAGE_ERROR: u8 = 2;
/// No daemon answers.
pub const DOWN: u8 = 3;
/// The worst finding of a check is a warning.
pub const WARNED: u8 = 4;
