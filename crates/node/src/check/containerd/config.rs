//! containerd's config as containerd itself reads it: `containerd config dump` merges the file with
//! its imports, converts it to the newest version and adds the defaults.

use std::path::Path;

use toml::{Table, Value};

use super::super::program::run;
use super::running::{ContainerdProgram, Flags};

/// Characters of containerd's own words in a finding.
const REASON_MAX: usize = 500;

/// The merged config of `file`.
///
/// # Errors
/// Why there is none, in containerd's words if it has some.
pub(super) async fn dump(program: &ContainerdProgram, file: &Path) -> Result<Table, String> {
    let mut command = program.command();
    command.arg("--config").arg(file).args(["config", "dump"]);
    let output = run(command).await?;
    if !output.status.success() {
        return Err(format!("{}: {}", output.status, last_line(&output.stderr)));
    }
    toml::from_str(&output.stdout).map_err(|e| format!("its output: {}", e.message()))
}

/// Lets the options of the containerd that runs override its config, as they do there.
pub(super) fn apply(flags: &Flags, table: &mut Table) {
    let text = |path: &Path| Value::from(path.to_string_lossy().into_owned());
    for (key, path) in [("root", &flags.root), ("state", &flags.state)] {
        if let Some(path) = path {
            table.insert(key.to_owned(), text(path));
        }
    }
    if let Some(path) = &flags.address {
        let server = table.get_mut("plugins").and_then(Value::as_table_mut);
        server.and_then(|plugins| plugins.remove(super::SERVER));
        let grpc = Table::from_iter([("address".to_owned(), text(path))]);
        table.insert("grpc".to_owned(), Value::Table(grpc));
    }
}

/// The last line with words, which has the error; of one line and of a limited length.
fn last_line(text: &str) -> String {
    let line = text.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
    line.trim().chars().filter(|c| !c.is_control()).take(REASON_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_dump_that_fails_has_containerds_reason() {
        let dir = tempfile::tempdir().unwrap();
        let script = async |text: &str| {
            let path = dir.path().join("script");
            std::fs::write(&path, text).unwrap();
            let mut command = std::process::Command::new("/bin/sh");
            command.arg(path);
            let output = run(command).await.unwrap();
            (output.status.success(), last_line(&output.stderr))
        };
        let (success, reason) =
            script("echo level=warning >&2; echo 'containerd: bad' >&2; exit 1").await;
        assert_eq!((success, reason.as_str()), (false, "containerd: bad"));
        assert_eq!(last_line(&"x".repeat(1000)).len(), REASON_MAX);
        assert_eq!(last_line("a\u{1b}[31mb\n\n"), "a[31mb");
    }

    #[test]
    fn options_override_the_config() {
        let mut table: Table = toml::from_str(
            "root = '/a'\nstate = '/b'\n[plugins.'io.containerd.server.v1.grpc']\naddress = '/c'",
        )
        .unwrap();
        apply(&Flags::default(), &mut table);
        assert_eq!((table["root"].as_str(), table.contains_key("grpc")), (Some("/a"), false));
        let flags = Flags {
            config: None,
            root: Some("/r".into()),
            state: None,
            address: Some("/s.sock".into()),
        };
        apply(&flags, &mut table);
        assert_eq!(table["root"].as_str(), Some("/r"));
        assert_eq!(table["state"].as_str(), Some("/b"));
        assert_eq!(table["grpc"]["address"].as_str(), Some("/s.sock"));
        assert!(table["plugins"].get("io.containerd.server.v1.grpc").is_none());
    }
}
