//! The config file and the flags. A zero byte ends the file; each text behind another is a word of
//! the command line.

use std::path::Path;

use clap::{Args as _, Command, FromArgMatches as _};
use pause_sandboxer::config::{Config, ConfigError, Flags};

use super::{Seeds, assert_told};

const FILE: &str = "/etc/pause-sandboxer/config.toml";

pub fn run(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let mut parts = text.split('\0');
    let file = parts.next().unwrap_or_default();
    let command = Flags::augment_args(Command::new("serve").no_binary_name(true))
        .args_override_self(true)
        .disable_help_flag(true);
    let Ok(matches) = command.try_get_matches_from(parts) else { return };
    let flags = Flags::from_arg_matches(&matches).expect("the flags");
    let path = Path::new(FILE);
    match Config::parse(path, file, &flags) {
        Ok(config) => {
            let shown = config.to_toml();
            let read = Config::parse(path, &shown, &Flags::default());
            assert_eq!(read.as_ref().ok(), Some(&config), "as it is shown: {read:?}\n{shown}");
        }
        Err(e) => {
            assert_told(&e.to_string());
            let lines = file.split('\n').count();
            match e {
                ConfigError::Read { .. } | ConfigError::Options(_) => unreachable!("{e}"),
                ConfigError::File { line, .. } => {
                    assert!((1..=lines).contains(&line), "line {line} of {lines}")
                }
                ConfigError::Flag { .. } => assert!(text.contains("--"), "no flag is given"),
                ConfigError::Default { .. } => {}
            }
        }
    }
}

pub fn seeds() -> Seeds {
    let file = r#"socket = "/a/s.sock"
state_dir = "/a/state"
containerd_address = "/a/c.sock"
shim = "runtime"
shim_env = ["A=b"]
restrict_oom_score_adj = true
selinux_category_range = 7
pod_annotations = ["a.example/*", "b[^a-c]?\\*"]
shm_size = "1Gi"
sysctls = ["net.core.somaxconn=4096"]
container_limits = ["nofile=1024:4096", "core=0"]
container_limits_max = ["nofile=unlimited"]
volatile_rootfs = true
forgotten_interval = 5
metrics = "unix:///a/m.sock"
log_level = "trace"
log_format = "json"
"#;
    let flags = "\0--socket=/b/s.sock\0--metrics=[::1]:9477\0--pod-annotations=*,a\0\
        --log-level=off";
    let mut seeds: Seeds = vec![
        ("default".into(), default()),
        ("file".into(), file.into()),
        ("flags".into(), format!("# none\n{flags}").into()),
        ("both".into(), format!("shim = 'own'\nforgotten_interval = 1{flags}").into()),
        ("tcp".into(), "metrics = \"127.0.0.1:9477\"\nselinux_category_range = 1024\n".into()),
        ("characters".into(), "# none\0--pod-annotations=a\u{7f}\u{1}\"\\é".into()),
        ("unknown".into(), "\n\nsocet = 1".into()),
        ("no-toml".into(), "socket = \n[".into()),
    ];
    for (name, value) in Config::default().values() {
        seeds.push((format!("setting-{name}"), format!("{name} = {value}\n").into()));
    }
    seeds
}

/// Without the meanings, which would be most of it.
fn default() -> Vec<u8> {
    let text = Config::default().to_toml();
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.fold(String::new(), |text, line| text + line + "\n").into()
}
