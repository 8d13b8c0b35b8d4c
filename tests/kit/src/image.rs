//! Images, made on the spot. Every node has two: one of busybox for containers, one that holds only
//! a pause program.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// Image of the containers: busybox with all its applets, and `/bin/probe`.
pub const TEST_IMAGE: &str = "localhost/kit/busybox:1";
/// Pause image of the built-in controller.
pub const PAUSE_IMAGE: &str = "localhost/kit/pause:1";

/// The static busybox of the machine.
const BUSYBOX: &str = "/bin/busybox";
/// The program that the kit's build makes of `probe/main.rs`.
pub const PROBE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/probe"));

/// Writes an OCI image archive with both images, for `ctr images import`.
///
/// # Errors
/// busybox does not run, or the archive cannot be written.
pub fn write_archive(path: &Path) -> Result<()> {
    write(
        path,
        &[
            Image::new(TEST_IMAGE, &busybox_layer()?, &["/bin/sh"], "")?,
            // The user and the command of the image that most nodes have.
            Image::new(PAUSE_IMAGE, &pause_layer()?, &["/pause"], "65535:65535")?,
        ],
    )
}

/// Writes an OCI image archive, for `ctr images import`.
///
/// # Errors
/// It cannot be written.
pub fn write(path: &Path, images: &[Image]) -> Result<()> {
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": images.iter().map(|i| i.descriptor.clone()).collect::<Vec<_>>(),
    });
    let file = std::fs::File::create(path).with_context(|| format!("create {}", path.display()))?;
    let mut archive = Layer::new(file);
    archive.file("oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    archive.file("index.json", 0o644, &serde_json::to_vec(&index)?)?;
    let mut written = BTreeSet::new();
    for blob in images.iter().flat_map(|i| &i.blobs) {
        if written.insert(blob.digest.clone()) {
            archive.file(&format!("blobs/sha256/{}", blob.digest), 0o644, &blob.bytes)?;
        }
    }
    archive.finish()?.flush()?;
    Ok(())
}

struct Blob {
    digest: String,
    bytes: Vec<u8>,
}

impl Blob {
    fn new(bytes: Vec<u8>) -> Self {
        Self { digest: hex(&Sha256::digest(&bytes)), bytes }
    }

    fn descriptor(&self, media_type: &str) -> Value {
        json!({
            "mediaType": media_type,
            "digest": format!("sha256:{}", self.digest),
            "size": self.bytes.len(),
        })
    }
}

/// An image of one layer, for this machine's processor.
pub struct Image {
    descriptor: Value,
    blobs: Vec<Blob>,
}

impl Image {
    /// An image by its name with tag. `user` is empty, or as in an image's config.
    ///
    /// # Errors
    /// It cannot be encoded.
    pub fn new(name: &str, layer: &[u8], command: &[&str], user: &str) -> Result<Self> {
        let layer = Blob::new(layer.to_vec());
        let config = Blob::new(serde_json::to_vec(&json!({
            "architecture": architecture(),
            "os": "linux",
            "config": { "Env": ["PATH=/bin"], "Entrypoint": command, "User": user },
            "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{}", layer.digest)] },
        }))?);
        let manifest = Blob::new(serde_json::to_vec(&json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": config.descriptor("application/vnd.oci.image.config.v1+json"),
            "layers": [layer.descriptor("application/vnd.oci.image.layer.v1.tar")],
        }))?);
        let mut descriptor = manifest.descriptor("application/vnd.oci.image.manifest.v1+json");
        descriptor["annotations"] = json!({ "io.containerd.image.name": name });
        descriptor["platform"] = json!({ "architecture": architecture(), "os": "linux" });
        Ok(Self { descriptor, blobs: vec![layer, config, manifest] })
    }
}

/// The name that OCI images have for this machine's processor.
pub fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

fn busybox_layer() -> Result<Vec<u8>> {
    let listed = Command::new(BUSYBOX)
        .arg("--list")
        .output()
        .with_context(|| format!("run {BUSYBOX} --list"))?;
    ensure!(listed.status.success(), "{BUSYBOX} --list: {}", listed.status);
    let mut layer = Layer::new(Vec::new());
    for directory in ["bin/", "dev/", "etc/", "proc/", "root/", "run/", "sys/"] {
        layer.directory(directory, 0o755)?;
    }
    layer.directory("tmp/", 0o1777)?;
    layer.file("etc/passwd", 0o644, b"root:x:0:0:root:/root:/bin/sh\n")?;
    layer.file("etc/group", 0o644, b"root:x:0:\n")?;
    layer.file(
        "bin/busybox",
        0o755,
        &std::fs::read(BUSYBOX).with_context(|| format!("read {BUSYBOX}"))?,
    )?;
    layer.file("bin/probe", 0o755, PROBE)?;
    for applet in String::from_utf8(listed.stdout)?.lines().filter(|applet| *applet != "busybox") {
        layer.symlink(&format!("bin/{applet}"), "busybox")?;
    }
    layer.finish()
}

fn pause_layer() -> Result<Vec<u8>> {
    let mut layer = Layer::new(Vec::new());
    layer.file("pause", 0o755, PROBE)?;
    layer.finish()
}

/// A tar archive whose entries are the same on every machine and at any time.
pub struct Layer<W: Write>(tar::Builder<W>);

impl<W: Write> Layer<W> {
    /// An empty one, written to `to`.
    pub fn new(to: W) -> Self {
        Self(tar::Builder::new(to))
    }

    /// Ends it.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn finish(self) -> Result<W> {
        Ok(self.0.into_inner()?)
    }

    fn header(kind: tar::EntryType, mode: u32, size: usize) -> tar::Header {
        let mut header = tar::Header::new_ustar();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_size(size as u64);
        header
    }

    /// Adds a file.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn file(&mut self, path: &str, mode: u32, bytes: &[u8]) -> Result<()> {
        let mut header = Self::header(tar::EntryType::Regular, mode, bytes.len());
        Ok(self.0.append_data(&mut header, path, bytes)?)
    }

    /// Adds a directory.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn directory(&mut self, path: &str, mode: u32) -> Result<()> {
        let mut header = Self::header(tar::EntryType::Directory, mode, 0);
        Ok(self.0.append_data(&mut header, path, std::io::empty())?)
    }

    /// Adds a symbolic link.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn symlink(&mut self, path: &str, target: &str) -> Result<()> {
        let mut header = Self::header(tar::EntryType::Symlink, 0o777, 0);
        Ok(self.0.append_link(&mut header, path, target)?)
    }

    /// Adds another name of a file that was added before.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn link(&mut self, path: &str, file: &str) -> Result<()> {
        let mut header = Self::header(tar::EntryType::Link, 0o755, 0);
        Ok(self.0.append_link(&mut header, path, file)?)
    }
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
