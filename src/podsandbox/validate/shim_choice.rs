//! The kind of a pod's shim: the one place that decides it. The record keeps the decision.

use super::super::{SandboxInfo, drivers};
use crate::config::{Config, DriverName, ShimOwner};
use crate::shim::{ShimKind, own};

/// The type of the options that this project's own shim reads.
const RUNC_OPTIONS: &str = "containerd.runc.v1.Options";

/// The kind of the shim of a new pod, and whether it is this project's own shim. `has_own`: the own
/// shim can be used.
pub(super) fn choose(info: &SandboxInfo, config: &Config, has_own: bool) -> (ShimKind, bool) {
    match config.shim {
        _ if drivers::choose(&info.runtime_name, config) == DriverName::Shim => {
            (ShimKind::RunsPause, false)
        }
        ShimOwner::Own => (ShimKind::Handover, has_own && own_fits(info, config)),
        ShimOwner::Runtime => (ShimKind::Handover, false),
        ShimOwner::Started => (ShimKind::SelfStarted, false),
        ShimOwner::Containerd => (ShimKind::ContainerdOwned, false),
    }
}

/// Whether the own shim serves a pod like that as the runtime's would.
fn own_fits(info: &SandboxInfo, config: &Config) -> bool {
    let kind = info.runtime_options.as_ref().map_or("", |options| options.type_url.as_str());
    own::serves(&info.runtime_name, config.shims.0.contains_key(&info.runtime_name))
        && ["", RUNC_OPTIONS].contains(&kind.rsplit('/').next().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Drivers, ShimBinaries};
    use crate::podsandbox::Payload;

    const RUNC: &str = "io.containerd.runc.v2";

    fn info(runtime: &str, options: Option<&str>) -> SandboxInfo {
        SandboxInfo {
            runtime_name: runtime.to_owned(),
            runtime_options: options
                .map(|kind| Payload { type_url: kind.to_owned(), value: vec![1].into() }),
            ..Default::default()
        }
    }

    #[test]
    fn every_setting_has_its_shim_kind() {
        for (shim, kind) in [
            (ShimOwner::Own, (ShimKind::Handover, true)),
            (ShimOwner::Runtime, (ShimKind::Handover, false)),
            (ShimOwner::Started, (ShimKind::SelfStarted, false)),
            (ShimOwner::Containerd, (ShimKind::ContainerdOwned, false)),
        ] {
            let mut config = Config { shim, ..Config::default() };
            assert_eq!(choose(&info(RUNC, None), &config, true), kind);
            config.drivers = Drivers([(RUNC.to_owned(), DriverName::Shim)].into());
            assert_eq!(choose(&info(RUNC, None), &config, true), (ShimKind::RunsPause, false));
            let other = info("io.containerd.runsc.v1", None);
            assert_eq!(choose(&other, &config, true), (ShimKind::RunsPause, false));
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
            let chosen = choose(&info(runtime, options), &config, true);
            assert_eq!(chosen, (ShimKind::Handover, own), "{runtime} {options:?}");
        }
        assert_eq!(choose(&info(RUNC, None), &config, false), (ShimKind::Handover, false));
        let shims = ShimBinaries([(RUNC.to_owned(), "/other".into())].into());
        let config = Config { shims, ..config };
        assert_eq!(choose(&info(RUNC, None), &config, true), (ShimKind::Handover, false));
    }
}
