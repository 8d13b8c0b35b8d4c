//! The cgroups of a container at its end: killed as a whole, or thawed, as what is frozen does not
//! die.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};

use process_identity::is_no_such_process;

use crate::cgroup::mounts::unified_point;
use crate::error::{IoContext as _, StepError};

/// The content of `/proc/PID/cgroup`; `None`: there is no such process. `process` is its pid, or
/// `self`. A user may give a cgroup a name that is not text: it says nothing, and hides nothing.
/// Empty for a process whose cgroup is nested deeper than the kernel prints (`PATH_MAX`,
/// `proc_cgroup_show`): any user who has a delegated cgroup can make such a process, so it must not
/// fail the search for others.
///
/// # Errors
/// It cannot be read.
pub fn of_process(process: &str) -> Result<Option<String>, StepError> {
    let path = format!("/proc/{process}/cgroup");
    content(fs::read(&path)).step_at("read", path)
}

/// The text of a cgroup file as [`of_process`] returns it.
fn content(read: io::Result<Vec<u8>>) -> io::Result<Option<String>> {
    match read {
        Ok(cgroups) => Ok(Some(String::from_utf8_lossy(&cgroups).into_owned())),
        Err(e) if is_no_such_process(&e) => Ok(None),
        Err(e) if e.raw_os_error() == Some(libc::ENAMETOOLONG) => Ok(Some(String::new())),
        Err(e) => Err(e),
    }
}

/// Whether a process with this content of `/proc/PID/cgroup` is in the container's cgroup, which is
/// named by the container's id: `ID`, or `PREFIX-ID.scope` with systemd. `mount` is where the
/// cgroup file systems are.
///
/// A user who has a delegated cgroup can create others in it and give them any name. The kernel
/// makes the user the owner of each directory that they can create others in, so a name counts only
/// where root owns the directory that contains it. A hierarchy that is not mounted below `mount`
/// has no owner to check; its name counts if no other hierarchy tells.
///
/// A container that runs as root can create others in its own cgroup, which root owns as well, so a
/// name does not count below another container's. `node` is the daemon's own `/proc/self/cgroup`:
/// with a node that is a container itself, all cgroups are below that container's.
pub fn holds(mount: &Path, cgroups: &str, id: &str, node: &str) -> bool {
    let is_own = |path: &str| is_outermost(path, id, node);
    let own: Vec<_> = lines(cgroups).filter(|(_, path)| is_own(path)).collect();
    let mut checked = false;
    for (controllers, path) in &own {
        for root in roots(mount, controllers) {
            let cgroup = below(&root, path, id).into_iter().next();
            match cgroup.and_then(|cgroup| cgroup.parent()?.metadata().ok()) {
                Some(parent) if parent.uid() == 0 => return true,
                Some(_) => checked = true,
                None => {}
            }
        }
    }
    !checked && !own.is_empty()
}

/// The path has a cgroup that is named by the container's id, below none of another container but
/// those that the node is in, and below none whose name is not text.
pub fn is_outermost(path: &str, id: &str, node: &str) -> bool {
    let counts = |part: &&str| {
        let other = container_in(part).is_some_and(|other| !containers(node).any(|n| n == other));
        is_named(part, id) || !(other || part.contains(char::REPLACEMENT_CHARACTER))
    };
    path.split('/').take_while(counts).any(|part| is_named(part, id))
}

/// Where the hierarchy with these controllers may be mounted: version 1 has a directory or a link
/// for each controller, and names its hierarchies without controllers.
fn roots(mount: &Path, controllers: &str) -> Vec<PathBuf> {
    if controllers.is_empty() {
        return unified_point(mount).into_iter().collect();
    }
    let directory = |name: &str| mount.join(name.strip_prefix("name=").unwrap_or(name));
    controllers.split(',').map(directory).collect()
}

fn is_named(part: &str, id: &str) -> bool {
    let part = part.strip_suffix(".scope").unwrap_or(part);
    part == id || part.strip_suffix(id).is_some_and(|prefix| prefix.ends_with('-'))
}

/// The containers by whose ids the cgroups of a process are named, by the content of its
/// `/proc/PID/cgroup`: ids of CRI are 64 hex digits. More than one where containers make cgroups
/// for others inside their own.
pub fn containers(cgroups: &str) -> impl Iterator<Item = &str> {
    lines(cgroups).flat_map(|(_, path)| path.split('/')).filter_map(container_in)
}

/// The id of CRI's by which a cgroup is named.
fn container_in(part: &str) -> Option<&str> {
    let part = part.strip_suffix(".scope").unwrap_or(part);
    let id = part.rsplit('-').next().unwrap_or(part);
    (id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(id)
}

/// Whether a process with this content of `/proc/PID/cgroup` is in a cgroup below `parent`, a path
/// from the root of the hierarchy or the name of a slice.
pub fn is_below(cgroups: &str, parent: &str) -> bool {
    let parent = parent.trim_matches('/');
    !parent.is_empty() && lines(cgroups).any(|(_, path)| path.contains(&format!("/{parent}/")))
}

/// Controllers and path of each line of `/proc/PID/cgroup`; version 2 has no controllers there.
fn lines(cgroups: &str) -> impl Iterator<Item = (&str, &str)> {
    cgroups.lines().filter_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        Some((fields.next()?, fields.next()?))
    })
}

/// Ends what is in the container's cgroups, of which a process has this content of
/// `/proc/PID/cgroup`, with version 2, and lets it end, with version 1: what is killed there and
/// frozen dies when it is thawed. `mount` is where the cgroup file systems are. Gone already is
/// success.
///
/// # Errors
/// The failed step.
pub fn kill_or_thaw(mount: &Path, cgroups: &str, id: &str) -> Result<(), StepError> {
    for (controllers, path) in lines(cgroups) {
        if controllers.is_empty() {
            let Some(unified) = unified_point(mount) else { continue };
            // All below it too.
            for dir in below(&unified, path, id).into_iter().take(1) {
                write_word(&dir.join("cgroup.kill"), "1")?;
            }
        } else if controllers.split(',').any(|controller| controller == "freezer") {
            for dir in below(&mount.join("freezer"), path, id) {
                write_word(&dir.join("freezer.state"), "THAWED")?;
            }
        }
    }
    Ok(())
}

/// Whether a process with this content of `/proc/PID/cgroup` is in a frozen cgroup. The kernel says
/// so of a cgroup below a frozen one as well. `mount` is where the cgroup file systems are.
pub fn is_frozen(mount: &Path, cgroups: &str) -> bool {
    lines(cgroups).any(|(controllers, path)| {
        let (root, file, thawed) = if controllers.is_empty() {
            (unified_point(mount), "cgroup.events", "frozen 0")
        } else if controllers.split(',').any(|controller| controller == "freezer") {
            (Some(mount.join("freezer")), "freezer.state", "THAWED")
        } else {
            return false;
        };
        let Some(root) = root else { return false };
        // The root of a hierarchy has no such file, and cannot be frozen.
        fs::read_to_string(root.join(path.trim_start_matches('/')).join(file))
            .is_ok_and(|state| !state.lines().any(|line| line == thawed))
    })
}

/// The container's cgroup and those below it on the way to `path`, which a process is in.
pub fn below(root: &Path, path: &str, id: &str) -> Vec<PathBuf> {
    let mut dir = root.to_owned();
    let mut found = Vec::new();
    for part in Path::new(path.trim_start_matches('/')).components() {
        // Outside of what this process sees of the hierarchy.
        let Component::Normal(part) = part else { return Vec::new() };
        dir.push(part);
        if !found.is_empty() || part.to_str().is_some_and(|part| is_named(part, id)) {
            found.push(dir.clone());
        }
    }
    found
}

/// Writes to a file of the kernel's, if there is one; Linux has `cgroup.kill` since 5.14, and not
/// for cgroups of threads.
fn write_word(file: &Path, word: &str) -> Result<(), StepError> {
    let written = OpenOptions::new()
        .write(true)
        .open(file)
        .and_then(|mut file| file.write_all(word.as_bytes()));
    match written {
        Err(e)
            if e.kind() == io::ErrorKind::NotFound
                || matches!(e.raw_os_error(), Some(libc::ENODEV | libc::EOPNOTSUPP)) =>
        {
            Ok(())
        }
        other => other.step_at("end processes by", file),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_is_known_by_its_cgroup() {
        let id = "0123abcd";
        // Where none of it is mounted.
        let names = |cgroups: &str, id: &str| holds(Path::new("/none"), cgroups, id, "");
        for yes in [
            "0::/kubepods/pod1/0123abcd",
            "3:memory:/kubepods/pod1/0123abcd/init.scope",
            "1:name=systemd:/\n0::/kubepods.slice/cri-containerd-0123abcd.scope",
        ] {
            assert!(names(yes, id), "{yes}");
        }
        for no in [
            "0::/",
            "0::/kubepods/0123abcd1",
            "0::/kubepods/x0123abcd",
            "0::/a/cri-0123abcd.slice",
            "",
        ] {
            assert!(!names(no, id), "{no}");
        }
    }

    #[test]
    fn a_frozen_cgroup_is_recognized_in_both_versions() {
        let mount = tempfile::tempdir().unwrap();
        for dir in ["freezer/a", "a"] {
            fs::create_dir_all(mount.path().join(dir)).unwrap();
        }
        fs::write(mount.path().join("cgroup.controllers"), "").unwrap();
        let (v1, v2) = (mount.path().join("freezer/a/freezer.state"), mount.path().join("a"));
        let set = |one: &str, two: &str| {
            fs::write(&v1, one).unwrap();
            fs::write(v2.join("cgroup.events"), two).unwrap();
        };
        let frozen = |cgroups: &str| is_frozen(mount.path(), cgroups);
        for (line, frozen_by) in [("4:freezer:/a\n3:cpu:/a", "1"), ("0::/a", "2")] {
            set("THAWED\n", "populated 1\nfrozen 0\n");
            assert!(!frozen(line), "{line}");
            match frozen_by {
                "1" => set("FREEZING\n", "populated 1\nfrozen 0\n"),
                _ => set("THAWED\n", "populated 1\nfrozen 1\n"),
            }
            assert!(frozen(line), "{line}");
        }
        assert!(!frozen("4:freezer:/\n0::/"), "the root has no such file");
    }

    #[test]
    fn a_name_in_a_cgroup_that_a_user_has_made_does_not_count() {
        if kit::skip_without_root() {
            return;
        }
        let (mount, id) = (tempfile::tempdir().unwrap(), "0123abcd");
        let make = |dir: &str| fs::create_dir_all(mount.path().join(dir)).unwrap();
        let user = "user.slice/user@1000.service";
        for dir in ["kubepods/pod1", user] {
            make(&format!("{dir}/{id}"));
            make(&format!("pids/{dir}/{id}"));
        }
        fs::write(mount.path().join("cgroup.controllers"), "").unwrap();
        for dir in [user.to_owned(), format!("{user}/{id}"), format!("pids/{user}")] {
            std::os::unix::fs::chown(mount.path().join(dir), Some(1000), Some(1000)).unwrap();
        }
        let counts = |cgroups: &str| holds(mount.path(), cgroups, id, "");
        assert!(counts(&format!("0::/kubepods/pod1/{id}")));
        assert!(counts(&format!("0::/kubepods/pod1/{id}/nested")));
        assert!(counts(&format!("4:pids:/kubepods/pod1/{id}\n0::/")));
        assert!(!counts(&format!("0::/{user}/{id}")));
        assert!(!counts(&format!("4:pids:/{user}/{id}\n0::/{user}/{id}")));
        assert!(!counts("0::/kubepods/pod1"));
        // Not mounted here: no owner to check.
        assert!(counts(&format!("5:memory:/kubepods/pod1/{id}")));
        assert!(!counts(&format!("5:memory:/{user}/{id}\n4:pids:/{user}/{id}")));
    }

    /// Promise: foreign_process_survives.
    #[test]
    fn a_name_below_another_containers_cgroup_does_not_count() {
        if kit::skip_without_root() {
            return;
        }
        let [a, b] = ["a", "b"].map(|digit| digit.repeat(64));
        let mount = tempfile::tempdir().unwrap();
        let (own, forged) = (format!("/kubepods/pod1/{b}"), format!("/kubepods/pod2/{a}/{b}"));
        let scope = format!("/kubepods.slice/cri-containerd-{a}.scope/{b}");
        for path in [&own, &forged, &scope] {
            fs::create_dir_all(mount.path().join(&path[1..])).unwrap();
        }
        fs::write(mount.path().join("cgroup.controllers"), "").unwrap();
        let counts = |path: &str, node: &str| holds(mount.path(), &format!("0::{path}"), &b, node);
        assert!(counts(&own, ""));
        assert!(counts(&format!("{own}/{b}"), "") && counts(&format!("{own}/{a}"), ""));
        for path in [&forged, &scope] {
            assert!(!counts(path, "") && !counts(path, "0::/system.slice"), "{path}");
        }
        // The node is in that container.
        assert!(counts(&forged, &format!("0::/kubepods/pod2/{a}/system.slice")));
        // As of a name that is not text: whose directory it is in cannot be checked.
        assert!(!counts(&format!("/user.slice/\u{fffd}/{b}"), ""));
        assert!(counts(&format!("{own}/\u{fffd}"), ""));
    }

    #[test]
    fn a_cgroup_whose_name_is_not_text_hides_no_process() {
        use std::os::unix::ffi::OsStrExt as _;
        if kit::skip_without_root() {
            return;
        }
        let hierarchy = kit::machine::cgroup::hierarchies().unwrap();
        let hierarchy = hierarchy.iter().find(|dir| dir.ends_with("pids")).unwrap_or(&hierarchy[0]);
        let name = format!("not-text-{}", std::process::id());
        let outer = hierarchy.join(&name);
        let inner = outer.join(std::ffi::OsStr::from_bytes(b"\xff"));
        fs::create_dir_all(&inner).unwrap();
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id().to_string();
        let moved = fs::write(inner.join("cgroup.procs"), &pid);
        let read = of_process(&pid);
        child.kill().unwrap();
        child.wait().unwrap();
        moved.unwrap();
        fs::remove_dir(inner).and_then(|()| fs::remove_dir(outer)).unwrap();
        assert!(read.unwrap().unwrap().contains(&name));
        assert_eq!(of_process(&pid).unwrap(), None);
    }

    #[test]
    fn a_process_in_a_deep_cgroup_fails_no_search_for_others() {
        use rustix::fs::{AtFlags, CWD, Mode, OFlags, mkdirat, openat, unlinkat};
        if kit::skip_without_root() {
            return;
        }
        let hierarchy = kit::machine::cgroup::hierarchies().unwrap();
        let hierarchy = hierarchy.iter().find(|dir| dir.ends_with("pids")).unwrap_or(&hierarchy[0]);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let mut dirs = vec![openat(CWD, hierarchy, flags, Mode::empty()).unwrap()];
        let name = format!("deep-{}-{}", std::process::id(), "x".repeat(230));
        // Longer than PATH_MAX.
        for _ in 0..18 {
            let outer = dirs.last().unwrap();
            mkdirat(outer, &name, Mode::RWXU).unwrap();
            let inner = openat(outer, &name, flags, Mode::empty()).unwrap();
            dirs.push(inner);
        }
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id().to_string();
        let procs =
            openat(dirs.last().unwrap(), "cgroup.procs", OFlags::WRONLY, Mode::empty()).unwrap();
        let moved = rustix::io::write(&procs, pid.as_bytes());
        let read = of_process(&pid);
        let other =
            [super::super::Container { id: "e".repeat(64), bundle: PathBuf::from("/none") }];
        let (alive, killed) = (super::super::any_alive(&other), super::super::kill(&other));
        child.kill().unwrap();
        child.wait().unwrap();
        dirs.pop();
        for dir in dirs.iter().rev() {
            unlinkat(dir, &name, AtFlags::REMOVEDIR).unwrap();
        }
        moved.unwrap();
        // Some kernels cut the path instead.
        assert!(read.unwrap().is_some_and(|text| text.is_empty() || text.contains(&name)));
        assert!(!alive.unwrap());
        killed.unwrap();
        let error = |code| content(Err(io::Error::from_raw_os_error(code)));
        assert_eq!(error(libc::ENAMETOOLONG).unwrap().as_deref(), Some(""));
        assert_eq!(error(libc::ESRCH).unwrap(), None);
        error(libc::EIO).unwrap_err();
    }

    #[test]
    fn a_cgroup_tells_the_container() {
        let id = "0123456789abcdef".repeat(4);
        for yes in [
            format!("2:cpu:/\n1:name=systemd:/a/{id}/b"),
            format!("0::/a.slice/cri-containerd-{id}.scope"),
        ] {
            assert_eq!(containers(&yes).next(), Some(id.as_str()), "{yes}");
        }
        for no in ["0::/user.slice/session-3.scope".to_owned(), format!("0::/x{id}"), String::new()]
        {
            assert_eq!(containers(&no).next(), None, "{no}");
        }
    }

    /// Files of a hierarchy as the kernel has them, and what is in one of them afterwards.
    fn after_end(files: &[&str], cgroups: &str, looked_at: &[&str]) -> Vec<String> {
        let mount = tempfile::tempdir().unwrap();
        for file in files.iter().chain(looked_at) {
            let path = mount.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        kill_or_thaw(mount.path(), cgroups, "0123abcd").unwrap();
        looked_at.iter().map(|file| fs::read_to_string(mount.path().join(file)).unwrap()).collect()
    }

    #[test]
    fn a_cgroup_of_version_2_is_killed_as_a_whole_and_no_other() {
        let looked_at = [
            "kubepods/pod1/0123abcd/cgroup.kill",
            "kubepods/pod1/cgroup.kill",
            "kubepods/pod1/0123abcd/nested/cgroup.kill",
            "kubepods/pod1/other/cgroup.kill",
        ];
        let cgroups = "0::/kubepods/pod1/0123abcd/nested\n";
        assert_eq!(after_end(&["cgroup.controllers"], cgroups, &looked_at), ["1", "", "", ""]);
        let scope = "a.slice/cri-containerd-0123abcd.scope/cgroup.kill";
        let cgroups = "0::/a.slice/cri-containerd-0123abcd.scope";
        assert_eq!(after_end(&["cgroup.controllers"], cgroups, &[scope]), ["1"]);
        // A path outside of this view, and one that does not exist.
        for cgroups in
            ["0::/../kubepods/pod1/0123abcd", "0::/elsewhere/0123abcd", "0::/kubepods/pod1/other"]
        {
            assert_eq!(
                after_end(&["cgroup.controllers"], cgroups, &looked_at),
                ["", "", "", ""],
                "{cgroups}"
            );
        }
    }

    #[test]
    fn a_cgroup_of_version_1_is_thawed_down_to_the_process() {
        let looked_at = [
            "freezer/pod1/freezer.state",
            "freezer/pod1/0123abcd/freezer.state",
            "freezer/pod1/0123abcd/nested/freezer.state",
            "freezer/pod1/other/freezer.state",
        ];
        let cgroups = "9:freezer:/pod1/0123abcd/nested\n4:pids:/pod1/other\n0::/";
        assert_eq!(after_end(&[], cgroups, &looked_at), ["", "THAWED", "THAWED", ""]);
    }
}
