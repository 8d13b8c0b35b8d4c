//! The package's own description in Cargo.toml: what it names is there.

use std::path::Path;
use std::process::Command;

use toml::Table;

use super::file;

#[test]
fn what_it_holds_is_there() {
    let manifest: Table = toml::from_str(&file("Cargo.toml")).unwrap();
    let deb = &manifest["package"]["metadata"]["deb"];
    let (root, generate) = (Path::new(env!("CARGO_MANIFEST_DIR")), file("packaging/debian/generate"));
    let mut places = Vec::new();
    for asset in deb["assets"].as_array().unwrap() {
        let [source, target] = [0, 1].map(|index| asset[index].as_str().unwrap());
        let name = source.rsplit('/').next().unwrap();
        match source.strip_prefix("target/package/") {
            Some(written) => assert!(generate.contains(&format!(">{written}\n")), "nobody writes {written}"),
            None if source == "target/release/pause-sandboxer" => {}
            None if name.contains('*') => assert!(root.join(source).parent().unwrap().is_dir(), "{source}"),
            None => assert!(root.join(source).is_file(), "{source}"),
        }
        places.push(if target.ends_with('/') { format!("/{target}{name}") } else { format!("/{target}") });
    }
    for conf in deb["conf-files"].as_array().unwrap() {
        assert!(places.iter().any(|place| place == conf.as_str().unwrap()), "{conf}");
    }
    for script in ["postinst", "prerm", "postrm"] {
        let path = root.join(deb["maintainer-scripts"].as_str().unwrap()).join(script);
        assert!(Command::new("sh").arg("-n").arg(&path).status().unwrap().success(), "{}", path.display());
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
