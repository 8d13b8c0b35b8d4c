//! The sandboxes of the running daemon, and whether CRI has the same pods.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::{Finding, Level};
use crate::client::{self, Sandbox, TIMEOUT};
use base::config::Config;
use containerd_api::cri::CriClient;
use containerd_api::protos::cri::PodSandboxState::SANDBOX_READY;
use containerd_api::protos::cri_runtime::PodSandbox;

const SUBJECT: &str = "sandboxes";

/// Most sandboxes that a finding names.
const NAMED: usize = 10;

/// A pod that starts or ends differs for a moment.
const MOMENT: Duration = Duration::from_secs(1);

/// How old a sandbox must be that CRI does not list. The garbage collection removes one that CRI
/// has forgotten within two intervals, unless it has a shim or got a call since the daemon started.
/// A minute more is for a slow node.
fn forgotten(config: &Config) -> Duration {
    Duration::from_secs(2 * u64::from(config.forgotten_interval) + 60)
}

/// How CRI and the daemon differ in a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Difference {
    /// It runs, and CRI lists it as NotReady.
    NotReadyInCri,
    /// It has ended, and CRI lists it as ready.
    ReadyInCri,
    /// CRI lists it as ready, and the daemon has no sandbox of it.
    UnknownHere,
    /// The daemon has a sandbox of it, and CRI does not list it.
    UnknownToCri,
}

/// Compares the daemon's sandboxes with CRI's pods of the runtime handlers `handlers`. `restart` is
/// the advice to restart containerd.
pub(super) async fn compare(config: &Config, handlers: &[String], restart: &str) -> Vec<Finding> {
    let differing = async || {
        let cri = CriClient::new(&config.containerd_address);
        let theirs = tokio::time::timeout(TIMEOUT, cri.pods()).await.ok()?.ok()?;
        let ours = client::list(config).await.ok()?;
        Some(differences(&ours, &theirs, handlers, SystemTime::now() - forgotten(config)))
    };
    // One that does not answer any more is reported by the next check.
    let mut found = differing().await.unwrap_or_default();
    if !found.is_empty() {
        tokio::time::sleep(MOMENT).await;
        let again = differing().await.unwrap_or_default();
        found.retain(|one| again.contains(one));
    }
    difference_findings(&found, restart)
}

/// A sandbox that was created before `forgotten` is removed by now if CRI has forgotten it.
fn differences(
    ours: &[Sandbox],
    theirs: &[PodSandbox],
    handlers: &[String],
    forgotten: SystemTime,
) -> BTreeSet<(Difference, String)> {
    let is_ready = |pod: &PodSandbox| pod.state.enum_value() == Ok(SANDBOX_READY);
    let in_cri: BTreeMap<&str, bool> =
        theirs.iter().map(|pod| (pod.id.as_str(), is_ready(pod))).collect();
    let known: BTreeSet<&str> = ours.iter().map(|one| one.id.as_str()).collect();
    let is_old = |one: &Sandbox| {
        let created = one.created_at.as_ref().and_then(|at| u64::try_from(at.seconds).ok());
        created.is_some_and(|seconds| UNIX_EPOCH + Duration::from_secs(seconds) < forgotten)
    };
    let here = ours.iter().filter_map(|one| {
        let difference = match (one.state.as_str(), in_cri.get(one.id.as_str())) {
            ("ready", Some(false)) => Difference::NotReadyInCri,
            ("not ready", Some(true)) => Difference::ReadyInCri,
            ("ready" | "not ready", None) if is_old(one) => Difference::UnknownToCri,
            _ => return None,
        };
        Some((difference, one.id.clone()))
    });
    // After a reboot CRI lists the pods of before as NotReady, until kubelet removes them.
    let missing = theirs
        .iter()
        .filter(|pod| is_ready(pod) && handlers.contains(&pod.runtime_handler))
        .filter(|pod| !known.contains(pod.id.as_str()));
    here.chain(missing.map(|pod| (Difference::UnknownHere, pod.id.clone()))).collect()
}

fn difference_findings(found: &BTreeSet<(Difference, String)>, restart: &str) -> Vec<Finding> {
    let reboot = "containerd has lost them, and kubelet does not remove them: drain and reboot the \
                  node";
    let kinds = [
        (
            Difference::NotReadyInCri,
            Level::Fail,
            "run, but CRI lists them as NotReady, so kubelet replaces them and none of their \
             containers can start",
            restart,
        ),
        (Difference::ReadyInCri, Level::Warn, "have ended, but CRI lists them as ready", restart),
        (Difference::UnknownHere, Level::Warn, "are ready for CRI, but have no sandbox", restart),
        (
            Difference::UnknownToCri,
            Level::Warn,
            "have a sandbox, but CRI does not list them",
            reboot,
        ),
    ];
    let finding = |(kind, level, fact, advice): &(Difference, Level, &str, &str)| {
        let ids: Vec<&str> =
            found.iter().filter(|(one, _)| one == kind).map(|(_, id)| id.as_str()).collect();
        (!ids.is_empty()).then(|| Finding {
            level: *level,
            subject: SUBJECT,
            fact: format!("{} pods {fact}: {}", ids.len(), named(&ids)),
            advice: (*advice).to_owned(),
        })
    };
    kinds.iter().filter_map(finding).collect()
}

/// Some of the ids.
fn named(ids: &[&str]) -> String {
    let more = if ids.len() > NAMED { ", …" } else { "" };
    let some: Vec<&str> = ids.iter().take(NAMED).copied().collect();
    format!("{}{more}", some.join(", "))
}

/// The findings about the daemon's sandboxes alone.
pub(super) fn examine(all: &[Sandbox]) -> Vec<Finding> {
    const LOG: &str = "see journalctl -u pause-sandboxer | grep ID for the failed step";
    type Condition = fn(&Sandbox) -> bool;
    // The condition, its fact, and the advice for the first sandbox of it, `ID`.
    let problems: [(Condition, &str, String); 3] = [
        (
            |one| one.state == "quarantined",
            "records are quarantined, so their pods cannot be removed",
            "pause-sandboxer list -o json shows the reason".to_owned(),
        ),
        (
            |one| one.state == "unknown",
            "have an unknown state",
            format!("{LOG}; pods keep running"),
        ),
        (|one| one.failed_cleanups > 0, "have a failed cleanup, which is retried", LOG.to_owned()),
    ];
    let mut findings = Vec::new();
    for (has_problem, fact, advice) in problems {
        let ids: Vec<&str> =
            all.iter().filter(|one| has_problem(one)).map(|one| one.id.as_str()).collect();
        if let Some(first) = ids.first() {
            let fact = format!("{} {fact}: {}", ids.len(), named(&ids));
            findings.push(Finding::warn(SUBJECT, fact, advice.replace("ID", first)));
        }
    }
    if findings.is_empty() {
        let ready = all.iter().filter(|one| one.state == "ready").count();
        findings.push(Finding::ok(SUBJECT, format!("{ready} of {} are ready", all.len())));
    }
    findings
}

#[cfg(test)]
mod tests {
    use containerd_api::protos::cri::PodSandboxState::SANDBOX_NOTREADY;
    use protobuf::MessageField;
    use protobuf::well_known_types::timestamp::Timestamp;

    use super::*;

    #[test]
    fn each_difference_between_cri_and_the_daemon_is_one_finding() {
        let ours = |id: &str, state: &str| Sandbox {
            id: id.to_owned(),
            state: state.to_owned(),
            created_at: MessageField::some(Timestamp { seconds: 1, ..Default::default() }),
            ..Default::default()
        };
        let theirs = |id: &str, is_ready: bool, handler: &str| PodSandbox {
            id: id.to_owned(),
            state: if is_ready { SANDBOX_READY } else { SANDBOX_NOTREADY }.into(),
            runtime_handler: handler.to_owned(),
            ..Default::default()
        };
        let here = ["ready", "not ready", "created", "starting", "unknown", "quarantined"];
        let mut here: Vec<Sandbox> = here.map(|state| ours(&format!("lone {state}"), state)).into();
        let mut young = ours("young", "ready");
        young.created_at.mut_or_insert_default().seconds = 1000;
        here.push(young);
        here.extend([ours("same", "ready"), ours("runs", "ready"), ours("ended", "not ready")]);
        let there = [
            theirs("same", true, "runc-pause"),
            theirs("runs", false, "runc-pause"),
            theirs("ended", true, "runc-pause"),
            theirs("missing", true, "runc-pause"),
            theirs("of before the reboot", false, "runc-pause"),
            theirs("of another sandboxer", true, "runc"),
        ];
        let forgotten = UNIX_EPOCH + Duration::from_secs(1000);
        let found = differences(&here, &there, &["runc-pause".to_owned()], forgotten);
        let found: Vec<_> = found.iter().map(|(kind, id)| (*kind, id.as_str())).collect();
        let expected = [
            (Difference::NotReadyInCri, "runs"),
            (Difference::ReadyInCri, "ended"),
            (Difference::UnknownHere, "missing"),
            (Difference::UnknownToCri, "lone not ready"),
            (Difference::UnknownToCri, "lone ready"),
        ];
        assert_eq!(found, expected);
        let found = found.iter().map(|(kind, id)| (*kind, (*id).to_owned())).collect();
        let findings = difference_findings(&found, "restart it");
        let levels: Vec<_> = findings.iter().map(|finding| finding.level).collect();
        assert_eq!(levels, [Level::Fail, Level::Warn, Level::Warn, Level::Warn], "{findings:?}");
        assert_eq!(findings[0].advice, "restart it");
        assert!(difference_findings(&BTreeSet::new(), "").is_empty());
    }

    #[test]
    fn many_ids_are_shortened() {
        assert_eq!(named(&["a", "b"]), "a, b");
        assert_eq!(named(&["a"; 11]), "a, a, a, a, a, a, a, a, a, a, …");
    }

    #[test]
    fn each_kind_of_trouble_is_one_finding() {
        let sandbox = |state: &str, failed_cleanups| Sandbox {
            id: format!("id-{state}"),
            state: state.to_owned(),
            failed_cleanups,
            ..Default::default()
        };
        assert_eq!(
            examine(&[sandbox("ready", 0), sandbox("not ready", 0)])[0].fact,
            "1 of 2 are ready"
        );
        let findings = examine(&[
            sandbox("quarantined", 0),
            sandbox("unknown", 0),
            sandbox("not ready", 3),
            sandbox("ready", 0),
        ]);
        assert_eq!(
            findings.iter().map(|finding| finding.level).collect::<Vec<_>>(),
            [Level::Warn; 3]
        );
        assert!(findings[2].fact.contains("id-not ready"), "{findings:?}");
    }
}
