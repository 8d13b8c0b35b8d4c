//! Compiles the freestanding programs to `$OUT_DIR/pause` and `$OUT_DIR/selftest`, which the daemon
//! embeds.

use std::env;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::{Command, exit};

/// Names and sources.
const PROGRAMS: [(&str, &str); 2] =
    [("pause", "src/pause/program/main.rs"), ("selftest", "src/pause/program/selftest.rs")];

/// How the program is laid out: one segment that is read and executed and nothing writable but the
/// stack.
const LAYOUT: [&str; 7] = [
    "--build-id=none",
    "--no-eh-frame-hdr",
    "--gc-sections",
    "-znorelro",
    "-znoseparate-code",
    "-znoexecstack",
    "-zmax-page-size=4096",
];

/// Compiles the programs for cargo's target.
pub(crate) fn compile() {
    println!("cargo:rerun-if-changed=build/pause.rs");
    println!("cargo:rerun-if-changed=src/pause/program");
    for (name, source) in PROGRAMS {
        compile_one(name, source);
    }
}

/// Links with the toolchain's own rust-lld where there is one, so that a cross build needs no C
/// toolchain; else with the C compiler driver.
fn compile_one(name: &str, source: &str) {
    let rustc = variable("RUSTC");
    let target = variable("TARGET");
    let out = PathBuf::from(variable("OUT_DIR")).join(name);
    let arch = variable("CARGO_CFG_TARGET_ARCH");
    if !["x86_64", "aarch64"].iter().any(|known| arch == *known) {
        fail(&format!(
            "the pause program is written for x86_64 and aarch64, not for {}",
            arch.display()
        ));
    }
    let mut command = Command::new(&rustc);
    command
        .args(["--edition=2024", "--crate-type=bin", "--crate-name", name, source])
        .args(["-Dwarnings", "-Cpanic=abort", "-Copt-level=s", "-Cstrip=symbols", "-Cdebuginfo=0"])
        .args(["-Crelocation-model=static", "-Cforce-unwind-tables=no"])
        .arg("--target")
        .arg(&target)
        .arg("-o")
        .arg(&out);
    if let Some(lld) = rust_lld(&rustc, &variable("HOST")) {
        command.arg(joined("-Clinker=", lld.as_os_str())).arg("-Clinker-flavor=ld.lld");
        command.args([
            "-Clink-self-contained=no",
            "-Clink-arg=-static",
            "-Clink-arg=--no-rosegment",
        ]);
        command.args(LAYOUT.iter().map(|arg| format!("-Clink-arg={arg}")));
    } else {
        if let Some(linker) = env::var_os("RUSTC_LINKER") {
            command.arg(joined("-Clinker=", &linker));
        }
        command.args(["-Clink-arg=-nostartfiles", "-Clink-arg=-nostdlib", "-Clink-arg=-static"]);
        command.args(LAYOUT.iter().map(|arg| format!("-Clink-arg=-Wl,{arg}")));
    }
    match command.status() {
        Ok(status) if status.success() => {}
        Ok(status) => fail(&format!("compile {source}: {command:?}: {status}")),
        Err(e) => fail(&format!("compile {source}: run {}: {e}", rustc.display())),
    }
}

/// The linker that comes with rustup's toolchains.
fn rust_lld(rustc: &OsStr, host: &OsStr) -> Option<PathBuf> {
    let output = Command::new(rustc).args(["--print", "sysroot"]).output().ok()?;
    let sysroot = String::from_utf8(output.stdout).ok()?;
    let lld = Path::new(sysroot.trim()).join("lib/rustlib").join(host).join("bin/rust-lld");
    lld.is_file().then_some(lld)
}

fn joined(prefix: &str, value: &OsStr) -> OsString {
    let mut arg = OsString::from(prefix);
    arg.push(value);
    arg
}

fn variable(name: &str) -> OsString {
    env::var_os(name).unwrap_or_else(|| fail(&format!("cargo has not set {name}")))
}

fn fail(message: &str) -> ! {
    eprintln!("error: {message}");
    exit(1)
}
