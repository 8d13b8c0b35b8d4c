//! The package's own description in Cargo.toml: what it names is there.

use std::fs;
use std::path::Path;
use std::process::Command;

use clap::CommandFactory as _;
use toml::Table;

use super::file;
use node::Node;

mod node;
mod other_installation;
mod removal;
mod shim;

#[path = "../../examples/package-files.rs"]
mod package_files;

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
    let node = Node::new();
    for (path, word) in
        [("packaging/debian/scripts/postinst", "configure"), ("packaging/rpm/post-install", "1")]
    {
        let said = node.said(path, &[word]);
        assert_eq!(said.lines().count(), 1, "{path}: {said}");
        assert!(said.contains("pause-sandboxer enable --restart"), "{path}: {said}");
    }
}

/// Programs and units of another installation count before those of the package.
#[test]
fn an_installation_warns_of_files_that_take_precedence() {
    let node = Node::new();
    let (unit, program) =
        ("etc/systemd/system/pause-sandboxer.service", "usr/local/bin/pause-sandboxer");
    let scripts: [(&str, &[&str]); 3] = [
        ("packaging/debian/scripts/postinst", &["configure", ""]),
        ("packaging/debian/scripts/postinst", &["configure", "0.1.0-1"]),
        ("packaging/rpm/post-install", &["1"]),
    ];
    // The unit is masked.
    node.write(unit, "");
    fs::remove_file(node.at(unit)).unwrap();
    std::os::unix::fs::symlink("/dev/null", node.at(unit)).unwrap();
    for (path, words) in scripts {
        let said = node.said(path, words);
        assert!(!said.contains("warning"), "{said}");
    }
    fs::remove_file(node.at(unit)).unwrap();
    for path in [unit, program] {
        node.write(path, "");
    }
    let command = format!("    rm {} {}\n", node.at(program).display(), node.at(unit).display());
    for (path, words) in scripts {
        let said = node.said(path, words);
        assert!(said.contains(&command), "{path}: {said}");
        assert!(said.contains("systemctl reenable pause-sandboxer.socket"), "{path}: {said}");
    }
    assert_eq!(node.said(scripts[0].0, &["abort-remove"]).matches("warning").count(), 0);
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
