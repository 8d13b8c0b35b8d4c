//! What Status tells of a sandbox.

use std::collections::BTreeMap;

use super::Error;
use super::owner::Published;
use super::record::Record;
use super::state::Phase;
use crate::config::Config;

/// The state's name as CRI reads it.
pub fn state(phase: Phase) -> &'static str {
    match phase {
        Phase::Ready => "SANDBOX_READY",
        Phase::Unknown => "SANDBOX_UNKNOWN",
        Phase::Created | Phase::Starting | Phase::NotReady | Phase::Gone => "SANDBOX_NOTREADY",
    }
}

/// The verbose information.
///
/// # Errors
/// Where the recorded config cannot be decoded.
pub fn info(_record: &Record, _published: &Published, _config: &Config) -> Result<BTreeMap<String, String>, Error> {
    Ok(BTreeMap::new())
}
