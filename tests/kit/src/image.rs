//! The images of a node, made on the spot: one of busybox for containers, one that holds only a
//! pause program.

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
    let images = [
        image(TEST_IMAGE, &busybox_layer()?, &["/bin/sh"], "")?,
        // The user and the command of the image that most nodes have.
        image(PAUSE_IMAGE, &pause_layer()?, &["/pause"], "65535:65535")?,
    ];
    let index = json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": images.iter().map(|i| i.descriptor.clone()).collect::<Vec<_>>(),
    });
    let file = std::fs::File::create(path).with_context(|| format!("create {}", path.display()))?;
    let mut archive = Layer(tar::Builder::new(file));
    archive.file("oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    archive.file("index.json", 0o644, &serde_json::to_vec(&index)?)?;
    let mut written = BTreeSet::new();
    for blob in images.into_iter().flat_map(|i| i.blobs) {
        if written.insert(blob.digest.clone()) {
            archive.file(&format!("blobs/sha256/{}", blob.digest), 0o644, &blob.bytes)?;
        }
    }
    archive.0.into_inner()?.flush()?;
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
        json!({ "mediaType": media_type, "digest": format!("sha256:{}", self.digest), "size": self.bytes.len() })
    }
}

struct Image {
    descriptor: Value,
    blobs: Vec<Blob>,
}

fn image(name: &str, layer: &[u8], command: &[&str], user: &str) -> Result<Image> {
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
    Ok(Image { descriptor, blobs: vec![layer, config, manifest] })
}

/// The name that OCI images have for this machine's processor.
fn architecture() -> &'static str {
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
    let mut layer = Layer(tar::Builder::new(Vec::new()));
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
    Ok(layer.0.into_inner()?)
}

fn pause_layer() -> Result<Vec<u8>> {
    let mut layer = Layer(tar::Builder::new(Vec::new()));
    layer.file("pause", 0o755, PROBE)?;
    Ok(layer.0.into_inner()?)
}

/// A tar archive whose entries are the same on every machine and at any time.
struct Layer<W: Write>(tar::Builder<W>);

impl<W: Write> Layer<W> {
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

    fn file(&mut self, path: &str, mode: u32, bytes: &[u8]) -> Result<()> {
        let mut header = Self::header(tar::EntryType::Regular, mode, bytes.len());
        Ok(self.0.append_data(&mut header, path, bytes)?)
    }

    fn directory(&mut self, path: &str, mode: u32) -> Result<()> {
        let mut header = Self::header(tar::EntryType::Directory, mode, 0);
        Ok(self.0.append_data(&mut header, path, std::io::empty())?)
    }

    fn symlink(&mut self, path: &str, target: &str) -> Result<()> {
        let mut header = Self::header(tar::EntryType::Symlink, 0o777, 0);
        Ok(self.0.append_link(&mut header, path, target)?)
    }
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
