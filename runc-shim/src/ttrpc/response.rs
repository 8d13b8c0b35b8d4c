//! Responses of calls.

use containerd_shim_protos::api::{self, StateResponse, Status};
use protobuf::well_known_types::any::Any;
use protobuf::{EnumOrUnknown, Message, MessageField};

use crate::error::Error;
use crate::exits::Exit;

/// The result of a call: the encoded response; `None`: the call is answered later.
pub type Answer = Result<Option<Vec<u8>>, Error>;

/// The answer with this response.
pub fn now(message: &impl Message) -> Answer {
    Ok(Some(message.write_to_bytes()?))
}

/// The answer with an empty response.
pub fn empty() -> Answer {
    Ok(Some(Vec::new()))
}

/// The answer to a Create.
pub fn created(pid: u32) -> Answer {
    now(&api::CreateTaskResponse { pid, ..Default::default() })
}

/// The answer to a Start.
pub fn started(pid: u32) -> Answer {
    now(&api::StartResponse { pid, ..Default::default() })
}

/// The response to a Delete.
pub fn deleted(pid: u32, exit: Option<Exit>) -> api::DeleteResponse {
    let mut response = api::DeleteResponse { pid, ..Default::default() };
    if let Some(exit) = exit {
        response.exit_status = exit.status;
        response.exited_at = MessageField::some(exit.at());
    }
    response
}

/// The answer to a Wait.
pub fn waited(exit: Exit) -> api::WaitResponse {
    let mut response = api::WaitResponse::new();
    response.exit_status = exit.status;
    response.exited_at = MessageField::some(exit.at());
    response
}

/// The response to State, without streams.
pub fn state(
    id: &str,
    bundle: String,
    pid: u32,
    status: Status,
    exit: Option<Exit>,
) -> StateResponse {
    let mut response = StateResponse::new();
    (response.id, response.bundle, response.pid) = (id.to_owned(), bundle, pid);
    response.status = EnumOrUnknown::new(status);
    if let Some(exit) = exit {
        response.exit_status = exit.status;
        response.exited_at = MessageField::some(exit.at());
    }
    response
}

/// The answer to Stats.
pub fn metrics(stats: Any) -> Answer {
    now(&api::StatsResponse { stats: MessageField::some(stats), ..Default::default() })
}

/// A pid in a message.
pub fn unsigned(pid: i32) -> u32 {
    u32::try_from(pid).unwrap_or(0)
}
