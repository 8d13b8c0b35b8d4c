//! Starts and kills a pause process, which tests what the kernel and its security modules permit.

use std::io;
use std::time::Duration;

use node::check::Finding;

use crate::config::Config;
use crate::error::{IoContext as _, StepError, StepErrors};
use crate::id::SandboxId;
use crate::pause::native::Native;
use crate::pause::{self, Driver, Plan};

const SUBJECT: &str = "pause process";

/// Timeout for the exit of the killed process; a process that takes longer hangs in the kernel.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// Starts a pause process with its own namespaces and a cgroup in the root of every hierarchy, and
/// kills it.
pub(super) async fn examine(config: &Config) -> Vec<Finding> {
    let advice = "the failed step shows what is not permitted: see the privileges above, and the \
                  security modules and seccomp filters of this process";
    let tried = async { attempt(&Native::new()?, &plan(config.restrict_oom_score_adj)?).await };
    vec![match tried.await {
        Ok(()) => Finding::ok(SUBJECT, "can be started and killed"),
        Err(steps) => {
            Finding::fail(SUBJECT, format!("cannot be started and killed: {steps}"), advice)
        }
    }]
}

fn plan(restricted: bool) -> Result<Plan, StepError> {
    let id = format!("pause-sandboxer-check-{}", std::process::id());
    let id = SandboxId::try_from(id).map_err(io::Error::other).step("make the sandbox id")?;
    Ok(Plan {
        hostname: "check".to_owned(),
        cgroup_parent: "/".to_owned(),
        oom_score_adj: pause::oom_score_adj(restricted),
        ..Plan::new(id)
    })
}

async fn attempt(driver: &dyn Driver, plan: &Plan) -> Result<(), StepErrors> {
    let pause = driver.start(plan)?;
    // The runtime has nothing else to do.
    pause.kill().and_then(|()| pause.thaw())?;
    let exit = tokio::time::timeout(EXIT_TIMEOUT, pause.exited()).await;
    let cleaned = driver.cleanup(&plan.cgroup_ref());
    exit.step("wait for the exit of the pause process")?;
    cleaned
}
