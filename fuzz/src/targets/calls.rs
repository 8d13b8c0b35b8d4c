//! Every call that is served, without the frames around it: the first byte chooses the method, the
//! rest is the message.

use std::sync::{Arc, LazyLock};

use pause_sandboxer::protos::{controller as c, inspect as i, types};
use pause_sandboxer::wire::{Code, Status, fuzzing};
use protobuf::{Message, MessageField};
use tokio::runtime::Runtime;

use super::{Seeds, assert_told};
use crate::service::{Asked, Fake, any};

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    let builder = &mut tokio::runtime::Builder::new_current_thread();
    builder.enable_time().start_paused(true).build().expect("a runtime")
});

/// One method: its path, and how a message of its request is tried.
struct Method {
    path: &'static str,
    run: fn(&str, &[u8]),
}

/// A service's methods by request, answer and what of the request names the sandbox.
macro_rules! methods {
    ($($service:literal {
        $($method:literal $request:ty => $answer:ty: $id:ident $check:expr;)+
    })+) => {
        const METHODS: &[Method] = &[$($(Method {
            path: concat!($service, "/", $method),
            run: |path, message| {
                let check: fn(&$request, &Asked) = $check;
                one::<$request, $answer>(path, message, |request| &request.$id, check);
            },
        },)+)+];
    };
}

methods! {
    "containerd.services.sandbox.v1.Controller" {
        "Create" c::ControllerCreateRequest => c::ControllerCreateResponse: sandbox_id created;
        "Start" c::ControllerStartRequest => c::ControllerStartResponse: sandbox_id |_, _| {};
        "Platform" c::ControllerPlatformRequest
            => c::ControllerPlatformResponse: sandbox_id |_, _| {};
        "Stop" c::ControllerStopRequest => c::ControllerStopResponse: sandbox_id |_, _| {};
        "Wait" c::ControllerWaitRequest => c::ControllerWaitResponse: sandbox_id |_, _| {};
        "Status" c::ControllerStatusRequest => c::ControllerStatusResponse: sandbox_id |_, _| {};
        "Shutdown" c::ControllerShutdownRequest
            => c::ControllerShutdownResponse: sandbox_id |_, _| {};
        "Metrics" c::ControllerMetricsRequest => c::ControllerMetricsResponse: sandbox_id |_, _| {};
        "Update" c::ControllerUpdateRequest => c::ControllerUpdateResponse: sandbox_id updated;
    }
    "pause_sandboxer.v1.Inspect" {
        "List" i::ListRequest => i::ListResponse: after |_, _| {};
    }
}

pub fn run(input: &[u8]) {
    let Some((method, message)) = input.split_first() else { return };
    let method = &METHODS[usize::from(*method) % METHODS.len()];
    (method.run)(method.path, message);
}

fn one<Q: Message, A: Message>(
    path: &str,
    message: &[u8],
    id: fn(&Q) -> &String,
    check: fn(&Q, &Asked),
) {
    let sandboxes = Arc::new(Fake::default());
    let answer = RUNTIME.block_on(fuzzing::handle_call(Arc::clone(&sandboxes), path, message));
    let asked = sandboxes.take();
    if let Err(Status { code, message }) = &answer {
        assert_ne!(*code, Code::OK);
        assert_told(message);
    }
    let Ok(request) = Q::parse_from_bytes(message) else {
        assert_eq!(answer.expect_err("it is malformed").code, Code::INVALID_ARGUMENT);
        return assert_eq!(asked.calls, 0, "a malformed message has reached a handler");
    };
    let again = Q::parse_from_bytes(&request.write_to_bytes().expect("it is encoded"))
        .expect("it is decoded again");
    // Not the bytes: maps have no order, and a NaN is no equal of itself; these messages have no
    // numbers that could be one.
    assert!(again == request, "{path}: it became another by encoding and decoding");
    match answer {
        Ok(bytes) => drop(A::parse_from_bytes(&bytes).expect("the answer is of its type")),
        // Refused before any handler.
        Err(Status { code: Code::INVALID_ARGUMENT, .. }) if asked.calls == 0 => return,
        Err(_) => {}
    }
    assert_eq!((asked.calls, &asked.id), (1, id(&request)), "{path}");
    check(&request, &asked);
}

fn created(request: &c::ControllerCreateRequest, asked: &Asked) {
    let create = asked.create.as_ref().expect("Create was called");
    assert_eq!(create.options.as_ref(), request.options.as_ref());
    assert_eq!(create.netns_path, request.netns_path);
    assert_eq!(create.sandbox.is_some(), request.sandbox.is_some());
}

fn updated(request: &c::ControllerUpdateRequest, asked: &Asked) {
    let (info, fields) = asked.update.as_ref().expect("Update was called");
    assert_eq!(*fields, request.fields);
    assert_eq!(info.labels.len(), request.sandbox.labels.len());
    for (key, extension) in &request.sandbox.extensions {
        assert_eq!(info.extensions.get(key), Some(extension));
    }
}

/// A message of a method, as an input of this target.
fn call(method: &str, message: &impl Message) -> (String, Vec<u8>) {
    let index = METHODS.iter().position(|known| known.path.ends_with(method)).expect("a method");
    let mut bytes = vec![index as u8];
    message.write_to_vec(&mut bytes).expect("it is encoded");
    (method.replace('/', "-"), bytes)
}

pub fn seeds() -> Seeds {
    let id = || "6f1c2a9be0d4".to_owned();
    let sandbox = || types::Sandbox {
        sandbox_id: id(),
        runtime: MessageField::some(types::sandbox::Runtime {
            name: "io.containerd.runc.v2".into(),
            options: MessageField::some(any("containerd.runc.v1.Options", b"\x48\x01")),
            ..Default::default()
        }),
        labels: [("io.cri-containerd.kind".into(), "sandbox".into())].into(),
        extensions: [("metadata".into(), any("m", b"{\"Version\":\"v1\"}"))].into(),
        ..Default::default()
    };
    let mut seeds = vec![
        call(
            "Controller/Create",
            &c::ControllerCreateRequest {
                sandbox_id: id(),
                options: MessageField::some(any("runtime.v1.PodSandboxConfig", b"\x12\x05web-0")),
                netns_path: "/run/netns/cni-1".into(),
                sandbox: MessageField::some(sandbox()),
                ..Default::default()
            },
        ),
        call(
            "Controller/Update",
            &c::ControllerUpdateRequest {
                sandbox_id: id(),
                sandbox: MessageField::some(sandbox()),
                fields: vec!["extensions.metadata".into(), "labels".into()],
                ..Default::default()
            },
        ),
        call(
            "Controller/Status",
            &c::ControllerStatusRequest { sandbox_id: id(), verbose: true, ..Default::default() },
        ),
        call(
            "Controller/Wait",
            &c::ControllerWaitRequest { sandbox_id: "wait".into(), ..Default::default() },
        ),
        call(
            "Controller/Stop",
            &c::ControllerStopRequest { sandbox_id: id(), timeout_secs: 9, ..Default::default() },
        ),
        call("Inspect/List", &i::ListRequest { after: id(), ..Default::default() }),
    ];
    // The others have an id alone; each fails in a way of its own.
    for (index, method) in METHODS.iter().enumerate() {
        let mut bytes = vec![index as u8, 0x0a, 4];
        bytes.extend(format!("{}abc", index % 10).bytes());
        let (service, method) = method.path.rsplit_once('/').expect("a path");
        seeds.push((
            format!("id-{}-{method}", service.rsplit('.').next().unwrap_or_default()),
            bytes,
        ));
    }
    seeds
}
