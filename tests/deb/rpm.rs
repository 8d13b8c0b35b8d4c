//! The RPM package: installed, upgraded and removed, on the node that the Debian package has left.
//! It runs on Debian, with Debian's rpm, which needs `--force-debian`, and knows no package of the
//! node. What differs from Fedora beside that is the distribution's own: dnf, presets, SELinux.

use std::fs;
use std::path::Path;

use super::pods::Pods;
use super::{CONFIG_BEFORE, typed};
use super::{DROP_IN, HANDLER, SERVICE, main_pid, no_process_is_left, pause_of, quiet, run, says};

const FORCE: &str = "/run/pause-sandboxer.force-remove";
const UNITS: &str = "pause-sandboxer.socket pause-sandboxer.service";

pub fn comes_and_goes(first: &str, second: &str) {
    let pods = Pods::new();
    says("Install the RPM package");
    run(&format!("rpm --force-debian --nodeps --install {first}"));
    // systemd's own preset, which Debian has: every unit is enabled, and none started.
    for unit in UNITS.split(' ') {
        assert_eq!(quiet(&format!("systemctl is-enabled {unit}")), "enabled", "{unit}");
        assert_eq!(quiet(&format!("systemctl is-active {unit}")), "inactive", "{unit}");
    }
    assert_eq!(quiet("rpm --verify --nodeps pause-sandboxer 2>&1"), "", "files and their modes");
    run(&format!("systemctl enable --now {UNITS} && pause-sandboxer enable --offline --restart"));
    pods.up();
    let web = pods.run("web", HANDLER).unwrap();
    let container = pods.container("web", &web, "main");
    let pause = pause_of("web");

    says("Upgrade the RPM package");
    let daemon = main_pid();
    run(&format!("rpm --force-debian --nodeps --upgrade {second}"));
    assert_eq!(quiet("rpm --query --queryformat '%{release}' pause-sandboxer"), "2");
    assert_ne!(main_pid(), daemon, "the new one runs");
    assert_eq!(pause_of("web"), pause);
    pods.ready("web");
    assert_eq!(pods.exec(&container, &["echo", "still here"]), "still here");

    says("Remove the RPM package with a pod alive");
    let (code, text) = typed("rpm --erase pause-sandboxer");
    assert_ne!(code, 0, "{text}");
    assert!(text.contains("\n    pod: default/web ("), "{text}");
    run("rpm --query pause-sandboxer");
    assert_eq!(quiet(&format!("systemctl is-active {SERVICE}")), "active");
    run(&format!("touch {FORCE}"));
    let text = run("rpm --erase pause-sandboxer");
    assert!(text.contains("\n    pod: default/web (") && text.contains("by force"), "{text}");
    assert!(Path::new(&format!("/proc/{pause}/ns")).exists(), "the pause lives on");
    assert!(!Path::new("/usr/bin/pause-sandboxer").exists() && !Path::new(FORCE).exists());
    assert!(Path::new(DROP_IN).exists(), "the pod's handler stays");
    run(&format!("rpm --force-debian --nodeps --install {second} && systemctl start {UNITS}"));
    pods.ready("web");
    assert_eq!(pause_of("web"), pause, "the pod has its daemon again");

    says("Remove the RPM package");
    pods.remove("web", &web);
    let (code, text) = typed("rpm --erase pause-sandboxer");
    assert!(code != 0 && text.contains("config: "), "the handler is left: {text}");
    run("pause-sandboxer disable --restart && rpm --erase pause-sandboxer");
    pods.up();
    for path in [DROP_IN, "/usr/bin/pause-sandboxer", "/run/pause-sandboxer"] {
        assert!(!Path::new(path).exists(), "{path} is left");
    }
    let config = fs::read_to_string("/etc/containerd/config.toml").unwrap();
    assert_eq!(config, fs::read_to_string(CONFIG_BEFORE).unwrap(), "containerd's config is back");
    assert_eq!(quiet("systemctl list-unit-files --no-legend 'pause-sandboxer*'"), "");
    no_process_is_left();
}
