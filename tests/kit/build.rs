//! Generates the messages that the kit speaks and builds the program that runs in its images.

use std::path::PathBuf;
use std::process::Command;
use std::{env, fs};

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    messages(&out.join("proto"));
    probe(&out.join("probe"));
}

/// Generates the messages that only the tests speak, by the parser that needs no protoc.
fn messages(out: &PathBuf) {
    println!("cargo:rerun-if-changed=protos");
    fs::create_dir_all(out).expect("make the directory of the generated messages");
    protobuf_codegen::Codegen::new()
        .pure()
        .include("protos")
        .input("protos/nri.proto")
        .input("protos/records.proto")
        .customize(protobuf_codegen::Customize::default().gen_mod_rs(false))
        .out_dir(out)
        .run()
        .expect("generate the messages");
    // The generated mod.rs has inner attributes, which include!() refuses.
    fs::write(out.join("mod.rs"), "pub mod nri;\npub mod records;\n")
        .expect("write mod.rs of the messages");
}

/// The program of the images: static, so that it runs in a root of its own.
fn probe(out: &PathBuf) {
    println!("cargo:rerun-if-changed=probe/main.rs");
    let mut rustc = Command::new(env::var_os("RUSTC").expect("cargo sets RUSTC"));
    rustc
        .args(["--edition=2024", "--crate-type=bin", "--crate-name=probe", "probe/main.rs"])
        .args(["-Ctarget-feature=+crt-static", "-Copt-level=s", "-Cpanic=abort", "-Cstrip=symbols"])
        .arg("--target")
        .arg(env::var_os("TARGET").expect("cargo sets TARGET"))
        .arg("-o")
        .arg(out);
    if let Some(linker) = env::var_os("RUSTC_LINKER") {
        rustc.arg("-C").arg(format!("linker={}", linker.to_string_lossy()));
    }
    let status = rustc.status().expect("run rustc");
    assert!(status.success(), "building the probe failed");
}
