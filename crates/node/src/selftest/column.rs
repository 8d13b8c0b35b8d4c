//! The pod of one runtime handler, with the times of its steps: a column of the table.

use std::pin::Pin;
use std::time::{Duration, Instant};

use super::pod::{PodPlan, TestPod, Timing};
use super::{Selftest, SelftestError, after_removal, machine};
use base::error::{StepError, StepErrors};
use containerd_api::cri::CriClient;

/// Timeout for the resources of a removed pod to disappear.
const SETTLED: Duration = Duration::from_secs(15);

/// Polling interval of the check for leftover resources.
const INTERVAL: Duration = Duration::from_millis(100);

/// Maximum number of attempts: kubelet removes pods without an API object, such as the test pod.
const ATTEMPTS: usize = 5;

/// The outcome of one handler's pod.
pub(super) struct Column {
    handler: String,
    timings: Vec<Timing>,
    /// The step that failed, and why.
    pub(super) failed: Option<(&'static str, SelftestError)>,
}

impl Column {
    /// The failure of its pod.
    pub(super) fn failure(self) -> Option<SelftestError> {
        let (step, reason) = self.failed?;
        Some(SelftestError(format!("runtime handler {}, step {step}: {reason}", self.handler)))
    }
}

/// One handler's pod, repeated while another program ends it.
pub(super) async fn column(
    wanted: &Selftest,
    cri: &CriClient,
    plan: PodPlan,
    mut stop: Pin<&mut impl Future<Output = String>>,
    say: &mut dyn FnMut(String),
) -> Column {
    let handler = plan.handler.clone();
    let mut attempt = 0;
    loop {
        attempt += 1;
        let mut pod = match TestPod::new(cri.clone(), plan.clone()) {
            Ok(pod) => pod,
            Err(step) => {
                let failed = Some(("make the pod's name", step.into()));
                return Column { handler, timings: Vec::new(), failed };
            }
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
        let step = pod.last_step();
        let failed = after_removal(done.err(), removed).err().map(|reason| (step, reason));
        return Column { handler, timings: pod.timings().to_vec(), failed };
    }
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

/// The times in a table: a row for each step of the first column.
pub(super) fn table(columns: &[Column]) -> String {
    let width = columns.iter().map(|column| column.handler.len()).max().unwrap_or_default().max(10);
    let mut text = format!("{:<24}", "STEP");
    for column in columns {
        text += &format!("  {:>width$}", column.handler);
    }
    text.push('\n');
    for (step, _) in columns.first().map_or(&[][..], |first| &first.timings) {
        text += &format!("{step:<24}");
        for column in columns {
            let time = column.timings.iter().find(|(name, _)| name == step);
            let time = time.map(|(_, time)| format!("{:.1} ms", time.as_secs_f64() * 1000.0));
            text += &format!("  {:>width$}", time.unwrap_or_else(|| "-".to_owned()));
        }
        text.push('\n');
    }
    for column in columns {
        match &column.failed {
            None => text += &format!("{}: no leftover resources\n", column.handler),
            Some((step, _)) => text += &format!("{}: failed in step {step}\n", column.handler),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_a_row_for_each_step() {
        let column = |handler: &str, timings: &[Timing], failed| Column {
            handler: handler.to_owned(),
            timings: timings.to_vec(),
            failed,
        };
        let ms = Duration::from_millis;
        let failed = || SelftestError("no image".to_owned());
        let columns = [
            column("runc-pause", &[("a", ms(1)), ("b", ms(1500))], None),
            column("runc", &[("a", ms(20))], Some(("b", failed()))),
        ];
        let shown = table(&columns);
        let lines: Vec<Vec<&str>> =
            shown.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["STEP", "runc-pause", "runc"]);
        assert_eq!(lines[1], ["a", "1.0", "ms", "20.0", "ms"]);
        assert_eq!(lines[2], ["b", "1500.0", "ms", "-"]);
        let end = "runc-pause: no leftover resources\nrunc: failed in step b\n";
        assert!(shown.ends_with(end), "{shown}");
        // The second handler's failure is one of the test.
        let failed = columns.into_iter().find_map(Column::failure).unwrap();
        assert_eq!(failed.to_string(), "runtime handler runc, step b: no image");
    }
}
