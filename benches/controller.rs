//! The controller's Create, Start and Stop through containerd: a real network namespace, no CNI.

use std::time::Instant;

use anyhow::{Context, Result};

use crate::Plan;
use crate::report::Report;
use crate::samples::{Samples, order};
use crate::setup::{BUILTIN, FLOOR, OURS, Setup};

pub(crate) async fn measure(setup: &mut Setup, plan: &Plan, report: &mut Report) -> Result<()> {
    let targets = setup.targets.clone();
    let mut homes = Vec::new();
    for target in &targets {
        homes.push((setup.controller(target), setup.home(target.name)?));
    }
    let mut starts = vec![Samples::default(); targets.len()];
    let mut stops = starts.clone();
    let mut both = starts.clone();
    for round in 0..=plan.calls {
        for index in order(round, targets.len()) {
            let (target, (controller, home)) = (&targets[index], &homes[index]);
            let id = setup.id();
            let request = setup.request(controller, target, &id, home.config())?;
            let created = Instant::now();
            controller.create_raw(&request).await.context(target.name)?;
            let begun = Instant::now();
            controller.start(&id).await.with_context(|| format!("{}: Start", target.name))?;
            let (started, with_create) = (begun.elapsed(), created.elapsed());
            let begun = Instant::now();
            controller.stop(&id).await.with_context(|| format!("{}: Stop", target.name))?;
            let stopped = begun.elapsed();
            controller.shutdown(&id).await.with_context(|| format!("{}: Shutdown", target.name))?;
            // The first round warms up.
            if round > 0 {
                starts[index].push(started);
                both[index].push(with_create);
                stops[index].push(stopped);
            }
        }
    }
    for (index, target) in targets.iter().enumerate() {
        report.median(format!("start_{}_ms", target.name), starts[index].median_ms());
        report.median(format!("create_and_start_{}_ms", target.name), both[index].median_ms());
        report.median(format!("stop_{}_ms", target.name), stops[index].median_ms());
        homes[index].1.clear()?;
    }
    report.ratio(
        "start_builtin_over_ours",
        &format!("start_{BUILTIN}_ms"),
        &format!("start_{OURS}_ms"),
    );
    report.ratio(
        "create_start_ours_over_floor",
        &format!("create_and_start_{OURS}_ms"),
        &format!("create_and_start_{FLOOR}_ms"),
    );
    report.ratio(
        "stop_builtin_over_ours",
        &format!("stop_{BUILTIN}_ms"),
        &format!("stop_{OURS}_ms"),
    );
    Ok(())
}
