//! One client for both protocols: bytes in, bytes or a code out.

use std::future::Future;
use std::path::Path;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use http::Request;
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
                let request = Request::post(format!("http://localhost/{service}/{method}"))
                    .header("content-type", "application/grpc")
                    .header("containerd-namespace", namespace)
                    .body(())
                    .unwrap();
                grpc(client.clone(), request, framed(&message)).await
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
                let mut request = Request::post(format!("http://localhost/{service}/{method}"))
                    .header("content-type", "application/grpc")
                    .body(())
                    .unwrap();
                if let Some(timeout) = timeout {
                    let value = format!("{}m", timeout.as_millis()).parse().unwrap();
                    request.headers_mut().insert("grpc-timeout", value);
                }
                grpc(client.clone(), request, framed(&payload)).await
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

/// A message as gRPC sends it.
pub(crate) fn framed(message: &[u8]) -> Bytes {
    let mut body = BytesMut::new();
    body.put_u8(0);
    body.put_u32(message.len() as u32);
    body.put_slice(message);
    body.freeze()
}

async fn ttrpc(client: &TtrpcClient, request: ttrpc::Request) -> Result<Vec<u8>, Failure> {
    match client.request(request).await {
        Ok(response) => Ok(response.payload),
        Err(ttrpc::Error::RpcStatus(status)) => Err((status.code.value(), status.message)),
        Err(e) => Err((14, format!("connection: {e}"))),
    }
}

/// Sends one request and gives the message of its answer.
pub(crate) fn grpc(
    client: h2::client::SendRequest<Bytes>,
    request: Request<()>,
    body: Bytes,
) -> impl Future<Output = Result<Vec<u8>, Failure>> {
    let broken = |e: h2::Error| (14, format!("connection: {e}"));
    async move {
        let mut client = client.ready().await.map_err(broken)?;
        let (response, mut stream) = client.send_request(request, false).map_err(broken)?;
        // As some clients do: the message, then an empty last frame.
        stream
            .send_data(body, false)
            .and_then(|()| stream.send_data(Bytes::new(), true))
            .map_err(broken)?;
        let (head, mut body) = response.await.map_err(broken)?.into_parts();
        assert_eq!(head.status, 200);
        let mut bytes = Vec::new();
        while let Some(chunk) = body.data().await {
            let chunk = chunk.map_err(broken)?;
            body.flow_control().release_capacity(chunk.len()).map_err(broken)?;
            bytes.extend_from_slice(&chunk);
        }
        let trailers = body.trailers().await.map_err(broken)?.unwrap_or(head.headers);
        let text =
            |name: &str| trailers.get(name).map_or("", |value| value.to_str().unwrap()).to_owned();
        match text("grpc-status").parse().unwrap() {
            0 => {
                let length = u32::from_be_bytes(bytes[1..5].try_into().unwrap()) as usize;
                assert_eq!((bytes[0], length), (0, bytes.len() - 5));
                Ok(bytes.split_off(5))
            }
            code => Err((code, text("grpc-message"))),
        }
    }
}
