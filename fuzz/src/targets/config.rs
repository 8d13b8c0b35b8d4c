//! The config file and the flags. A zero byte ends the file; each text behind another is a flag, as
//! `NAME=VALUE`.

use std::path::Path;

use pause_sandboxer::config::{Config, ConfigError, SETTINGS};

use super::{Seeds, assert_told};

const FILE: &str = "/etc/pause-sandboxer/config.toml";

pub fn run(input: &[u8]) {
    let Ok(text) = std::str::from_utf8(input) else { return };
    let mut parts = text.split('\0');
    let file = parts.next().unwrap_or_default();
    let flags: Vec<(String, String)> = parts
        .filter_map(|flag| flag.split_once('='))
        .map(|(name, value)| (name.into(), value.into()))
        .collect();
    let path = Path::new(FILE);
    match Config::parse(path, file, &flags) {
        Ok(config) => {
            let shown = config.to_toml();
            assert_eq!(
                Config::parse(path, &shown, &[]).as_ref(),
                Ok(&config),
                "as it is shown:\n{shown}"
            );
            for setting in SETTINGS {
                assert!(
                    !setting.show(&config).contains('\n'),
                    "{} takes more than a line",
                    setting.name
                );
            }
        }
        Err(e) => {
            assert_told(&e.to_string());
            let lines = file.split('\n').count();
            match e {
                ConfigError::Read { .. } => unreachable!("no file is read"),
                ConfigError::Syntax { line, .. } => {
                    assert!((1..=lines).contains(&line), "line {line} of {lines}")
                }
                ConfigError::Setting { origin, name, .. } => {
                    let line = origin
                        .strip_prefix(FILE)
                        .map(|line| line.strip_prefix(':').expect("a line").parse());
                    let known =
                        flags.iter().any(|(flag, _)| *flag == name) && origin.starts_with("--");
                    match line {
                        Some(line) => assert!(
                            (1..=lines).contains(&line.expect("a line")),
                            "{origin} of {lines}"
                        ),
                        None => assert!(known || origin == "default", "{origin}: {name}"),
                    }
                }
            }
        }
    }
}

pub fn seeds() -> Seeds {
    let file = r#"socket = "/a/s.sock"
state_dir = "/a/state"
containerd_address = "/a/c.sock"
containerd_namespace = "other"
cgroup_driver = "cgroupfs"
shim = "runtime"
shims = { "io.x.v2" = "/a/shim" }
restrict_oom_score_adj = true
selinux_category_range = 7
pod_annotations = ["a.example/*", "b[^a-c]?\\*"]
abandoned_after = 5
metrics = "unix:///a/m.sock"
log_level = "trace"
log_format = "json"
"#;
    let flags = "\0socket=/b/s.sock\0metrics=[::1]:9477\0shims={ x = \"/y\" \
        }\0pod_annotations=[\"*\"]\0log_level=off";
    let mut seeds: Seeds = vec![
        ("default".into(), default()),
        ("file".into(), file.into()),
        ("flags".into(), format!("# none\n{flags}").into()),
        ("both".into(), format!("shim = 'started'\nabandoned_after = 1{flags}").into()),
        ("tcp".into(), "metrics = \"127.0.0.1:9477\"\nselinux_category_range = 1024\n".into()),
        ("characters".into(), "# none\0pod_annotations=a\u{7f}\u{1}\"\\é".into()),
        ("unknown".into(), "\n\nsocet = 1".into()),
        ("no-toml".into(), "socket = \n[".into()),
    ];
    for setting in SETTINGS {
        let line = format!("{} = {}\n", setting.name, setting.show(&Config::default()));
        seeds.push((format!("setting-{}", setting.name), line.into()));
    }
    seeds
}

/// Without the meanings, which would be most of it.
fn default() -> Vec<u8> {
    let text = Config::default().to_toml();
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.fold(String::new(), |text, line| text + line + "\n").into()
}
