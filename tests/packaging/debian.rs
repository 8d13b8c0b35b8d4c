//! The package's own description in Cargo.toml: what it names is there.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use clap::CommandFactory as _;
use pause_sandboxer::cli::table::list_json;
use pause_sandboxer::client::Sandbox;
use pause_sandboxer::enable::RemovalPlan;
use pause_sandboxer::shim::own;
use toml::Table;

use super::file;

mod other_installation;
mod state_dir;

#[path = "../../examples/package-files.rs"]
mod package_files;

#[test]
fn every_packaged_file_exists() {
    let manifest: Table = toml::from_str(&file("Cargo.toml")).unwrap();
    let deb = &manifest["package"]["metadata"]["deb"];
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let generated = tempfile::tempdir().unwrap();
    package_files::write(generated.path()).unwrap();
    let pages = generated.path().join("pause-sandboxer-check.8");
    assert!(pages.is_file(), "each command has its page");
    let mut places = Vec::new();
    for asset in deb["assets"].as_array().unwrap() {
        let [source, target] = [0, 1].map(|index| asset[index].as_str().unwrap());
        let name = source.rsplit('/').next().unwrap();
        match source.strip_prefix("target/package/") {
            Some("*.8") => {}
            Some("config.toml") => {
                assert!(file("packaging/debian/generate").contains(">config.toml\n"))
            }
            Some(shim @ own::NAME) => {
                assert!(file("packaging/debian/generate").contains(&format!(" \"$2/{shim}\"\n")));
                // The daemon looks for it beside its own program.
                assert_eq!(target, "usr/bin/");
            }
            Some(written) => assert!(generated.path().join(written).is_file(), "{written}"),
            None if source == "target/release/pause-sandboxer" => {}
            None if name.contains('*') => {
                assert!(root.join(source).parent().unwrap().is_dir(), "{source}")
            }
            None => assert!(root.join(source).is_file(), "{source}"),
        }
        places.push(if target.ends_with('/') {
            format!("/{target}{name}")
        } else {
            format!("/{target}")
        });
    }
    for program in ["/usr/bin/pause-sandboxer", "/usr/bin/pause-sandboxer-runc-shim"] {
        assert!(places.iter().any(|place| place == program), "{program}");
    }
    for conf in deb["conf-files"].as_array().unwrap() {
        assert!(places.iter().any(|place| place == conf.as_str().unwrap()), "{conf}");
    }
    for script in ["postinst", "prerm", "postrm"] {
        let path = root.join(deb["maintainer-scripts"].as_str().unwrap()).join(script);
        assert!(
            Command::new("sh").arg("-n").arg(&path).status().unwrap().success(),
            "{}",
            path.display()
        );
    }
}

/// Every command and option is in the manual pages and in the completions of every shell.
#[test]
fn manual_pages_and_completions_have_every_command_and_option() {
    let dir = tempfile::tempdir().unwrap();
    package_files::write(dir.path()).unwrap();
    let text = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
    let shells = ["pause-sandboxer.bash", "_pause-sandboxer", "pause-sandboxer.fish"].map(&text);
    let mut cli = pause_sandboxer::cli::Cli::command();
    cli.build();
    let (mut pending, mut seen) = (vec![cli], 0);
    while let Some(command) = pending.pop() {
        let name = command.get_display_name().unwrap_or(command.get_name());
        // The man page's hyphens are escaped.
        let page = text(&format!("{name}.8")).replace("\\-", "-");
        for arg in command.get_arguments().filter_map(clap::Arg::get_long) {
            assert!(page.contains(&format!("--{arg}")), "{name}: {arg}");
            for shell in &shells {
                assert!(shell.contains(arg), "{name}: {arg}");
            }
            seen += 1;
        }
        let own = command.get_subcommands().filter(|command| command.get_name() != "help");
        for one in own {
            let word = one.get_name();
            assert!(shells.iter().all(|shell| shell.contains(word)), "{word}");
            assert!(page.contains(word), "{name}: {word}");
            pending.push(one.clone());
        }
    }
    assert!(seen > 100, "only {seen} options were seen");
}

/// The first line of the drop-in that `enable` writes.
const MARK: &str = "# Written by `pause-sandboxer enable`; `pause-sandboxer disable` removes it.\n";

/// The script before a removal, on a node below `root` whose `pause-sandboxer list` does what the
/// shell makes of `list`. `disable --dry-run` prints the file `plan`, or fails; `config show`
/// prints `settings`, or fails.
fn removal(root: &Path, list: &str) -> Output {
    let sandboxer = root.join("pause-sandboxer");
    let stub = format!(
        "#!/bin/sh\ncase $* in 'disable --dry-run --output json') exec cat {0}/plan ;; \
         'config show') exec cat {0}/settings ;; \
         'list --output json') ;; *) exit 9 ;; esac\n{list}\n",
        root.display()
    );
    kit::write_program(&sandboxer, stub.as_bytes()).unwrap();
    let root = root.display();
    let script = file("packaging/debian/scripts/prerm")
        .replace("/etc/containerd", &format!("{root}/etc/containerd"))
        .replace("/run/", &format!("{root}/run/"));
    let path = format!("{root}:/usr/bin:/bin");
    Command::new("sh").args(["-c", &script, "prerm", "remove"]).env("PATH", path).output().unwrap()
}

#[test]
fn a_removal_is_refused_where_new_pods_need_it() {
    let root = tempfile::tempdir().unwrap();
    let (conf, main) =
        (root.path().join("etc/containerd/conf.d"), root.path().join("etc/containerd/config.toml"));
    fs::create_dir_all(&conf).unwrap();
    assert!(removal(root.path(), "exit 3").status.success(), "there is no containerd");
    for (path, text) in [
        (
            conf.join("pause-sandboxer-default.toml"),
            "[plugins.x.containerd]\ndefault_runtime_name = \"runc-pause\"\n",
        ),
        (main.clone(), "[plugins.x.containerd]\n  default_runtime_name = 'runc-pause'\n"),
    ] {
        fs::write(&path, text).unwrap();
        let output = removal(root.path(), "exit 3");
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains(&format!("{} makes runc-pause", path.display())), "{said}");
        fs::remove_file(&path).unwrap();
    }
    fs::write(&main, "default_runtime_name = \"runc\"\n#default_runtime_name = \"runc-pause\"\n")
        .unwrap();
    assert!(removal(root.path(), "exit 3").status.success());
    // The drop-in names what `--handler` has named; another file's default is not of this program.
    let drop_in = conf.join("pause-sandboxer.toml");
    fs::write(&drop_in, format!("{MARK}default_runtime_name = \"small\"\n")).unwrap();
    let output = removal(root.path(), "exit 3");
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("{} makes small the default", drop_in.display())), "{said}");
    assert!(said.contains("pause-sandboxer enable --handler small --restart"), "{said}");
    for text in
        ["default_runtime_name = \"small\"\n", &format!("{MARK}#default_runtime_name = 'x'\n")]
    {
        fs::write(&drop_in, text).unwrap();
        assert!(removal(root.path(), "exit 3").status.success(), "{text}");
    }
}

/// In a directory of containerd's `imports`, and where the program alone knows the config file.
#[test]
fn a_removal_is_refused_wherever_containerd_has_its_config() {
    const DEFAULT: &str = "default_runtime_name = 'runc-pause'\n";
    for (imports, path, is_refused) in [
        ("imports = ['config.d/*.toml']", "etc/containerd/config.d/x.toml", true),
        ("imports = [\n  \"ROOT/data/*.toml\",\n]", "data/x.toml", true),
        ("imports = [\"/none/*.toml\", \"one.toml\"]", "etc/containerd/one.toml", true),
        ("  # imports = ['config.d/*.toml']", "etc/containerd/config.d/x.toml", false),
    ] {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        for directory in ["etc/containerd/config.d", "data"] {
            fs::create_dir_all(at(directory)).unwrap();
        }
        let imports = imports.replace("ROOT", &root.path().display().to_string());
        fs::write(at("etc/containerd/config.toml"), imports + "\nversion = 2\n").unwrap();
        fs::write(at(path), DEFAULT).unwrap();
        let output = removal(root.path(), "exit 3");
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(!output.status.success(), is_refused, "{path}: {said}");
        assert_eq!(said.contains(&format!("/{path} makes runc-pause the default")), is_refused);
    }

    let root = tempfile::tempdir().unwrap();
    let drop_in = root.path().join("data/my containerd/drop-ins/pause-sandboxer.toml");
    let main = root.path().join("data/my containerd/config.toml");
    fs::create_dir_all(drop_in.parent().unwrap()).unwrap();
    fs::write(&drop_in, format!("{MARK}default_runtime_name = \"small\"\n")).unwrap();
    assert!(removal(root.path(), "exit 3").status.success(), "the program fails");
    let shown = drop_in.display();
    let plan = RemovalPlan {
        containerd_config: main.display().to_string(),
        drop_in: shown.to_string(),
        // The backup of a config file has the default handler from before.
        diff: "-default_runtime_name = \"runc-pause\"\n".to_owned(),
        ..RemovalPlan::default()
    };
    fs::write(root.path().join("plan"), plan.to_json()).unwrap();
    let output = removal(root.path(), "exit 3");
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(&format!("{shown} makes small the default handler")), "{said}");
    fs::write(&drop_in, MARK).unwrap();
    assert!(removal(root.path(), "exit 3").status.success());
    fs::write(&main, DEFAULT).unwrap();
    let said = String::from_utf8(removal(root.path(), "exit 3").stdout).unwrap();
    assert!(said.contains(&format!("{} makes runc-pause", main.display())), "{said}");
}

/// The default handler of the containerd that runs may be another than that of its files.
#[test]
fn a_removal_is_refused_while_containerd_may_have_the_handler_as_its_default() {
    let list = |items: &[&str]| items.iter().map(|item| (*item).to_owned()).collect::<Vec<_>>();
    let plan = |changes: &[&str], stale: Option<&[&str]>, unread: &[&str]| RemovalPlan {
        changes: list(changes),
        stale_handlers: stale.map(list),
        unread_files: list(unread),
        diff: "  \"unread_files\": [\n    \"/x\"\n".to_owned(),
        ..RemovalPlan::default()
    };
    let (drop_in, main) = ("/etc/containerd/conf.d/x.toml", "/etc/my containerd.toml");
    for (plan, named) in [
        (plan(&[drop_in], Some(&[]), &[main, drop_in]), Some(main)),
        (plan(&[drop_in], None, &[main]), Some(main)),
        (plan(&[], Some(&["runc-pause", "small"]), &[main]), Some("    runc-pause\n    small\n")),
        (plan(&[drop_in], Some(&[]), &[]), None),
        // containerd has no handler of this sandboxer, so its default is another.
        (plan(&[], Some(&[]), &[main]), None),
        (plan(&[], None, &[main]), None),
    ] {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("plan"), plan.to_json()).unwrap();
        let output = removal(root.path(), "exit 3");
        let said = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(i32::from(named.is_some())), "{plan:?}: {said}");
        let command = "pause-sandboxer disable --restart";
        assert_eq!(said.contains(command), named.is_some(), "{said}");
        assert!(said.contains(named.unwrap_or_default()), "{said}");
    }
}

/// The options of `enable` are the complete state: without `--offline` the image is removed, and
/// without `--options-of` the settings of another handler are copied.
#[test]
fn the_advice_of_a_refused_removal_keeps_the_earlier_options() {
    let root = tempfile::tempdir().unwrap();
    let conf = root.path().join("etc/containerd/conf.d");
    fs::create_dir_all(&conf).unwrap();
    let image = pause_sandboxer::oci_image::NAME;
    let settings = format!("default_runtime_name = \"runc-pause\"\nsandbox = \"{image}\"\n");
    let base = "# The handler has the settings of runtime handler \"nvidia\"";
    for (base, options) in [
        (String::new(), "--offline"),
        (format!("{base}.\n"), "--offline"),
        (format!("{base} (--options-of).\n"), "--offline --options-of nvidia"),
    ] {
        fs::write(conf.join("pause-sandboxer.toml"), format!("{MARK}{base}\n{settings}")).unwrap();
        let said = String::from_utf8(removal(root.path(), "exit 3").stdout).unwrap();
        let command = format!("To undo it: pause-sandboxer enable {options} --restart\n");
        assert!(said.contains(&command), "{said}");
    }
}

/// Other packages print more of what matters.
#[test]
fn a_first_installation_says_what_is_next_in_one_line() {
    let root = tempfile::tempdir().unwrap();
    for name in ["deb-systemd-helper", "deb-systemd-invoke", "systemctl"] {
        kit::write_program(root.path().join(name), b"#!/bin/sh\n").unwrap();
    }
    let place = |path: &str| format!("{}{path}", root.path().display());
    fs::create_dir_all(place("/run/systemd/system")).unwrap();
    for (path, word) in
        [("packaging/debian/scripts/postinst", "configure"), ("packaging/rpm/post-install", "1")]
    {
        let script = ["/run/", "/etc/", "/usr/local/"]
            .into_iter()
            .fold(file(path), |script, part| script.replace(part, &place(part)));
        let mut command = Command::new("sh");
        command.args(["-c", &script, "script", word]).env("PATH", place(":/usr/bin:/bin"));
        let said = String::from_utf8(command.output().unwrap().stdout).unwrap();
        assert_eq!(said.lines().count(), 1, "{path}: {said}");
        assert!(said.contains("pause-sandboxer enable --restart"), "{path}: {said}");
    }
}

/// Programs and units of another installation count before those of the package.
#[test]
fn an_installation_warns_of_files_that_take_precedence() {
    let root = tempfile::tempdir().unwrap();
    let place = |path: &str| format!("{}{path}", root.path().display());
    // The machine's own would change its units.
    for name in ["deb-systemd-helper", "deb-systemd-invoke", "systemctl"] {
        kit::write_program(root.path().join(name), b"#!/bin/sh\n").unwrap();
    }
    let installed = |path: &str, words: &[&str]| {
        let script = ["/run/", "/etc/", "/usr/local/"]
            .into_iter()
            .fold(file(path), |script, part| script.replace(part, &place(part)));
        let mut command = Command::new("sh");
        command.args(["-c", &script, "script"]).args(words).env("PATH", place(":/usr/bin:/bin"));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let unit = place("/etc/systemd/system/pause-sandboxer.service");
    let program = place("/usr/local/bin/pause-sandboxer");
    for path in [&unit, &program] {
        fs::create_dir_all(Path::new(path).parent().unwrap()).unwrap();
    }
    let scripts: [(&str, &[&str]); 3] = [
        ("packaging/debian/scripts/postinst", &["configure", ""]),
        ("packaging/debian/scripts/postinst", &["configure", "0.1.0-1"]),
        ("packaging/rpm/post-install", &["1"]),
    ];
    // A unit that is masked.
    std::os::unix::fs::symlink("/dev/null", &unit).unwrap();
    for (path, words) in scripts {
        let said = installed(path, words);
        assert!(!said.contains("warning"), "{said}");
    }
    fs::remove_file(&unit).unwrap();
    for path in [&unit, &program] {
        fs::write(path, "").unwrap();
    }
    for (path, words) in scripts {
        let said = installed(path, words);
        assert!(said.contains(&format!("    rm {program} {unit}\n")), "{path}: {said}");
        assert!(said.contains("systemctl reenable pause-sandboxer.socket"), "{path}: {said}");
    }
    assert_eq!(installed(scripts[0].0, &["abort-remove"]).matches("warning").count(), 0);
}

#[test]
fn a_removal_names_the_pods_that_are_left() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir_all(root.path().join("run/pause-sandboxer/sandboxes/abc")).unwrap();
    let web = Sandbox {
        id: "abc".to_owned(),
        pod: "web".to_owned(),
        namespace: "default".to_owned(),
        ..Default::default()
    };
    let quarantined = Sandbox { id: "def".to_owned(), ..Default::default() };
    let list = format!("echo '{:#}'", list_json(&[web, quarantined]));
    // A daemon that does not respond may have sandboxes.
    for (list, pod) in
        [("exit 3", "abc"), (list.as_str(), "default/web\n    sandbox def"), ("echo '[]'", "abc")]
    {
        let output = removal(root.path(), list);
        let said = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success(), "{said}");
        let left = format!("still have a sandbox of this daemon:\n    {pod}\n");
        assert!(said.contains(&left), "{said}");
    }
}

/// Sockets, lock and mark are of no use without the daemon; records are, to the next one.
#[test]
fn a_removal_deletes_the_run_directory_unless_pods_have_records() {
    if kit::skip_without_root() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let run = root.path().join("run/pause-sandboxer");
    let script = file("packaging/debian/scripts/postrm")
        .replace("/run/", &format!("{}/run/", root.path().display()))
        .replace("/usr/bin/deb-systemd-helper", "/nowhere");
    for (word, record, left) in [
        ("remove", true, true),
        ("upgrade", false, true),
        ("remove", false, false),
        ("purge", false, false),
    ] {
        let sandboxes = run.join("sandboxes");
        let _ = fs::remove_dir_all(&run);
        fs::create_dir_all(if record { sandboxes.join("abc") } else { sandboxes }).unwrap();
        fs::write(run.join("lock"), "1").unwrap();
        let output = Command::new("sh").args(["-c", &script, "postrm", word]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert_eq!(run.exists(), left, "{word}");
    }
    // A daemon that was killed leaves the directory of its records mounted.
    fs::create_dir_all(run.join("sandboxes")).unwrap();
    let mounted = format!(
        "mount -t tmpfs x '{}' && sh -c \"$1\" postrm remove",
        run.join("sandboxes").display()
    );
    let mut command = Command::new("unshare");
    let output = command.args(["--mount", "sh", "-c", &mounted, "sh", &script]).output().unwrap();
    assert!(output.status.success() && !run.exists(), "{output:?}");
}

/// An operator's own file of that name stays.
#[test]
fn a_purge_deletes_the_drop_in_that_enable_has_written() {
    let root = tempfile::tempdir().unwrap();
    let place = |path: &str| format!("{}{path}", root.path().display());
    let script = file("packaging/debian/scripts/postrm")
        .replace("/run/", &place("/run/"))
        .replace("/etc/", &place("/etc/"))
        .replace("/usr/bin/deb-systemd-helper", "/nowhere");
    let record = root.path().join("run/pause-sandboxer/sandboxes/abc");
    fs::create_dir_all(root.path().join("etc/containerd/conf.d")).unwrap();
    fs::create_dir(root.path().join("drop-ins")).unwrap();
    let imports = format!("imports = [\"{}\"]\n", place("/drop-ins/*.toml"));
    fs::write(root.path().join("etc/containerd/config.toml"), imports).unwrap();
    for (path, word, text, has_record, left) in [
        ("etc/containerd/conf.d", "remove", MARK, false, true),
        ("etc/containerd/conf.d", "purge", "# My own.\n", false, true),
        // Pods need the handler.
        ("etc/containerd/conf.d", "purge", MARK, true, true),
        ("etc/containerd/conf.d", "purge", MARK, false, false),
        ("drop-ins", "purge", "# My own.\n", false, true),
        ("drop-ins", "purge", MARK, true, true),
        ("drop-ins", "purge", MARK, false, false),
    ] {
        let drop_in = root.path().join(path).join("pause-sandboxer.toml");
        fs::write(&drop_in, text).unwrap();
        let _ = fs::remove_dir_all(root.path().join("run"));
        if has_record {
            fs::create_dir_all(&record).unwrap();
        }
        let output = Command::new("sh").args(["-c", &script, "postrm", word]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        assert_eq!(drop_in.exists(), left, "{word} {text}");
    }
}

/// The documented command must work with pods of DaemonSets, as there are on every node that
/// has the installer, and with pods that have volumes of the type emptyDir.
#[test]
fn the_documented_drain_works_with_daemonsets_and_volumes() {
    let options = " --ignore-daemonsets --delete-emptydir-data NODE";
    for page in ["docs/install.md", "docs/kubernetes.md", "packaging/debian/scripts/prerm"] {
        let text = file(page);
        let drains: Vec<&str> = text.split("kubectl drain").skip(1).collect();
        assert!(!drains.is_empty(), "{page}");
        assert!(drains.iter().all(|rest| rest.starts_with(options)), "{page}: {drains:?}");
    }
}

/// The units are found where the package puts the program.
#[test]
fn the_units_fit_the_package() {
    let service = file("packaging/systemd/pause-sandboxer.service");
    assert!(service.contains("\nExecStart=pause-sandboxer serve\n"));
    let socket = file("packaging/systemd/pause-sandboxer.socket");
    let config = pause_sandboxer::config::Config::default();
    for path in [config.socket.clone(), config.ttrpc_socket()] {
        assert!(socket.contains(&format!("\nListenStream={}\n", path.display())));
    }
}

/// The pods' shared memory is mounted where containerd must see it, and what else systemd can do to
/// a unit its pods inherit.
#[test]
fn the_unit_stays_in_the_mount_namespace_of_the_node() {
    let service = file("packaging/systemd/pause-sandboxer.service");
    let settings = service.lines().filter_map(|line| line.split_once('=')).map(|(key, _)| key);
    for key in settings.filter(|key| !key.starts_with('#')) {
        // systemd.exec(5): each of these gives the unit a mount namespace, or lets pods inherit a
        // restriction.
        let namespaces = [
            "Private",
            "Protect",
            "ReadOnly",
            "ReadWrite",
            "Inaccessible",
            "NoExecPaths",
            "ExecPaths",
            "TemporaryFileSystem",
            "Bind",
            "Mount",
            "Root",
            "DynamicUser",
            "LogNamespace",
            "ExtensionImages",
            "ExtensionDirectories",
            "Restrict",
            "NoNewPrivileges",
            "SystemCall",
            "CapabilityBoundingSet",
            "AmbientCapabilities",
            "LockPersonality",
            "Memory",
            "UMask",
        ];
        assert!(!namespaces.iter().any(|prefix| key.starts_with(prefix)), "{key}=");
    }
}
