//! What the values of the chart change on a node.

use std::fs;
use std::process::{Command, Stdio};

use super::Node;

const SETTINGS: &str = "host/etc/pause-sandboxer/config.toml";

impl Node {
    /// Installs with these variables; returns the status and what was said.
    pub(super) fn installs(&self, variables: &[(&str, &str)]) -> (Option<i32>, String) {
        let mut command = self.command("install");
        command.envs(variables.iter().copied()).stderr(Stdio::piped());
        let output = command.output().unwrap();
        let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        (output.status.code(), said)
    }
}

#[test]
fn the_settings_of_the_chart_are_those_of_the_daemon() {
    let node = Node::new();
    let text = "log_level = \"debug\"\nshim_env = [\"A=b\"]";
    assert_eq!(node.installs(&[("SETTINGS", text)]).0, Some(0));
    let written = fs::read_to_string(node.path(SETTINGS)).unwrap();
    assert!(written.ends_with(&format!("\n{text}\n")), "{written}");
    assert!(written.starts_with("# Written by the installer"), "{written}");
    assert!(node.asked().contains("restart pause-sandboxer.service"));
    // The same settings restart nothing, others restart the daemon.
    assert_eq!(node.installs(&[("SETTINGS", text)]).0, Some(0));
    assert!(!node.asked().contains("restart pause-sandboxer.service"));
    assert_eq!(node.installs(&[("SETTINGS", "log_level = \"info\"")]).0, Some(0));
    assert!(node.asked().contains("restart pause-sandboxer.service"));
    // Without any the file goes, as with the removal.
    assert_eq!(node.installs(&[]).0, Some(0));
    assert!(!node.path(SETTINGS).exists());
    assert!(node.asked().contains("restart pause-sandboxer.service"));
    assert_eq!(node.installs(&[("SETTINGS", text)]).0, Some(0));
    node.ends();
    assert!(!node.path(SETTINGS).exists());
}

#[test]
fn the_settings_of_an_operator_are_not_replaced() {
    let node = Node::new();
    fs::create_dir_all(node.path("host/etc/pause-sandboxer")).unwrap();
    let mine = "# mine\nlog_level = \"debug\"\n";
    fs::write(node.path(SETTINGS), mine).unwrap();
    let (status, said) = node.installs(&[("SETTINGS", "log_level = \"info\"")]);
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("is not the installer's"), "{said}");
    assert_eq!(fs::read_to_string(node.path(SETTINGS)).unwrap(), mine);
    assert_eq!(node.asked(), "");
    assert_eq!(node.installs(&[]).0, Some(0));
    node.ends();
    assert_eq!(fs::read_to_string(node.path(SETTINGS)).unwrap(), mine);
}

/// As where /usr/local is read-only. The unit finds the program there, and the removal too.
#[test]
fn the_programs_are_in_the_directory_of_the_chart() {
    let node = Node::new();
    let unit = || {
        fs::read_to_string(node.path("host/etc/systemd/system/pause-sandboxer.service")).unwrap()
    };
    assert_eq!(node.installs(&[("DIRECTORY", "/opt/bin")]).0, Some(0));
    assert!(unit().contains("\nExecStart=/opt/bin/pause-sandboxer serve\n"), "{}", unit());
    assert!(node.asked().contains("/opt/bin/pause-sandboxer selftest"));
    assert!(!node.path("host/usr/local/bin").exists());
    // It moves, and leaves nothing.
    assert_eq!(node.installs(&[("DIRECTORY", "/usr/local/bin")]).0, Some(0));
    assert!(unit().contains("\nExecStart=/usr/local/bin/pause-sandboxer serve\n"), "{}", unit());
    assert_eq!(fs::read_dir(node.path("host/opt/bin")).unwrap().count(), 0);
    let mut command = node.command("uninstall");
    assert!(command.env("DIRECTORY", "/opt/bin").status().unwrap().success());
    assert!(!node.path("host/usr/local/bin/pause-sandboxer").exists());
}

#[test]
fn a_directory_that_cannot_be_written_is_named_with_the_value() {
    let node = Node::new();
    fs::write(node.path("host/usr"), "").unwrap();
    let (status, said) = node.installs(&[]);
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("set installDirectory of the chart"), "{said}");
}

/// As with containerd 1.x. `helm uninstall` has nothing to do there.
#[test]
fn a_node_that_cannot_have_the_sandboxer_stays_as_it_was() {
    let node = Node::new();
    let before = node.files();
    let dry_run = "/usr/local/bin/pause-sandboxer enable --dry-run";
    fs::write(node.path("fails"), dry_run).unwrap();
    let (status, said) = node.installs(&[("SETTINGS", "log_level = \"info\"")]);
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("cannot add the handler to containerd"), "{said}");
    assert_eq!(node.asked(), format!("{dry_run}\nsystemctl daemon-reload\n"));
    assert_eq!(node.files(), before);
    fs::write(node.path("fails"), "nothing").unwrap();
    assert_eq!(node.installs(&[]).0, Some(0));
    // An update that fails leaves the version that works.
    fs::write(node.path("fails"), "/usr/local/bin/pause-sandboxer enable --restart").unwrap();
    assert_eq!(node.installs(&[]).0, Some(1));
    assert!(node.path("host/usr/local/bin/pause-sandboxer").exists());
}

/// The old daemon must not find settings of the new one at the next boot.
#[test]
fn files_that_cannot_all_be_placed_stay_as_they_were() {
    let node = Node::new();
    assert_eq!(node.installs(&[("SETTINGS", "x = 1")]).0, Some(0));
    let (before, settings) = (node.files(), fs::read_to_string(node.path(SETTINGS)).unwrap());
    fs::write(node.path("dist/pause-sandboxer"), "newer").unwrap();
    let socket = node.path("host/etc/systemd/system/pause-sandboxer.socket");
    fs::write(node.path("dist/pause-sandboxer.socket"), "newer").unwrap();
    // As of a unit that is masked, and of a disk that is full or damaged.
    fs::remove_file(&socket).unwrap();
    std::os::unix::fs::symlink("/dev/null", &socket).unwrap();
    let copies = node.path("host/var/lib");
    for reason in ["pause-sandboxer.socket is a link", "cannot copy"] {
        if reason == "cannot copy" {
            fs::remove_dir_all(&copies).unwrap();
            fs::write(&copies, "").unwrap();
        }
        let (status, said) = node.installs(&[("SETTINGS", "x = 2")]);
        assert_eq!(status, Some(1), "{said}");
        assert!(said.contains(reason), "{said}");
        let program = node.path("host/usr/local/bin/pause-sandboxer");
        assert_eq!(fs::read_to_string(program).unwrap(), "program");
        assert_eq!(fs::read_to_string(node.path(SETTINGS)).unwrap(), settings);
    }
    assert_eq!(fs::read_link(&socket).unwrap(), std::path::Path::new("/dev/null"));
    fs::remove_file(&copies).unwrap();
    fs::remove_file(&socket).unwrap();
    fs::write(&socket, "").unwrap();
    assert_eq!(node.files(), before);
    // A removal makes no copies.
    fs::remove_dir_all(&copies).unwrap_or_default();
    fs::write(&copies, "").unwrap();
    node.ends();
    assert!(!node.path(SETTINGS).exists());
}

/// The new files need more than there is, beside the copies of the old ones.
#[test]
fn a_full_disk_leaves_the_earlier_version() {
    if kit::skip_without_root() {
        return;
    }
    let node = Node::new();
    let write = |version: u8| {
        for (name, size) in [("pause-sandboxer", 400), ("pause-sandboxer-runc-shim", 100)] {
            fs::write(node.path(&format!("dist/{name}")), vec![version; size << 10]).unwrap();
        }
    };
    write(2);
    fs::rename(node.path("dist"), node.path("later")).unwrap();
    fs::create_dir(node.path("dist")).unwrap();
    for unit in ["pause-sandboxer.service", "pause-sandboxer.socket"] {
        fs::copy(node.path(&format!("later/{unit}")), node.path(&format!("dist/{unit}"))).unwrap();
    }
    write(1);
    let install = node.command("install").get_program().display().to_string();
    let script = format!(
        "cd {}; mount -t tmpfs -o size=1300k tmpfs host; SETTINGS='x = 1' {install} install; \
         status=0; SETTINGS='x = 2' DIST=$PWD/later {install} install || status=$?; \
         [ $status = 1 ]; for name in pause-sandboxer pause-sandboxer-runc-shim; do \
         cmp dist/$name host/usr/local/bin/$name; done; \
         grep -qx 'x = 1' host/etc/pause-sandboxer/config.toml; \
         [ -z \"$(find host -name '*.new')\" ]; [ ! -e host/var/lib/pause-sandboxer.before ]",
        node.path("").display()
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-euxc", &script]);
    let of_script = node.command("install");
    command.envs(of_script.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// As one that an operator has installed without a package, with pods that run.
#[test]
fn another_installation_stays_where_the_sandboxer_cannot_be() {
    let node = Node::new();
    let earlier = [
        ("host/usr/local/bin/pause-sandboxer", "earlier"),
        ("host/etc/systemd/system/pause-sandboxer.service", "ExecStart=pause-sandboxer serve\n"),
    ];
    for (path, text) in earlier {
        fs::create_dir_all(node.path(path).parent().unwrap()).unwrap();
        fs::write(node.path(path), text).unwrap();
    }
    let before = node.files();
    fs::write(node.path("fails"), "/usr/local/bin/pause-sandboxer enable --dry-run").unwrap();
    assert_eq!(node.installs(&[("SETTINGS", "log_level = \"info\"")]).0, Some(1));
    assert_eq!(node.files(), before);
    for (path, text) in earlier {
        assert_eq!(fs::read_to_string(node.path(path)).unwrap(), text, "{path}");
    }
}

#[test]
fn the_test_pod_has_the_options_of_the_chart() {
    let node = Node::new();
    let options = ("SELFTEST_OPTIONS", "--host-network --timeout 60");
    assert_eq!(node.installs(&[options]).0, Some(0));
    assert!(node.asked().contains("pause-sandboxer selftest --host-network --timeout 60\n"));
}

/// The pod of an attempt that has run out of time may still end.
#[test]
fn one_installer_at_a_time_works_on_a_node() {
    let node = Node::new();
    fs::create_dir_all(node.path("host/run")).unwrap();
    let lock = fs::File::create(node.path("host/run/pause-sandboxer.installer")).unwrap();
    lock.lock().unwrap();
    let (status, said) = node.installs(&[]);
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("another installer works on this node"), "{said}");
    assert_eq!(node.asked(), "");
    drop(lock);
    assert_eq!(node.installs(&[]).0, Some(0));
}
