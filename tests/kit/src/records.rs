//! containerd's own records of pods, in the namespace of CRI: containers, tasks, sandboxes, leases,
//! and the snapshots that containers write to.

use containerd_api::framing::NAMESPACE as HEADER;

use crate::config::{Layout, NAMESPACE};
use crate::cri::{DEADLINE, decode, encode};
use crate::grpc::{Client, Status};
use crate::proto::records::{
    Kind, ListResponse, ListSnapshotsRequest, ListSnapshotsResponse, ListTasksResponse,
};
use crate::snapshot::Thing;

/// The kinds of record, and the method that lists them.
const LISTS: [(&str, &str); 3] = [
    ("container", "containerd.services.containers.v1.Containers/List"),
    ("sandbox", "containerd.services.sandbox.v1.Store/List"),
    ("lease", "containerd.services.leases.v1.Leases/List"),
];
const TASKS: &str = "containerd.services.tasks.v1.Tasks/List";
const SNAPSHOTS: &str = "containerd.services.snapshots.v1.Snapshots/List";

/// All of them. The committed snapshots are those of images, which no pod makes.
///
/// # Errors
/// containerd does not answer.
pub(crate) async fn all(layout: &Layout, snapshotter: &str) -> Result<Vec<Thing>, Status> {
    let client = Client::new(layout.containerd_socket()).header(HEADER, NAMESPACE);
    let mut records = Vec::new();
    let list = async |method| client.unary(method, Vec::new(), Some(DEADLINE)).await;
    let listed: ListTasksResponse = decode(&list(TASKS).await?)?;
    records.extend(listed.tasks.into_iter().map(|task| Thing::Record(task.id, "task")));
    for (kind, method) in LISTS {
        let listed: ListResponse = decode(&list(method).await?)?;
        records.extend(listed.entries.into_iter().map(|entry| Thing::Record(entry.id, kind)));
    }
    let request = ListSnapshotsRequest { snapshotter: snapshotter.into(), ..Default::default() };
    let mut answers = client.stream(SNAPSHOTS, encode(&request)?).await?;
    while let Some(answer) = answers.next().await? {
        let listed: ListSnapshotsResponse = decode(&answer)?;
        let of_containers = |kind| kind != Ok(Kind::COMMITTED);
        records.extend(
            listed
                .info
                .into_iter()
                .filter(|info| of_containers(info.kind.enum_value()))
                .map(|info| Thing::Record(info.name, "snapshot")),
        );
    }
    Ok(records)
}
