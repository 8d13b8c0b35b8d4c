//! Wire messages to the types of the domain, and back.

use std::collections::{BTreeMap, HashMap};

use protobuf::MessageField;

use crate::podsandbox::{
    CreateRequest, Exit, Metric, Platform, SandboxInfo, StartResponse, StatusReport,
};
use crate::protos::controller::{
    ControllerCreateRequest, ControllerMetricsResponse, ControllerPlatformResponse,
    ControllerStartResponse, ControllerStatusResponse, ControllerWaitResponse,
};
use crate::protos::types;

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
        created_at: MessageField::some(started.created_at.into()),
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
        created_at: MessageField::some(report.created_at.into()),
        exited_at: report.exited_at.map(Into::into).into(),
        address: report.address,
        version: report.version,
        ..Default::default()
    }
}

pub(super) fn exit(exit: Exit) -> ControllerWaitResponse {
    ControllerWaitResponse {
        exit_status: exit.status,
        exited_at: MessageField::some(exit.at.into()),
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
        timestamp: MessageField::some(metric.timestamp.into()),
        id,
        data: MessageField::some(metric.data),
        ..Default::default()
    };
    ControllerMetricsResponse { metrics: MessageField::some(metric), ..Default::default() }
}
