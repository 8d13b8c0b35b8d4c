//! The package's own description in Cargo.toml: what it names is there.

use std::fs;
use std::path::Path;
use std::process::Command;

use clap::CommandFactory as _;
use pause_sandboxer::shim::own;
use toml::Table;

use super::file;

mod other_installation;
mod removal;
mod shim;
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
