//! `pause-sandboxer check` with the config of a real containerd, which merges it.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output};

use kit::Parts;

use crate::daemon::{Daemon, Scratch, program, stdout};

/// `check` of a containerd that does not run, with flags.
fn command(flags: &[String], containerd_config: &str) -> Command {
    let mut command = program();
    command.arg("check").args(flags).args(["--containerd-config", containerd_config]);
    command.arg("--containerd").arg(Parts::get().unwrap().program("containerd"));
    command
}

/// The output of `check` for a config file of containerd.
fn found(config: &str) -> String {
    stdout(&command(&[], config).output().unwrap()).to_owned()
}

/// A containerd config that names the sandboxer of `scratch` as `mine`.
fn containerd_config(scratch: &Scratch, sandboxer: &str) -> String {
    let path = |name: &str| scratch.path(name).display().to_string();
    scratch.write(
        "containerd.toml",
        &format!(
            r#"version = 3
root = "{}"
state = "{}"
[grpc]
address = "{}"
[proxy_plugins.mine]
type = "sandbox"
address = "{}"
[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.fast]
runtime_type = "io.containerd.runc.v2"
sandboxer = "{sandboxer}"
"#,
            path("root"),
            path("containerd"),
            path("containerd/c.sock"),
            path("run/s.sock")
        ),
    )
}

pub(crate) fn check(scratch: &Scratch, sandboxer: &str) -> Output {
    let config = containerd_config(scratch, sandboxer);
    // A node has a shim, and this machine may have none.
    let shim = scratch.write("containerd-shim-runc-v2", "");
    fs::set_permissions(shim, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", scratch.dir.path().display(), std::env::var("PATH").unwrap());
    command(&scratch.flags(), &config).env("PATH", path).output().unwrap()
}

/// Promise: check_names_the_remedy.
#[test]
fn check_reports_problems_and_sets_the_exit_status() {
    let scratch = Scratch::new();
    let stopped = check(&scratch, "mine");
    assert_eq!(stopped.status.code(), Some(1), "without the daemon no pod can run");
    assert!(stdout(&stopped).contains("FAIL  daemon: is not running"), "{}", stdout(&stopped));
    assert!(!scratch.path("state").exists(), "check must change nothing");
    let daemon = Daemon::start(&scratch, &scratch.flags());
    daemon.noticed("READY=1");
    let good = check(&scratch, "mine");
    // The containerd of the config does not run, and a pod needs one: `tests/check` has nodes.
    let failed: Vec<&str> = stdout(&good).lines().filter(|line| line.starts_with("FAIL")).collect();
    assert!(
        matches!(failed[..], [one] if one.starts_with("FAIL  containerd: does not listen on ")),
        "{}",
        stdout(&good)
    );
    assert_eq!(good.status.code(), Some(1), "{}", stdout(&good));
    for part in [
        "ok    kernel: Linux ",
        "ok    privileges: root",
        "ok    containerd config: runtime handlers of this sandboxer: \"fast\"",
    ] {
        assert!(stdout(&good).contains(part), "{part} is missing in\n{}", stdout(&good));
    }
    let bad = check(&scratch, "podsandbox");
    assert_eq!(bad.status.code(), Some(1));
    assert!(
        stdout(&bad).contains(
            "FAIL  containerd config: no runtime handler has sandboxer = \"mine\"\n      -> \
             pause-sandboxer enable --restart; or add: ["
        ),
        "{}",
        stdout(&bad)
    );
}

/// A containerd that does not run does not report its `PATH`.
#[test]
fn without_containerd_shims_are_looked_for_in_the_usual_directories() {
    let scratch = Scratch::new();
    let config = containerd_config(&scratch, "mine");
    let text = fs::read_to_string(&config)
        .unwrap()
        .replace("io.containerd.runc.v2", "io.containerd.youki.v1");
    fs::write(&config, text).unwrap();
    let output = command(&scratch.flags(), &config).env("PATH", "/only").output().unwrap();
    let places = "not found in PATH (/opt/containerd/bin:/only:/usr/local/sbin:/usr/local/bin:\
        /usr/sbin:/usr/bin:/sbin:/bin) or next to the containerd binary";
    assert!(stdout(&output).contains(places), "{}", stdout(&output));
}

#[test]
fn the_packaged_drop_in_names_the_default_sandboxer() {
    let scratch = Scratch::new();
    let drop_in = concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/containerd/pause-sandboxer.toml");
    let main =
        scratch.write("containerd.toml", &format!("version = 3\nimports = [\"{drop_in}\"]\n"));
    let output = found(&main);
    let named = "ok    containerd config: runtime handlers of this sandboxer: \"runc-pause\"";
    assert!(output.contains(named), "{output}");
    assert!(!output.contains("FAIL  containerd config"), "{output}");
}

/// Promise: check_names_the_remedy.
#[test]
fn the_config_is_what_containerd_makes_of_its_files() {
    let scratch = Scratch::new();
    let imported = scratch.write("imported.toml", "root = \"/imported\"\n");
    let main = |text: &str| {
        let text = format!("imports = [\"{imported}\"]\nroot = \"/main\"\n{text}");
        scratch.write("containerd.toml", &text)
    };
    let output = found(&main("version = 3\n"));
    assert!(output.contains("containerd's root is /imported, but"), "{output}");
    let output = found(&main("version = 2\nstate = \"/two\"\n"));
    assert!(output.contains("containerd's root is /imported, but"), "{output}");
    assert!(output.contains("containerd's state is /two, but"), "{output}");
}

/// containerd takes such a file as one of its newest version.
#[test]
fn a_config_without_a_version_is_accepted() {
    let scratch = Scratch::new();
    let config = containerd_config(&scratch, "mine");
    let text = fs::read_to_string(&config).unwrap().replace("version = 3\n", "");
    assert!(!text.contains("version"), "{text}");
    fs::write(&config, text).unwrap();
    let output = command(&scratch.flags(), &config).output().unwrap();
    let output = stdout(&output);
    assert!(
        output.contains("ok    containerd config: runtime handlers of this sandboxer: \"fast\""),
        "{output}"
    );
    assert!(!output.contains("FAIL  containerd config"), "{output}");
}

/// kubelet takes the driver from containerd, and containerd from its default handler.
#[test]
fn the_cgroup_driver_is_compared_with_that_of_containerds_default_handler() {
    let scratch = Scratch::new();
    let config = containerd_config(&scratch, "mine");
    let text = fs::read_to_string(&config).unwrap();
    let other = |systemd: bool| {
        let section = "[plugins.\"io.containerd.cri.v1.runtime\".containerd";
        let set = format!(
            "{text}{section}]\ndefault_runtime_name = \"usual\"\n{section}.runtimes.usual]\n\
             runtime_type = \"io.containerd.runc.v2\"\n{section}.runtimes.usual.options]\n\
             SystemdCgroup = {systemd}\n"
        );
        fs::write(&config, set).unwrap();
        stdout(&command(&scratch.flags(), &config).output().unwrap()).to_owned()
    };
    let output = other(false);
    assert!(
        output.contains("ok    kubelet: cgroup driver of runtime handler \"fast\" is cgroupfs"),
        "{output}"
    );
    let output = other(true);
    let differs = "FAIL  kubelet: SystemdCgroup of runtime handler \"fast\" is false, but \
        containerd reports systemd to kubelet, because of its runtime handler \"usual\"";
    assert!(output.contains(differs), "{output}");
}

/// containerd 2.0 to 2.2 lose them, later versions do not.
#[test]
fn handlers_that_containerd_drops_are_reported() {
    let scratch = Scratch::new();
    let drop_in = concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/containerd/pause-sandboxer.toml");
    let main = scratch.write(
        "containerd.toml",
        &format!(
            "version = 2\nimports = [\"{drop_in}\"]\n\
             [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.kata]\n\
             runtime_type = \"io.containerd.kata.v2\"\n"
        ),
    );
    let output = found(&main);
    let version = Parts::get().unwrap().version();
    let drops = ["2.0.", "2.1.", "2.2."].iter().any(|release| version.starts_with(release));
    let reported =
        output.contains("FAIL  containerd config: containerd drops runtime handler \"kata\"");
    assert_eq!(reported, drops, "{version}: {output}");
    assert!(output.contains("runtime handlers of this sandboxer: \"runc-pause\""), "{output}");
}

#[test]
fn a_config_that_containerd_does_not_take_is_reported_in_its_words() {
    let scratch = Scratch::new();
    let output = found(&scratch.write("containerd.toml", "version = 3\nroot = \n"));
    assert!(output.contains("config dump` fails: exit status: 1: containerd: "), "{output}");
    assert!(output.contains(" row 2 "), "{output}");
    let output = found(&scratch.path("missing.toml").display().to_string());
    assert!(output.contains("missing.toml: No such file"), "{output}");
    let missing = scratch.write("containerd.toml", "version = 3\nimports = [\"missing.toml\"]\n");
    let output = found(&missing);
    assert!(output.contains("/missing.toml, which does not exist"), "{output}");
}

#[test]
fn without_containerd_its_config_is_not_examined() {
    let scratch = Scratch::new();
    let config = scratch.write("containerd.toml", "version = 3\n");
    for (other, reason) in
        [("/nowhere/containerd", "No such file or directory"), ("/bin/true", "so it is not")]
    {
        let mut command = program();
        command.args(["check", "--containerd-config", &config, "--containerd", other]);
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let output = stdout(&output);
        let failed = format!("FAIL  containerd: {other} --version: ");
        assert!(output.contains(&failed) && output.contains(reason), "{output}");
        assert!(!output.contains("containerd config"), "{output}");
    }
}

/// The output of `check` on a terminal, which `script` makes.
fn on_a_terminal(environment: &[(&str, &str)]) -> String {
    let check = format!("{} check --containerd-config /nowhere", program().get_program().display());
    let mut command = Command::new("script");
    command.args(["-qec", &check, "/dev/null"]).env_remove("NO_COLOR").env("TERM", "xterm");
    let output = command.envs(environment.iter().copied()).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_terminal_gets_colours_and_nothing_else_does() {
    const GREEN: &str = "\x1b[32mok\x1b[0m    kernel: ";
    let coloured = on_a_terminal(&[]);
    assert!(coloured.contains(GREEN) && coloured.contains("\x1b[31mFAIL\x1b[0m  "), "{coloured}");
    for environment in [("NO_COLOR", "1"), ("TERM", "dumb")] {
        let plain = on_a_terminal(&[environment]);
        assert!(plain.contains("ok    kernel: ") && !plain.contains('\x1b'), "{plain}");
    }
    // An empty value asks for nothing.
    assert!(on_a_terminal(&[("NO_COLOR", "")]).contains(GREEN));
    let piped = program().args(["check", "--containerd-config", "/nowhere"]).output().unwrap();
    assert!(stdout(&piped).contains("ok    kernel: ") && !stdout(&piped).contains('\x1b'));
}
