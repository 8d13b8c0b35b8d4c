//! Pods with settings of the security context.

use kit::cri::api::security_profile::ProfileType;
use kit::cri::api::{self, SELinuxOption, SecurityProfile};

use super::{Case, secure};

fn profile(kind: ProfileType, file: &str) -> protobuf::MessageField<SecurityProfile> {
    Some(SecurityProfile {
        profile_type: kind.into(),
        localhost_ref: file.to_owned(),
        ..Default::default()
    })
    .into()
}

fn number(value: i64) -> protobuf::MessageField<api::Int64Value> {
    Some(api::Int64Value { value, ..Default::default() }).into()
}

#[allow(clippy::too_many_lines, reason = "a table of cases")]
pub(super) fn security() -> Vec<Case> {
    let selinux = |level: &str| SELinuxOption {
        user: "system_u".to_owned(),
        role: "system_r".to_owned(),
        type_: "container_t".to_owned(),
        level: level.to_owned(),
        ..Default::default()
    };
    let labelled = |level: &str| {
        let options = selinux(level);
        secure(move |s| s.selinux_options = Some(options).into())
    };
    vec![
        Case::new("privileged", secure(|s| s.privileged = true)),
        Case::new("run_as_user", secure(|s| s.run_as_user = number(1000))),
        Case::new(
            "run_as_user, run_as_group",
            secure(|s| {
                s.run_as_user = number(1000);
                s.run_as_group = number(3000);
            }),
        ),
        Case::new("run_as_group without a user", secure(|s| s.run_as_group = number(3000))),
        Case::new(
            "supplemental_groups",
            secure(|s| {
                s.supplemental_groups = vec![4000, 5000];
                s.supplemental_groups_policy = api::SupplementalGroupsPolicy::Strict.into();
            }),
        ),
        Case::new("run_as_user below 0", secure(|s| s.run_as_user = number(-1))),
        Case::new("run_as_user beyond all ids", secure(|s| s.run_as_user = number(1 << 31))),
        Case::new(
            "run_as_group below 0",
            secure(|s| {
                s.run_as_user = number(1000);
                s.run_as_group = number(-1);
            }),
        ),
        Case::new("readonly_rootfs", secure(|s| s.readonly_rootfs = true)),
        Case::new(
            "seccomp RuntimeDefault",
            secure(|s| s.seccomp = profile(ProfileType::RuntimeDefault, "")),
        ),
        Case::new(
            "seccomp RuntimeDefault, privileged",
            secure(|s| {
                s.seccomp = profile(ProfileType::RuntimeDefault, "");
                s.privileged = true;
            }),
        ),
        Case::new(
            "seccomp Unconfined",
            secure(|s| s.seccomp = profile(ProfileType::Unconfined, "")),
        ),
        Case::new(
            "seccomp Localhost of a file that is none",
            secure(|s| s.seccomp = profile(ProfileType::Localhost, "/no/such/profile")),
        ),
        Case::new(
            "seccomp Localhost of a file without a profile",
            secure(|s| s.seccomp = profile(ProfileType::Localhost, "/etc/hosts")),
        ),
        Case::new(
            "seccomp Localhost of a directory",
            secure(|s| s.seccomp = profile(ProfileType::Localhost, "localhost//etc")),
        ),
        Case::new(
            "seccomp_profile_path of a file that is none",
            secure(|s| s.seccomp_profile_path = "localhost//no/such/profile".to_owned()),
        ),
        Case::new(
            "seccomp RuntimeDefault with a file",
            secure(|s| s.seccomp = profile(ProfileType::RuntimeDefault, "/a/profile")),
        ),
        Case::new(
            "seccomp_profile_path runtime/default",
            secure(|s| s.seccomp_profile_path = "runtime/default".to_owned()),
        ),
        Case::new(
            "seccomp_profile_path of no known form",
            secure(|s| s.seccomp_profile_path = "strict".to_owned()),
        ),
        Case::new(
            "apparmor",
            secure(|s| s.apparmor = profile(ProfileType::Localhost, "no-such-profile")),
        ),
        Case::new("selinux_options", labelled("s0:c1,c2")),
        Case::new("selinux_options with a level of no known form", labelled("high")),
    ]
}
