//! The answer to a call, its bytes or an error: the same for both protocols.

use std::any::Any;

use containerd_api::framing::MAX_MESSAGE;
use protobuf::Message;

use super::status::{self, Code, Status};
use crate::podsandbox::Error;

/// Maximum size of an answer over gRPC, bytes: containerd reads it.
pub(super) const GRPC_ANSWER: usize = MAX_MESSAGE - (64 << 10);

/// Maximum size of an answer over ttrpc, bytes: the protocol's clients read 4 MiB, including its
/// wrapping.
pub(super) const TTRPC_ANSWER: usize = (4 << 20) - (64 << 10);

/// A call's answer as bytes.
pub(super) type Answer = Result<Vec<u8>, Status>;

pub(super) fn not_served(service: &str, method: &str) -> Status {
    Status::new(Code::UNIMPLEMENTED, format!("/{service}/{method} is unimplemented"))
}

pub(super) fn decode<M: Message>(bytes: &[u8]) -> Result<M, Status> {
    M::parse_from_bytes(bytes)
        .map_err(|e| Status::new(Code::INVALID_ARGUMENT, format!("malformed {}: {e}", M::NAME)))
}

/// Turns an RPC's result into bytes, and logs why it failed.
pub(super) fn encode<M: Message>(method: &str, result: Result<M, Error>) -> Answer {
    match result {
        Ok(message) => message.write_to_bytes().map_err(|e| {
            Status::new(Code::INTERNAL, format!("encode the response of {method}: {e}"))
        }),
        Err(error) => {
            let status = status::of_call(method, &error);
            // A caller reports its own mistake; the daemon logs what the node could not do.
            // Metrics are queried every second, also for pods that have none.
            let level = match status.code {
                _ if method == "Metrics" => log::Level::Debug,
                Code::INTERNAL | Code::RESOURCE_EXHAUSTED | Code::DEADLINE_EXCEEDED => {
                    log::Level::Warn
                }
                _ => log::Level::Debug,
            };
            log::log!(
                level, sandbox = status::sandbox(&error), call = method;
                "{method} failed: {error}"
            );
            Err(status)
        }
    }
}

/// The answer, unless its caller would not read that much.
pub(super) fn fits(method: &str, answer: Answer, most: usize) -> Answer {
    answer.and_then(|bytes| match bytes.len() {
        size if size > most => {
            let text = format!("response of {method} has {size} bytes, the limit is {most}");
            Err(Status::new(Code::RESOURCE_EXHAUSTED, text))
        }
        _ => Ok(bytes),
    })
}

/// The name of an answer's code, for counters.
pub(super) fn code_of(answer: &Answer) -> &'static str {
    answer.as_ref().err().map_or("OK", |status| status::name(status.code))
}

/// The answer to the caller of a handler that panicked.
pub(super) fn panicked(method: &str, panic: &(dyn Any + Send)) -> Status {
    let reason = panic_text(panic);
    log::error!(call = method; "the handler of {method} panicked: {reason}");
    Status::new(Code::INTERNAL, format!("internal fault in {method}: {reason}"))
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("no message")
}
