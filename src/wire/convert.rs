//! Wire messages to the types of the domain, and back.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use protobuf::MessageField;
use protobuf::well_known_types::timestamp::Timestamp;

use crate::podsandbox::{
    CreateRequest, Exit, Metric, Platform, SandboxInfo, StartResponse, StatusReport,
};
use crate::protos::controller::{
    ControllerCreateRequest, ControllerMetricsResponse, ControllerPlatformResponse,
    ControllerStartResponse, ControllerStatusResponse, ControllerWaitResponse,
};
use crate::protos::types;

/// A time as seconds and nanoseconds after the epoch; the nanoseconds count forward also before it.
pub(super) fn timestamp(time: SystemTime) -> Timestamp {
    let (seconds, nanos) = match time.duration_since(UNIX_EPOCH) {
        Ok(after) => (i64::try_from(after.as_secs()).unwrap_or(i64::MAX), after.subsec_nanos()),
        Err(e) => {
            let before = e.duration();
            let whole = before.as_secs() + u64::from(before.subsec_nanos() > 0);
            let rest = Duration::from_secs(whole) - before;
            (i64::try_from(whole).map_or(i64::MIN, |whole| -whole), rest.subsec_nanos())
        }
    };
    // Below 10^9, so it fits.
    Timestamp { seconds, nanos: nanos as i32, ..Default::default() }
}

fn hashed(map: BTreeMap<String, String>) -> HashMap<String, String> {
    map.into_iter().collect()
}

pub(super) fn sandbox_info(sandbox: types::Sandbox) -> SandboxInfo {
    let runtime = sandbox.runtime.into_option().unwrap_or_default();
    SandboxInfo {
        runtime_name: runtime.name,
        runtime_options: runtime.options.into_option(),
        labels: sandbox.labels.into_iter().collect(),
        extensions: sandbox.extensions.into_iter().collect(),
    }
}

/// `rootfs` and `annotations` are for sandboxes with a root of their own; CRI leaves them empty.
pub(super) fn create(request: ControllerCreateRequest) -> CreateRequest {
    CreateRequest {
        id: request.sandbox_id,
        options: request.options.into_option(),
        netns_path: request.netns_path,
        sandbox: request.sandbox.into_option().map(sandbox_info),
    }
}

pub(super) fn started(id: String, started: StartResponse) -> ControllerStartResponse {
    ControllerStartResponse {
        sandbox_id: id,
        pid: started.pid,
        created_at: MessageField::some(timestamp(started.created_at)),
        labels: hashed(started.labels),
        address: started.address,
        version: started.version,
        spec: started.spec.into(),
        ..Default::default()
    }
}

pub(super) fn status(id: String, report: StatusReport) -> ControllerStatusResponse {
    ControllerStatusResponse {
        sandbox_id: id,
        pid: report.pid,
        state: report.state.to_owned(),
        info: hashed(report.info),
        created_at: MessageField::some(timestamp(report.created_at)),
        exited_at: MessageField::from_option(report.exited_at.map(timestamp)),
        address: report.address,
        version: report.version,
        ..Default::default()
    }
}

pub(super) fn exit(exit: Exit) -> ControllerWaitResponse {
    ControllerWaitResponse {
        exit_status: exit.status,
        exited_at: MessageField::some(timestamp(exit.at)),
        ..Default::default()
    }
}

pub(super) fn platform(platform: Platform) -> ControllerPlatformResponse {
    let platform = types::Platform {
        os: platform.os.to_owned(),
        architecture: platform.architecture.to_owned(),
        variant: platform.variant.to_owned(),
        ..Default::default()
    };
    ControllerPlatformResponse { platform: MessageField::some(platform), ..Default::default() }
}

/// containerd names a metric by the id it belongs to.
pub(super) fn metric(id: String, metric: Metric) -> ControllerMetricsResponse {
    let metric = types::Metric {
        timestamp: MessageField::some(timestamp(metric.timestamp)),
        id,
        data: MessageField::some(metric.data),
        ..Default::default()
    };
    ControllerMetricsResponse { metrics: MessageField::some(metric), ..Default::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_and_after_the_epoch() {
        let parts = |time| (timestamp(time).seconds, timestamp(time).nanos);
        assert_eq!(parts(UNIX_EPOCH), (0, 0));
        assert_eq!(
            parts(UNIX_EPOCH + Duration::new(1_700_000_000, 999_999_999)),
            (1_700_000_000, 999_999_999)
        );
        assert_eq!(parts(UNIX_EPOCH - Duration::from_secs(2)), (-2, 0));
        assert_eq!(parts(UNIX_EPOCH - Duration::from_millis(1500)), (-2, 500_000_000));
    }
}
