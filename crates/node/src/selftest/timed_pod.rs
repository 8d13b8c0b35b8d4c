//! The pod of the test, with the times of its steps.

use std::pin::Pin;
use std::time::{Duration, Instant};

use super::pod::{PodPlan, TestPod, Timing};
use super::{Selftest, SelftestError, SelftestReport, after_removal, machine};
use base::error::{StepError, StepErrors};
use containerd_api::cri::CriClient;

/// Timeout for the resources of a removed pod to disappear.
const SETTLED: Duration = Duration::from_secs(15);

/// Polling interval of the check for leftover resources.
const INTERVAL: Duration = Duration::from_millis(100);

/// Maximum number of attempts: kubelet removes pods without an API object, such as the test pod.
const ATTEMPTS: usize = 5;

/// Runs the pod, and repeats that while another program ends it.
pub(super) async fn run(
    wanted: &Selftest,
    cri: &CriClient,
    plan: PodPlan,
    mut stop: Pin<&mut impl Future<Output = String>>,
    say: &mut dyn FnMut(String),
) -> SelftestReport {
    let handler = plan.handler.clone();
    let mut attempt = 0;
    loop {
        attempt += 1;
        let mut pod = match TestPod::new(cri.clone(), plan.clone()) {
            Ok(pod) => pod,
            Err(step) => return report(&handler, &[], Some(("make the pod's name", step.into()))),
        };
        let mut is_stopped = false;
        let done = tokio::select! {
            done = pod.run() => done,
            reason = stop.as_mut() => {
                is_stopped = true;
                Err(SelftestError(reason))
            }
        };
        let was_ended = done.is_err() && !is_stopped && pod.was_ended().await;
        let removed = remove_until_gone(wanted, &mut pod).await;
        if was_ended && removed.is_ok() && attempt < ATTEMPTS {
            say(format!(
                "another program, usually kubelet, stopped the test pod of {handler}; retrying \
                 (attempt {} of {ATTEMPTS})",
                attempt + 1
            ));
            continue;
        }
        let failed = after_removal(done.err(), removed).err();
        let failed = failed.map(|reason| (pod.last_step(), reason));
        return report(&handler, pod.timings(), failed);
    }
}

/// The times in a table, a row for each step; and the step that failed, and why.
fn report(
    handler: &str,
    timings: &[Timing],
    failed: Option<(&str, SelftestError)>,
) -> SelftestReport {
    let width = handler.len().max(10);
    let mut table = format!("{:<24}  {handler:>width$}\n", "STEP");
    for (step, time) in timings {
        let time = format!("{:.1} ms", time.as_secs_f64() * 1000.0);
        table += &format!("{step:<24}  {time:>width$}\n");
    }
    table += &match &failed {
        None => format!("{handler}: no leftover resources\n"),
        Some((step, _)) => format!("{handler}: failed in step {step}\n"),
    };
    let failed = failed.map(|(step, reason)| {
        SelftestError(format!("runtime handler {handler}, step {step}: {reason}"))
    });
    SelftestReport { table, failed }
}

/// Removes the pod, and waits until no resource on the machine has its name.
async fn remove_until_gone(wanted: &Selftest, pod: &mut TestPod) -> Result<(), StepErrors> {
    let begun = Instant::now();
    loop {
        let removed = pod.clean_up(&wanted.subject.config).await;
        let (words, paths) = pod.identity(&wanted.subject.config);
        let left = machine::traces(&words, &paths);
        if removed.is_ok() && left.is_empty() {
            return Ok(());
        }
        if begun.elapsed() > SETTLED {
            let mut steps = StepErrors::default();
            steps.check_all(removed);
            if !left.is_empty() {
                let left: Vec<String> = left.into_iter().collect();
                let reason = std::io::Error::other(left.join(", "));
                steps.check(Err(StepError::new("leftover resources", reason)));
            }
            return Err(steps);
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_a_row_for_each_step() {
        let ms = Duration::from_millis;
        let pod = |failed| report("runc-pause", &[("a", ms(1)), ("b", ms(1500))], failed);
        let shown = pod(None).table;
        let lines: Vec<Vec<&str>> =
            shown.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            lines[..3],
            [&["STEP", "runc-pause"][..], &["a", "1.0", "ms"], &["b", "1500.0", "ms"]]
        );
        assert!(shown.ends_with("\nrunc-pause: no leftover resources\n"), "{shown}");
        let failed = pod(Some(("b", SelftestError("no image".to_owned()))));
        let shown = failed.table;
        assert!(shown.ends_with("\nrunc-pause: failed in step b\n"), "{shown}");
        let failure = failed.failed.unwrap().to_string();
        assert_eq!(failure, "runtime handler runc-pause, step b: no image");
    }
}
