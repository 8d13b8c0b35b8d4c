//! The program of this package; all of it is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    runc_shim::main()
}
