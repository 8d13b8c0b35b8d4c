//! Real nodes for tests, demo and benches.
//!
//! A [`Node`] is one real containerd with everything of its own: root, state, sockets, pod network,
//! cgroup parent. It knows two CRI runtime handlers, [`Handler::Builtin`] and [`Handler::Ours`],
//! which differ in nothing but the sandboxer, so that the same pod can be run by both. Pods are
//! described with [`PodSpec`] and [`ContainerSpec`], run through containerd's CRI socket by
//! [`Cri`], and what they leave on the machine is read from the machine by [`Snapshot`], never
//! asked of a daemon. What they leave in containerd's store is asked of containerd.
//!
//! ```no_run
//! # async fn example() -> anyhow::Result<()> {
//! let node = kit::Node::start(kit::Options::default()).await?;
//! let before = node.snapshot()?;
//! let pod = node.run(kit::Handler::Builtin, kit::PodSpec::new("one")).await?;
//! let container = pod.run(kit::ContainerSpec::sleeping("main")).await?;
//! assert_eq!(container.sh("hostname").await?, "one\n");
//! pod.remove().await?;
//! node.settles_to(&before).await?;
//! # Ok(())
//! # }
//! ```
//!
//! Everything needs root. The parts (containerd itself and some packages) are fetched by
//! `tests/kit/fetch-parts`, which [`Node::start`] runs where they are missing.

pub mod controller;
pub mod cri;
pub mod grpc;
pub mod image;
pub mod machine;
pub mod metrics;
pub mod nri;
pub mod shim;
pub mod strace;

mod config;
mod container;
mod dice;
mod events;
mod forward;
mod left;
mod node;
mod parts;
mod pod;
mod privilege;
mod process;
mod program;
mod records;
mod snapshot;
mod teardown;
mod wait;

pub use container::{Container, ContainerSpec};
pub use cri::Cri;
pub use dice::Dice;
pub use events::Events;
pub use forward::port_forward;
pub use image::{PAUSE_IMAGE, PROBE, TEST_IMAGE, write_archive as write_images};
pub use left::{Inventory, Kind, Left};
pub use node::{Handler, Node, Options};
pub use parts::Parts;
pub use pod::{Pod, PodHome, PodSpec};
pub use privilege::{skip, skip_without_root};
pub use process::Process;
pub use program::write_program;
pub use snapshot::{Snapshot, Thing};
pub use wait::{fewer, patient, until};

/// The messages of NRI, and of containerd's lists.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic)]
pub mod proto {
    include!(concat!(env!("OUT_DIR"), "/proto/mod.rs"));
}
