//! The image of the test's containers, which is made in memory.

use std::time::Duration;

use serde_json::json;

use super::pod::PROGRAM_NAME;
use crate::oci_image;
use base::config::{CONTAINERD_NAMESPACE, Config};
use base::error::{IoContext as _, StepError};
use containerd_api::{GrpcEndpoint, images};

/// Timeout for the removal of an image whose import has failed: containerd may hang.
const REMOVED: Duration = Duration::from_secs(5);

/// A name that no other test of the node has: each removes only its own image.
pub(super) fn unique_name() -> Result<String, StepError> {
    Ok(format!("localhost/pause-sandboxer/selftest:{}", super::unique()?))
}

fn endpoint(config: &Config) -> GrpcEndpoint {
    GrpcEndpoint::new(&config.containerd_address, CONTAINERD_NAMESPACE)
}

/// Imports an image of this name with the program, of a config that no other has.
pub(super) async fn import(config: &Config, name: &str, program: &[u8]) -> Result<(), StepError> {
    let about = json!({
        "Entrypoint": [format!("/{PROGRAM_NAME}")],
        "User": "65535:65535",
        "Labels": { "pause-sandboxer.selftest": name },
    });
    let image = oci_image::of_program(name, PROGRAM_NAME, program, &about);
    images::import(&endpoint(config), &image.step("make image")?, &[]).await
}

/// Removes the image of an import that has failed or was given up: containerd may have stored it.
/// A containerd that hangs may store it later; then this fails.
pub(super) async fn remove(config: &Config, name: &str) -> Result<(), StepError> {
    images::remove(&endpoint(config), name, REMOVED).await.map_err(|step| {
        let reason = format!("{}; if it is left, run `crictl rmi {name}`", step.io());
        StepError::at(step.what(), name, std::io::Error::other(reason))
    })
}
