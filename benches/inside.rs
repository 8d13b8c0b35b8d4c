//! The daemon's own time for Start and Stop, without any socket: its controller in this process,
//! beside the kernel's steps.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use kit::controller::{CONFIG_TYPE, any};
use pause_sandboxer::config::Config;
use pause_sandboxer::controller::{Controller, SandboxService};
use pause_sandboxer::pause::native::Native;
use pause_sandboxer::podsandbox::{CreateRequest, Environment, SandboxInfo};
use protobuf::Message;

use crate::report::Report;
use crate::samples::Samples;
use crate::setup::Setup;
use crate::{Plan, kernel};

/// The daemon's inside.
pub(crate) struct Inside {
    controller: Arc<Controller>,
    config: Vec<u8>,
}

impl Inside {
    /// A controller with a state directory of its own on the node.
    pub(crate) async fn open(setup: &Setup, home: &kit::PodHome) -> Result<Self> {
        let layout = setup.node.layout();
        let config = Config {
            state_dir: layout.state().join("bench-inside"),
            containerd_root: layout.root(),
            containerd_state: layout.state(),
            containerd_address: layout.containerd_socket(),
            restrict_oom_score_adj: true,
            ..Config::default()
        };
        std::fs::create_dir_all(&config.state_dir)?;
        let driver = Arc::new(Native::new()?.for_state_dir(&config.state_dir));
        let own = pause_sandboxer::process::inheritance::Inheritance::read("self")?;
        let environment = Arc::new(Environment::new(config, driver, own, None)?);
        Ok(Self {
            controller: Controller::open(environment).await?,
            config: home.config().write_to_bytes()?,
        })
    }

    /// One sandbox from Create to Shutdown; how long Create, Start and Stop took.
    pub(crate) async fn cycle(&self, id: String, netns_path: String) -> Result<[Duration; 3]> {
        let request = self.request(&id, netns_path);
        let controller = Arc::clone(&self.controller);
        // On a worker, as a call of the wire is.
        let cycle = tokio::spawn(async move {
            let begun = Instant::now();
            controller.create(request).await?;
            let created = begun.elapsed();
            let begun = Instant::now();
            controller.start(&id).await?;
            let started = begun.elapsed();
            let begun = Instant::now();
            controller.stop(&id).await?;
            let stopped = begun.elapsed();
            controller.shutdown(&id).await?;
            anyhow::Ok([created, started, stopped])
        });
        cycle.await?.context("a sandbox of the controller in this process")
    }

    fn request(&self, id: &str, netns_path: String) -> CreateRequest {
        CreateRequest {
            id: id.into(),
            options: Some(any(CONFIG_TYPE, self.config.clone())),
            netns_path,
            sandbox: Some(SandboxInfo {
                runtime_name: "io.containerd.runc.v2".into(),
                ..SandboxInfo::default()
            }),
        }
    }

    /// Leaves nothing mounted.
    pub(crate) async fn close(self) {
        self.controller.drain().await;
    }
}

pub(crate) async fn measure(setup: &mut Setup, plan: &Plan, report: &mut Report) -> Result<()> {
    let home = setup.home("inside")?;
    let inside = Inside::open(setup, &home).await?;
    let steps = kernel::Steps::prepare(setup, "inside")?;
    let mut own = vec![Samples::default(); 3];
    let (mut kernel, mut kernel_stop) = (Samples::default(), Samples::default());
    let mut parts = vec![Samples::default(); kernel::PARTS.len()];
    for round in 0..=plan.fast {
        let id = setup.id();
        let network = setup.network(&id);
        let straight = {
            let (steps, network) = (steps.clone(), network.clone());
            async move {
                let cycle = tokio::task::spawn_blocking(move || steps.cycle(&network));
                anyhow::Ok(cycle.await??)
            }
        };
        let (times, straight) = if round % 2 == 0 {
            let times = inside.cycle(id, network).await?;
            (times, straight.await?)
        } else {
            let straight = straight.await?;
            (inside.cycle(id, network).await?, straight)
        };
        if round > 0 {
            own.iter_mut().zip(times).for_each(|(samples, time)| samples.push(time));
            kernel.push(straight.start());
            kernel_stop.push(straight.stop);
            parts.iter_mut().zip(straight.parts).for_each(|(samples, time)| samples.push(time));
        }
    }
    inside.close().await;
    home.clear()?;
    for (what, samples) in ["create", "start", "stop"].iter().zip(&own) {
        report.median(format!("{what}_inside_ours_us"), samples.median_us());
        report.p99(format!("{what}_inside_ours_us"), samples.p99_us());
    }
    report.median("kernel_start_us".into(), kernel.median_us());
    report.median("kernel_stop_us".into(), kernel_stop.median_us());
    report.p99("kernel_start_us".into(), kernel.p99_us());
    for (part, samples) in kernel::PARTS.iter().zip(&parts) {
        report.median(format!("kernel_part_{part}_us"), samples.median_us());
    }
    report.ratio("start_ours_over_kernel", "start_inside_ours_us", "kernel_start_us");
    Ok(())
}
