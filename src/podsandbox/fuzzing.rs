//! Entry points of the fuzzer in `fuzz/`: the check of a Create, what is reported of a sandbox, and
//! the record on disk.

use std::collections::BTreeMap;

use super::actor::Published;
use super::selinux::Selinux;
use super::{CreateRequest, Error, Phase};
use crate::config::Config;

pub use super::layout::Layout;
pub use super::oci_spec::describe;
pub use super::record::{Blob, Info, Record, Stage, Store, Unreadable, VERSION};
pub use super::status::config_json;

/// Checks a request on a node without SELinux.
///
/// # Errors
/// Why it is refused.
pub fn check(request: &CreateRequest, config: &Config) -> Result<Record, Error> {
    super::validate::check(request, config, "native", &Selinux::default()).map(|(record, _)| record)
}

/// The verbose information of a pod that runs.
///
/// # Errors
/// It cannot be written as JSON.
pub fn info(record: &Record, config: &Config) -> Result<BTreeMap<String, String>, Error> {
    let ready = Published { phase: Phase::Ready, pid: 4711, exit: None, failures: 0 };
    super::status::info(record, &ready, config)
}

/// The content of resolv.conf; `None`: a copy of the node's.
pub fn resolv_conf(record: &Record) -> Option<String> {
    record.files.dns.as_ref().map(super::files::Dns::resolv_conf)
}
