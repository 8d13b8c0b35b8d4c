//! The fields of the security context that our pause makes no use of. What containerd's built-in controller refuses in them is
//! refused here too: a pod that names a profile which cannot be is not to run as if it had named none.

use super::invalid;
use crate::podsandbox::Error;
use crate::protos::cri::{LinuxSandboxSecurityContext, security_profile::ProfileType};

const FIELD: &str = "linux.security_context";

/// Checks them as containerd does (`podsandbox/sandbox_run_linux.go`, `podsandbox/helpers_linux.go`, `sputil/seccomp_linux.go`).
///
/// # Errors
/// [`Error::Invalid`] names the field.
pub(super) fn check(id: &str, security: &LinuxSandboxSecurityContext) -> Result<(), Error> {
    let refuse = |field: &str, reason: &str| Err(invalid(id, &format!("{FIELD}.{field}"), reason.to_owned()));
    if security.run_as_group.is_some() && security.run_as_user.is_none() {
        return refuse("run_as_group", "is given without run_as_user");
    }
    if let Some(selinux) = security.selinux_options.as_ref()
        && !is_level(&selinux.level)
    {
        return refuse("selinux_options.level", "is no level such as s0:c1,c2");
    }
    let Some(seccomp) = security.seccomp.as_ref() else {
        let path = security.seccomp_profile_path.as_str();
        let known = ["", "runtime/default", "docker/default", "unconfined"].contains(&path);
        if !known && !path.starts_with("localhost/") {
            return refuse(
                "seccomp_profile_path",
                "is none of runtime/default, docker/default, unconfined, localhost/PATH",
            );
        }
        return Ok(());
    };
    if security.privileged {
        return Ok(());
    }
    match seccomp.profile_type.enum_value() {
        Ok(ProfileType::Localhost) => Ok(()),
        Ok(_) if seccomp.localhost_ref.is_empty() => Ok(()),
        Ok(_) => refuse("seccomp.localhost_ref", "goes with the type Localhost alone"),
        Err(_) => refuse("seccomp.profile_type", "is none of RuntimeDefault, Unconfined, Localhost"),
    }
}

/// Whether containerd takes it for an SELinux level: `sN[-sN][:CATEGORIES]`, categories `cN[.cN]`, separated by commas, each with at
/// most four digits. Empty is none.
fn is_level(level: &str) -> bool {
    let number = |text: &str, letter: char, most: usize| {
        let digits = text.strip_prefix(letter).unwrap_or_default();
        (1..=most).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_digit())
    };
    let (sensitivity, categories) = match level.split_once(':') {
        Some((sensitivity, categories)) => (sensitivity, Some(categories)),
        None => (level, None),
    };
    let range = |text: &str, separator: char, letter: char, most: usize| match text.split_once(separator) {
        Some((low, high)) => number(low, letter, most) && number(high, letter, most),
        None => number(text, letter, most),
    };
    level.is_empty()
        || range(sensitivity, '-', 's', 1)
            && categories.is_none_or(|all| all.split(',').all(|category| range(category, '.', 'c', 4)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels() {
        for good in ["", "s0", "s0-s1", "s0:c1", "s0:c1,c2", "s0-s0:c0.c1023", "s0:c1.c3,c5,c7.c9"] {
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
