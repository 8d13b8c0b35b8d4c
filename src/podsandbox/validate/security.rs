//! The fields of the security context that our pause process makes no use of. What containerd's
//! built-in controller refuses in them is refused here too: a pod that names a profile which cannot
//! be is not to run as if it had named none.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::OpenOptionsExt as _;

use serde::de::IgnoredAny;

use crate::podsandbox::Error;
use crate::podsandbox::error::shorten;
use crate::protos::cri::{LinuxSandboxSecurityContext, security_profile::ProfileType};

const FIELD: &str = "linux.security_context";

/// Largest seccomp profile that is read, bytes.
const LARGEST_PROFILE: u64 = 16 << 20;

/// Optional prefix of a profile's path.
const LOCALHOST: &str = "localhost/";

/// Checks them as containerd does (`podsandbox/sandbox_run_linux.go`,
/// `podsandbox/helpers_linux.go`, `sputil/seccomp_linux.go`).
///
/// # Errors
/// [`Error::Invalid`] names the field.
pub(super) fn check(id: &str, security: &LinuxSandboxSecurityContext) -> Result<(), Error> {
    let refuse = |field: &str, reason: &str| {
        Err(Error::invalid(id, &format!("{FIELD}.{field}"), reason.to_owned()))
    };
    if security.run_as_group.is_some() && security.run_as_user.is_none() {
        return refuse("run_as_group", "is given without run_as_user");
    }
    for (field, given) in
        [("run_as_user", &security.run_as_user), ("run_as_group", &security.run_as_group)]
    {
        // Any other number is the name of a user to containerd, which the pause image does not
        // have.
        if given
            .as_ref()
            .is_some_and(|given| i32::try_from(given.value).map_or(true, i32::is_negative))
        {
            return refuse(field, "is below 0 or above 2147483647");
        }
    }
    if let Some(selinux) = security.selinux_options.as_ref()
        && !is_level(&selinux.level)
    {
        return refuse("selinux_options.level", "is not a level such as s0:c1,c2");
    }
    let Some(seccomp) = security.seccomp.as_ref() else {
        let path = security.seccomp_profile_path.as_str();
        if path.starts_with(LOCALHOST) && !security.privileged {
            return check_profile(id, "seccomp_profile_path", path);
        }
        let known = ["", "runtime/default", "docker/default", "unconfined"].contains(&path);
        if !known && !path.starts_with(LOCALHOST) {
            return refuse(
                "seccomp_profile_path",
                "is not one of runtime/default, docker/default, unconfined, localhost/PATH",
            );
        }
        return Ok(());
    };
    if security.privileged {
        return Ok(());
    }
    match seccomp.profile_type.enum_value() {
        Ok(ProfileType::Localhost) => {
            check_profile(id, "seccomp.localhost_ref", &seccomp.localhost_ref)
        }
        Ok(_) if seccomp.localhost_ref.is_empty() => Ok(()),
        Ok(_) => refuse("seccomp.localhost_ref", "is only valid with profile type Localhost"),
        Err(_) => {
            refuse("seccomp.profile_type", "is not one of RuntimeDefault, Unconfined, Localhost")
        }
    }
}

/// Looks for a profile where containerd does: a file that holds a JSON object. What is in it
/// concerns the containers alone.
fn check_profile(id: &str, field: &str, reference: &str) -> Result<(), Error> {
    let path = reference.strip_prefix(LOCALHOST).unwrap_or(reference);
    let field = format!("{FIELD}.{field}");
    let refuse = |reason: &dyn std::fmt::Display| {
        Error::invalid(id, &field, format!("names the profile {:?}: {reason}", shorten(path)))
    };
    let unreadable = |e| Error::unreadable(id, &field, path, e);
    // A fifo must hold up nothing.
    let file =
        File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(unreadable)?;
    let about = file.metadata().map_err(unreadable)?;
    if !about.is_file() || about.len() > LARGEST_PROFILE {
        return Err(refuse(&format_args!("is not a file of at most {LARGEST_PROFILE} bytes")));
    }
    let mut text = Vec::new();
    file.take(LARGEST_PROFILE).read_to_end(&mut text).map_err(unreadable)?;
    let profile = serde_json::from_slice::<HashMap<String, IgnoredAny>>(&text);
    profile.map(drop).map_err(|e| refuse(&format_args!("is not a seccomp profile: {e}")))
}

/// Whether containerd takes it for an SELinux level: `sN[-sN][:CATEGORIES]`, categories `cN[.cN]`,
/// separated by commas, each with at most four digits. An empty text is no level.
fn is_level(level: &str) -> bool {
    let number = |text: &str, letter: char, most: usize| {
        let digits = text.strip_prefix(letter).unwrap_or_default();
        (1..=most).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit())
    };
    let (sensitivity, categories) = match level.split_once(':') {
        Some((sensitivity, categories)) => (sensitivity, Some(categories)),
        None => (level, None),
    };
    let range =
        |text: &str, separator: char, letter: char, most: usize| match text.split_once(separator) {
            Some((low, high)) => number(low, letter, most) && number(high, letter, most),
            None => number(text, letter, most),
        };
    level.is_empty()
        || range(sensitivity, '-', 's', 1)
            && categories
                .is_none_or(|all| all.split(',').all(|category| range(category, '.', 'c', 4)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protos::cri::{Int64Value, SELinuxOption, SecurityProfile};

    #[test]
    fn profiles_are_files_with_an_object() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, text).unwrap();
            path.to_str().unwrap().to_owned()
        };
        let good =
            file("good", r#"{"defaultAction": "SCMP_ACT_ALLOW", "of a later runtime": [1]}"#);
        let checked = |path: &str, privileged| {
            let seccomp = SecurityProfile {
                profile_type: ProfileType::Localhost.into(),
                localhost_ref: path.to_owned(),
                ..Default::default()
            };
            let of_now = LinuxSandboxSecurityContext {
                seccomp: Some(seccomp).into(),
                privileged,
                ..Default::default()
            };
            let of_old = LinuxSandboxSecurityContext {
                seccomp_profile_path: format!("localhost/{path}"),
                privileged,
                ..Default::default()
            };
            [of_now, of_old].map(|security| check("id", &security).map_err(|e| e.to_string()))
        };
        assert_eq!(checked(&good, false), [Ok(()), Ok(())]);
        let fifo = dir.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
        for (bad, reason) in [
            ("/no/such/profile".to_owned(), "os error 2"),
            ("/".to_owned(), "is not a file"),
            (fifo.to_str().unwrap().to_owned(), "is not a file"),
            (file("text", "allow"), "is not a seccomp profile"),
        ] {
            for refused in checked(&bad, false) {
                assert!(
                    refused.as_ref().is_err_and(|e| e.contains(reason) && e.contains("seccomp")),
                    "{bad}: {refused:?}"
                );
            }
            assert_eq!(checked(&bad, true), [Ok(()), Ok(())], "a privileged pod has no profile");
        }
    }

    #[test]
    fn a_profile_has_at_most_16_mib() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        // Blanks, which JSON permits after the object.
        let mut text = format!("{{}}{}", " ".repeat((16 << 20) - 2));
        std::fs::write(path, &text).unwrap();
        assert!(check_profile("id", "f", path).is_ok());
        text.push(' ');
        std::fs::write(path, &text).unwrap();
        let error = check_profile("id", "f", path).unwrap_err().to_string();
        assert!(error.contains("is not a file of at most 16777216 bytes"), "{error}");
    }

    #[test]
    fn only_a_localhost_profile_has_a_path() {
        let checked = |kind, path: &str| {
            let seccomp = SecurityProfile {
                profile_type: protobuf::EnumOrUnknown::from_i32(kind),
                localhost_ref: path.to_owned(),
                ..Default::default()
            };
            let seccomp = Some(seccomp).into();
            let security = LinuxSandboxSecurityContext { seccomp, ..Default::default() };
            check("id", &security).map_err(|e| e.to_string())
        };
        for kind in [ProfileType::RuntimeDefault, ProfileType::Unconfined] {
            assert_eq!(checked(kind as i32, ""), Ok(()));
            assert!(checked(kind as i32, "/a").is_err_and(|e| e.contains("seccomp.localhost_ref")));
        }
        assert!(checked(9, "").is_err_and(|e| e.contains("seccomp.profile_type")));
    }

    #[test]
    fn a_wrong_selinux_level_and_a_group_without_a_user_are_refused() {
        let checked = |security| check("id", &security).map_err(|e| e.to_string());
        let with_level = |level: &str| {
            let selinux = SELinuxOption { level: level.to_owned(), ..Default::default() };
            let selinux_options = Some(selinux).into();
            LinuxSandboxSecurityContext { selinux_options, ..Default::default() }
        };
        assert_eq!(checked(with_level("s0:c1,c2")), Ok(()));
        assert!(checked(with_level("high")).is_err_and(|e| e.contains("selinux_options.level")));
        let run_as_group = Some(Int64Value::new()).into();
        let group = LinuxSandboxSecurityContext { run_as_group, ..Default::default() };
        assert!(checked(group).is_err_and(|e| e.contains("is given without run_as_user")));
    }

    #[test]
    fn users_are_numbers_that_there_are() {
        let id = |value: i64| Some(Int64Value { value, ..Default::default() }).into();
        let checked = |user: i64, group: i64| {
            let security = LinuxSandboxSecurityContext {
                run_as_user: id(user),
                run_as_group: id(group),
                ..Default::default()
            };
            check("id", &security).map_err(|e| e.to_string())
        };
        assert_eq!(checked(0, i64::from(i32::MAX)), Ok(()));
        for bad in [-1, i64::MIN, 1 << 31, i64::MAX] {
            assert!(checked(bad, 0).is_err_and(|e| e.contains("run_as_user")), "{bad}");
            assert!(checked(0, bad).is_err_and(|e| e.contains("run_as_group")), "{bad}");
        }
    }

    #[test]
    fn selinux_levels_are_checked_as_containerd_does() {
        for good in ["", "s0", "s0-s1", "s0:c1", "s0:c1,c2", "s0-s0:c0.c1023", "s0:c1.c3,c5,c7.c9"]
        {
            assert!(is_level(good), "{good}");
        }
        for bad in [
            "high",
            "s",
            "s10",
            "s0:",
            "s0:c",
            "s0:c1,",
            "s0:c12345",
            "s0:d1",
            "s0:c1.c2.c3",
            "s0-s1-s2",
            "s0:c1:c2",
            ":",
        ] {
            assert!(!is_level(bad), "{bad}");
        }
    }
}
