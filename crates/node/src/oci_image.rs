//! The pause program as an OCI image, for containerd's built-in controller and for nodes without a
//! registry.
//!
//! It has one layer that holds one file, and is the same, byte for byte, on every machine and at
//! any time: a tool that compares digests sees an image that it has.

use std::io;

use serde_json::{Value, json};
use tar::{Builder, EntryType, Header};

use base::platform::Platform;
use containerd_api::images::{ImageBlob, ImageInMemory};

/// The image's name, for `pinned_images.sandbox` of containerd's CRI. Its tag counts the pause
/// program's changes that matter to those who run it.
pub const NAME: &str = "localhost/pause-sandboxer/pause:1";

/// User and group that the program runs as, as from most pause images.
pub(crate) const USER: &str = "65535:65535";

const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";

/// The pause program as an image. `program` is its executable.
///
/// # Errors
/// The layer cannot be written.
pub fn pause(program: &[u8]) -> io::Result<ImageInMemory> {
    let config = json!({ "Entrypoint": ["/pause"], "User": USER, "WorkingDir": "/" });
    of_program(NAME, "pause", program, &config)
}

/// An image of one program in the root directory, for the node's platform. `config` is the `config`
/// of the image's config (OCI image spec).
///
/// # Errors
/// The layer cannot be written.
pub fn of_program(
    name: &str,
    file_name: &str,
    program: &[u8],
    config: &Value,
) -> io::Result<ImageInMemory> {
    let layer = ImageBlob::new(LAYER, layer(file_name, program)?);
    let Platform { os, architecture, variant } = Platform::node();
    let mut about = json!({
        "architecture": architecture,
        "os": os,
        "config": config,
        "rootfs": { "type": "layers", "diff_ids": [layer.digest] },
    });
    if !variant.is_empty() {
        about["variant"] = variant.into();
    }
    let config = ImageBlob::json(CONFIG, &about);
    let manifest = ImageBlob::json(
        MANIFEST,
        &json!({
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": config.descriptor(),
            "layers": [layer.descriptor()],
        }),
    );
    Ok(ImageInMemory { name: name.to_owned(), layer, config, manifest })
}

/// A tar with one file, of root's and of no time, that all may execute.
fn layer(file_name: &str, bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut header = Header::new_ustar();
    header.set_entry_type(EntryType::Regular);
    header.set_mode(0o755);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(bytes.len() as u64);
    let mut layer = Builder::new(Vec::new());
    layer.append_data(&mut header, file_name, bytes)?;
    layer.into_inner()
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    const PROGRAM: &[u8] = b"\x7fELF";

    /// The digests are constants: two images that are made one after the other would have the same
    /// time, names of users and order of keys, whatever these are.
    #[test]
    fn it_is_the_same_on_every_machine_and_at_any_time() {
        let expected = match Platform::node().architecture {
            "amd64" => "sha256:2ffab7c2dee39293db75fa00c01340df763e0f21936eeda66670da8acfb35728",
            "arm64" => "sha256:2eb3b63b9c12742fdd00438d9414e6f6541b1198463f31cb4686b7943f565016",
            other => panic!("no digest of the image for {other}"),
        };
        assert_eq!(pause(PROGRAM).unwrap().manifest.digest, expected);
    }

    #[test]
    fn every_descriptor_fits_its_blob_and_the_layer_holds_the_program() {
        let ImageInMemory { name, layer, config, manifest } = pause(PROGRAM).unwrap();
        assert_eq!(name, NAME);
        let json = |blob: &ImageBlob| serde_json::from_slice::<Value>(&blob.bytes).unwrap();
        let described = json(&manifest);
        assert_eq!(described["config"], config.descriptor());
        assert_eq!(described["layers"], json!([layer.descriptor()]));
        let about = json(&config);
        assert_eq!(about["architecture"], Platform::node().architecture);
        assert_eq!(about["rootfs"]["diff_ids"][0], layer.digest, "an uncompressed layer");
        assert_eq!(about["config"]["User"], USER);
        let mut archive = tar::Archive::new(&layer.bytes[..]);
        let mut entries = archive.entries().unwrap();
        let mut entry = entries.next().unwrap().unwrap();
        assert_eq!((entry.header().mtime().unwrap(), entry.header().uid().unwrap()), (0, 0));
        assert_eq!(entry.path().unwrap().to_str(), Some("pause"));
        let mut bytes = Vec::new();
        entry.read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes, PROGRAM);
        assert!(entries.next().is_none());
    }
}
