//! The runtime handlers of pods' shims, of which a node has few.

use std::io;
use std::sync::{Arc, Weak};

use containerd_shim_protos::shim::oci::Options;
use parking_lot::Mutex;
use protobuf::Message as _;
use protobuf::well_known_types::any::Any;

use crate::config::ContainerLimit;
use crate::error::{IoContext as _, StepError};

/// The runtime handler of a pod's shim.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Runtime {
    /// Runtime name, such as `io.containerd.runc.v2`, or an absolute path of a shim.
    pub name: String,
    /// The handler's options.
    pub options: Option<Any>,
    /// The pod has this project's own shim instead of the runtime's.
    pub own_shim: bool,
    /// The limits that the pod has chosen.
    pub limits: Vec<ContainerLimit>,
}

impl Runtime {
    /// The options, if they are runc's.
    ///
    /// # Errors
    /// They are malformed.
    pub(super) fn runc_options(&self) -> Result<Option<Options>, StepError> {
        match &self.options {
            Some(any) if any.type_url.ends_with("containerd.runc.v1.Options") => {
                Options::parse_from_bytes(&any.value)
                    .map(Some)
                    .map_err(io::Error::other)
                    .step("decode runtime options")
            }
            _ => Ok(None),
        }
    }
}

/// The runtimes of all pods, each once however many pods have it.
#[derive(Debug, Default)]
pub(super) struct Runtimes(Mutex<Vec<Weak<Runtime>>>);

impl Runtimes {
    /// The shared instance that equals `runtime`.
    pub(super) fn share(&self, runtime: Runtime) -> Arc<Runtime> {
        let mut known = self.0.lock();
        known.retain(|one| one.strong_count() > 0);
        if let Some(same) = known.iter().filter_map(Weak::upgrade).find(|one| **one == runtime) {
            return same;
        }
        let runtime = Arc::new(runtime);
        known.push(Arc::downgrade(&runtime));
        runtime
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_runtimes_share_one_value_until_the_last_pod_ends() {
        let runtimes = Runtimes::default();
        let runtime = |name: &str, value: &[u8]| Runtime {
            name: name.to_owned(),
            options: Some(Any {
                type_url: "type".to_owned(),
                value: value.to_vec(),
                ..Default::default()
            }),
            own_shim: false,
            limits: Vec::new(),
        };
        let share = |name: &str, value: &[u8]| runtimes.share(runtime(name, value));
        let first = share("runc", b"1");
        assert!(Arc::ptr_eq(&first, &share("runc", b"1")));
        let others = [share("runc", b"2"), share("kata", b"1")];
        assert!(others.iter().all(|other| **other != *first));
        drop((first, others));
        assert_eq!(*share("runc", b"1"), runtime("runc", b"1"));
        assert_eq!(runtimes.0.lock().len(), 1);
    }
}
