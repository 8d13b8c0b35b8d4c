//! One client for both protocols: bytes in, bytes or a code out.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use pause_sandboxer::containerd::framing::{self, Answers, CallFailure, Status};
use protobuf::Message;
use tokio::net::UnixStream;
use ttrpc::r#async::Client as TtrpcClient;

pub(crate) const CONTROLLER: &str = "containerd.services.sandbox.v1.Controller";
/// The service of containerd's shims, which the daemon does not serve.
pub(crate) const SANDBOX: &str = "containerd.runtime.sandbox.v1.Sandbox";

/// How a call failed: the code's number and the message.
pub(crate) type Failure = (i32, String);

/// A connection to one of the sockets.
#[derive(Clone)]
pub(crate) enum Client {
    Grpc(h2::client::SendRequest<Bytes>),
    Ttrpc(TtrpcClient),
}

impl Client {
    /// Connects with gRPC.
    pub(crate) async fn grpc(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).await.unwrap();
        // A thousand small answers at once are no attack here.
        let builder = h2::client::Builder::new().data_frame_budget(1 << 24).to_owned();
        let (client, connection) = builder.handshake(stream).await.unwrap();
        tokio::spawn(connection);
        Self::Grpc(client)
    }

    /// Connects with ttrpc.
    pub(crate) async fn ttrpc(socket: &Path) -> Self {
        Self::Ttrpc(TtrpcClient::connect(&format!("unix://{}", socket.display())).await.unwrap())
    }

    /// Calls a method of the controller.
    pub(crate) async fn call<A: Message>(
        &self,
        method: &str,
        request: impl Message,
    ) -> Result<A, Failure> {
        let bytes = self.raw(CONTROLLER, method, request.write_to_bytes().unwrap(), None).await?;
        Ok(A::parse_from_bytes(&bytes).unwrap())
    }

    /// Calls any method with a sandbox's id, in a namespace of containerd's.
    pub(crate) async fn in_namespace(
        &self,
        namespace: &str,
        (service, method): (&str, &str),
        message: Vec<u8>,
    ) -> Result<Vec<u8>, Failure> {
        match self {
            Self::Grpc(client) => {
                let metadata = [(framing::NAMESPACE, namespace)];
                let request = framing::request(&format!("{service}/{method}"), &metadata, None);
                grpc(client.clone(), request.unwrap(), framing::frame(&message)).await
            }
            Self::Ttrpc(client) => {
                let mut request = ttrpc::Request::new();
                (request.service, request.method, request.payload) =
                    (service.into(), method.into(), message);
                let mut pair = ttrpc::proto::KeyValue::new();
                (pair.key, pair.value) = ("containerd-namespace-ttrpc".into(), namespace.into());
                request.metadata.push(pair);
                ttrpc(client, request).await
            }
        }
    }

    /// Calls any method with any bytes. A connection that breaks is code 14, as in grpc-go.
    pub(crate) async fn raw(
        &self,
        service: &str,
        method: &str,
        payload: Vec<u8>,
        timeout: Option<Duration>,
    ) -> Result<Vec<u8>, Failure> {
        match self {
            Self::Grpc(client) => {
                let request = framing::request(&format!("{service}/{method}"), &[], timeout);
                grpc(client.clone(), request.unwrap(), framing::frame(&payload)).await
            }
            Self::Ttrpc(client) => {
                let mut request = ttrpc::Request::new();
                request.service = service.to_owned();
                request.method = method.to_owned();
                request.payload = payload;
                request.timeout_nano = timeout.map_or(0, |timeout| timeout.as_nanos() as i64);
                ttrpc(client, request).await
            }
        }
    }
}

async fn ttrpc(client: &TtrpcClient, request: ttrpc::Request) -> Result<Vec<u8>, Failure> {
    match client.request(request).await {
        Ok(response) => Ok(response.payload),
        Err(ttrpc::Error::RpcStatus(status)) => Err((status.code.value(), status.message)),
        Err(e) => Err((14, format!("connection: {e}"))),
    }
}

/// Sends one request and returns the message of its answer.
pub(crate) async fn grpc(
    client: h2::client::SendRequest<Bytes>,
    request: Request<()>,
    body: Bytes,
) -> Result<Vec<u8>, Failure> {
    let answer = async {
        let mut client = client.ready().await?;
        let (response, mut stream) = client.send_request(request, false)?;
        // Some clients send the message, then an empty last frame.
        stream.send_data(body, false)?;
        stream.send_data(Bytes::new(), true)?;
        Answers::new(response).only().await
    };
    match answer.await {
        Ok(message) => Ok(message.to_vec()),
        Err(CallFailure::Malformed(status)) => panic!("the answer is malformed: {status}"),
        Err(e) => {
            let Status { code, message } = e.into();
            Err((code as i32, message))
        }
    }
}
