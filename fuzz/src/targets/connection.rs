//! One connection of a caller who says what the input says.

use std::future::Future;
use std::sync::{Arc, LazyLock};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::net::unix::OwnedReadHalf;
use tokio::runtime::{Builder, Runtime};

use crate::service::Fake;

/// Its time passes when there is nothing else to do: no input takes as long as a call's deadline.
static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    let builder = &mut Builder::new_current_thread();
    builder.enable_all().start_paused(true).build().expect("a runtime")
});

/// Serves a connection on which a caller says `said`, and hangs up when `until` has of what is
/// answered what it wants. It is ended when the connection is: a wait for something that does not
/// come hangs, which is a finding.
pub fn speak<S, U, F, R>(said: Vec<u8>, serve: S, until: U) -> R
where
    S: FnOnce(Arc<Fake>, UnixStream) -> F,
    F: Future<Output = Result<(), String>>,
    U: AsyncFnOnce(&mut Answers) -> R,
{
    RUNTIME.block_on(async {
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        let caller = async {
            let (reader, mut writer) = ours.into_split();
            let mut answers = Answers { reader, bytes: Vec::new() };
            // A server that has hung up need not read all of it.
            let write = async {
                let _ = writer.write_all(&said).await;
            };
            let ((), result) = tokio::join!(write, until(&mut answers));
            result
        };
        let (result, _why) = tokio::join!(caller, serve(Arc::default(), theirs));
        result
    })
}

/// The answers to the calls.
pub struct Answers {
    reader: OwnedReadHalf,
    bytes: Vec<u8>,
}

impl Answers {
    /// The next so many bytes; `None` at the end of the connection.
    pub async fn take(&mut self, length: usize) -> Option<Vec<u8>> {
        while self.bytes.len() < length {
            if self.reader.read_buf(&mut self.bytes).await.ok()? == 0 {
                return None;
            }
        }
        let rest = self.bytes.split_off(length);
        Some(std::mem::replace(&mut self.bytes, rest))
    }
}
