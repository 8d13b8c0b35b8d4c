//! Generates the wire types from `protos/`.

/// Generates the wire types.
pub fn generate() {}
