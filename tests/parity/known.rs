//! The differences that there are, each with its reason. One that is not seen any more must go.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use kit::machine::cgroup;
use kit::machine::cgroup_driver::CgroupDriver;

use crate::nri;

/// A difference. In each text `*` stands for anything.
pub(crate) struct Known {
    /// The case.
    pub(crate) case: &'static str,
    /// The field.
    pub(crate) field: &'static str,
    /// The value of the built-in controller.
    pub(crate) builtin: &'static str,
    /// The value of this sandboxer.
    pub(crate) ours: &'static str,
    /// Why.
    pub(crate) why: &'static str,
    /// The nodes that it is seen on: all that are each of these.
    on: &'static [On],
}

/// Nodes, by what keeps their cgroups and by their kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
enum On {
    /// Version 1, or both.
    V1,
    /// Version 2 alone.
    V2,
    /// Where systemd keeps the cgroups, of either version.
    Slices,
    /// Where only runc and the sandboxer do.
    Directories,
    /// Where systemd does not run.
    NoSystemd,
    /// With a kernel, such as 6.1, that has no net.core.somaxconn in the network of a user
    /// namespace.
    NoSomaxconn,
    /// With a containerd before 2.2, which does not mask /proc/interrupts.
    NoInterrupts,
    /// With a containerd before 2.3.
    Before23,
    /// With a containerd from 2.3 on, whose NRI plugins get the spec.
    Since23,
}

/// Whether systemd runs the node (sd_booted(3)).
pub(crate) fn systemd_runs() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

/// The properties of a node.
struct Here {
    unified: bool,
    no_somaxconn: bool,
    no_interrupts: bool,
    since_2_3: bool,
}

impl Here {
    fn look() -> Result<Self> {
        const LOOK: [&str; 6] =
            ["--user", "--map-root-user", "--net", "test", "-e", "/proc/sys/net/core/somaxconn"];
        let looked = Command::new("unshare").args(LOOK).output().context("run unshare")?;
        let version = kit::Parts::get()?.version();
        Ok(Self {
            unified: cgroup::unified()?,
            no_somaxconn: !looked.status.success(),
            no_interrupts: ["2.0.", "2.1."].iter().any(|old| version.starts_with(old)),
            since_2_3: nri::tells_the_spec()?,
        })
    }
}

impl Known {
    const fn on(mut self, on: &'static [On]) -> Self {
        self.on = on;
        self
    }

    fn is_on(&self, here: &Here) -> bool {
        self.on.iter().all(|on| match on {
            On::V1 => !here.unified,
            On::V2 => here.unified,
            On::NoSomaxconn => here.no_somaxconn,
            On::NoInterrupts => here.no_interrupts,
            On::Before23 => !here.since_2_3,
            On::Since23 => here.since_2_3,
            On::Slices => CgroupDriver::chosen() == CgroupDriver::Systemd,
            On::Directories => CgroupDriver::chosen() == CgroupDriver::Cgroupfs,
            On::NoSystemd => !systemd_runs(),
        })
    }
}

/// The differences that there are on this node.
///
/// # Errors
/// The machine does not tell what it is.
pub(crate) fn here() -> Result<Vec<&'static Known>> {
    let here = Here::look()?;
    Ok(KNOWN.iter().filter(|known| known.is_on(&here)).collect())
}

const fn known(
    case: &'static str,
    field: &'static str,
    builtin: &'static str,
    ours: &'static str,
    why: &'static str,
) -> Known {
    Known { case, field, builtin, ours, why, on: &[] }
}

const NO_IMAGE: &str = "the pause program is inside the sandboxer; there is no image";
const NO_RIGHTS: &str = "our pause needs no capability, and has none in any set";
const PAUSE_USER: &str =
    "our pause is always 65535 without groups: what a pod asks for is for its containers";
const OWN_FILTER: &str = "our pause has a list of its own of the few calls that it makes; the \
    pod's profile is for its containers";
const CLASS: &str = "the built-in gives its errors no class; the text says the same";
const CONFIG: &str = "the built-in adds its defaults to the config that it was given, where that \
    has sysctls already";
const CGROUP_NONE: &str = "without a cgroup in the request our pause stays in the daemon's";
const NO_SLICE: &str = "runc with the systemd driver takes nothing but a slice; ours goes by what \
    it is given, and needs no cgroup of its own";
const RELATIVE: &str = "runc takes it from the cgroup of the shim, where CRI's own statistics do \
    not find it; ours is where CRI looks";
const PLAIN_SLICE: &str = "runc makes one directory of slice, prefix and name, outside of the \
    parent; ours is below it, where CRI and kubelet look";
const MADE_PARENT: &str = "the program that starts the pod makes the missing parent of its cgroup, \
    and leaves it: the parent is kubelet's, which makes and removes it";
const METRICS: &str = "the built-in has none; containerd asks for them from 2.4 on";
const UPDATE: &str = "containerd tells the controller of a resize from 2.3 on";

const SECCOMP: &str = "the spec tells what is true: our pause does not run under the pod's profile";

/// All of them. The first that fits counts.
const KNOWN: &[Known] = &[
    // ---- whether it runs ----
    known(
        "userns POD, network NODE",
        "RunPodSandbox",
        "refused",
        "runs",
        "the built-in takes the user namespace from the pod's netns, and so knows none without \
         one; ours makes it",
    )
    .on(&[On::Before23]),
    known("userns POD, network NODE", "RunPodSandbox: code", "UNKNOWN", "-", "as above")
        .on(&[On::Before23]),
    known(
        "userns POD, network NODE",
        "*",
        "-",
        "*",
        "shown because the built-in has none to compare with",
    ),
    known(
        "userns POD of few ids",
        "RunPodSandbox",
        "refused",
        "runs",
        "the user of the pause image is not mapped; our pause takes the last id that is",
    ),
    known("userns POD of few ids", "RunPodSandbox: code", "UNKNOWN", "-", "as above"),
    known(
        "userns POD of few ids",
        "*",
        "-",
        "*",
        "shown because the built-in has none to compare with",
    ),
    known(
        "cgroup_parent with ..",
        "RunPodSandbox",
        "runs",
        "refused",
        "it leads out of the cgroup that kubelet accounts and limits",
    ),
    known("cgroup_parent with ..", "RunPodSandbox: code", "-", "INVALID_ARGUMENT", "as above"),
    known("cgroup_parent with ..", "left behind", "cgroup /<node>/b", "nothing", MADE_PARENT)
        .on(&[On::Directories]),
    known(
        "cgroup_parent with ..",
        "left behind",
        "cgroup /*-up.slice, unit",
        "nothing",
        "systemd has made the slice",
    )
    .on(&[On::Slices]),
    known("cgroup_parent with ..", "*", "*", "-", "shown because ours has none to compare with"),
    known(
        "an annotation with limits",
        "RunPodSandbox",
        "runs",
        "refused",
        "the annotation is this sandboxer's own, and has no maximum by default",
    ),
    known("an annotation with limits", "RunPodSandbox: code", "-", "INVALID_ARGUMENT", "as above"),
    known("an annotation with limits", "*", "*", "-", "as above"),
    known("without a *", "RunPodSandbox", "refused", "runs", NO_SLICE).on(&[On::Slices]),
    known("without a *", "RunPodSandbox: code", "UNKNOWN", "-", "as above").on(&[On::Slices]),
    known("without a *", "*", "-", "*", "shown because the built-in has none to compare with")
        .on(&[On::Slices]),
    known("cgroup_parent, no slice", "left behind", "nothing", "cgroup */plain", MADE_PARENT)
        .on(&[On::Slices]),
    known("cgroup_parent, no slice", "RunPodSandbox", "refused", "runs", NO_SLICE)
        .on(&[On::Slices]),
    known("cgroup_parent, no slice", "RunPodSandbox: code", "UNKNOWN", "-", "as above")
        .on(&[On::Slices]),
    known(
        "cgroup_parent, no slice",
        "*",
        "-",
        "*",
        "shown because the built-in has none to compare with",
    )
    .on(&[On::Slices]),
    known("*", "RunPodSandbox: code", "UNKNOWN", "INVALID_ARGUMENT", CLASS),
    known(
        "*a slice without systemd",
        "pause: cgroup of *",
        "*/new.slice:cri-containerd:<id>",
        "*",
        PLAIN_SLICE,
    )
    .on(&[On::NoSystemd, On::Directories]),
    known(
        "*a slice without systemd",
        "spec.linux.cgroupsPath",
        "new.slice:*",
        "/<node>/new.slice/<id>",
        PLAIN_SLICE,
    )
    .on(&[On::NoSystemd, On::Directories]),
    known("*a slice without systemd", "stats", "refused with code 2", "-", PLAIN_SLICE)
        .on(&[On::NoSystemd, On::Directories]),
    known("*a slice without systemd", "list of stats", "refused with code 2", "<id>", PLAIN_SLICE)
        .on(&[On::NoSystemd, On::Directories]),
    known("*a slice without systemd", "stats.*", "-", "a *", PLAIN_SLICE)
        .on(&[On::NoSystemd, On::Directories]),
    known(
        "*a slice without systemd",
        "left behind",
        "nothing",
        "cgroup /<node>/new.slice",
        MADE_PARENT,
    )
    .on(&[On::NoSystemd, On::Directories]),
    known("*a slice without systemd", "Metrics: *", "-", "*", PLAIN_SLICE)
        .on(&[On::NoSystemd, On::Directories]),
    known("sysctls net.core.*", "RunPodSandbox: code", "UNKNOWN", "13", CLASS),
    known("userns POD, a sysctl of each kind", "RunPodSandbox: code", "UNKNOWN", "13", CLASS)
        .on(&[On::NoSomaxconn]),
    // ---- the pause ----
    known("*", "pause: CapBnd", "00000000a80425fb", "0000000000000000", NO_RIGHTS),
    known("*", "pause: Seccomp", "0", "2", OWN_FILTER),
    known("*", "pause: Groups", "*", "", PAUSE_USER),
    known(
        "run_as_user*",
        "pause: Uid",
        "1000 1000 1000 1000",
        "65535 65535 65535 65535",
        PAUSE_USER,
    ),
    known("run_as_user*", "pause: Gid", "* * * *", "65535 65535 65535 65535", PAUSE_USER),
    known("*", "pause: environment", "PATH=/bin HOME=/", "", NO_IMAGE),
    known(
        "*privileged",
        "pause: open files",
        "3",
        "1",
        "our pause holds the network's sysfs, so that a privileged container can write to it",
    ),
    known("*", "pause: open files", "3", "0", "our pause reads and writes nothing"),
    known("*", "pause: limit of open files", "*", "*", "our pause opens no file"),
    known(
        "*",
        "pause: its root",
        "has files",
        "empty",
        "the root of the built-in's pause is its image, which shows in a shared PID namespace",
    ),
    known("without a *", "pause: cgroup of *", "/k8s.io/<id>", "*", CGROUP_NONE)
        .on(&[On::Directories]),
    known(
        "*without a slash in front",
        "pause: cgroup of *",
        "*/<node>/relative/<id>",
        "*",
        RELATIVE,
    )
    .on(&[On::Directories]),
    known(
        "*",
        "pause: cgroup of version 2",
        "*/<id>",
        "/",
        "beside version 1 it has no controllers, and our pause stays in the daemon's",
    )
    .on(&[On::V1]),
    known("without a *", "pause: cpu.shares of its cgroup", "2", "1024", CGROUP_NONE)
        .on(&[On::V1, On::Directories]),
    known("without a *", "pause: cpu.weight of its cgroup", "1", "100", CGROUP_NONE)
        .on(&[On::V2, On::Directories]),
    known(
        "an annotation with the size of /dev/shm",
        "container: *dev/shm",
        "*size=65536k*",
        "*size=32768k*",
        "the annotation is this sandboxer's own",
    ),
    // ---- the container ----
    known(
        "userns POD*",
        "container: /dev/mqueue",
        "directory 0:0 41777 1000000:0",
        "directory 0:0 41777 1000000:2000000",
        "it belongs to the maker of the IPC namespace: of runc's pause the group is the node's, \
         which the pod does not have; of ours both ids are the pod's root",
    ),
    // ---- what is reported of it ----
    known("*", "info.image", "localhost/kit/pause:1", "", NO_IMAGE),
    known("*", "info.snapshotKey", "<id>", "", NO_IMAGE),
    known("*", "info.snapshotter", "*", "", NO_IMAGE),
    known("*sysctl*", "info.*.sysctls.net.ipv4.*", "*", "-", CONFIG),
    known("*without a slash in front", "stats.linux.memory.*", "-", "*", RELATIVE)
        .on(&[On::V1, On::Directories]),
    known(
        "*without a slash in front",
        "left behind",
        "nothing",
        "cgroup /<node>/relative",
        MADE_PARENT,
    )
    .on(&[On::V2, On::Directories]),
    known("without a *", "Metrics", "refused with code 12", "refused with code 13", METRICS)
        .on(&[On::Directories]),
    known("*", "Metrics", "refused with code 12", "reported", METRICS),
    known("*", "Metrics: *", "-", "io.containerd.cgroups.v1.Metrics", METRICS).on(&[On::V1]),
    known("*", "Metrics: *", "-", "io.containerd.cgroups.v2.Metrics", METRICS).on(&[On::V2]),
    known("*", "Metrics: id", "-", "<id>", METRICS),
    known("*", "Metrics: *", "-", "as the kernel's", METRICS),
    known("*", "after Update: info.resources.linux.cpu_shares", "-", "512", UPDATE),
    known("*", "after Update: info.overhead.linux.cpu_shares", "-", "2", UPDATE),
    known("*", "after Update: info.sandboxMetadata", "-", "as before", UPDATE),
    // ---- the spec ----
    known(
        "*",
        "spec.annotations.io.kubernetes.cri.podsandbox.image-name",
        "localhost/kit/pause:1",
        "",
        NO_IMAGE,
    ),
    known(
        "*",
        "spec.ociVersion",
        "1.*",
        "1.2.0",
        "it has nothing that containerd 2.0 would not know",
    ),
    known(
        "*",
        "spec.linux.maskedPaths",
        r#"["/proc/acpi","/proc/asound","/proc/kcore",*]"#,
        r#"["/proc/acpi","/proc/asound","/proc/interrupts","/proc/kcore",*]"#,
        "as newer releases of containerd have it",
    )
    .on(&[On::NoInterrupts]),
    known("*", "spec.process.capabilities*", "[\"CAP_*]", "-", NO_RIGHTS),
    known("*", "spec.process.capabilities", "-", "{}", NO_RIGHTS),
    known("*", "spec.process.env", "[\"PATH=/bin\"]", "-", NO_IMAGE),
    known("*", "spec.process.user.additionalGids", "[*]", "-", PAUSE_USER),
    known("run_as_user*", "spec.process.user.*id", "*", "65535", PAUSE_USER),
    known(
        "userns POD*",
        "spec.linux.namespaces[user].path",
        "*/pinned-namespaces/user",
        "-",
        "our pause joins the namespace that owns the pod's netns, which has no path of its own",
    ),
    known(
        "*",
        "spec.mounts[/etc/host*].*",
        "-",
        "*",
        "the built-in's pause has no such files; with ours all four files of the pod are listed",
    ),
    known("without a *", "spec.linux.cgroupsPath", "/k8s.io/<id>", "-", CGROUP_NONE)
        .on(&[On::Directories]),
    known(
        "sysctls net/core/*",
        "spec.linux.sysctl.net/core/somaxconn",
        "\"1235\"",
        "-",
        "it is reported with dots, as sysctls are named",
    ),
    known(
        "sysctls net/core/*",
        "spec.linux.sysctl.net.core.somaxconn",
        "-",
        "\"1235\"",
        "it is reported with dots, as sysctls are named",
    ),
    // ---- what NRI plugins receive ----
    known(
        "*",
        "NRI *.annotations.io.kubernetes.cri.podsandbox.image-name",
        "localhost/kit/pause:1",
        "",
        NO_IMAGE,
    )
    .on(&[On::Since23]),
    known(
        "userns POD*",
        "NRI *.linux.namespaces[user].path",
        "*/pinned-namespaces/user",
        "-",
        "as in the spec",
    )
    .on(&[On::Since23]),
    known("without a *", "NRI *.linux.cgroups_path", "/k8s.io/<id>", "-", CGROUP_NONE)
        .on(&[On::Since23, On::Directories]),
    known(
        "*a slice without systemd",
        "NRI *.linux.cgroups_path",
        "new.slice:*",
        "/<node>/new.slice/<id>",
        PLAIN_SLICE,
    )
    .on(&[On::Since23, On::NoSystemd, On::Directories]),
    // ---- where the runtime runs the pause ----
    known("seccomp*runtime/default", "spec.linux.seccomp.*", "*", "-", SECCOMP),
    known("seccomp RuntimeDefault", "spec.linux.seccomp.*", "*", "-", SECCOMP),
];
