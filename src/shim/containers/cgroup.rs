//! The cgroups of a container at its end: killed as a whole, or thawed, as what is frozen does not
//! die.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};

use crate::cgroup::mounts::unified_point;
use crate::error::{IoContext as _, StepError};

/// Whether a process with this content of `/proc/PID/cgroup` is in the cgroup that is named by the
/// container's id: `ID`, or `PREFIX-ID.scope` with systemd.
pub fn names(cgroups: &str, id: &str) -> bool {
    lines(cgroups).any(|(_, path)| path.split('/').any(|part| is_named(part, id)))
}

/// Whether a process with this content of `/proc/PID/cgroup` is in the container's cgroup. `mount`
/// is where the cgroup file systems are.
///
/// A user who has a delegated cgroup can create others in it and give them any name. The kernel
/// makes the user the owner of each directory that they can create others in, so a name counts only
/// where root owns the directory that contains it. A hierarchy that is not mounted below `mount`
/// has no owner to check; its name counts if no other hierarchy tells.
pub fn holds(mount: &Path, cgroups: &str, id: &str) -> bool {
    if !names(cgroups, id) {
        return false;
    }
    let mut checked = false;
    for (controllers, path) in lines(cgroups) {
        for root in roots(mount, controllers) {
            let cgroup = below(&root, path, id).into_iter().next();
            match cgroup.and_then(|cgroup| cgroup.parent()?.metadata().ok()) {
                Some(parent) if parent.uid() == 0 => return true,
                Some(_) => checked = true,
                None => {}
            }
        }
    }
    !checked
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
    let id = |part| {
        let part: &str = str::strip_suffix(part, ".scope").unwrap_or(part);
        let id = part.rsplit('-').next().unwrap_or(part);
        (id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(id)
    };
    lines(cgroups).flat_map(|(_, path)| path.split('/')).filter_map(id)
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
    use std::fs;

    use super::*;

    #[test]
    fn a_container_is_known_by_its_cgroup() {
        let id = "0123abcd";
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
        let counts = |cgroups: &str| holds(mount.path(), cgroups, id);
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
        // What is not seen from here, and what is not there.
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
