//! The images of the test, which are made in memory: that of the containers, and a pause image
//! where the node lacks the one that containerd needs.

use std::time::Duration;

use serde_json::json;

use super::pod::PROGRAM_NAME;
use crate::oci_image;
use base::config::{CONTAINERD_NAMESPACE, Config};
use base::error::{IoContext as _, StepError};
use containerd_api::GrpcEndpoint;
use containerd_api::cri::CriClient;
use containerd_api::images::{self, ImageInMemory};

/// Timeout for the removal of an image whose import has failed: containerd may hang.
const REMOVED: Duration = Duration::from_secs(5);

/// Time for CRI to learn of an image, and the interval of the questions.
const KNOWN: Duration = Duration::from_secs(10);
const INTERVAL: Duration = Duration::from_millis(20);

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

/// A pause image of the test.
#[derive(Debug)]
pub(super) struct PauseImage(ImageInMemory);

impl PauseImage {
    /// The pause program under this name. Its id in CRI is that of no other image, because the name
    /// may become that of another one while the test runs.
    ///
    /// # Errors
    /// It cannot be made.
    pub(super) fn new(name: &str, program: &[u8]) -> Result<Self, StepError> {
        let about = json!({
            "Entrypoint": ["/pause"],
            "User": oci_image::USER,
            "Labels": { "pause-sandboxer.selftest": super::unique()? },
        });
        oci_image::of_program(name, "pause", program, &about).step("make pause image").map(Self)
    }

    /// Imports it, and waits until CRI knows it.
    ///
    /// # Errors
    /// The step that failed.
    pub(super) async fn import(&self, config: &Config) -> Result<(), StepError> {
        images::import(&endpoint(config), &self.0, &[]).await?;
        let cri = CriClient::new(&config.containerd_address);
        let known = async {
            while cri.image(&self.0.name).await?.is_none() {
                tokio::time::sleep(INTERVAL).await;
            }
            Ok(())
        };
        let known = tokio::time::timeout(KNOWN, known).await;
        known.step_at("wait until CRI knows image", &self.0.name)?
    }

    /// Removes it, and no other image that has got its name.
    ///
    /// # Errors
    /// The call that failed.
    pub(super) async fn remove(&self, config: &Config) -> Result<(), StepError> {
        let id = &self.0.config.digest;
        CriClient::new(&config.containerd_address).remove_image(id).await.map_err(|step| {
            let reason = format!("{}; if it is left, run `crictl rmi {id}`", step.io());
            StepError::at(step.what(), &self.0.name, std::io::Error::other(reason))
        })
    }
}
