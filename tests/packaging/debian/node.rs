//! The root of a node for the scripts of the packages.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

use crate::file;

/// A directory that is a script's root, with systemd. Commands that change units are written down.
pub(super) struct Node(TempDir);

impl Node {
    pub(super) fn new() -> Self {
        let node = Self(tempfile::tempdir().unwrap());
        fs::create_dir_all(node.at("run/systemd/system")).unwrap();
        let note = format!("#!/bin/sh\necho \"${{0##*/}} $*\" >>{}\n", node.at("asked").display());
        for name in ["deb-systemd-helper", "deb-systemd-invoke", "systemctl"] {
            node.program(name, &note);
        }
        node
    }

    /// A path of the node.
    pub(super) fn at(&self, path: impl AsRef<Path>) -> PathBuf {
        self.0.path().join(path)
    }

    /// A program in the scripts' `PATH`.
    pub(super) fn program(&self, name: &str, text: &str) {
        kit::write_program(self.at(name), text.as_bytes()).unwrap();
    }

    /// A file, with the directories that it is in.
    pub(super) fn write(&self, path: &str, text: &str) {
        fs::create_dir_all(self.at(path).parent().unwrap()).unwrap();
        fs::write(self.at(path), text).unwrap();
    }

    /// The text of a script whose paths are those of the node.
    pub(super) fn script(&self, path: &str) -> String {
        let place = |path: &str| format!("{}{path}", self.0.path().display());
        let script = ["/run/", "/etc/", "/usr/local/"]
            .into_iter()
            .fold(file(path), |script, part| script.replace(part, &place(part)));
        script.replace("/usr/bin/deb-systemd-helper", &place("/deb-systemd-helper"))
    }

    /// Runs a script of a package.
    pub(super) fn run(&self, path: &str, words: &[&str]) -> Output {
        let mut command = Command::new("sh");
        command.args(["-c", &self.script(path), path]).args(words);
        let programs = format!("{}:/usr/bin:/bin", self.0.path().display());
        command.env("PATH", programs).output().unwrap()
    }

    /// The output of a script that must succeed.
    pub(super) fn said(&self, path: &str, words: &[&str]) -> String {
        let output = self.run(path, words);
        assert!(output.status.success(), "{path} {words:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// The commands that have changed units since the last call.
    pub(super) fn asked(&self) -> String {
        let asked = fs::read_to_string(self.at("asked")).unwrap_or_default();
        let _ = fs::remove_file(self.at("asked"));
        asked.lines().filter(|line| !line.ends_with("daemon-reload")).collect::<Vec<_>>().join("\n")
    }
}
