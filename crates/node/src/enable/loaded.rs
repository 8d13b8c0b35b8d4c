//! The runtime handlers that the running containerd has loaded: those of its files at its start.

use toml::Table;

use super::runtime;
use crate::check::Subject;
use crate::check::containerd as merged_config;
use base::error::StepError;
use containerd_api::cri::CriClient;

/// The runtime handlers of the containerd that runs; empty if it does not name them.
///
/// # Errors
/// CRI does not answer, or its runtime is not ready.
pub(super) async fn of_cri(cri: &CriClient) -> Result<Vec<String>, String> {
    let status = cri.status().await.map_err(|step| step.to_string())?;
    let conditions = &status.status.conditions;
    // The network may be missing for reasons of the cluster.
    match conditions.iter().find(|condition| condition.type_ == "RuntimeReady") {
        Some(ready) if ready.status => {}
        _ => return Err("its runtime is not ready".to_owned()),
    }
    Ok(CriClient::handlers_of(status))
}

/// Whether the containerd that runs has a handler; false if CRI does not answer.
///
/// # Errors
/// A local step failed.
pub(super) fn has(subject: &Subject, handler: &str) -> Result<bool, StepError> {
    let cri = CriClient::new(&subject.config.containerd_address);
    let known = runtime()?.block_on(of_cri(&cri));
    Ok(known.is_ok_and(|known| known.iter().any(|name| name == handler)))
}

/// The handlers of the containerd that runs without those of its files.
pub(super) fn stale(
    before: Option<&Table>,
    subject: &Subject,
) -> Result<Option<Vec<String>>, StepError> {
    let cri = CriClient::new(&subject.config.containerd_address);
    let Ok(mut loaded) = runtime()?.block_on(of_cri(&cri)) else { return Ok(None) };
    // The files of which containerd makes no config do not show which they have.
    let files = before.map(|before| merged_config::all(before, &subject.config).all);
    loaded.retain(|name| {
        // The default handler has an entry without a name too.
        !name.is_empty() && files.as_ref().is_some_and(|files| !files.contains_key(name))
    });
    Ok(Some(loaded))
}
