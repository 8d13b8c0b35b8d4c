//! Resources of a pod on the machine. They are read from the kernel and the file system, because a
//! daemon may report them wrongly.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Where the cgroup hierarchies are mounted.
const CGROUPS: &str = "/sys/fs/cgroup";

/// Where libcni has the result of a pod's network, until the network is removed. Its name has the
/// pod's id.
const CNI_RESULTS: &str = "/var/lib/cni/results";

/// Depth of directories below a mount of cgroups that are searched: those of a pod without kubelet
/// are near the root.
const DEPTH: usize = 6;

/// Mounts, cgroups, processes and CNI results whose path or command has one of the words, and those
/// of the paths that exist; one line each.
pub(super) fn traces(words: &[String], paths: &[PathBuf]) -> BTreeSet<String> {
    let names = |text: &str| words.iter().any(|word| text.contains(word.as_str()));
    let mut found = BTreeSet::new();
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mounts = mounts.lines().filter_map(|line| line.split(' ').nth(4));
    found.extend(mounts.filter(|place| names(place)).map(|place| format!("mount {place}")));
    cgroups(Path::new(CGROUPS), DEPTH, &names, &mut found);
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().filter(|name| name.starts_with(|c: char| c.is_ascii_digit()))
        else {
            continue;
        };
        if pid == std::process::id().to_string() {
            continue;
        }
        let read = |file: &str| {
            String::from_utf8_lossy(&fs::read(entry.path().join(file)).unwrap_or_default())
                .replace('\0', " ")
        };
        let command = read("cmdline");
        if names(&command) || names(&read("cgroup")) {
            found.insert(format!("process {pid}: {}", command.trim()));
        }
    }
    results(Path::new(CNI_RESULTS), &names, &mut found);
    let there = paths.iter().filter(|path| path.exists());
    found.extend(there.map(|path| format!("file {}", path.display())));
    found
}

fn results(directory: &Path, names: &impl Fn(&str) -> bool, found: &mut BTreeSet<String>) {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let named = entries.filter(|entry| entry.file_name().to_str().is_some_and(names));
    found.extend(named.map(|entry| format!("CNI result {}", entry.path().display())));
}

fn cgroups(
    directory: &Path,
    depth: usize,
    names: &impl Fn(&str) -> bool,
    found: &mut BTreeSet<String>,
) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        if entry.file_name().to_str().is_some_and(names) {
            found.insert(format!("cgroup {}", entry.path().display()));
        }
        if depth > 0 {
            cgroups(&entry.path(), depth - 1, names, found);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    #[test]
    fn traces_are_those_of_the_words_and_paths() {
        let dir = tempfile::tempdir().unwrap();
        let word = dir.path().file_name().unwrap().to_str().unwrap().to_owned();
        // The word is the name of the shell's script, which waits for the end of its input.
        let mut child = std::process::Command::new("/bin/sh")
            .args(["-c", "echo; read -r _", &word])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        // A process has no command line for a moment after its parent's fork has returned.
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let child_line = format!("process {}", child.id());
        let found = traces(&[word], &[dir.path().to_owned(), "/nowhere".into()]);
        child.kill().unwrap();
        child.wait().unwrap();
        let has = |part: &str| found.iter().any(|line| line.contains(part));
        assert!(has(&format!("file {}", dir.path().display())), "{found:?}");
        assert!(!has("/nowhere"), "{found:?}");
        assert!(has(&child_line) && found.len() == 2, "{found:?}");
    }

    #[test]
    fn a_cni_result_is_found_by_the_id_in_its_name() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["net-0123-eth0", "cni-loopback-4567-lo"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        let mut found = BTreeSet::new();
        results(dir.path(), &|name: &str| name.contains("4567"), &mut found);
        let path = dir.path().join("cni-loopback-4567-lo");
        assert_eq!(found, BTreeSet::from([format!("CNI result {}", path.display())]));
    }
}
