//! How containerd's config file and what it imports fit together, and whether containerd has read
//! them as they are now.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use nix::unistd::{SysconfVar, sysconf};
use toml::{Table, Value};

use super::super::Finding;
use super::{CONFIG, runtime_plugin};

/// Where the package puts its drop-in.
const DROP_IN: &str = "/etc/containerd/conf.d/pause-sandboxer.toml";

/// The packaged drop-in, if it is there.
pub(super) fn drop_in() -> Option<&'static Path> {
    Some(Path::new(DROP_IN)).filter(|path| path.exists())
}

/// A file's version; `None` where it has none, so that it is read as of the first file's.
fn version(table: &Table) -> Option<i64> {
    table.get("version").and_then(Value::as_integer)
}

fn has_handlers(table: &Table, of: i64) -> bool {
    let plugin = table.get("plugins").and_then(|plugins| plugins.get(runtime_plugin(of)));
    plugin.and_then(|plugin| plugin.get("containerd")?.get("runtimes")).is_some()
}

/// Whether `drop_in` is among the files of a config.
pub(super) fn imports(files: &[(PathBuf, Table)], drop_in: &Path) -> bool {
    files.iter().any(|(path, _)| path == drop_in)
}

/// A drop-in that is there, and that the first file does not import.
pub(super) fn not_imported(files: &[(PathBuf, Table)], drop_in: &Path) -> Option<Finding> {
    let (main, root) = files.first()?;
    let main = main.display();
    let pattern = format!("{}/*.toml", drop_in.parent().unwrap_or(drop_in).display());
    Some(Finding::fail(
        CONFIG,
        format!(
            "{main} does not import {}, so containerd does not know this sandboxer",
            drop_in.display()
        ),
        match root.get("imports") {
            None => format!(
                "sed -i '1i imports = [\"{pattern}\"]' {main} && systemctl restart containerd"
            ),
            Some(_) => {
                format!(
                    "add \"{pattern}\" to the list `imports` in {main}, then systemctl restart \
                     containerd"
                )
            }
        },
    ))
}

/// Examines the files of a config, the first of which imports the others.
pub(super) fn judge(files: &[(PathBuf, Table)]) -> Vec<Finding> {
    let Some(((main, root), imported)) = files.split_first() else { return Vec::new() };
    // Without a version, or of version 1, a config takes what is imported as it is.
    let (main, of) = (main.display(), version(root).filter(|version| *version > 1));
    let mut findings = Vec::new();
    let migrate = format!(
        "containerd --config {main} config migrate >/tmp/migrated.toml && mv /tmp/migrated.toml \
         {main}, then add `imports` again"
    );
    for (path, table) in imported {
        if let (Some(of), Some(higher)) = (of, version(table))
            && higher > of
        {
            let fact = format!(
                "{} has version {higher} and {main} version {of}: containerd 2.3 does not start \
                 with it, older versions ignore CRI's settings of {main}",
                path.display()
            );
            findings.push(Finding::fail(CONFIG, fact, migrate.clone()));
        }
        if of == Some(2) && has_handlers(root, 2) && has_handlers(table, 3) {
            let fact = format!(
                "{} has runtime handlers as of version 3, which hide those of {main} from \
                 containerd 2.0 to 2.2, as it has version 2",
                path.display()
            );
            findings.push(Finding::fail(CONFIG, fact, migrate.clone()));
        }
    }
    findings
}

/// Whether containerd, which listens at `address`, was started before its config was written last.
pub(super) fn stale(files: &[(PathBuf, Table)], address: &Path) -> Vec<Finding> {
    let Ok(started) = started(address) else { return Vec::new() };
    let newer = files.iter().filter(|(path, _)| {
        path.metadata().and_then(|meta| meta.modified()).is_ok_and(|written| written > started)
    });
    let newer: Vec<String> = newer.map(|(path, _)| path.display().to_string()).collect();
    if newer.is_empty() {
        return Vec::new();
    }
    let fact = format!(
        "containerd was started before {} was written, and has not read it",
        newer.join(" and ")
    );
    vec![Finding::warn(CONFIG, fact, "systemctl restart containerd; pods keep running")]
}

/// When the process that listens at a socket was started, to the second.
fn started(socket: &Path) -> io::Result<SystemTime> {
    let stream = UnixStream::connect(socket)?;
    let pid = getsockopt(&stream, PeerCredentials)?.pid();
    let text = |path: &str| std::fs::read_to_string(path);
    let odd = || io::Error::from(io::ErrorKind::InvalidData);
    // Field 22, in ticks since boot; the name in brackets may hold anything.
    let stat = text(&format!("/proc/{pid}/stat"))?;
    let ticks = stat
        .rsplit_once(')')
        .and_then(|(_, rest)| rest.split_whitespace().nth(19)?.parse::<u64>().ok());
    let boot = text("/proc/stat")?;
    let boot =
        boot.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse::<u64>().ok());
    let per_second =
        sysconf(SysconfVar::CLK_TCK)?.and_then(|number| u64::try_from(number).ok()).unwrap_or(100);
    let seconds = boot.ok_or_else(odd)? + ticks.ok_or_else(odd)? / per_second.max(1);
    // Both are cut down to whole seconds.
    Ok(UNIX_EPOCH + Duration::from_secs(seconds + 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings_of(main: &str, imported: &str) -> Vec<String> {
        let file = |path: &str, text: &str| (PathBuf::from(path), toml::from_str(text).unwrap());
        let files = [file("/c.toml", main), file("/d.toml", imported)];
        judge(&files).iter().map(|finding| finding.fact.clone()).collect()
    }

    const OLD: &str =
        "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\n";
    const NEW: &str = "[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.x]\n";

    #[test]
    fn versions_that_do_not_fit() {
        assert!(findings_of("version = 3", NEW).is_empty());
        assert!(findings_of("", &format!("version = 3\n{NEW}")).is_empty());
        assert!(findings_of("version = 4", &format!("version = 3\n{NEW}")).is_empty());
        assert!(findings_of("version = 2", NEW).is_empty(), "no handlers of its own");
        let higher = findings_of("version = 2", &format!("version = 3\n{NEW}"));
        assert!(
            higher[0].starts_with("/d.toml has version 3 and /c.toml version 2: "),
            "{higher:?}"
        );
        let hidden = findings_of(OLD, NEW);
        assert!(hidden[0].contains("hide those of /c.toml"), "{hidden:?}");
        assert!(findings_of(OLD, "").is_empty());
    }

    #[test]
    fn a_drop_in_that_is_not_imported() {
        let drop_in = Path::new("/etc/conf.d/x.toml");
        let finding = |text: &str| {
            not_imported(&[(PathBuf::from("/c.toml"), toml::from_str(text).unwrap())], drop_in)
                .unwrap()
        };
        assert_eq!(
            finding("version = 2").advice,
            "sed -i '1i imports = [\"/etc/conf.d/*.toml\"]' /c.toml && systemctl restart containerd"
        );
        assert!(
            finding("imports = [\"/x\"]")
                .advice
                .starts_with("add \"/etc/conf.d/*.toml\" to the list")
        );
        let files = [(PathBuf::from("/c.toml"), Table::new()), (drop_in.to_owned(), Table::new())];
        assert!(imports(&files, drop_in) && !imports(&files[..1], drop_in));
    }

    #[test]
    fn what_was_written_after_the_start_was_not_read() {
        let dir = tempfile::tempdir().unwrap();
        let (socket, file) = (dir.path().join("s"), dir.path().join("c.toml"));
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let files = [(file.clone(), Table::new())];
        std::fs::write(&file, "").unwrap();
        let set = |time: SystemTime| {
            std::fs::File::options().write(true).open(&file).unwrap().set_modified(time).unwrap()
        };
        set(SystemTime::now() + Duration::from_secs(3600));
        assert_eq!(stale(&files, &socket).len(), 1);
        set(UNIX_EPOCH + Duration::from_secs(1));
        assert!(stale(&files, &socket).is_empty());
        assert!(stale(&files, &dir.path().join("none")).is_empty());
    }
}
