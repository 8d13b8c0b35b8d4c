//! The Debian package on a node: installed, used, restarted, upgraded, rebooted, removed, with pods
//! alive all the while. Then the RPM package: installed, upgraded, removed. Then the packages of
//! the shim alone.
//!
//! For a node that may be messed up, with systemd, containerd, dpkg and rpm; `tests/deb/run-in-vm`
//! runs it on the machine of `tests/vm`. What it does and what the node answers is printed as at a
//! terminal; crictl calls CRI as kubelet does.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use pods::Pods;

mod kind;
mod pods;
mod rpm;
mod shim_alone;

const HANDLER: &str = "runc-pause";
const DROP_IN: &str = "/etc/containerd/conf.d/pause-sandboxer.toml";
const SERVICE: &str = "pause-sandboxer.service";
/// A copy of containerd's config file as it was before the installation.
const CONFIG_BEFORE: &str = "/root/config.toml";

/// The machine may be a slow one.
const SOON: Duration = Duration::from_secs(120);

/// The steps of `selftest`, each a row of its table.
const STEPS: [&str; 9] = [
    "run the sandbox",
    "create the container",
    "start the container",
    "read its log",
    "run a command in it",
    "stop the container",
    "remove the container",
    "stop the sandbox",
    "remove the sandbox",
];

/// Prints what pods and images have on the node: files, cgroups, mounts, processes, and objects of
/// containerd. Of the snapshots only those of containers: the first pod of the default handler
/// unpacks the pause image, which stays.
const RESOURCES: &str = "
find /run /sys/fs/cgroup /var/lib/containerd | grep -E '[0-9a-f]{64}|selftest|cni-' | sort
cut -d ' ' -f 5 /proc/self/mountinfo | sort
ps -eo comm= | grep -E 'pause|shim|selftest' | sort | uniq -c
for what in images containers tasks leases; do ctr -n k8s.io $what ls -q; done
ctr -n k8s.io snapshots ls | grep Active";

fn main() {
    let packages: Vec<String> = std::env::args().skip(1).collect();
    let [first, second, first_rpm, second_rpm, shim, shim_rpm] = &packages[..] else {
        panic!("usage: deb DEB DEB RPM RPM DEB RPM: before and after the upgrade, the shim alone");
    };
    if std::env::var("VM_BOOT").as_deref() == Ok("2") {
        after_the_reboot();
        rpm::comes_and_goes(first_rpm, second_rpm);
        shim_alone::comes_and_goes(shim, shim_rpm);
        kind::try_it();
    } else {
        before_the_reboot(first, second);
    }
}

/// The version in a package's file name, `NAME_VERSION_ARCHITECTURE.deb`.
fn version(package: &str) -> &str {
    package.split('_').nth(1).unwrap_or_else(|| panic!("{package} has no version"))
}

/// Runs a line of shell as if typed, shows it and its output, and answers exit code and output.
fn typed(line: &str) -> (i32, String) {
    println!("# {line}");
    let output = Command::new("sh").args(["-c", &format!("exec 2>&1; {line}")]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    print!("{text}");
    (output.status.code().unwrap_or(-1), text)
}

/// A line that must succeed; its output.
fn run(line: &str) -> String {
    let (code, text) = typed(line);
    assert_eq!(code, 0, "`{line}` ended with {code}");
    text.trim().to_owned()
}

/// Output of what is asked behind the scene.
fn quiet(line: &str) -> String {
    let output = Command::new("sh").args(["-c", line]).output().unwrap();
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

fn says(text: &str) {
    println!("\n## {text}");
}

/// Waits for what will be so soon.
fn eventually<T>(what: &str, mut so: impl FnMut() -> Result<T, String>) -> T {
    let begun = Instant::now();
    loop {
        match so() {
            Ok(value) => return value,
            Err(why) => assert!(begun.elapsed() < SOON, "not in time: {what}: {why}"),
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

fn pause_of(name: &str) -> u32 {
    let all: serde_json::Value =
        serde_json::from_str(&quiet("pause-sandboxer list -o json")).unwrap();
    let sandbox = all
        .as_array()
        .unwrap()
        .iter()
        .find(|sandbox| sandbox["pod"] == name)
        .unwrap_or_else(|| panic!("{name} in {all}"));
    assert_eq!(sandbox["state"], "ready", "{sandbox}");
    u32::try_from(sandbox["pid"].as_u64().unwrap()).unwrap()
}

fn main_pid() -> String {
    quiet(&format!("systemctl show --value --property MainPID {SERVICE}"))
}

/// `selftest` runs a pod and leaves nothing.
fn selftest() {
    says("Run a test pod");
    let before = quiet(RESOURCES);
    assert!(before.contains(kit::TEST_IMAGE), "the images are not listed:\n{before}");
    // Its default timeout is that of a machine at full speed.
    let table = run("pause-sandboxer selftest --timeout 600");
    let mut rows = table.lines();
    let head: Vec<&str> = rows.next().unwrap_or_default().split_whitespace().collect();
    assert_eq!(head, ["STEP", HANDLER], "{table}");
    for step in STEPS {
        let times = rows.next().and_then(|row| row.strip_prefix(step)).unwrap_or_else(|| {
            panic!("no row of the step {step:?} where it is expected:\n{table}");
        });
        let times: Vec<&str> = times.split_whitespace().collect();
        let [time, "ms"] = times[..] else { panic!("{step}: {times:?}") };
        assert!(time.parse::<f64>().is_ok_and(|time| time > 0.0), "{step}: {times:?}");
    }
    let end: Vec<&str> = rows.collect();
    assert_eq!(end, [format!("{HANDLER}: no leftover resources")], "{table}");
    eventually("nothing of selftest is left", || {
        let after = quiet(RESOURCES);
        let is_old = |line: &str| before.lines().any(|old| old == line);
        let new: Vec<&str> = after.lines().filter(|line| !is_old(line)).collect();
        if new.is_empty() { Ok(()) } else { Err(format!("{new:?}")) }
    });
}

/// The maxima of processes, of core files and of open files of a process: what a shim passes on.
fn limits(pid: &str) -> (String, String, Option<String>) {
    let text = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = |name: &str| {
        text.lines()
            .find(|line| line.starts_with(name))
            .unwrap()
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
    };
    let [processes, core, files] =
        ["Max processes", "Max core file size", "Max open files"].map(line);
    // Both shims raise their soft limit, and give the runtime the one from before.
    let hard = files.split(' ').nth(4).map(str::to_owned);
    (processes, core, hard)
}

/// Installs the package: containerd keeps its config, and `check` says what is next.
fn install(first_package: &str) {
    let config = fs::read_to_string("/etc/containerd/config.toml").unwrap();
    fs::write(CONFIG_BEFORE, &config).unwrap();

    says("Install the package");
    run(&format!("dpkg -i {first_package}"));
    assert_eq!(
        fs::read_to_string("/etc/containerd/config.toml").unwrap(),
        config,
        "containerd's own config is containerd's"
    );
    for unit in ["pause-sandboxer.socket", SERVICE] {
        assert_eq!(quiet(&format!("systemctl is-enabled {unit}")), "enabled");
        assert_eq!(quiet(&format!("systemctl is-active {unit}")), "active", "{unit}");
    }
    let findings = quiet("pause-sandboxer check; echo exit code $?");
    assert!(findings.ends_with("exit code 1"), "containerd knows nothing of it yet: {findings}");
    assert!(findings.contains("-> pause-sandboxer enable --restart"), "{findings}");
}

/// A setting of containerd's that differs from the default.
const SHIM_ENV: &str = "/etc/containerd/conf.d/shim-env.toml";

fn adopted() -> Option<String> {
    fs::read_to_string("/etc/pause-sandboxer/config.adopted.toml").ok()
}

/// Lets `enable` adopt a setting of containerd's; the text of its file. dpkg still finds its own
/// config file as it has installed it, or it would ask what to do with another version of it.
fn adopt_settings() -> Option<String> {
    let text = "[plugins.\"io.containerd.shim.v1.manager\"]\nenv = [\"A=1\"]\n";
    fs::write(SHIM_ENV, text).unwrap();
    let enabled = quiet("systemctl restart containerd; pause-sandboxer enable --offline 2>&1");
    let adopted = adopted();
    assert!(adopted.as_ref().is_some_and(|text| text.contains("A=1")), "{adopted:?}: {enabled}");
    // The image leaves out documents, which dpkg misses.
    let changed = quiet("dpkg --verify pause-sandboxer 2>&1 | grep -v /usr/share/");
    assert_eq!(changed, "", "dpkg would ask about it");
    adopted
}

/// Undoes it.
fn forget_settings() {
    fs::remove_file(SHIM_ENV).unwrap();
    let enabled = "systemctl restart containerd; pause-sandboxer enable --offline --restart 2>&1";
    let enabled = quiet(enabled);
    assert_eq!(adopted(), None, "what containerd no longer has stays: {enabled}");
}

/// `enable` waits for CRI and not for the unit, which can be ready much later.
fn unit_that_is_ready_late() {
    let directory = "/run/systemd/system/containerd.service.d";
    fs::create_dir(directory).unwrap();
    let late = "[Service]\nTimeoutStartSec=infinity\nExecStartPost=/bin/sleep infinity\n";
    fs::write(format!("{directory}/late.conf"), late).unwrap();
    let enabled = quiet(
        "systemctl daemon-reload; pause-sandboxer enable --restart 2>&1; \
         systemctl is-active containerd",
    );
    assert!(enabled.contains("restarted containerd: it has loaded"), "{enabled}");
    assert!(enabled.ends_with("\nactivating"), "{enabled}");
    fs::remove_dir_all(directory).unwrap();
    let enabled = quiet(
        "systemctl daemon-reload; systemctl restart containerd; \
         pause-sandboxer enable --offline --restart 2>&1",
    );
    assert!(enabled.contains("restarted containerd: it has loaded"), "{enabled}");
}

/// Installs the other version over this one. dpkg has no terminal: a question would end it.
fn upgrade(first_package: &str, second_package: &str) {
    says("Upgrade");
    let daemon = main_pid();
    run(&format!("dpkg -i {second_package} </dev/null"));
    assert_ne!(main_pid(), daemon, "the new one runs");
    assert_eq!(
        quiet("dpkg-query -W -f '${Version}' pause-sandboxer"),
        version(second_package),
        "upgraded from {}",
        version(first_package)
    );
    assert!(
        fs::read_to_string(DROP_IN).unwrap().contains("localhost/pause-sandboxer/pause:1"),
        "what was enabled stays"
    );
}

fn before_the_reboot(first_package: &str, second_package: &str) {
    let pods = Pods::new();
    pods.up();
    // Other nodes get the image from a registry.
    kit::write_images(Path::new("/tmp/images.tar")).unwrap();
    quiet("ctr -n k8s.io images import --local /tmp/images.tar");
    install(first_package);

    says("Add the handler to containerd");
    // The node has no registry: the pause comes from the binary.
    run("pause-sandboxer enable --offline --restart");
    pods.up();
    assert_eq!(typed("pause-sandboxer check").0, 0);

    says("Run a pod");
    let web = eventually("the first pod", || pods.run("web", HANDLER));
    let plain = pods.run("plain", "").expect("the default handler runs on the same image");
    let first = pods.container("web", &web, "main");
    pods.list();
    let list = run("pause-sandboxer list");
    assert!(
        list.contains("web") && !list.contains("plain"),
        "the default handler is still containerd's: {list}"
    );
    let pause = pause_of("web");

    let settings = adopt_settings();
    upgrade(first_package, second_package);
    assert_eq!(adopted(), settings, "the settings stay");
    pods.ready("web");
    assert_eq!(pause_of("web"), pause, "the same pause");
    assert_eq!(pods.exec(&first, &["echo", "still here"]), "still here");
    run("pause-sandboxer list");
    let new = pods.run("new", HANDLER).unwrap();
    pods.container("new", &new, "main");
    let [ours, theirs] =
        [&new, &plain].map(|pod| quiet(&format!("pgrep -f 'shim.* -id {pod}' | head -n 1")));
    assert_eq!(limits(&ours), limits(&theirs), "a shim has the limits that containerd gives one");
    let environment = fs::read_to_string(format!("/proc/{ours}/environ")).unwrap();
    assert!(environment.split('\0').any(|variable| variable == "A=1"), "{environment}");
    pods.remove("new", &new);
    forget_settings();
    unit_that_is_ready_late();
    pods.up();

    selftest();

    says("Restart both daemons");
    for unit in [SERVICE, "containerd"] {
        run(&format!("systemctl restart {unit}"));
        pods.up();
        pods.ready("web");
        assert_eq!(pause_of("web"), pause);
        assert_eq!(pods.exec(&first, &["echo", "still here"]), "still here");
    }
    pods.list();
    run("pause-sandboxer list");
    let second = pods.container("web", &web, "second");
    assert!(pods.exec(&second, &["cat", "/etc/hosts"]).contains("localhost"), "its files are back");

    says("Remove the package with a pod alive, and install it again");
    let (code, text) = typed("apt-get -qq remove pause-sandboxer");
    assert_eq!(code, 100, "{text}");
    assert!(text.contains("\n    pod: default/web ("), "{text}");
    assert!(text.contains("kubectl drain --ignore-daemonsets "), "{text}");
    assert_eq!(quiet("dpkg-query -W -f '${db:Status-Status}' pause-sandboxer"), "installed");
    assert_eq!(quiet(&format!("systemctl is-active {SERVICE}")), "active");
    run("touch /run/pause-sandboxer.force-remove");
    let text = run("apt-get -qq remove pause-sandboxer");
    assert!(text.contains("\n    pod: default/web ("), "{text}");
    assert!(Path::new(&format!("/proc/{pause}/ns")).exists(), "the pause lives on");
    assert!(!Path::new("/usr/bin/pause-sandboxer").exists());
    assert!(Path::new(DROP_IN).exists(), "the pod's handler stays");
    run(&format!("dpkg -i {second_package}"));
    assert_eq!(pause_of("web"), pause);
    pods.ready("web");
    pods.remove("plain", &plain);

    says("Reboot");
    fs::write("/root/web", &web).unwrap();
    run("systemctl reboot");
    std::thread::sleep(Duration::from_secs(600));
    panic!("the node did not reboot");
}

fn after_the_reboot() {
    let pods = Pods::new();
    pods.up();
    for unit in ["pause-sandboxer.socket", SERVICE] {
        assert_eq!(quiet(&format!("systemctl is-active {unit}")), "active", "{unit}");
    }
    let pod = pods.list();
    assert_eq!(pod, [("web".to_owned(), false)], "it ended with the boot");
    run("pause-sandboxer list");
    // As kubelet does: the old sandbox goes, a new one comes.
    pods.remove("web", &fs::read_to_string("/root/web").unwrap());
    let web = pods.run("web", HANDLER).unwrap();
    pods.container("web", &web, "main");
    run("pause-sandboxer list");
    assert_eq!(typed("pause-sandboxer check").0, 0);

    says("Undo it");
    pods.remove("web", &web);
    run("pause-sandboxer disable --restart");
    run("apt-get -qq purge pause-sandboxer");
    pods.up();
    for path in [
        DROP_IN,
        "/etc/pause-sandboxer",
        "/usr/bin/pause-sandboxer",
        "/usr/bin/pause-sandboxer-runc-shim",
        "/run/pause-sandboxer",
    ] {
        assert!(!Path::new(path).exists(), "{path} is left");
    }
    let config = fs::read_to_string("/etc/containerd/config.toml").unwrap();
    assert_eq!(config, fs::read_to_string(CONFIG_BEFORE).unwrap(), "containerd's config is back");
    assert_eq!(quiet("systemctl list-unit-files --no-legend 'pause-sandboxer*'"), "");
    no_process_is_left();
    assert!(pods.run("web", HANDLER).is_err(), "containerd has forgotten the handler");
    println!("\nthe package has come and gone");
}

fn no_process_is_left() {
    // The names of the packages are arguments of this program.
    let left = quiet("ps -eo pid,ppid,lstart,args | grep '[p]ause' | grep -v '_amd64[.]deb'");
    assert_eq!(left, "", "left processes; journal:\n{}", quiet("journalctl --no-pager -n 60"));
}
