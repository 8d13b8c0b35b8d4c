//! The containerd of the node, where no option and no setting names it: the one that listens at an
//! address of the known distributions.

use std::path::{Path, PathBuf};

use base::config::Config;

use super::super::Subject;
use super::NodeContainerd;

/// An address at which the containerd of a distribution listens.
#[derive(Debug)]
struct Place {
    address: &'static str,
    /// The distributions.
    used_by: &'static str,
    /// What generates its config file, if something does.
    template: Option<Template>,
}

/// The file from which a distribution generates containerd's config file at each start.
#[derive(Debug)]
struct Template {
    /// Its name in the directory of the config file.
    file: &'static str,
    /// The directory that it can import, from the directory of the config file.
    directory: &'static str,
    /// What else to know before it is edited.
    note: &'static str,
}

/// Kubernetes distributions and containerd's packages. Other properties, such as the config file
/// and the unit, are those of the process that listens.
const PLACES: &[Place] = &[
    Place {
        address: "/run/containerd/containerd.sock",
        used_by: "packages, kubeadm, kind",
        template: None,
    },
    Place {
        address: "/run/k3s/containerd/containerd.sock",
        used_by: "k3s, RKE2",
        template: Some(Template {
            file: "config-v3.toml.tmpl",
            directory: "config-v3.toml.d",
            note: "; if there is no such file, {{ template \"base\" . }} is its second line. Newer \
                   versions of k3s and RKE2 import this directory without a template: upgrade \
                   instead, or remove the line before an upgrade",
        }),
    },
    Place { address: "/run/k0s/containerd.sock", used_by: "k0s", template: None },
    Place {
        address: "/var/snap/microk8s/common/run/containerd.sock",
        used_by: "MicroK8s",
        template: Some(Template {
            file: "containerd-template.toml",
            // The directory of the config file is another one after an upgrade of the snap.
            directory: "/var/snap/microk8s/common/containerd.d",
            note: "",
        }),
    },
];

/// Whether the containerd of a distribution listens at this address.
pub(crate) fn is_known(address: &Path) -> bool {
    PLACES.iter().any(|place| Path::new(place.address) == address)
}

/// The address of the one containerd that runs; `None`: none runs at a known address. An address
/// that the settings name counts alone.
///
/// # Errors
/// Several run.
pub(crate) fn address(config: &Config, subject: &Subject) -> Result<Option<PathBuf>, String> {
    if config.containerd_address != Config::default().containerd_address {
        return Ok(Some(config.containerd_address.clone()));
    }
    one_of(PLACES.iter().filter_map(|place| {
        let mut subject = subject.clone();
        subject.config.containerd_address = place.address.into();
        let found = NodeContainerd::find(&subject);
        Some(Found { address: place.address.into(), pid: found.pid?, unit: found.unit })
    }))
}

/// A containerd that runs.
struct Found {
    address: PathBuf,
    pid: i32,
    unit: String,
}

fn one_of(all: impl Iterator<Item = Found>) -> Result<Option<PathBuf>, String> {
    let mut found: Vec<Found> = Vec::new();
    for one in all {
        // An address can be a link to another.
        if found.iter().all(|other| other.pid != one.pid) {
            found.push(one);
        }
    }
    if found.len() < 2 {
        return Ok(found.pop().map(|one| one.address));
    }
    let shown = found.iter().map(|Found { address, pid, unit }| {
        format!("{} (process {pid} of {unit})", address.display())
    });
    Err(format!(
        "{} containerds run: {}: choose kubelet's with --containerd-address ADDRESS",
        found.len(),
        shown.collect::<Vec<_>>().join(", ")
    ))
}

/// The addresses that were searched, for messages.
pub(crate) fn known() -> String {
    let shown = PLACES.iter().map(|place| format!("{} ({})", place.address, place.used_by));
    shown.collect::<Vec<_>>().join(", ")
}

/// Why the config `file` of the containerd at `address` is not edited, and what to do instead;
/// `None`: nothing is known to generate it.
pub(crate) fn generated(address: &Path, file: &Path, unit: &str) -> Option<String> {
    let place = PLACES.iter().find(|place| Path::new(place.address) == address)?;
    let (template, directory) = (place.template.as_ref()?, file.parent().unwrap_or(Path::new("/")));
    Some(format!(
        "containerd's config {} is generated at each start by {}, and imports no directory: make \
         imports = [\"{}/*.toml\"] the first line of {}, restart {unit}, and run this command \
         again{}",
        file.display(),
        place.used_by,
        directory.join(template.directory).display(),
        directory.join(template.file).display(),
        template.note
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_containerds_are_named_with_the_option_that_chooses() {
        let found = |address: &str, pid, unit: &str| Found {
            address: address.into(),
            pid,
            unit: unit.to_owned(),
        };
        assert_eq!(one_of([].into_iter()).unwrap(), None);
        let link = [found("/a", 7, "k3s.service"), found("/b", 7, "k3s.service")];
        assert_eq!(one_of(link.into_iter()).unwrap(), Some("/a".into()));
        let two = [found("/a", 7, "containerd.service"), found("/b", 8, "k3s.service")];
        let error = one_of(two.into_iter()).unwrap_err();
        assert_eq!(
            error,
            "2 containerds run: /a (process 7 of containerd.service), /b (process 8 of \
             k3s.service): choose kubelet's with --containerd-address ADDRESS"
        );
    }

    #[test]
    fn the_template_of_a_generated_config_is_named() {
        let remedy =
            |address: &str, file: &str| generated(Path::new(address), Path::new(file), "u");
        let k3s = "/var/lib/rancher/k3s/agent/etc/containerd";
        let text = remedy(PLACES[1].address, &format!("{k3s}/config.toml")).unwrap();
        let line =
            format!("imports = [\"{k3s}/config-v3.toml.d/*.toml\"] the first line of {k3s}/");
        assert!(text.contains(&(line + "config-v3.toml.tmpl, restart u, and")), "{text}");
        let text = remedy(PLACES[3].address, "/var/snap/microk8s/7/args/containerd.toml").unwrap();
        assert!(text.contains("[\"/var/snap/microk8s/common/containerd.d/*.toml\"]"), "{text}");
        assert!(text.contains("/var/snap/microk8s/7/args/containerd-template.toml,"), "{text}");
        assert_eq!(remedy(PLACES[0].address, "/etc/containerd/config.toml"), None);
    }
}
