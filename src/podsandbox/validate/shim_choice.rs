//! The decision whose shim serves a new pod. The record keeps the decision.

use super::super::SandboxInfo;
use crate::config::{Config, ShimOwner};
use crate::shim::own;

/// The type of the options that this project's own shim reads.
const RUNC_OPTIONS: &str = "containerd.runc.v1.Options";

/// Whether a new pod has this project's own shim instead of its runtime's. `has_own`: the own shim
/// can be used.
pub(super) fn is_own(info: &SandboxInfo, config: &Config, has_own: bool) -> bool {
    config.shim == ShimOwner::Own && has_own && own_fits(info)
}

/// Whether the own shim serves a pod like that as the runtime's would.
fn own_fits(info: &SandboxInfo) -> bool {
    let kind = info.runtime_options.as_ref().map_or("", |options| options.type_url.as_str());
    own::serves(&info.runtime_name)
        && ["", RUNC_OPTIONS].contains(&kind.rsplit('/').next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use protobuf::well_known_types::any::Any;

    use super::*;

    const RUNC: &str = "io.containerd.runc.v2";

    fn info(runtime: &str, options: Option<&str>) -> SandboxInfo {
        SandboxInfo {
            runtime_name: runtime.to_owned(),
            runtime_options: options.map(|kind| Any {
                type_url: kind.to_owned(),
                value: vec![1],
                ..Default::default()
            }),
            ..Default::default()
        }
    }

    #[test]
    fn the_own_shim_serves_runc_with_its_options_if_it_is_there() {
        let config = Config { shim: ShimOwner::Own, ..Config::default() };
        for (runtime, options, own) in [
            (RUNC, None, true),
            (RUNC, Some("containerd.runc.v1.Options"), true),
            (RUNC, Some("types.containerd.io/containerd.runc.v1.Options"), true),
            (RUNC, Some("runtimeoptions.v1.Options"), false),
            (RUNC, Some("other.containerd.runc.v1.Options"), false),
            ("io.containerd.crun.v2", None, false),
            ("/usr/bin/containerd-shim-runc-v2", None, false),
            ("", None, false),
        ] {
            assert_eq!(
                is_own(&info(runtime, options), &config, true),
                own,
                "{runtime} {options:?}"
            );
        }
        assert!(!is_own(&info(RUNC, None), &config, false));
        let config = Config { shim: ShimOwner::Runtime, ..config };
        assert!(!is_own(&info(RUNC, None), &config, true));
    }
}
