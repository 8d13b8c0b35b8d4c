//! Writes the manual pages and the shell completions of a package into a directory.
//!
//! usage: cargo run --example package-files -- DIR

use std::fs::{self, File};
use std::io;
use std::path::Path;

use clap::CommandFactory as _;
use clap_complete::Shell;
use clap_mangen::Man;
use pause_sandboxer::cli::Cli;

/// Further sections of the main page, as roff.
const MORE: &str = "\
.SH FILES
.TP
.I /etc/pause-sandboxer/config.toml
Settings.
.TP
.I /etc/containerd/conf.d/pause-sandboxer.toml
Registers the sandboxer and the runtime handler runc-pause in containerd.
.TP
.I /run/pause-sandboxer
Sockets, records and private mounts; does not survive a reboot.
.TP
.I /usr/share/doc/pause-sandboxer
How to install, configure and operate it.
.SH SEE ALSO
.BR containerd (8),
.BR ctr (8),
.BR systemctl (1)
";

/// Writes all files into `dir`.
///
/// # Errors
/// A file that cannot be written.
pub fn write(dir: &Path) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    let mut command = Cli::command();
    for (shell, name) in [
        (Shell::Bash, "pause-sandboxer.bash"),
        (Shell::Zsh, "_pause-sandboxer"),
        (Shell::Fish, "pause-sandboxer.fish"),
    ] {
        let mut file = File::create(dir.join(name))?;
        clap_complete::generate(shell, &mut command, "pause-sandboxer", &mut file);
    }
    command.build();
    page(&command, dir)?;
    let main = dir.join("pause-sandboxer.8");
    fs::write(&main, fs::read_to_string(&main)? + MORE)
}

/// Writes the page of a command, and those of its own commands.
fn page(command: &clap::Command, dir: &Path) -> io::Result<()> {
    let name = command.get_display_name().unwrap_or(command.get_name()).to_owned();
    let man = Man::new(command.clone().name(name.clone())).section("8");
    man.render(&mut File::create(dir.join(format!("{name}.8")))?)?;
    command
        .get_subcommands()
        .filter(|command| command.get_name() != "help")
        .try_for_each(|command| page(command, dir))
}

#[allow(dead_code, reason = "the package's tests call write()")]
fn main() -> io::Result<()> {
    let dir = std::env::args_os().nth(1).ok_or_else(|| io::Error::other("usage: DIR"))?;
    write(Path::new(&dir))
}
