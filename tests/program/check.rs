//! What `pause-sandboxer check` prints where containerd does not run: `tests/check` has nodes on
//! which it does.

use std::process::Command;

use kit::Parts;

use crate::daemon::{Scratch, program, stdout};

/// A containerd that does not run does not report its `PATH`.
#[test]
fn without_containerd_shims_are_looked_for_in_the_usual_directories() {
    let scratch = Scratch::new();
    let text = format!(
        "version = 3\n[proxy_plugins.mine]\ntype = \"sandbox\"\naddress = {:?}\n\
         [plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.fast]\n\
         runtime_type = \"io.containerd.youki.v1\"\nsandboxer = \"mine\"\n",
        scratch.path("run/s.sock")
    );
    let config = scratch.write("containerd.toml", &text);
    let mut command = program();
    command.arg("check").args(scratch.flags()).args(["--containerd-config", &config]);
    command.arg("--containerd").arg(Parts::get().unwrap().program("containerd"));
    let output = command.env("PATH", "/only").output().unwrap();
    let places = "not found in PATH (/opt/containerd/bin:/only:/usr/local/sbin:/usr/local/bin:\
        /usr/sbin:/usr/bin:/sbin:/bin) or next to the containerd binary";
    assert!(stdout(&output).contains(places), "{}", stdout(&output));
}

/// The output of `check` on a terminal, which `script` makes.
fn on_a_terminal(environment: &[(&str, &str)]) -> String {
    let check = format!("{} check --containerd-config /nowhere", program().get_program().display());
    let mut command = Command::new("script");
    command.args(["-qec", &check, "/dev/null"]).env_remove("NO_COLOR").env("TERM", "xterm");
    let output = command.envs(environment.iter().copied()).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_terminal_gets_colours_and_nothing_else_does() {
    const GREEN: &str = "\x1b[32mok\x1b[0m    kernel: ";
    let coloured = on_a_terminal(&[]);
    assert!(coloured.contains(GREEN) && coloured.contains("\x1b[31mFAIL\x1b[0m  "), "{coloured}");
    for environment in [("NO_COLOR", "1"), ("TERM", "dumb")] {
        let plain = on_a_terminal(&[environment]);
        assert!(plain.contains("ok    kernel: ") && !plain.contains('\x1b'), "{plain}");
    }
    // An empty value asks for nothing.
    assert!(on_a_terminal(&[("NO_COLOR", "")]).contains(GREEN));
    let piped = program().args(["check", "--containerd-config", "/nowhere"]).output().unwrap();
    assert!(stdout(&piped).contains("ok    kernel: ") && !stdout(&piped).contains('\x1b'));
}
