//! The order of a boot in which another unit than `containerd.service` runs containerd.

use std::fs;

use super::node::{alone, eventually, run, show};
use super::unit::{SERVICE, SOCKET, up};

/// A unit whose program starts containerd, as that of k3s does.
const OTHER: &str = "k3s.service";
/// What a boot starts.
const BOOT: &str = "psbtest-boot.target";
const RUNTIME_UNITS: &str = "/run/systemd/system";
const CONFIG_DIR: &str = "/etc/psbtest-k3s";
const PROGRAM: &str = "/usr/local/bin/pause-sandboxer";

/// The daemon takes a moment until it serves, so that the order shows.
fn write_units() {
    let other = format!(
        "[Service]\nExecStart=/bin/sh -c 'containerd --config {CONFIG_DIR}/config.toml & wait'\n\
         Delegate=yes\n"
    );
    let slow = "[Service]\nExecStartPre=/bin/sleep 2\n";
    let boot = format!("[Unit]\nWants={SERVICE} {OTHER}\n");
    let drop_ins = format!("{RUNTIME_UNITS}/{SERVICE}.d");
    fs::create_dir_all(&drop_ins).unwrap();
    fs::create_dir_all(CONFIG_DIR).unwrap();
    fs::write(format!("{CONFIG_DIR}/config.toml"), "version = 3\n").unwrap();
    fs::write(format!("{drop_ins}/slow.conf"), slow).unwrap();
    fs::write(format!("{RUNTIME_UNITS}/{OTHER}"), other).unwrap();
    fs::write(format!("{RUNTIME_UNITS}/{BOOT}"), boot).unwrap();
    run("systemctl", &["daemon-reload"]);
}

fn remove_units() {
    fs::remove_dir_all(format!("{RUNTIME_UNITS}/{SERVICE}.d")).unwrap();
    fs::remove_dir_all(CONFIG_DIR).unwrap();
    for unit in [OTHER, BOOT] {
        fs::remove_file(format!("{RUNTIME_UNITS}/{unit}")).unwrap();
    }
    run("systemctl", &["daemon-reload"]);
}

/// Starts all in one transaction, as a boot does; whether the daemon served before the other unit
/// began.
fn boot() -> bool {
    run("systemctl", &["stop", BOOT, OTHER, SOCKET, SERVICE]);
    run("systemctl", &["start", BOOT]);
    eventually("containerd answers", || {
        std::process::Command::new("ctr").arg("version").output().unwrap().status.success()
    });
    let time = |unit, property| show(unit, property).parse::<u64>().unwrap();
    let served = time(SERVICE, "ActiveEnterTimestampMonotonic");
    let began = time(OTHER, "ExecMainStartTimestampMonotonic");
    assert!(served > 0 && began > 0);
    served <= began
}

#[test]
fn the_daemon_serves_before_another_unit_of_containerd_begins() {
    let _alone = alone();
    up();
    run("systemctl", &["stop", "containerd.service"]);
    write_units();
    assert!(!boot(), "without an order systemd starts both at once");
    run(PROGRAM, &["enable"]);
    for unit in [SERVICE, SOCKET] {
        let before = show(unit, "Before");
        assert!(before.split(' ').any(|later| later == OTHER), "{unit}: {before}");
    }
    assert!(boot(), "{OTHER} began before the daemon served");
    run(PROGRAM, &["disable"]);
    assert!(!show(SERVICE, "Before").contains(OTHER), "the order is left");
    run("systemctl", &["stop", BOOT, OTHER]);
    remove_units();
    run("systemctl", &["start", "containerd.service"]);
}
