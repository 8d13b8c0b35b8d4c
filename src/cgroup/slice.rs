//! systemd's names: slices, and where systemd puts them (systemd.slice(5), systemd.unit(5)).

use std::ffi::CString;
use std::path::PathBuf;

/// Suffix of the name of a slice.
const SUFFIX: &str = ".slice";

/// The slice of all slices.
const ROOT: &str = "-";

/// Longest name of a unit, bytes (systemd's `UNIT_NAME_MAX` without the closing zero).
const LONGEST: usize = 255;

/// The scope of one pause process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Scope {
    /// The scope's own name.
    pub(crate) unit: String,
    /// The slice that it is in.
    pub(crate) slice: String,
    /// Its cgroup, by the path below the root of every hierarchy.
    pub(crate) path: CString,
}

impl Scope {
    /// The scope of sandbox `id` in `slice`, named as containerd and runc name it.
    ///
    /// # Errors
    /// The names are not valid.
    pub(super) fn new(slice: &str, id: &str) -> Result<Self, String> {
        let mut path = path(slice)?;
        let unit = format!("cri-containerd-{id}.scope");
        check(&unit)?;
        path.push(&unit);
        let path =
            CString::new(path.into_os_string().into_encoded_bytes()).map_err(|e| e.to_string())?;
        Ok(Self { unit, slice: slice.to_owned(), path })
    }

    /// The cgroup of the slice.
    pub(super) fn parent(&self) -> CString {
        let bytes = self.path.to_bytes();
        let end = bytes.iter().rposition(|byte| *byte == b'/').unwrap_or(0);
        CString::new(&bytes[..end]).unwrap_or_default()
    }
}

/// Where systemd puts a slice, below the root of a hierarchy: `a-b.slice` is within `a.slice`. The
/// root slice, `-.slice`, is the root itself.
///
/// # Errors
/// Why it is not the name of a slice.
pub fn path(slice: &str) -> Result<PathBuf, String> {
    check(slice)?;
    let stem = slice.strip_suffix(SUFFIX).ok_or_else(|| format!("does not end in {SUFFIX:?}"))?;
    if stem == ROOT {
        return Ok(PathBuf::new());
    }
    if stem.split('-').any(str::is_empty) {
        return Err("has nothing before, after or between its dashes".to_owned());
    }
    let dashes = stem.match_indices('-').map(|(at, _)| at);
    Ok(dashes.chain([stem.len()]).map(|end| format!("{}{SUFFIX}", &stem[..end])).collect())
}

/// Whether a `cgroup_parent` of a `Plan` means a slice, by its bare name.
pub fn is_slice(parent: &str) -> bool {
    parent.ends_with(SUFFIX) && !parent.contains('/')
}

fn check(unit: &str) -> Result<(), String> {
    if unit.len() > LONGEST {
        return Err(format!("makes the name of a unit of more than {LONGEST} bytes"));
    }
    // Without '@': neither slices nor scopes have instances.
    match unit.chars().find(|c| !c.is_ascii_alphanumeric() && !":-_.\\".contains(*c)) {
        Some(c) => Err(format!("has {c:?}, which the name of a slice cannot have")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn slices_are_within_each_other() {
        for (slice, expected) in [
            ("a.slice", "a.slice"),
            ("a-b.slice", "a.slice/a-b.slice"),
            (
                "kubepods-besteffort-pod1_2.slice",
                "kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1_2.slice",
            ),
            // As `systemd-escape` writes a slash.
            ("a\\x2fb-c.slice", "a\\x2fb.slice/a\\x2fb-c.slice"),
            ("a.b:c.slice", "a.b:c.slice"),
            ("-.slice", ""),
        ] {
            assert_eq!(path(slice).unwrap(), Path::new(expected), "{slice}");
        }
    }

    #[test]
    fn names_that_no_slice_has() {
        let long = format!("{}.slice", "a".repeat(250));
        for bad in [
            "",
            ".slice",
            "a",
            "a.scope",
            "a.slice.",
            "-a.slice",
            "a-.slice",
            "a--b.slice",
            "--.slice",
            "../a.slice",
            "a/b.slice",
            "a@b.slice",
            "a b.slice",
            "a\0.slice",
            "ä.slice",
            "a\n.slice",
            &long,
        ] {
            assert!(path(bad).is_err(), "{bad:?}");
            assert!(Scope::new(bad, "id").is_err(), "{bad:?}");
        }
    }

    #[test]
    fn scope_of_a_pause() {
        let scope = Scope::new("a-b.slice", "x1").unwrap();
        assert_eq!(scope.unit, "cri-containerd-x1.scope");
        assert_eq!(scope.path.to_str().unwrap(), "a.slice/a-b.slice/cri-containerd-x1.scope");
        assert_eq!(scope.parent().to_str().unwrap(), "a.slice/a-b.slice");
        let scope = Scope::new("-.slice", "x1").unwrap();
        assert_eq!(
            (scope.path.to_str().unwrap(), scope.parent().to_bytes()),
            ("cri-containerd-x1.scope", &b""[..])
        );
        // The longest identifier that containerd allows.
        assert!(Scope::new("a.slice", &"i".repeat(76)).is_ok());
    }

    #[test]
    fn only_a_bare_name_means_a_slice() {
        assert!(is_slice("a.slice"));
        for path in ["/a.slice", "/a.slice/b.slice", "a/b.slice", "", "a", "/"] {
            assert!(!is_slice(path), "{path:?}");
        }
    }
}
