//! A registry on loopback, and a containerd that pulls everything from it.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kit::image::{self, Image};
use kit::{Node, Process, until};

/// Its address, in the network namespace of the suite.
pub(crate) const ADDRESS: &str = "127.0.0.1:5000";
/// containerd's namespace of the images on their way to the registry.
const NAMESPACE: &str = "conformance";

/// The text that is appended to containerd's config file.
pub(crate) const CONTAINERD: &str = r#"
[plugins."io.containerd.cri.v1.images".registry]
config_path = "{top}/registries"
"#;

/// Starts the registry with these images in it, as the only one that the node pulls from.
pub(crate) async fn start(
    program: &Path,
    node: &Node,
    images: Vec<(String, Image)>,
) -> Result<Process> {
    let top = &node.layout().top;
    let config = top.join("registry.yml");
    let text = format!(
        "version: 0.1\nlog: {{ level: warn }}\n\
         storage: {{ filesystem: {{ rootdirectory: {}/registry }} }}\n\
         http: {{ addr: '{ADDRESS}' }}\n",
        top.display()
    );
    fs::write(&config, text)?;
    let mut command = Command::new(program);
    command.arg("serve").arg(&config);
    let registry = Process::spawn(command, &top.join("logs/registry.log"))?;
    until("the registry listens", Duration::from_secs(20), async || {
        tokio::net::TcpStream::connect(ADDRESS).await.map(drop).context(ADDRESS)
    })
    .await?;
    push(node, images)?;
    let all = top.join("registries/_default");
    fs::create_dir_all(&all)?;
    // As the server too, or containerd would ask the one that the image's name says.
    let hosts = format!(
        "server = \"http://{ADDRESS}\"\n\n[host.\"http://{ADDRESS}\"]\n\
         capabilities = [\"pull\", \"resolve\"]\n"
    );
    fs::write(all.join("hosts.toml"), hosts)?;
    Ok(registry)
}

fn push(node: &Node, images: Vec<(String, Image)>) -> Result<()> {
    let archive = node.layout().top.join("registry.tar");
    let (names, images): (Vec<String>, Vec<Image>) = images.into_iter().unzip();
    image::write(&archive, &images)?;
    ctr(node, &["import", "--local", "--no-unpack", &archive.to_string_lossy()])?;
    for name in &names {
        ctr(node, &["push", "--local", "--plain-http", name])?;
    }
    ctr(node, &["remove"].into_iter().chain(names.iter().map(String::as_str)).collect::<Vec<_>>())?;
    Ok(fs::remove_file(archive)?)
}

fn ctr(node: &Node, arguments: &[&str]) -> Result<()> {
    let done = Command::new(node.parts().program("ctr"))
        .arg("--address")
        .arg(node.layout().containerd_socket())
        .args(["-n", NAMESPACE, "images"])
        .args(arguments)
        .output()
        .context("run ctr")?;
    let said = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "ctr images {}: {}", arguments.join(" "), said.trim());
    Ok(())
}
