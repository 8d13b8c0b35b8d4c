//! Why a verb of a sandbox was refused or failed.

use crate::error::StepError;

/// Why a verb was refused or failed. The wire's table gives each variant its RPC code.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// A field of the request is not what it must be.
    #[error("sandbox {id:?}: {field}: {reason}")]
    Invalid {
        /// The sandbox id as it was given, shortened.
        id: String,
        /// The field of the request.
        field: String,
        /// What is wrong with it.
        reason: String,
    },
    /// There is no such sandbox.
    #[error("sandbox {id}: not found")]
    NotFound {
        /// The sandbox id.
        id: String,
    },
    /// There is such a sandbox already.
    #[error("sandbox {id}: exists already")]
    AlreadyExists {
        /// The sandbox id.
        id: String,
    },
    /// The sandbox's state does not allow the verb.
    #[error("sandbox {id}: cannot {verb} in state {state}")]
    State {
        /// The sandbox id.
        id: String,
        /// The verb, lower case.
        verb: &'static str,
        /// The state, lower case.
        state: &'static str,
    },
    /// A step of the work failed. What a Create or Start had made has been undone.
    #[error("sandbox {id}: {verb}: {step}")]
    Step {
        /// The sandbox id.
        id: String,
        /// The verb, lower case.
        verb: &'static str,
        /// The step that failed.
        #[source]
        step: StepError,
    },
    /// Several steps of a cleanup failed.
    #[error("sandbox {id}: {verb}: {}", .steps.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Steps {
        /// The sandbox id.
        id: String,
        /// The verb, lower case.
        verb: &'static str,
        /// The steps that failed.
        steps: Vec<StepError>,
    },
    /// Work that was begun did not end within its time; it goes on in the background.
    #[error("sandbox {id}: {verb}: not done after {seconds} s, goes on in the background")]
    Timeout {
        /// The sandbox id.
        id: String,
        /// The verb, lower case.
        verb: &'static str,
        /// The time that it was given, seconds.
        seconds: u64,
    },
    /// The daemon is going down; the caller should try again.
    #[error("sandbox {id}: the sandboxer is stopping")]
    Stopping {
        /// The sandbox id.
        id: String,
    },
    /// A fault of the daemon itself, such as a task that panicked.
    #[error("sandbox {id}: {verb}: internal fault: {reason}")]
    Fault {
        /// The sandbox id.
        id: String,
        /// The verb, lower case.
        verb: &'static str,
        /// What happened.
        reason: String,
    },
}
