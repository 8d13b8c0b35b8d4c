//! The native driver.

/// Whether `path` is a network namespace.
///
/// # Errors
/// The system's answer.
pub fn is_network_namespace(_path: &std::path::Path) -> std::io::Result<bool> {
    Ok(true)
}
