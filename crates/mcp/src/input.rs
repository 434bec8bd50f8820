//! A client's messages, line by line: what is no JSON or too long is answered, not dropped.
//!
//! The library's transport ignores a line that it cannot parse, and a client that wrote one
//! would wait for ever. Lines that are JSON go on to that transport as they came.

use rmcp::{
    ErrorData, RoleServer,
    service::{RxJsonRpcMessage, TxJsonRpcMessage},
    transport::{Transport, async_rw::AsyncRwTransport},
};
use serde::de::IgnoredAny;
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, DuplexStream},
    sync::mpsc,
};

/// The largest message of a client, the same as a session's line.
const MAX_MESSAGE_LEN: u64 = 64 << 20;
/// Bytes on their way to the transport.
const BUFFER: usize = 64 << 10;

/// A transport that answers what is no message.
pub(crate) struct Checked<W: AsyncWrite> {
    inner: AsyncRwTransport<RoleServer, DuplexStream, W>,
    refusals: mpsc::Receiver<ErrorData>,
}

impl<W: AsyncWrite + Send + Unpin + 'static> Checked<W> {
    /// Of these streams; begins to read.
    pub(crate) fn new(read: impl AsyncRead + Send + Unpin + 'static, write: W) -> Self {
        let (messages, checked) = tokio::io::duplex(BUFFER);
        let (refuse, refusals) = mpsc::channel(1);
        tokio::spawn(check(BufReader::new(read), messages, refuse));
        Checked { inner: AsyncRwTransport::new_server(checked, write).with_max_line_length(usize::MAX), refusals }
    }
}

/// Passes lines on until either side ends.
async fn check(mut read: BufReader<impl AsyncRead + Unpin>, mut messages: DuplexStream, refuse: mpsc::Sender<ErrorData>) {
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut read).take(MAX_MESSAGE_LEN).read_until(b'\n', &mut line).await {
            Ok(0) | Err(_) => return,
            Ok(_) => {}
        }
        let refusal = if line.len() as u64 == MAX_MESSAGE_LEN && !line.ends_with(b"\n") {
            if skip_line(&mut read).await.is_none() {
                return;
            }
            Some(ErrorData::invalid_request(format!("a message has at most {MAX_MESSAGE_LEN} bytes"), None))
        } else {
            no_json(&line).map(|error| ErrorData::parse_error(format!("the line is no JSON: {error}"), None))
        };
        let passed_on = match refusal {
            Some(refusal) => refuse.send(refusal).await.is_ok(),
            None => messages.write_all(&line).await.is_ok(),
        };
        if !passed_on {
            return;
        }
    }
}

/// Reads to the end of a line, in parts; none where the input ends.
async fn skip_line(read: &mut BufReader<impl AsyncRead + Unpin>) -> Option<()> {
    loop {
        let mut part = Vec::new();
        match read.take(BUFFER as u64).read_until(b'\n', &mut part).await {
            Ok(0) | Err(_) => return None,
            Ok(_) if part.ends_with(b"\n") => return Some(()),
            Ok(_) => {}
        }
    }
}

/// Why a line is no JSON; the transport skips an empty one and a byte order mark itself.
fn no_json(line: &[u8]) -> Option<serde_json::Error> {
    let text = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(line);
    if text.trim_ascii().is_empty() { None } else { serde_json::from_slice::<IgnoredAny>(text).err() }
}

impl<W: AsyncWrite + Send + Unpin + 'static> Transport<RoleServer> for Checked<W> {
    type Error = std::io::Error;

    fn send(&mut self, item: TxJsonRpcMessage<RoleServer>) -> impl Future<Output = Result<(), Self::Error>> + Send + 'static {
        self.inner.send(item)
    }

    async fn receive(&mut self) -> Option<RxJsonRpcMessage<RoleServer>> {
        loop {
            tokio::select! {
                // First, so that the end of the input does not overtake them.
                biased;
                Some(refusal) = self.refusals.recv() => self.inner.send(TxJsonRpcMessage::<RoleServer>::error(refusal, None)).await.ok()?,
                message = self.inner.receive() => return message,
            }
        }
    }

    async fn close(&mut self) -> Result<(), Self::Error> {
        self.inner.close().await
    }
}
