//! Stores an image in containerd, blob by blob: no registry and no other program is needed.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use protobuf::well_known_types::empty::Empty;
use protobuf::{Message, MessageField};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::framing::Code;
use super::grpc::{CallError, GrpcEndpoint};
use crate::protos::image_store::{
    ContentDescriptor, CreateImageRequest, CreateLeaseRequest, DeleteImageRequest,
    DeleteLeaseRequest, StoredImage, UpdateImageRequest, UpdatedFields, WriteAction,
    WriteContentRequest,
};
use base::error::StepError;
use base::time::rfc3339;

const IMPORT: &str = "import image";

/// Timeout of a call.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// Timeout of an import, in which each call may take its own timeout.
const LEASED: Duration = Duration::from_secs(600);

/// The label by which kubelet's garbage collection leaves an image alone.
pub const PINNED: (&str, &str) = ("io.cri-containerd.pinned", "pinned");

/// A part of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageBlob {
    /// Its media type (OCI image spec).
    pub media_type: String,
    /// Its digest, with `sha256:`.
    pub digest: String,
    /// Its content.
    pub bytes: Vec<u8>,
}

impl ImageBlob {
    /// A part with that content.
    pub fn new(media_type: &str, bytes: Vec<u8>) -> Self {
        let digest: String = Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
        Self { media_type: media_type.to_owned(), digest: format!("sha256:{digest}"), bytes }
    }

    /// A part whose content is JSON.
    pub fn json(media_type: &str, value: &Value) -> Self {
        Self::new(media_type, value.to_string().into_bytes())
    }

    /// Its descriptor (OCI image spec).
    pub fn descriptor(&self) -> Value {
        json!({ "mediaType": self.media_type, "digest": self.digest, "size": self.bytes.len() })
    }
}

/// An image in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageInMemory {
    /// Its name.
    pub name: String,
    /// Its only layer.
    pub layer: ImageBlob,
    /// Its config.
    pub config: ImageBlob,
    /// Its manifest.
    pub manifest: ImageBlob,
}

/// Stores an image under its name, in place of what has that name.
///
/// # Errors
/// The call that failed.
pub async fn import(
    endpoint: &GrpcEndpoint,
    image: &ImageInMemory,
    labels: &[(&str, &str)],
) -> Result<(), StepError> {
    // Until the image refers to the blobs, only a lease keeps them.
    let lease = format!("pause-sandboxer-import-{}", std::process::id());
    // A command that is killed leaves it.
    let expires = ("containerd.io/gc.expire".to_owned(), rfc3339(SystemTime::now() + LEASED));
    let labels_of_lease = HashMap::from([expires]);
    let created =
        CreateLeaseRequest { id: lease.clone(), labels: labels_of_lease, ..Default::default() };
    let method = "containerd.services.leases.v1.Leases/Create";
    or_exists(endpoint.call::<Empty>(IMPORT, method, &created, CALL_TIMEOUT).await)?;
    let leased = GrpcEndpoint { lease: lease.clone(), ..endpoint.clone() };
    let stored = store(&leased, image, labels).await;
    let deleted = DeleteLeaseRequest { id: lease, ..Default::default() };
    let method = "containerd.services.leases.v1.Leases/Delete";
    let released = endpoint.call::<Empty>(IMPORT, method, &deleted, CALL_TIMEOUT).await;
    stored.and(released.map(drop).map_err(CallError::step))
}

/// Removes an image from containerd; of an unknown one this is success. CRI learns later than
/// containerd that there is one.
///
/// # Errors
/// The call that failed.
pub async fn remove(
    endpoint: &GrpcEndpoint,
    name: &str,
    within: Duration,
) -> Result<(), StepError> {
    let request = DeleteImageRequest { name: name.to_owned(), ..Default::default() };
    let method = "containerd.services.images.v1.Images/Delete";
    match endpoint.call::<Empty>("remove image", method, &request, within).await {
        Err(e) if e.is(Code::NOT_FOUND) => Ok(()),
        removed => Ok(removed.map(drop)?),
    }
}

async fn store(
    endpoint: &GrpcEndpoint,
    image: &ImageInMemory,
    labels: &[(&str, &str)],
) -> Result<(), StepError> {
    write(endpoint, &image.layer, HashMap::new()).await?;
    write(endpoint, &image.config, HashMap::new()).await?;
    // The garbage collection follows these from the image on.
    let refers = [("config", &image.config), ("l.0", &image.layer)];
    let refers = refers
        .map(|(name, blob)| (format!("containerd.io/gc.ref.content.{name}"), blob.digest.clone()));
    write(endpoint, &image.manifest, refers.into()).await?;

    let target = ContentDescriptor {
        media_type: image.manifest.media_type.clone(),
        digest: image.manifest.digest.clone(),
        size: size(&image.manifest),
        ..Default::default()
    };
    let stored = MessageField::some(StoredImage {
        name: image.name.clone(),
        labels: labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
        target: MessageField::some(target),
        ..Default::default()
    });
    let create = CreateImageRequest { image: stored.clone(), ..Default::default() };
    match images(endpoint, "Create", &create).await {
        Err(e) if e.is(Code::ALREADY_EXISTS) => {}
        created => return Ok(created?),
    }
    // Labels that others have set stay.
    let labels = labels.iter().map(|(key, _)| format!("labels.{key}"));
    let paths = ["target".to_owned()].into_iter().chain(labels).collect();
    let fields = UpdatedFields { paths, ..Default::default() };
    let update = UpdateImageRequest {
        image: stored,
        update_mask: MessageField::some(fields),
        ..Default::default()
    };
    Ok(images(endpoint, "Update", &update).await?)
}

async fn images(
    endpoint: &GrpcEndpoint,
    method: &str,
    request: &impl Message,
) -> Result<(), CallError> {
    let method = format!("containerd.services.images.v1.Images/{method}");
    endpoint.call::<Empty>(IMPORT, &method, request, CALL_TIMEOUT).await.map(drop)
}

/// Writes a blob; one that is there already is success.
async fn write(
    endpoint: &GrpcEndpoint,
    blob: &ImageBlob,
    labels: HashMap<String, String>,
) -> Result<(), StepError> {
    let request = WriteContentRequest {
        action: WriteAction::COMMIT.into(),
        ref_: format!("pause-sandboxer-{}-{}", std::process::id(), blob.digest),
        total: size(blob),
        expected: blob.digest.clone(),
        data: blob.bytes.clone(),
        labels,
        ..Default::default()
    };
    let method = "containerd.services.content.v1.Content/Write";
    or_exists(endpoint.stream::<Empty>(IMPORT, method, &request, CALL_TIMEOUT, drop).await)
}

/// ALREADY_EXISTS is success.
fn or_exists<T>(made: Result<T, CallError>) -> Result<(), StepError> {
    match made {
        Err(e) if e.is(Code::ALREADY_EXISTS) => Ok(()),
        other => Ok(other.map(drop)?),
    }
}

fn size(blob: &ImageBlob) -> i64 {
    i64::try_from(blob.bytes.len()).unwrap_or(i64::MAX)
}
