//! Compiles the freestanding pause program.

/// Compiles the pause program.
pub fn compile() {}
