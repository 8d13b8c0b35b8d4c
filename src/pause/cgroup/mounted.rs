//! Which cgroup file systems are mounted where.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

/// Mount points by version.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// With whether it has the cpuset controller.
    pub(super) v1: Vec<(PathBuf, bool)>,
    pub(super) v2: Option<PathBuf>,
    pub(super) unified: bool,
}

/// Reads proc_pid_mountinfo(5). A hierarchy that is mounted twice counts once, at its first mount point.
pub(super) fn parse(mountinfo: &[u8]) -> Found {
    let mut found = Found::default();
    let mut seen = BTreeSet::new();
    let mut controllers = false;
    for line in mountinfo.split(|byte| *byte == b'\n') {
        let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
        let Some(dash) = fields.iter().position(|field| *field == b"-") else { continue };
        let (Some(device), Some(mount), Some(kind)) = (fields.get(2), fields.get(4), fields.get(dash + 1)) else {
            continue;
        };
        let mount = PathBuf::from(OsStr::from_bytes(&unescape(mount)));
        match *kind {
            b"cgroup" if seen.insert(device.to_vec()) => {
                let options = fields.get(dash + 3).copied().unwrap_or_default();
                let has = |name: &[u8]| options.split(|byte| *byte == b',').any(|option| option == name);
                controllers |= !options.split(|byte| *byte == b',').any(|option| option.starts_with(b"name="));
                found.v1.push((mount, has(b"cpuset")));
            }
            b"cgroup2" if found.v2.is_none() => found.v2 = Some(mount),
            _ => {}
        }
    }
    // A named hierarchy alone is only systemd's bookkeeping.
    if !controllers && found.v2.is_some() {
        found.v1.clear();
    }
    found.unified = found.v1.is_empty();
    found
}

/// Replaces `\040` and the like.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let octal = after.get(..3).filter(|_| *first == b'\\');
        let byte = octal.and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        plain.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &after[3..] } else { after };
    }
    plain
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn hybrid_counts_as_version_1() {
        let text = b"32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
            33 31 0:31 / /sys/fs/cgroup/cpuset rw shared:9 - cgroup cgroup rw,cpuset\n\
            34 31 0:31 / /mnt/again rw - cgroup cgroup rw,cpuset\n\
            35 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n\
            36 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let found = parse(text);
        let v1 = [("cpu,cpuacct", false), ("cpuset", true), ("systemd", false)];
        assert_eq!(found.v1, v1.map(|(name, cpuset)| (Path::new("/sys/fs/cgroup").join(name), cpuset)));
        assert!(!found.unified);
    }

    #[test]
    fn version_2_alone_or_with_a_named_hierarchy() {
        let v2 = "36 31 0:38 / /sys/fs/c\\040group rw - cgroup2 cgroup2 rw\n";
        let named = "35 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n";
        for text in [v2.to_owned(), format!("{named}{v2}")] {
            let found = parse(text.as_bytes());
            assert_eq!(found, Found { v1: vec![], v2: Some("/sys/fs/c group".into()), unified: true });
        }
    }
}
