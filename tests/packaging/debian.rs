//! The package's own description in Cargo.toml: what it names is there.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use clap::CommandFactory as _;
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
    assert!(seen > 80, "only {seen} options were seen");
}

/// The first line of the drop-in that `enable` writes.
const MARK: &str = "# Written by `pause-sandboxer enable`; `pause-sandboxer disable` removes it.\n";

/// The script before a removal, on a node below `root` whose `pause-sandboxer disable --check` does
/// what the shell makes of `answer`.
fn removal(root: &Path, answer: &str) -> Output {
    let sandboxer = root.join("pause-sandboxer");
    let stub = format!("#!/bin/sh\n[ \"$*\" = 'disable --check' ] || exit 9\n{answer}\n");
    kit::write_program(&sandboxer, stub.as_bytes()).unwrap();
    let root = root.display();
    let script = file("packaging/debian/scripts/prerm").replace("/run/", &format!("{root}/run/"));
    let path = format!("{root}:/usr/bin:/bin");
    Command::new("sh").args(["-c", &script, "prerm", "remove"]).env("PATH", path).output().unwrap()
}

/// The program decides what needs the sandboxer, and a program that fails gives no answer.
#[test]
fn a_removal_is_refused_where_new_pods_need_it_or_that_is_unknown() {
    let root = tempfile::tempdir().unwrap();
    for (answer, said) in [
        ("echo 'default: runc-pause'; exit 75", "new pods may need the sandboxer:\n    default: "),
        ("echo 'default: a'; echo 'pod: b'; exit 75", "    default: a\n    pod: b\n"),
        ("echo 'unread: x'; echo 'config: y'", "    unread: x\n    config: y\n"),
        ("echo 'read records: EIO' >&2; exit 1", "(exit status 1):\n    read records: EIO\n"),
        ("exit 127", "it is unknown what needs the sandboxer (exit status 127)"),
    ] {
        let output = removal(root.path(), answer);
        let text = String::from_utf8(output.stdout).unwrap();
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains(said) && text.contains("not removed"), "{text}");
        assert!(text.contains("pause-sandboxer disable --restart"), "{text}");
    }
    for answer in ["exit 0", "echo 'config: runtime handler runc-pause'"] {
        let output = removal(root.path(), answer);
        assert!(output.status.success() && output.stdout.is_empty(), "{answer}: {output:?}");
    }
}

/// The shim's page is written by hand, as the shim has no parser that could print it.
#[test]
fn the_page_of_the_shim_has_every_option_of_its_help() {
    let source = file("runc-shim/src/arguments.rs");
    let help = source.split("const USAGE").nth(1).unwrap().split("\";").next().unwrap();
    let page = file("packaging/debian/pause-sandboxer-runc-shim.8").replace("\\-", "-");
    let words = help.split(|c: char| c.is_whitespace() || "[],".contains(c));
    let options: Vec<&str> = words.filter(|word| word.starts_with('-')).collect();
    assert!(options.len() > 5, "{options:?}");
    for option in options.iter().chain(&["delete"]) {
        assert!(page.contains(&format!("\\fB{option}\\fR")), "{option}");
    }
}

/// deb-changelog(5): a heading, changes, and a trailer with the maintainer and the date.
#[test]
fn the_changelog_has_the_format_of_debian() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/debian/changelog");
    let mut command = Command::new(script);
    command.args(["A Name <a@example.org>", "3"]).env("SOURCE_DATE_EPOCH", "86400");
    let text = String::from_utf8(command.output().unwrap().stdout).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let [heading, "", change, "", trailer] = lines[..] else { panic!("{text}") };
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(heading, format!("pause-sandboxer ({version}-3) unstable; urgency=medium"));
    assert!(change.starts_with("  * ") && change.len() <= 80, "{change}");
    assert_eq!(trailer, " -- A Name <a@example.org>  Fri, 02 Jan 1970 00:00:00 +0000");
    let manifest: Table = toml::from_str(&file("Cargo.toml")).unwrap();
    let deb = &manifest["package"]["metadata"]["deb"];
    assert_eq!(deb["changelog"].as_str(), Some("target/package/changelog"));
    // As lintian has it: `localhost` is no domain.
    let host = deb["maintainer"].as_str().unwrap().rsplit('@').next().unwrap();
    assert!(host.trim_end_matches('>').contains('.'), "{host}");
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
    // The unit is masked.
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
    let answer = "echo 'pod: default/web (abc)'; echo 'pod: a sandbox (def)'; exit 75";
    let output = removal(root.path(), answer);
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}");
    let left = "still have a sandbox of this daemon:\n    default/web (abc)\n    a sandbox (def)\n";
    assert!(said.contains(left), "{said}");
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
