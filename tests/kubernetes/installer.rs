//! The DaemonSets that install and remove the sandboxer.

use crate::Run;

pub(crate) const CASES: &[(&str, Run)] = &[];
