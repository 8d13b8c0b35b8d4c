//! Settings from files and flags.

use super::*;

fn load(text: &str, flags: &[&str]) -> Result<Config, String> {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("c.toml");
    std::fs::write(&file, text).unwrap();
    let command = Flags::augment_args(Command::new("serve").no_binary_name(true));
    let matches = command.args_override_self(true).try_get_matches_from(flags);
    let matches = matches.map_err(|e| e.to_string().lines().next().unwrap().to_owned())?;
    let prefix = format!("{}/", dir.path().display());
    Config::load(Some(&file), &Flags::All(matches)).map_err(|e| e.to_string().replace(&prefix, ""))
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
    let (text, values) = (Config::default().to_toml(), Config::default().values());
    let options = Config::options();
    assert_eq!(options.len(), values.len());
    for option in options {
        let name = option.get_id().as_str();
        assert!(values.contains_key(name) && text.contains(&format!("\n{name} = ")), "{name}");
        assert_eq!(option.get_long().unwrap(), name.replace('_', "-"));
        let meaning = meaning(&option);
        assert!(!meaning.is_empty(), "{name}");
        for line in meaning.lines() {
            assert!(text.contains(format!("\n# {line}").trim_end()), "{name}: {line}");
        }
    }
    assert!(text.contains("\n# - `own`: the sandboxer's own"), "the lines of a list stay: {text}");
    assert!(text.contains("\n# Values: text, json\n"), "{text}");
}

#[test]
fn every_setting_takes_effect_from_file_and_flag() {
    let text = r#"
        socket = "/a/s.sock"
        state_dir = "/a/state"
        containerd_root = "/a/root"
        containerd_state = "/a/run"
        containerd_address = "/a/c.sock"
        shim = "runtime"
        shim_env = ["SCHED_CORE=1", "B=x; y=z"]
        container_record = false
        restrict_oom_score_adj = true
        enable_unprivileged_ports = false
        enable_unprivileged_icmp = false
        enable_selinux = true
        selinux_category_range = 7
        pod_annotations = ["a.example/*", "b"]
        shm_size = "1Gi"
        shm_size_max = "3"
        sysctls = ["net.core.somaxconn=7", "kernel.sem=1 2 3 4"]
        container_limits = ["nofile=1024:unlimited", "core=0:0"]
        container_limits_max = ["nofile=2048:unlimited"]
        volatile_rootfs = true
        forgotten_interval = 6
        metrics = "unix:///a/m.sock"
        log_level = "trace"
        log_format = "json"
    "#;
    let changed = load(text, &[]).unwrap();
    let (default, mut flags) = (Config::default().values(), Vec::new());
    for (name, value) in changed.values() {
        assert_ne!(default.get(&name), Some(&value), "{name} is not in this test");
        let values = match value {
            toml::Value::Array(values) => values,
            value => vec![value],
        };
        for value in values {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            flags.push(format!("--{}={value}", name.replace('_', "-")));
        }
    }
    let flags: Vec<_> = flags.iter().map(String::as_str).collect();
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
    let text = "socket = \"/a/b\"\nforgotten_interval = 7\nenable_selinux = true";
    let config = load(text, &["--socket", "/c/d", "--enable-selinux=false"]).unwrap();
    assert_eq!((config.socket, config.forgotten_interval), ("/c/d".into(), 7));
    assert!(!config.enable_selinux);
    let file = Path::new("c.toml");
    let client = Config::parse(file, text, &Flags::Socket(Some("/e/f".into()))).unwrap();
    assert_eq!(client.socket, Path::new("/e/f"));
    let fault = Config::parse(file, "", &Flags::Socket(Some("/f".into()))).unwrap_err();
    assert_eq!(fault.to_string(), "--socket: must be in a directory below /");
}

#[test]
fn adopted_settings_are_read_before_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("c.toml");
    let adopted = adopted_file(&file);
    assert_eq!(adopted, dir.path().join("c.adopted.toml"));
    std::fs::write(&file, "containerd_state = '/b'\nlog_level = 'debug'\n").unwrap();
    std::fs::write(&adopted, "containerd_root = '/a'\ncontainerd_state = '/a'\n").unwrap();
    let config = Config::load(Some(&file), &Flags::default()).unwrap();
    let expected = Config {
        containerd_root: "/a".into(),
        containerd_state: "/b".into(),
        log_level: LevelFilter::Debug,
        ..Config::default()
    };
    assert_eq!(config, expected);
    for (text, fault) in [
        ("\nsocet = 1", "c.adopted.toml:2: socet: unknown field"),
        ("\nshim_env = ['A=b', 'A=c']", "c.adopted.toml:2: shim_env: A is set twice"),
    ] {
        std::fs::write(&adopted, text).unwrap();
        let said = Config::load(Some(&file), &Flags::default()).unwrap_err().to_string();
        assert!(said.contains(fault), "{said}");
    }
}

/// Promise: settings_errors_name_the_place.
#[test]
fn errors_name_file_line_and_setting() {
    for (text, fault) in [
        ("\nsocet = 1", "c.toml:2: socet: unknown field `socet`, expected one of `socket`, "),
        ("socket = 1", "c.toml:1: socket: invalid type: integer `1`, expected a string"),
        ("\n\nlog_level = \"loud\"", "c.toml:3: log_level: unknown variant `loud`, expected "),
        ("shim = 'none'", "c.toml:1: shim: unknown variant `none`, expected `own` or `runtime`"),
        ("forgotten_interval = -1", "c.toml:1: forgotten_interval: invalid value: integer `-1`"),
        ("forgotten_interval = 0", "c.toml:1: forgotten_interval: must be at least 1"),
        (
            "\nselinux_category_range = 1",
            "c.toml:2: selinux_category_range: must be a number from 2 to 1024",
        ),
        ("pod_annotations = 1", "c.toml:1: pod_annotations: invalid type: integer `1`, "),
        (
            "pod_annotations = [\n\"a\",\n\"[b\"]",
            "c.toml:1: pod_annotations: \"[b\" is not a valid pattern",
        ),
        ("restrict_oom_score_adj = \"yes\"", "c.toml:1: restrict_oom_score_adj: invalid type: "),
        ("state_dir = \"run\"", "c.toml:1: state_dir: must be an absolute path"),
        ("state_dir = \"/a/../b\"", "c.toml:1: state_dir: must be an absolute path without "),
        ("[log]\nlevel = 1", "c.toml:1: log: unknown field `log`, expected one of "),
        ("containerd_namespace = 'x'", "c.toml:1: containerd_namespace: unknown field "),
        ("abandoned_after = 1", "c.toml:1: abandoned_after: unknown field "),
        ("a = 1\nsocket =", "c.toml:2: "),
        ("log_level = \"info\"\nlog_level = \"info\"", "c.toml:2: "),
        ("sysctls = ['vm.swappiness=1']", "c.toml:1: sysctls: vm.swappiness is not namespaced"),
        ("sysctls = ['net.core.somaxconn']", "c.toml:1: sysctls: \"net.core.somaxconn\" is not "),
        ("sysctls = ['net/core/x=1']", "c.toml:1: sysctls: \"net/core/x=1\" is not NAME=value"),
        ("sysctls = ['net...x=1']", "c.toml:1: sysctls: \"net...x=1\" is not NAME=value"),
        ("sysctls = ['net.a=']", "c.toml:1: sysctls: \"net.a=\" has no value"),
        ("sysctls = [\"net.a=1\\n2\"]", "c.toml:1: sysctls: \"net.a=1\\n2\" has no value, or a "),
        ("shm_size = '64MB'", "c.toml:1: shm_size: must be a number of bytes from 1 to "),
        ("shm_size_max = 1", "c.toml:1: shm_size_max: invalid type: integer `1`, "),
        ("metrics = '0.0.0.0:1'", "c.toml:1: metrics: must be off, unix:///PATH or a loopback "),
    ] {
        let said = error(text);
        assert!(said.starts_with(fault), "{text}: {said}");
    }
    let flag = load("", &["--state-dir=x"]).unwrap_err();
    assert!(
        flag.starts_with("error: invalid value 'x' for '--state-dir <PATH>': must be an absolute"),
        "{flag}"
    );
}

#[test]
fn settings_that_do_not_fit_together_are_named_where_they_were_set() {
    let cri = "/run/containerd/io.containerd.grpc.v1.cri";
    let own = format!("must not be containerd_state nor below {cri}: that is containerd's own");
    assert_eq!(error(&format!("\nstate_dir = \"{cri}/x\"")), format!("c.toml:2: state_dir: {own}"));
    assert_eq!(
        load("", &[&format!("--state-dir={cri}")]).unwrap_err(),
        format!("--state-dir: {own}")
    );
    assert_eq!(
        error("containerd_state = \"/run/pause-sandboxer\""),
        "default of state_dir: must not be containerd_state nor below \
         /run/pause-sandboxer/io.containerd.grpc.v1.cri: that is containerd's own"
    );
    for (text, fault) in [
        ("state_dir = \"/x\"\ncontainerd_root = \"/x/\"", "c.toml:1: state_dir: "),
        ("socket = \"/run/containerd/containerd.sock\"", "c.toml:1: socket: "),
        ("socket = \"/sock\"", "c.toml:1: socket: "),
        ("socket = \"/a/s\"\nmetrics = \"unix:///a/s.ttrpc\"", "c.toml:2: metrics: "),
        ("shim_env = [\"A=b\", \"A=c\"]", "c.toml:1: shim_env: A is set twice"),
        (
            "container_limits = ['core=0', 'core=1']",
            "c.toml:1: container_limits: core is set twice",
        ),
        (
            "container_limits_max = ['core=0', 'core=1']",
            "c.toml:1: container_limits_max: core is set twice",
        ),
        ("sysctls = [\"net.a=1\", \"net.a=2\"]", "c.toml:1: sysctls: net.a is set twice"),
    ] {
        assert!(error(text).starts_with(fault), "{text}: {}", error(text));
    }
}

#[test]
fn variables_are_names_with_values() {
    for text in ["SCHED_CORE=1", "A=b, c=[d]", "A=", "_B9=x=y", "A=\"é"] {
        let config = load("", &[&format!("--shim-env={text}")]).unwrap();
        assert_eq!(config.shim_env.iter().map(ToString::to_string).collect::<Vec<_>>(), [text]);
        assert_eq!(load(&config.to_toml(), &[]), Ok(config));
    }
    for (text, fault) in [
        ("A", "\"A\" is not NAME=value"),
        ("=b", "\"=b\" is not NAME=value"),
        ("9A=b", "\"9A=b\" is not NAME=value"),
        ("A B=c", "\"A B=c\" is not NAME=value"),
        ("A=b\0c", "\"A=b\\0c\" has a control character"),
        ("NAMESPACE=x", "NAMESPACE is set by the sandboxer"),
    ] {
        assert_eq!(text.parse::<Variable>().unwrap_err(), fault);
    }
}

#[test]
fn sizes_are_bytes_or_binary_quantities() {
    for (text, bytes, shown) in [
        ("64Mi", 64 << 20, "64Mi"),
        ("67108864", 64 << 20, "64Mi"),
        ("1025Ki", 1025 << 10, "1025Ki"),
        ("2048Gi", 2 << 40, "2Ti"),
        ("0000000000000000000001", 1, "1"),
        ("9223372036854775807", i64::MAX as u64, "9223372036854775807"),
        ("8388607Ti", 8_388_607 << 40, "8388607Ti"),
    ] {
        let size: Size = text.parse().unwrap();
        assert_eq!((size.bytes(), size.to_string().as_str()), (bytes, shown), "{text}");
    }
    // A tmpfs of size 0 has no limit, and one close to 2^64 overflows to 0 pages.
    for bad in [
        "",
        "0",
        "0Mi",
        "-1",
        "+1",
        "1.5Gi",
        "1e9",
        "64M",
        "64mi",
        "64 Mi",
        " 64Mi",
        "Mi",
        "0x40",
        "9223372036854775808",
        "18446744073709551615",
        "18446744073709551616",
        "8388608Ti",
        "16777216Ti",
        "99999999999999999999Ki",
        "64Mi,mode=0",
        "64Mi\0",
        "٦٤",
        "50%",
        "max",
    ] {
        let fault = bad.parse::<Size>().unwrap_err();
        assert!(fault.starts_with("must be a number of bytes from 1 to 9223372036854775807"));
    }
}

#[test]
fn limits_of_containers_are_two_numbers_in_order() {
    for (text, shown) in [
        ("core=0", "core=0:0"),
        ("nofile=1024:1024", "nofile=1024:1024"),
        ("memlock=unlimited", "memlock=unlimited:unlimited"),
        ("nproc=18446744073709551614:unlimited", "nproc=18446744073709551614:unlimited"),
    ] {
        assert_eq!(text.parse::<ContainerLimit>().unwrap().to_string(), shown);
    }
    for (text, fault) in [
        ("core", "is not NAME=LIMIT or NAME=SOFT:HARD"),
        ("core=-1", "is not NAME=LIMIT or NAME=SOFT:HARD"),
        ("core=+1", "is not NAME=LIMIT or NAME=SOFT:HARD"),
        ("core=", "is not NAME=LIMIT or NAME=SOFT:HARD"),
        ("core=1:", "is not NAME=LIMIT or NAME=SOFT:HARD"),
        ("core=1:2:3", "is not NAME=LIMIT or NAME=SOFT:HARD"),
        ("core=1k", "is not NAME=LIMIT or NAME=SOFT:HARD"),
        ("core=18446744073709551615", "is not NAME=LIMIT or NAME=SOFT:HARD"),
        ("core=18446744073709551616", "is not NAME=LIMIT or NAME=SOFT:HARD"),
        ("core=2:1", "has a soft limit above the hard limit"),
        ("core=unlimited:1", "has a soft limit above the hard limit"),
        ("nofile=1023:4096", "\"nofile=1023:4096\" is below 1024"),
        ("cpu=1", "\"cpu\" is none of core, memlock, "),
        ("as=1", "\"as\" is none of core, memlock, "),
        ("NOFILE=2048", "\"NOFILE\" is none of core, memlock, "),
    ] {
        let said = text.parse::<ContainerLimit>().unwrap_err();
        assert!(said.contains(fault), "{text}: {said}");
    }
}

#[test]
fn patterns_are_separated_by_commas_in_a_flag() {
    let config = load("", &["--pod-annotations=io.x.*,b/?", "--pod-annotations=[ab]*"]).unwrap();
    let shown: Vec<&str> = config.pod_annotations.iter().map(Pattern::as_str).collect();
    assert_eq!(shown, ["io.x.*", "b/?", "[ab]*"]);
    let fault = load("", &["--pod-annotations=a,[b"]).unwrap_err();
    assert!(fault.ends_with("\"[b\" is not a valid pattern"), "{fault}");
}

/// Promise: only_root_calls.
#[test]
fn metrics_are_for_the_node_alone() {
    for good in ["off", "unix:///a/b", "127.0.0.1:9477", "127.8.9.1:1", "[::1]:9477"] {
        assert_eq!(good.parse::<Metrics>().unwrap().to_string(), good);
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
        assert!(bad.parse::<Metrics>().unwrap_err().starts_with("must be "), "{bad}");
    }
}

#[test]
fn the_longest_socket_path_fits() {
    let path = |length: usize| format!("--socket=/d/{}", "a".repeat(length - 3));
    assert!(load("", &[&path(97)]).is_ok());
    assert_eq!(
        load("", &[&path(98)]).unwrap_err(),
        "--socket: must be at most 97 bytes long, to leave room for the ttrpc socket's name; has 98"
    );
}

#[test]
fn a_named_file_must_exist() {
    let file = Path::new("/nowhere/c.toml");
    let e = Config::load(Some(file), &Flags::default()).unwrap_err().to_string();
    assert_eq!(e, "read config file /nowhere/c.toml: No such file or directory (os error 2)");
}
