//! The pause program as an OCI image, for containerd's built-in controller and for nodes without a
//! registry.
//!
//! An archive of one image with one layer that holds one file. It is the same, byte for byte,
//! on every machine and at any time: a tool that compares digests sees an image that it has.

use std::io::{self, Write};

use serde_json::{Value, json};
use tar::{Builder, EntryType, Header};

use base::platform::Platform;
use containerd_api::images::{ImageBlob, ImageInMemory};

/// The image's name, for `pinned_images.sandbox` of containerd's CRI. Its tag counts the pause
/// program's changes that matter to those who run it.
pub const NAME: &str = "localhost/pause-sandboxer/pause:1";

/// User and group that the program runs as, as from most pause images.
pub(crate) const USER: &str = "65535:65535";

const INDEX: &str = "application/vnd.oci.image.index.v1+json";
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
    let mut layer = Builder::new(Vec::new());
    file(&mut layer, file_name, 0o755, program)?;
    let layer = ImageBlob::new(LAYER, layer.into_inner()?);
    let mut about = platform();
    about["config"] = config.clone();
    about["rootfs"] = json!({ "type": "layers", "diff_ids": [layer.digest] });
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

/// The node's platform (OCI image spec).
fn platform() -> Value {
    let Platform { os, architecture, variant } = Platform::node();
    let mut platform = json!({ "architecture": architecture, "os": os });
    if !variant.is_empty() {
        platform["variant"] = variant.into();
    }
    platform
}

/// Writes the archive (OCI image layout in a tar) of the pause program to `to`.
///
/// # Errors
/// That of `to`.
pub fn write(program: &[u8], to: impl Write) -> io::Result<()> {
    let ImageInMemory { name, layer, config, manifest } = pause(program)?;
    let mut entry = manifest.descriptor();
    entry["platform"] = platform();
    // The first is containerd's own, the second what others read.
    entry["annotations"] = json!({
        "io.containerd.image.name": name,
        "org.opencontainers.image.ref.name": name.rsplit(':').next(),
    });
    let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [entry] });

    let mut archive = Builder::new(to);
    file(&mut archive, "oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    file(&mut archive, "index.json", 0o644, index.to_string().as_bytes())?;
    for blob in [layer, config, manifest] {
        let path = format!("blobs/{}", blob.digest.replace(':', "/"));
        file(&mut archive, &path, 0o644, &blob.bytes)?;
    }
    archive.into_inner()?.flush()
}

/// Adds a file of root's and of no time.
fn file<W: Write>(archive: &mut Builder<W>, path: &str, mode: u32, bytes: &[u8]) -> io::Result<()> {
    let mut header = Header::new_ustar();
    header.set_entry_type(EntryType::Regular);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(bytes.len() as u64);
    archive.append_data(&mut header, path, bytes)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io::Read as _;

    use super::*;

    const PROGRAM: &[u8] = b"\x7fELF";

    fn written() -> Vec<u8> {
        let mut bytes = Vec::new();
        write(PROGRAM, &mut bytes).unwrap();
        bytes
    }

    fn files(archive: &[u8]) -> BTreeMap<String, Vec<u8>> {
        let mut archive = tar::Archive::new(archive);
        let read = |entry: io::Result<tar::Entry<'_, &[u8]>>| {
            let mut entry = entry.unwrap();
            assert_eq!((entry.header().mtime().unwrap(), entry.header().uid().unwrap()), (0, 0));
            let mut bytes = Vec::new();
            entry.read_to_end(&mut bytes).unwrap();
            (entry.path().unwrap().to_str().unwrap().to_owned(), bytes)
        };
        archive.entries().unwrap().map(read).collect()
    }

    /// The digests are constants: two archives that are written one after the other would have
    /// the same time, names of users and order of keys, whatever these are.
    #[test]
    fn it_is_the_same_on_every_machine_and_at_any_time() {
        let expected = match Platform::node().architecture {
            "amd64" => "sha256:c131a1e74e865b5686e02e2545e8a40d2e2afdf8a5d198d2bcf46c5ea526d660",
            "arm64" => "sha256:e89b90872951e2e46c6857bc502193d0c58e23508b14b6383d9347d8c267e847",
            other => panic!("no digest of the image for {other}"),
        };
        assert_eq!(ImageBlob::new("", written()).digest, expected);
    }

    #[test]
    fn every_descriptor_fits_its_blob_and_the_layer_holds_the_program() {
        let files = files(&written());
        let json = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
        let blob = |descriptor: &Value| {
            let digest = descriptor["digest"].as_str().unwrap();
            let bytes = &files[&format!("blobs/{}", digest.replace(':', "/"))];
            assert_eq!(ImageBlob::new("", bytes.clone()).digest, digest);
            assert_eq!(descriptor["size"], bytes.len());
            bytes
        };
        let index = json(&files["index.json"]);
        let entry = &index["manifests"][0];
        assert_eq!(entry["annotations"]["io.containerd.image.name"], NAME);
        assert_eq!(entry["platform"]["architecture"], Platform::node().architecture);
        let manifest = json(blob(entry));
        let config = json(blob(&manifest["config"]));
        let layer = blob(&manifest["layers"][0]);
        assert_eq!(
            config["rootfs"]["diff_ids"][0], manifest["layers"][0]["digest"],
            "an uncompressed layer"
        );
        assert_eq!(config["config"]["User"], USER);
        let inside = self::files(layer);
        assert_eq!(inside.keys().collect::<Vec<_>>(), ["pause"]);
        assert_eq!(inside["pause"], PROGRAM);
    }
}
