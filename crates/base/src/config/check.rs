//! Whether the settings fit each other.

use std::collections::BTreeSet;
use std::path::Path;

use super::{CATEGORIES, CRI_PLUGIN_DIR, Config, Metrics, SHIM_SOCKET_SUFFIX, TTRPC_SUFFIX};

/// Longest path of a unix socket, bytes: `sun_path` less its closing NUL (unix(7)).
const SOCKET_PATH_MAX: usize = 107;

/// Size of the suffix of a socket's path until it listens (`.new`), bytes.
const SOCKET_PATH_SPARE: usize = 4;

impl Config {
    /// Checks the settings against each other.
    ///
    /// # Errors
    /// The first one that does not fit the others, and why.
    pub(super) fn check(&self) -> Result<(), (&'static str, String)> {
        self.check_sockets()?;
        self.check_state_dir()?;
        if !(2..=CATEGORIES).contains(&self.selinux_category_range) {
            let reason = format!("must be a number from 2 to {CATEGORIES}");
            return Err(("selinux_category_range", reason));
        }
        if self.forgotten_interval == 0 {
            return Err(("forgotten_interval", "must be at least 1".to_owned()));
        }
        set_once("shim_env", self.shim_env.iter().map(|variable| &variable.name))?;
        for (setting, limits) in [
            ("container_limits", &self.container_limits),
            ("container_limits_max", &self.container_limits_max),
        ] {
            set_once(setting, limits.iter().map(|limit| &limit.name))?;
        }
        set_once("sysctls", self.sysctls.iter().map(|sysctl| &sysctl.name))
    }

    fn check_sockets(&self) -> Result<(), (&'static str, String)> {
        let most = SOCKET_PATH_MAX - SOCKET_PATH_SPARE - TTRPC_SUFFIX.len();
        let length = self.socket.as_os_str().len();
        if length > most {
            let reason = format!(
                "must be at most {most} bytes long, to leave room for the ttrpc socket's name; has \
                 {length}"
            );
            return Err(("socket", reason));
        }
        if self.socket.parent() == Some(Path::new("/")) {
            return Err(("socket", "must be in a directory below /".to_owned()));
        }
        if self.socket == self.containerd_address {
            return Err(("socket", "must not be containerd's own socket".to_owned()));
        }
        if self.containerd_address.as_os_str().len() > SOCKET_PATH_MAX {
            let reason = format!("must be at most {SOCKET_PATH_MAX} bytes long");
            return Err(("containerd_address", reason));
        }
        if let Metrics::Unix(path) = &self.metrics {
            let most = SOCKET_PATH_MAX - SOCKET_PATH_SPARE;
            if path.as_os_str().len() > most {
                return Err(("metrics", format!("must have a path of at most {most} bytes")));
            }
            if [&self.socket, &self.ttrpc_socket(), &self.containerd_address].contains(&path) {
                return Err(("metrics", "must be a socket of its own".to_owned()));
            }
        }
        Ok(())
    }

    fn check_state_dir(&self) -> Result<(), (&'static str, String)> {
        let fault = |reason: String| Err(("state_dir", reason));
        let most = SOCKET_PATH_MAX - SHIM_SOCKET_SUFFIX;
        if self.state_dir.as_os_str().len() > most {
            return fault(format!(
                "must be at most {most} bytes long, to leave room for the shims' sockets"
            ));
        }
        if self.state_dir == Path::new("/") {
            return fault("must be a directory of the daemon's own".to_owned());
        }
        for (name, dir) in [
            ("containerd_root", &self.containerd_root),
            ("containerd_state", &self.containerd_state),
        ] {
            let cri = dir.join(CRI_PLUGIN_DIR);
            if self.state_dir == *dir || self.state_dir.starts_with(&cri) {
                return fault(format!(
                    "must not be {name} nor below {}: that is containerd's own",
                    cri.display()
                ));
            }
        }
        Ok(())
    }
}

/// # Errors
/// A name that a setting has twice.
fn set_once<'a>(
    setting: &'static str,
    mut names: impl Iterator<Item = &'a String>,
) -> Result<(), (&'static str, String)> {
    let mut seen = BTreeSet::new();
    let twice = names.find(|name| !seen.insert(*name));
    twice.map_or(Ok(()), |name| Err((setting, format!("{name} is set twice"))))
}
