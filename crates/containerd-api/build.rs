//! Generates the wire types from `protos/`: messages of every file, and ttrpc services where a file
//! has one.

// Panicking is how a build script fails.
#![allow(clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};
use std::{env, fs};

use ttrpc_codegen::{Codegen, Customize, ProtobufCustomize};

/// The directory of the definitions, below the workspace.
const PROTOS: &str = "../../protos";

/// The files of `protos/` without their ending. The generated modules have these names, so no two
/// may be equal, and a file holds at most one service: the generator names handlers by method
/// alone.
const FILES: [&str; 10] = [
    "types",
    "controller",
    "store",
    "containers",
    "tasks",
    "cri",
    "inspect",
    "introspection",
    "cri_runtime",
    "image_store",
];

/// Generates one module per file and a `mod.rs` that names them all into `OUT_DIR/protos`.
fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=../../protos");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("protos");
    fs::create_dir_all(&out).unwrap_or_else(|e| panic!("mkdir {}: {e}", out.display()));
    Codegen::new()
        .inputs(FILES.map(|file| format!("{PROTOS}/{file}.proto")))
        .include(PROTOS)
        .out_dir(&out)
        .rust_protobuf()
        .rust_protobuf_customize(ProtobufCustomize::default().gen_mod_rs(false))
        .customize(Customize { async_all: true, ..Default::default() })
        .run()
        .unwrap_or_else(|e| panic!("generate protos/: {e}"));

    // A mod.rs of our own: the generated one has inner attributes, which include! refuses.
    let services = FILES.map(|file| format!("{file}_ttrpc"));
    let modules: String = FILES
        .iter()
        .copied()
        .chain(services.iter().map(String::as_str))
        .filter(|module| out.join(module).with_extension("rs").exists())
        .map(|module| format!("pub mod {module};\n"))
        .collect();
    write(&out.join("mod.rs"), &modules);
}

fn write(path: &Path, text: &str) {
    fs::write(path, text).unwrap_or_else(|e| panic!("write {}: {e}", path.display()));
}
