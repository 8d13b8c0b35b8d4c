//! Which shim the pods of the sandboxer get, and the sandboxer's own as cargo builds it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyhow::{Context, Result, bail, ensure};

/// The sandboxer's default of the setting `shim`.
const DEFAULT: &str = "own";

/// Name of the sandboxer's own shim, in the directory of the sandboxer.
pub const NAME: &str = "pause-sandboxer-runc-shim";

/// The setting `shim` of every sandboxer that has none of its own: the environment variable
/// `KIT_SHIM`, or else the sandboxer's default.
pub fn setting() -> String {
    std::env::var("KIT_SHIM")
        .ok()
        .filter(|setting| !setting.is_empty())
        .unwrap_or_else(|| DEFAULT.to_owned())
}

/// The shim of pods of the built-in controller in place of containerd's: the path in the
/// environment variable `KIT_BUILTIN_SHIM`.
pub(crate) fn of_builtin() -> Option<PathBuf> {
    std::env::var_os("KIT_BUILTIN_SHIM").filter(|path| !path.is_empty()).map(PathBuf::from)
}

/// The setting `shim` of a sandboxer with these lines in its config file.
pub(crate) fn setting_with(config: &str) -> String {
    let named = config.lines().find_map(|line| line.strip_prefix("shim = "));
    named.map_or_else(setting, |named| named.trim().trim_matches('"').to_owned())
}

/// Makes sure that the own shim of the sandboxer at this path is there: without it the sandboxer
/// would use the runtime's, and the tests would be about that. `cargo test` does not build the
/// program of another package, so it is built here.
///
/// # Errors
/// It is not there and cannot be built.
pub fn prepare(sandboxer: &Path) -> Result<()> {
    static BUILT: OnceLock<Result<(), String>> = OnceLock::new();
    let program = sandboxer.with_file_name(NAME);
    let debug = program.parent().is_some_and(|dir| dir.ends_with("target/debug"));
    if let Some(cargo) = std::env::var_os("CARGO").filter(|_| debug) {
        let built = BUILT.get_or_init(|| build(&cargo).map_err(|e| format!("{e:#}")));
        if let Err(reason) = built {
            bail!("{reason}");
        }
    }
    ensure!(
        program.is_file(),
        "there is no {}: cargo build -p {NAME}, or make build",
        program.display()
    );
    Ok(())
}

fn build(cargo: &std::ffi::OsStr) -> Result<()> {
    let status = Command::new(cargo)
        .args(["build", "--quiet", "--locked", "--package", NAME])
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."))
        .status()
        .context("run cargo")?;
    ensure!(status.success(), "cargo build --package {NAME}: {status}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_setting_of_the_node_goes_before_that_of_all() {
        assert_eq!(setting_with("a = 1\nshim = \"runtime\"\n"), "runtime");
        assert_eq!(setting_with("shim_env = []\n"), setting());
    }
}
