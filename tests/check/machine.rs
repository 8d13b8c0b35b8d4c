//! Nodes whose kernel, file systems or service manager do not fit. What belongs to the machine is
//! replaced in a mount namespace that only `check` has.

use std::fs;

use anyhow::{Context as _, Result};
use nix::mount::MsFlags;

use crate::bench::Bench;
use crate::{BrokenNode, broken};

pub(crate) fn all() -> Vec<BrokenNode> {
    broken! {
        the_kernel_is_too_old:
            "FAIL  kernel: Linux 4.19.0-27-amd64", "boot a kernel of 5.9 or newer", 1, NotTried;
        the_state_directory_is_full:
            "FAIL  state directory: {top}/sandboxer is on a file system that has 0 bytes left",
            "remove files or enlarge it: df -h and df -i {top}/sandboxer", 1, NoSandbox;
        the_state_directory_is_read_only:
            "FAIL  state directory: {top}/sandboxer is on a file system that is read-only",
            "see dmesg for the reason, and mount it writable: findmnt --target {top}/sandboxer",
            1, NoSandbox;
        the_unit_is_not_ordered_before_containerds:
            "warn  systemd: pause-sandboxer.service is not ordered before k3s.service",
            "pause-sandboxer enable --restart", 4, NotTried;
        the_unit_is_masked:
            "FAIL  systemd: pause-sandboxer.service is masked",
            "systemctl unmask pause-sandboxer.service", 1, NotTried;
    }
}

/// Has `check` run after a script, in a mount namespace of its own.
fn beside(bench: &mut Bench, script: &str) {
    let line = ["unshare", "--mount", "--propagation", "private", "sh", "-ec"].map(str::to_owned);
    bench.wrapper = line.into();
    bench.wrapper.extend([format!("{script}\nexec \"$@\""), "sh".to_owned()]);
}

async fn the_kernel_is_too_old(bench: &mut Bench) -> Result<()> {
    let release = bench.node.layout().top.join("osrelease");
    fs::write(&release, "4.19.0-27-amd64\n")?;
    beside(bench, &format!("mount --bind {} /proc/sys/kernel/osrelease", release.display()));
    Ok(())
}

async fn the_state_directory_is_full(bench: &mut Bench) -> Result<()> {
    let filler = bench.node.layout().sandboxer_state().join("filler");
    // The tmpfs has 2 MiB.
    let written = fs::write(filler, vec![0; 4 << 20]);
    written.err().context("the file system is not full").map(drop)
}

/// The lock of the daemon is open for writing, so that its own file system cannot become read-only.
async fn the_state_directory_is_read_only(bench: &mut Bench) -> Result<()> {
    let state = bench.node.layout().sandboxer_state();
    let flags = MsFlags::MS_RDONLY;
    Ok(nix::mount::mount(Some("state"), &state, Some("tmpfs"), flags, Some("mode=700"))?)
}

/// Has `check` see a systemd that shows these properties of the service, and a containerd of
/// k3s.service.
fn with_systemd(bench: &mut Bench, properties: &str) -> Result<()> {
    let top = bench.node.layout().top.clone();
    let socket = "LoadState=loaded\nUnitFileState=enabled\nActiveState=active\n\
                  Before=k3s.service containerd.service";
    bench.script(
        &top.join("systemctl"),
        &format!("[ \"$1\" = show ] && printf '%s\\n\\n%s\\n' '{socket}' '{properties}'"),
    )?;
    let cgroup = top.join("cgroup");
    fs::write(&cgroup, "0::/system.slice/k3s.service\n")?;
    let pid = bench.node.containerd_pid()?;
    bench.path.insert(0, top.clone());
    // The kit's CRI has no slices; /run is replaced only where systemd is looked for. The node
    // stays, which may be below /run.
    let script = format!(
        "mount --bind {cgroup} /proc/{pid}/cgroup; mount --rbind {top} /mnt; mount -t tmpfs run \
         /run; mkdir -p /run/systemd/system /run/dbus {top}; : >/run/dbus/system_bus_socket; \
         mount --move /mnt {top}",
        cgroup = cgroup.display(),
        top = top.display(),
    );
    beside(bench, &script);
    Ok(())
}

async fn the_unit_is_not_ordered_before_containerds(bench: &mut Bench) -> Result<()> {
    let properties = "LoadState=loaded\nUnitFileState=enabled\nActiveState=active\n\
                      Before=containerd.service shutdown.target";
    with_systemd(bench, properties)
}

async fn the_unit_is_masked(bench: &mut Bench) -> Result<()> {
    with_systemd(bench, "LoadState=masked\nUnitFileState=masked\nActiveState=inactive\nBefore=")
}
