//! Settings from files and flags.

use super::*;

fn load(text: &str, flags: &[(&str, &str)]) -> Result<Config, String> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("c.toml");
    std::fs::write(&file, text).unwrap();
    let flags: Vec<_> = flags.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
    let prefix = format!("{}/", dir.path().display());
    Config::load(Some(&file), &flags).map_err(|e| e.to_string().replace(&prefix, ""))
}

fn error(text: &str) -> String {
    load(text, &[]).unwrap_err()
}

#[test]
fn default_file_parses_back_to_the_defaults() {
    assert_eq!(load(&Config::default().to_toml(), &[]), Ok(Config::default()));
    assert_eq!(load("", &[]), Ok(Config::default()));
}

#[test]
fn every_setting_is_described_and_shown() {
    let text = Config::default().to_toml();
    for setting in SETTINGS {
        // Empty lines separate paragraphs and lists.
        let ends = [setting.meaning.first(), setting.meaning.last()];
        assert!(ends.iter().all(|line| !line.unwrap().trim().is_empty()), "{}", setting.name);
        assert!(text.contains(&format!("\n{} = ", setting.name)), "{}", setting.name);
        for line in setting.meaning {
            assert!(text.contains(&format!("#{line}")), "{}: {line}", setting.name);
        }
    }
}

#[test]
fn every_setting_takes_effect_from_file_and_flag() {
    let text = r#"
        socket = "/a/s.sock"
        state_dir = "/a/state"
        containerd_root = "/a/root"
        containerd_state = "/a/run"
        containerd_address = "/a/c.sock"
        containerd_namespace = "other"
        cgroup_driver = "cgroupfs"
        shim = "runtime"
        shims = { "io.x.v2" = "/a/shim", "y.v1" = "/b" }
        shim_env = ["SCHED_CORE=1", "B=x, y=z"]
        container_record = false
        restrict_oom_score_adj = true
        enable_unprivileged_ports = false
        enable_unprivileged_icmp = false
        enable_selinux = true
        selinux_category_range = 7
        pod_annotations = ["a.example/*", "b"]
        abandoned_after = 5
        forgotten_interval = 6
        metrics = "unix:///a/m.sock"
        log_level = "trace"
        log_format = "json"
    "#;
    let changed = load(text, &[]).unwrap();
    let (default, mut flags) = (Config::default(), Vec::new());
    for setting in SETTINGS {
        let (was, is) = (setting.show(&default), setting.show(&changed));
        assert_ne!(was, is, "{} is not in this test", setting.name);
        flags.push((setting.name, is.trim_matches('"').to_owned()));
    }
    let flags: Vec<_> = flags.iter().map(|(n, v)| (*n, v.as_str())).collect();
    assert_eq!(load("", &flags), Ok(changed.clone()));
    assert_eq!(load(&changed.to_toml(), &[]), Ok(changed));
}

#[test]
fn what_is_shown_parses_back_whatever_characters_it_has() {
    let odd: String =
        (1..0xa1).filter_map(char::from_u32).filter(|c| !"[]*?\\".contains(*c)).collect();
    let config = Config { pod_annotations: vec![odd.parse().unwrap()], ..Config::default() };
    assert_eq!(load(&config.to_toml(), &[]), Ok(config));
}

#[test]
fn flags_override_the_file() {
    let config = load("socket = \"/a/b\"\nabandoned_after = 7", &[("socket", "/c/d")]).unwrap();
    assert_eq!((config.socket, config.abandoned_after), ("/c/d".into(), Duration::from_secs(7)));
}

/// Promise: settings_errors_name_the_place.
#[test]
fn errors_name_file_line_and_setting() {
    assert_eq!(
        error("\nsocet = 1"),
        "c.toml:2: socet: unknown setting (`pause-sandboxer config default` prints all)"
    );
    assert_eq!(error("socket = 1"), "c.toml:1: socket: invalid value 1: must be an absolute path");
    assert_eq!(
        error("\n\nlog_level = \"loud\""),
        "c.toml:3: log_level: invalid value \"loud\": must be one of off, error, warn, info, \
         debug, trace"
    );
    assert_eq!(
        error("abandoned_after = -1"),
        "c.toml:1: abandoned_after: invalid value -1: must be an integer of at least 1, in seconds"
    );
    assert_eq!(
        error("abandoned_after = 0"),
        "c.toml:1: abandoned_after: invalid value 0: must be an integer of at least 1, in seconds"
    );
    assert_eq!(
        error("pod_annotations = 1"),
        "c.toml:1: pod_annotations: invalid value 1: must be a list of patterns"
    );
    assert_eq!(
        error("pod_annotations = [\"a\", \"[b\"]"),
        "c.toml:1: pod_annotations: \"[b\" is not a valid pattern"
    );
    assert_eq!(
        error("restrict_oom_score_adj = \"yes\""),
        "c.toml:1: restrict_oom_score_adj: invalid value \"yes\": must be true or false"
    );
    assert_eq!(
        error("state_dir = \"run\""),
        "c.toml:1: state_dir: invalid value \"run\": must be an absolute path"
    );
    assert_eq!(
        error("state_dir = \"/a/../b\""),
        "c.toml:1: state_dir: invalid value \"/a/../b\": must be an absolute path without \"..\""
    );
    assert_eq!(
        error("[log]\nlevel = 1"),
        "c.toml:1: log: unknown setting (`pause-sandboxer config default` prints all)"
    );
    assert!(error("a = 1\nsocket =").starts_with("c.toml:2: "), "{}", error("a = 1\nsocket ="));
    assert!(error("log_level = \"info\"\nlog_level = \"info\"").starts_with("c.toml:2: "));
    assert_eq!(
        load("", &[("state_dir", "x")]).unwrap_err(),
        "--state-dir: invalid value \"x\": must be an absolute path"
    );
    assert_eq!(
        load("", &[("x", "x")]).unwrap_err(),
        "--x: unknown setting (`pause-sandboxer config default` prints all)"
    );
}

#[test]
fn settings_that_do_not_fit_together_are_named_where_they_were_set() {
    assert_eq!(
        error("state_dir = \"/run/containerd/io.containerd.grpc.v1.cri/x\""),
        "c.toml:1: state_dir: must not be containerd_state nor below \
         /run/containerd/io.containerd.grpc.v1.cri: that is containerd's own"
    );
    assert!(
        error("state_dir = \"/x\"\ncontainerd_root = \"/x/\"").starts_with("c.toml:1: state_dir: ")
    );
    assert!(
        error("socket = \"/run/containerd/containerd.sock\"").starts_with("c.toml:1: socket: ")
    );
    assert!(error("socket = \"/sock\"").starts_with("c.toml:1: socket: "));
    assert!(
        error("socket = \"/a/s\"\nmetrics = \"unix:///a/s.ttrpc\"")
            .starts_with("c.toml:2: metrics: ")
    );
    assert!(
        error("containerd_namespace = \"a/b\"").starts_with("c.toml:1: containerd_namespace: ")
    );
}

/// serde takes a table of one key for an enum, and an untagged enum takes a string for a list.
#[test]
fn words_and_lists_are_nothing_else() {
    for (text, fault) in [
        (
            "log_format = { json = {} }",
            "log_format: invalid value { json = {} }: must be one of text, json",
        ),
        ("shim = { sandboxer = {} }", "shim: invalid value { sandboxer = {} }: must be one of "),
        (
            "cgroup_driver = [\"auto\"]",
            "cgroup_driver: invalid value [\"auto\"]: must be one of auto, cgroupfs, systemd",
        ),
        ("shim_env = \"A=b\"", "shim_env: invalid value \"A=b\": must be a list of NAME=value"),
        (
            "pod_annotations = \"a\"",
            "pod_annotations: invalid value \"a\": must be a list of patterns",
        ),
    ] {
        let e = load(text, &[]).unwrap_err();
        assert!(e.starts_with(&format!("c.toml:1: {fault}")), "{text}: {e}");
    }
}

#[test]
fn errors_of_a_table_name_the_entry() {
    for (text, fault) in [
        (
            "shims = { a = \"/a\", b = 1 }",
            "shims: \"b\": invalid value 1: must be an absolute path",
        ),
        ("shims = { b = \"b\" }", "shims: \"b\": invalid value \"b\": must be an absolute path"),
        (
            "shims = { b = \"/a/../b\" }",
            "shims: \"b\": invalid value \"/a/../b\": must be an absolute path without \"..\"",
        ),
    ] {
        assert_eq!(load(text, &[]).unwrap_err(), format!("c.toml:1: {fault}"), "{text}");
    }
    let flag = load("", &[("shims", "{ b = 'b' }")]).unwrap_err();
    assert_eq!(flag, "--shims: \"b\": invalid value \"b\": must be an absolute path");
}

#[test]
fn patterns_are_plain_words_in_a_flag() {
    let shown = |text: &str| {
        load("", &[("pod_annotations", text)]).map(|config| {
            config
                .pod_annotations
                .iter()
                .map(|pattern| pattern.as_str().to_owned())
                .collect::<Vec<_>>()
        })
    };
    for (text, patterns) in [
        ("io.x.*", &["io.x.*"][..]),
        ("io.x.*, b/?", &["io.x.*", "b/?"]),
        ("[ab]*", &["[ab]*"]),
        ("[\"a\", \"b*\"]", &["a", "b*"]),
        ("[]", &[]),
        ("", &[]),
    ] {
        assert_eq!(shown(text).unwrap(), patterns, "{text}");
    }
    assert!(shown("a,[b").unwrap_err().ends_with("\"[b\" is not a valid pattern"));
}

/// Promise: only_root_calls.
#[test]
fn metrics_are_for_the_node_alone() {
    for good in ["off", "unix:///a/b", "127.0.0.1:9477", "127.8.9.1:1", "[::1]:9477"] {
        let config = load("", &[("metrics", good)]).unwrap();
        assert_eq!(config.metrics.to_string(), good);
    }
    for bad in [
        "",
        "on",
        "0.0.0.0:9477",
        "10.0.0.1:9477",
        "[::]:9477",
        "localhost:9477",
        "127.0.0.1",
        "127.0.0.1:0",
        "unix://a/b",
        "/a/b",
    ] {
        let e = load("", &[("metrics", bad)]).unwrap_err();
        assert!(
            e.starts_with(&format!(
                "--metrics: invalid value {bad:?}: must be off, unix:///PATH or "
            )),
            "{bad}: {e}"
        );
    }
}

#[test]
fn the_longest_socket_path_fits() {
    let path = |length: usize| format!("/d/{}", "a".repeat(length - 3));
    assert!(load("", &[("socket", &path(97))]).is_ok());
    let e = load("", &[("socket", &path(98))]).unwrap_err();
    assert_eq!(
        e,
        "--socket: must be at most 97 bytes long, to leave room for the ttrpc \
         socket's name; has 98"
    );
}

#[test]
fn a_named_file_must_exist() {
    let e = Config::load(Some(Path::new("/nowhere/c.toml")), &[]).unwrap_err().to_string();
    assert_eq!(e, "read config file /nowhere/c.toml: No such file or directory (os error 2)");
}

#[test]
fn the_shim_is_one_of_two() {
    for gone in ["sandboxer", "started", "containerd", "none"] {
        let text = format!("shim = \"{gone}\"");
        let error = Config::parse(Path::new("c.toml"), &text, &[]).unwrap_err().to_string();
        assert!(error.contains("must be own or runtime"), "{error}");
    }
}

#[test]
fn the_namespace_of_containerd_is_an_identifier() {
    let parse = |text: &str| {
        let flag = ("containerd_namespace".to_owned(), text.to_owned());
        Config::parse(Path::new("c.toml"), "", &[flag]).map_err(|e| e.to_string())
    };
    assert_eq!(parse("A-b_c.9").unwrap().containerd_namespace, "A-b_c.9");
    assert_eq!(
        parse("a..b").unwrap_err(),
        "--containerd-namespace: must be a containerd identifier \
         (letters and digits joined by single . _ -, at most 76 bytes)"
    );
}
