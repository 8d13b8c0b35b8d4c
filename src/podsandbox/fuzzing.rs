//! Entry points of the fuzzer in `fuzz/`: the check of a Create, and what is reported of a sandbox.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::actor::Published;
use super::layout::Layout;
use super::selinux::Selinux;
use super::{CreateRequest, Error, Phase};
use crate::config::Config;

pub use super::record::Record;

/// Checks a request on a node without SELinux.
///
/// # Errors
/// Why it is refused.
pub fn check(request: &CreateRequest, config: &Config) -> Result<Record, Error> {
    let checked = super::validate::check(request, config, &Selinux::default(), true);
    checked.map(|checked| checked.record)
}

/// The OCI spec of a pod, as JSON.
///
/// # Errors
/// Why there is none.
pub fn describe(record: &Record, config: &Config) -> Result<Vec<u8>, String> {
    let pod = record.decode_config().map_err(|e| e.to_string())?;
    let described = super::oci_spec::describe(record, &pod, &Arc::new(Layout::new(config)), config);
    described.map(|described| described.spec.into()).map_err(|e| e.to_string())
}

/// The verbose information of a pod that runs.
///
/// # Errors
/// It cannot be written as JSON.
pub fn info(record: &Record, config: &Config) -> Result<BTreeMap<String, String>, Error> {
    let ready = Published { phase: Phase::Ready, pid: 4711, exit: None, failures: 0 };
    super::status::info(record, &ready, &Arc::new(Layout::new(config)), config)
}

/// The content of resolv.conf; `None`: a copy of the node's.
pub fn resolv_conf(record: &Record) -> Option<String> {
    record.files.dns.as_ref().map(super::files::Dns::resolv_conf)
}
