//! The pause image that containerd 2.3 pulls for each pod, although no pod of this sandboxer uses
//! it.

use toml::{Table, Value};

use super::super::{ENABLE, Finding};
use super::{CONFIG, IMAGES, Release};
use crate::client::TIMEOUT;
use crate::oci_image;
use containerd_api::cri::CriClient;

/// The first release that pulls the image, and the first one whose handlers can prevent that.
const PULLS: Release = (2, 3);
const CAN_PREVENT: Release = (2, 4);

/// The image that containerd pulls before a pod of one of these handlers is started. `None`: it
/// pulls none.
pub(crate) fn needed<'a>(
    merged: &Table,
    release: Release,
    mut handlers: impl Iterator<Item = &'a Table>,
) -> Option<String> {
    let prevents = |handler: &Table| {
        let set = handler.get("disable_pause_image_pull").and_then(Value::as_bool);
        release >= CAN_PREVENT && set.unwrap_or(false)
    };
    if release < PULLS || handlers.all(prevents) {
        return None;
    }
    name(merged)
}

/// The image that CRI's config names, which the built-in controller runs.
pub(crate) fn name(merged: &Table) -> Option<String> {
    let images = merged.get("plugins")?.get(IMAGES)?;
    Some(images.get("pinned_images")?.get("sandbox")?.as_str()?.to_owned())
}

/// The finding about the image of that name, unless CRI has it. `command` repeats the last
/// `enable`.
pub(super) async fn examine(cri: &CriClient, name: &str, command: &str) -> Option<Finding> {
    let query = tokio::time::timeout(TIMEOUT, cri.image(name)).await;
    match query.map_err(|late| late.to_string()).and_then(|found| found.map_err(|e| e.to_string()))
    {
        Ok(Some(_)) => None,
        Ok(None) => Some(missing(name, command)),
        Err(reason) => {
            let advice = "see the log of containerd";
            Some(Finding::warn(CONFIG, format!("pause image {name}: {reason}"), advice))
        }
    }
}

/// What to add to `command`, which repeats the last `enable`, to import a pause image.
pub(crate) fn offline(command: &str) -> &'static str {
    if command.contains("--offline") { "" } else { " --offline" }
}

fn missing(name: &str, command: &str) -> Finding {
    let way = format!("{ENABLE}{}", offline(command));
    if name == oci_image::NAME {
        let fact = format!(
            "pause image {name} is not on the node, so no pod can start: this containerd pulls it \
             before each pod, and no registry has it"
        );
        return Finding::fail(CONFIG, fact, way);
    }
    let fact = format!(
        "pause image {name} is not on the node: this containerd pulls it before each pod, and no \
         pod starts unless its registry answers"
    );
    Finding::fail(CONFIG, fact, format!("{way} needs no registry; or: crictl pull {name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_some_releases_need_the_image() {
        let merged: Table =
            toml::from_str(&format!("[plugins.'{IMAGES}'.pinned_images]\nsandbox = 'x/pause:1'"))
                .unwrap();
        let handler = |text: &str| toml::from_str::<Table>(text).unwrap();
        let (plain, prevents) = (handler(""), handler("disable_pause_image_pull = true"));
        let needed = |release, handlers: &[&Table]| {
            needed(&merged, release, handlers.iter().copied()).is_some()
        };
        for (release, expected) in
            [((2, 0), false), ((2, 2), false), ((2, 3), true), ((2, 4), false), ((3, 0), false)]
        {
            assert_eq!(needed(release, &[&prevents]), expected, "{release:?}");
        }
        assert!(needed((2, 4), &[&plain]) && needed((2, 4), &[&prevents, &plain]));
        assert!(!needed((2, 2), &[&plain]) && !needed((2, 3), &[]));
    }

    #[test]
    fn the_remedy_for_a_missing_image_needs_no_registry() {
        let finding = missing("registry.k8s.io/pause:3.10", ENABLE);
        assert!(finding.advice.starts_with("pause-sandboxer enable --restart --offline needs no"));
        assert!(finding.advice.ends_with("crictl pull registry.k8s.io/pause:3.10"), "{finding}");
        let own = missing(oci_image::NAME, "pause-sandboxer enable --restart --offline");
        assert_eq!(own.advice, ENABLE, "the caller adds the options of the last command");
    }
}
