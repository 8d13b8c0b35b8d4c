//! The real binary: its command line, and the daemon's life from the lock of its directory to its
//! end.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use std::fs;
use std::io::BufRead as _;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;

use nix::sys::signal::Signal;

mod check;
mod daemon;
mod operators;

use daemon::{Daemon, Scratch, program, run, stderr, stdout};

#[test]
fn version_and_help() {
    let version = run(&["version"]);
    assert!(version.status.success());
    assert_eq!(stdout(&version), format!("pause-sandboxer {}\n", env!("CARGO_PKG_VERSION")));
    let help = run(&["help"]);
    assert!(help.status.success());
    assert!(stdout(&help).contains("\n  serve "), "{}", stdout(&help));
}

#[test]
fn a_command_that_is_not_understood_is_a_usage_error() {
    for (args, part) in
        [(&["dance"][..], "'dance'"), (&["serve", "--sockt=/x"], "--sockt"), (&[], "Usage: ")]
    {
        let output = run(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(stderr(&output).contains(part), "{}", stderr(&output));
        assert_eq!(stdout(&output), "");
    }
}

#[test]
fn an_invalid_value_of_an_option_is_a_usage_error() {
    for (command, option, reason) in [
        (
            "serve",
            "--state-dir=here",
            "invalid value 'here' for '--state-dir <PATH>': must be an absolute",
        ),
        ("serve", "--socket=/s.sock", "--socket: must be in a directory below /"),
        ("serve", "--log-level=loud", "possible values: off, error, warn, info, debug, trace"),
        ("enable", "--socket=x", "'--socket <PATH>'"),
        ("enable", "--containerd-address=x", "'--containerd-address <PATH>'"),
        ("enable", "--metrics=off", "--metrics"),
        ("list", "--socket=/x", "--socket"),
    ] {
        let output = run(&[command, option]);
        assert_eq!(output.status.code(), Some(2), "{command} {option}");
        assert!(stderr(&output).contains(reason), "{}", stderr(&output));
    }
}

#[test]
fn the_default_config_parses_back() {
    let scratch = Scratch::new();
    let printed = run(&["config", "default"]);
    assert!(printed.status.success());
    let file = scratch.write("c.toml", stdout(&printed));
    let shown = run(&["config", "show", "--config", &file]);
    assert!(shown.status.success(), "{}", stderr(&shown));
    assert_eq!(stdout(&shown), stdout(&printed));
}

/// Promise: settings_errors_name_the_place.
#[test]
fn a_wrong_setting_is_named_with_its_place() {
    let scratch = Scratch::new();
    let file = scratch.write("c.toml", "log_level = \"info\"\nsocet = \"/run/x.sock\"\n");
    for command in [&["config", "show"][..], &["serve"], &["check"]] {
        let output = program().args(command).args(["--config", &file]).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{command:?}");
        assert!(
            stderr(&output)
                .starts_with(&format!("pause-sandboxer: {file}:2: socet: unknown field")),
            "{}",
            stderr(&output)
        );
    }
    let file = scratch.write("d.toml", "forgotten_interval = \"soon\"");
    let output = run(&["serve", "--config", &file]);
    assert!(
        stderr(&output).contains("d.toml:1: forgotten_interval: invalid type: string \"soon\""),
        "{}",
        stderr(&output)
    );
    let output = run(&["serve", "--config", "/nowhere/c.toml"]);
    assert!(
        stderr(&output).contains("read config file /nowhere/c.toml: No such file"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn serve_comes_up_answers_and_ends() {
    let scratch = Scratch::new();
    let check = || program().arg("check").args(scratch.flags()).output().unwrap();
    let stopped = check();
    assert_eq!(stopped.status.code(), Some(1), "without the daemon no pod can run");
    assert!(!scratch.path("state").exists(), "check must change nothing");
    let mut daemon = Daemon::start(&scratch, &scratch.flags());
    daemon.noticed("READY=1");
    for name in ["run/s.sock", "run/s.sock.ttrpc"] {
        UnixStream::connect(scratch.path(name)).unwrap();
    }
    let checked = check();
    assert!(stdout(&checked).contains("ok    daemon: answers on "), "{}", stdout(&checked));
    assert!(stdout(&checked).contains("; kube-reserved needs 10Mi "), "{}", stdout(&checked));
    daemon.signal(Signal::SIGTERM);
    daemon.noticed("STOPPING=1");
    assert_eq!(daemon.ended().code(), Some(0));
    assert!(UnixStream::connect(scratch.path("run/s.sock")).is_err());
}

#[test]
fn inherited_ignored_signals_have_no_effect() {
    let scratch = Scratch::new();
    let mut command = Command::new("/bin/sh");
    command.args([
        "-c",
        "trap '' CHLD TERM; exec \"$@\"",
        "sh",
        env!("CARGO_BIN_EXE_pause-sandboxer"),
        "serve",
    ]);
    let mut daemon = Daemon::spawn(&scratch, {
        command.args(scratch.flags());
        command
    });
    daemon.noticed("READY=1");
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.ended().code(), Some(0));
}

#[test]
fn a_socket_of_the_service_manager_is_used() {
    let scratch = Scratch::new();
    fs::create_dir(scratch.path("run")).unwrap();
    let listener = UnixListener::bind(scratch.path("run/s.sock")).unwrap();
    let inode = fs::metadata(scratch.path("run/s.sock")).unwrap().ino();
    // As systemd does it: the socket is descriptor 3, and LISTEN_PID is the daemon's own.
    let activate = |listener: &UnixListener, flags: &[String]| {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "LISTEN_PID=$$ LISTEN_FDS=1 exec \"$@\" 3<&0 </dev/null", "sh"]);
        command.arg(env!("CARGO_BIN_EXE_pause-sandboxer")).arg("serve").args(flags);
        command.stdin(OwnedFd::from(listener.try_clone().unwrap()));
        command
    };
    // Asked before there is a daemon, answered as soon as there is one.
    let checking = std::thread::spawn({
        let flags = scratch.flags();
        move || program().arg("check").args(flags).output().unwrap()
    });
    let mut daemon = Daemon::spawn(&scratch, activate(&listener, &scratch.flags()));
    daemon.noticed("READY=1");
    let checked = checking.join().unwrap();
    assert!(stdout(&checked).contains("ok    daemon: answers on "), "{}", stdout(&checked));
    UnixStream::connect(scratch.path("run/s.sock.ttrpc")).unwrap();
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.ended().code(), Some(0));
    assert_eq!(
        fs::metadata(scratch.path("run/s.sock")).unwrap().ino(),
        inode,
        "the service manager's socket is not replaced"
    );
    let other = format!("--socket={}", scratch.path("run/other.sock").display());
    let output = activate(&listener, &[scratch.flags(), vec![other]].concat()).output().unwrap();
    assert!(stderr(&output).contains("run/s.sock: is neither "), "{}", stderr(&output));
}

/// Promise: state_has_one_daemon.
#[test]
fn a_state_directory_and_a_socket_have_one_daemon() {
    let scratch = Scratch::new();
    let mut first = Daemon::start(&scratch, &scratch.flags());
    first.noticed("READY=1");
    let second = program()
        .arg("serve")
        .args(scratch.flags())
        .arg("--socket=/nowhere/s.sock")
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(1));
    let reason = format!(
        "lock state directory {}: in use by process {}",
        scratch.path("state/lock").display(),
        first.child.id()
    );
    assert!(stderr(&second).contains(&reason), "{}", stderr(&second));
    let other_state = format!("--state-dir={}", scratch.path("other").display());
    let second = program().arg("serve").args(scratch.flags()).arg(other_state).output().unwrap();
    assert_eq!(second.status.code(), Some(1));
    assert!(stderr(&second).contains("s.sock: Address already in use"), "{}", stderr(&second));
    UnixStream::connect(scratch.path("run/s.sock")).unwrap();
    // Neither the lock nor the socket of one that was killed is in the way of the next.
    first.signal(Signal::SIGKILL);
    first.ended();
    let third = Daemon::start(&scratch, &scratch.flags());
    third.noticed("READY=1");
}

/// Promise: only_files_of_root_count.
#[test]
fn a_state_directory_that_others_may_write_is_refused() {
    use std::os::unix::fs::{PermissionsExt as _, chown};
    let scratch = Scratch::new();
    let state = scratch.path("state");
    std::fs::create_dir(&state).unwrap();
    let refused = || {
        let output = program().arg("serve").args(scratch.flags()).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        let path = state.display();
        let remedy = format!("chown root:root {path} && chmod 0700 {path}");
        assert!(stderr(&output).contains(&remedy), "{}", stderr(&output));
        assert!(std::fs::read_dir(&state).unwrap().next().is_none(), "something was made in it");
    };
    for mode in [0o777, 0o1777, 0o770] {
        std::fs::set_permissions(&state, std::fs::Permissions::from_mode(mode)).unwrap();
        refused();
    }
    std::fs::set_permissions(&state, std::fs::Permissions::from_mode(0o755)).unwrap();
    chown(&state, Some(65534), None).unwrap();
    refused();
    chown(&state, Some(0), None).unwrap();
    Daemon::start(&scratch, &scratch.flags()).noticed("READY=1");
}

#[test]
fn sighup_reads_the_log_level_again() {
    let scratch = Scratch::new();
    let flags = scratch.flags();
    let mut daemon = Daemon::start(&scratch, &flags);
    daemon.noticed("READY=1");
    scratch.write("config.toml", "log_level = \"loud\"");
    daemon.signal(Signal::SIGHUP);
    assert!(
        daemon
            .logged("config reload failed; keeping settings")
            .contains("log_level: unknown variant `loud`")
    );
    scratch.write("config.toml", "log_level = \"debug\"");
    daemon.signal(Signal::SIGHUP);
    daemon.logged("log_level=DEBUG");
}

#[test]
fn json_log_is_json_from_the_first_line_to_the_last() {
    let scratch = Scratch::new();
    let mut daemon =
        Daemon::start(&scratch, &[scratch.flags(), vec!["--log-format=json".to_owned()]].concat());
    daemon.noticed("READY=1");
    daemon.signal(Signal::SIGINT);
    assert_eq!(daemon.ended().code(), Some(0));
    let lines: Vec<String> = (&mut daemon.log).lines().map(Result::unwrap).collect();
    let messages: Vec<String> = lines
        .iter()
        .map(|line| {
            let json: serde_json::Value =
                serde_json::from_str(line).unwrap_or_else(|e| panic!("{line:?}: {e}"));
            json["message"].as_str().unwrap().to_owned()
        })
        .collect();
    assert_eq!(
        (messages.first().unwrap().as_str(), messages.last().unwrap().as_str()),
        ("daemon starts", "daemon has completed pending calls")
    );
}

#[test]
fn no_config_file_at_all_is_needed() {
    assert!(
        !Path::new("/etc/pause-sandboxer/config.toml").exists(),
        "this machine has a config file of its own"
    );
    let scratch = Scratch::new();
    let daemon = Daemon::start(&scratch, &scratch.options());
    daemon.noticed("READY=1");
}
