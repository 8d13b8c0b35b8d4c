//! Starts and kills a pause process: only then it shows what the kernel and its security modules
//! permit.

use std::time::Duration;

use super::Finding;
use crate::config::Config;
use crate::error::{IoContext as _, StepError};
use crate::pause::native::Native;
use crate::pause::{Driver, Namespace, Plan};

const SUBJECT: &str = "trial";

/// `oom_score_adj` of a pause (kubelet's `qos` policy for pod sandboxes).
const OOM_SCORE: i32 = -998;

/// A killed process that has not exited by then hangs in the kernel.
const PATIENCE: Duration = Duration::from_secs(10);

/// Starts a pause process with its own namespaces and a cgroup in the root of every hierarchy, and
/// kills it.
pub(super) fn examine(config: &Config) -> Vec<Finding> {
    let advice = "the step names what is not permitted: see the privileges above, and the security \
                  modules or filters of this process";
    let tried = Native::new()
        .and_then(|driver| attempt(&driver, &plan(own_score(), config.restrict_oom_score_adj)));
    vec![match tried {
        Ok(()) => Finding::ok(SUBJECT, "started and killed a pause process"),
        Err(step) => {
            Finding::fail(SUBJECT, format!("cannot start and kill a pause process: {step}"), advice)
        }
    }]
}

fn own_score() -> i32 {
    let text = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

fn plan(own_score: i32, restricted: bool) -> Plan {
    Plan {
        id: format!("pause-sandboxer-check-{}", std::process::id()).into(),
        netns: None,
        pid: Namespace::Private,
        ipc: Namespace::Private,
        uts: Namespace::Private,
        hostname: "check".to_owned(),
        userns: None,
        sysctls: Vec::new(),
        cgroup_parent: "/".to_owned(),
        oom_score_adj: if restricted { OOM_SCORE.max(own_score) } else { OOM_SCORE },
        selinux_label: String::new(),
    }
}

fn attempt(driver: &dyn Driver, plan: &Plan) -> Result<(), StepError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .step("make a runtime")?;
    runtime.block_on(async {
        let pause = driver.start(plan)?;
        // The runtime has nothing else to do.
        pause.kill().and_then(|()| pause.thaw())?;
        let exit = tokio::time::timeout(PATIENCE, pause.exited()).await;
        let cleaned = driver.cleanup(&plan.cgroup_ref()).map_err(|mut steps| steps.swap_remove(0));
        exit.map(drop).step("wait for the end of the pause process").and(cleaned)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_score_is_what_a_pod_would_get() {
        assert_eq!(plan(-999, false).oom_score_adj, -998);
        assert_eq!(plan(0, false).oom_score_adj, -998);
        assert_eq!(plan(0, true).oom_score_adj, 0);
        assert_eq!(plan(-999, true).oom_score_adj, -998);
    }
}
