//! The limits that a pod chooses for its containers.

use std::collections::BTreeSet;

use crate::config::{Config, ContainerLimit};
use crate::podsandbox::Error;
use crate::podsandbox::error::shorten;
use crate::protos::cri::PodSandboxConfig;

/// Annotation with the limits, separated by commas.
const LIMITS: &str = "pause-sandboxer/limits";

/// The limits that the pod chooses, each at most that of the settings.
///
/// # Errors
/// [`Error::Invalid`]: one is malformed, given twice, above the maximum, or has none.
pub(super) fn check(
    id: &str,
    pod: &PodSandboxConfig,
    config: &Config,
) -> Result<Vec<ContainerLimit>, Error> {
    let Some(text) = pod.annotations.get(LIMITS) else { return Ok(Vec::new()) };
    let refuse = |reason| Error::invalid(id, &format!("annotations[{LIMITS:?}]"), reason);
    let mut names = BTreeSet::new();
    let mut limits = Vec::new();
    for one in text.split(',') {
        let limit: ContainerLimit = shorten(one).parse().map_err(refuse)?;
        let most = config.container_limits_max.iter().find(|most| most.name == limit.name);
        let Some(most) = most else {
            return Err(refuse(format!("the node's container_limits_max has no {}", limit.name)));
        };
        if !limit.is_within(most) {
            return Err(refuse(format!("{limit} is more than the node's maximum, {most}")));
        }
        if !names.insert(limit.name.clone()) {
            return Err(refuse(format!("{} is set twice", limit.name)));
        }
        limits.push(limit);
    }
    Ok(limits)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Promise: invalid_request_names_the_field.
    #[test]
    fn a_pod_chooses_limits_up_to_the_maximum_of_each() {
        let checked = |annotation: Option<&str>, most: &[&str]| {
            let mut pod = PodSandboxConfig::new();
            pod.annotations.extend(annotation.map(|text| (LIMITS.to_owned(), text.to_owned())));
            let most = most.iter().map(|limit| limit.parse().unwrap());
            let config = Config { container_limits_max: most.collect(), ..Config::default() };
            let shown = |limit: &ContainerLimit| limit.to_string();
            check("id", &pod, &config)
                .map(|limits| limits.iter().map(shown).collect::<Vec<_>>().join(","))
                .map_err(|e| e.to_string())
        };
        let most = ["nofile=2048:4096", "core=0", "memlock=unlimited"];
        assert_eq!(checked(None, &most).unwrap(), "");
        let chosen = "nofile=2048:4096,core=0:0,memlock=9:unlimited";
        assert_eq!(checked(Some(chosen), &most).unwrap(), chosen);
        assert_eq!(checked(Some("nofile=1024"), &most).unwrap(), "nofile=1024:1024");
        let long = format!("nofile={}", "9".repeat(1 << 20));
        for (limits, reason) in [
            ("nofile=2049:4096", "nofile=2049:4096 is more than the node's maximum, nofile=2048:"),
            ("nofile=2048:4097", "nofile=2048:4097 is more than the node's maximum, nofile=2048:"),
            ("core=0:unlimited", "core=0:unlimited is more than the node's maximum, core=0:0"),
            ("core=0,nproc=1", "the node's container_limits_max has no nproc"),
            ("core=0,core=0", "core is set twice"),
            ("core=0, core=0", "\" core\" is none of core, "),
            ("core=0,", "\"\" is not NAME=LIMIT or NAME=SOFT:HARD"),
            ("cpu=1", "\"cpu\" is none of core, "),
            ("nofile=3:2048", "is below 1024, which shims need"),
            (&long, "\u{2026}\" is not NAME=LIMIT or NAME=SOFT:HARD"),
        ] {
            let error = checked(Some(limits), &most).unwrap_err();
            let field = "sandbox \"id\": annotations[\"pause-sandboxer/limits\"]: ";
            assert!(error.starts_with(field) && error.contains(reason), "{error}");
            assert!(error.len() < 400, "{error}");
        }
        let error = checked(Some("core=0"), &[]).unwrap_err();
        assert!(error.ends_with("the node's container_limits_max has no core"), "{error}");
    }
}
