//! What the processes of `stockade serve` say to each other: front, workers and supervisor.
//!
//! A frame is the length of its payload (u32, little endian), its kind (u8) and the payload, which
//! has at most [`MAX_PAYLOAD`] bytes. Each pair of processes has a stream socket of its own. To a
//! worker and to the supervisor, what comes from the front is hostile: nothing here panics on any
//! input, and no more is kept than one frame. What a message permits is not decided here.

mod keeper;
mod template;

use alloc::{collections::BTreeMap, string::String, vec::Vec};
use core::fmt;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

pub use keeper::{FromFront, KeeperOf, NoKeeper};
pub use template::{ReadyFor, TemplateLent, TemplateOf, TemplateRefused, TemplateWanted, ToSupervisor};

use crate::OutputStream;

/// The most bytes of a payload.
pub const MAX_PAYLOAD: usize = 64 << 10;
/// Length and kind.
const HEADER: usize = 5;

/// Why bytes are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// A payload of more than [`MAX_PAYLOAD`] bytes is announced.
    TooLong,
    /// No message that may come here has this kind.
    Kind(u8),
    /// The payload is not that of its kind.
    Payload,
}

impl fmt::Display for Malformed {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Malformed::TooLong => write!(out, "a frame of more than {MAX_PAYLOAD} bytes"),
            Malformed::Kind(kind) => write!(out, "a frame of the unexpected kind {kind}"),
            Malformed::Payload => out.write_str("a frame whose payload does not fit its kind"),
        }
    }
}

impl core::error::Error for Malformed {}

/// A message that crosses one of these sockets.
pub trait Message: Sized {
    /// Its frame.
    ///
    /// # Errors
    /// It is [`Malformed::TooLong`]: its reader would refuse it, and read nothing more.
    fn to_frame(&self) -> Result<Vec<u8>, Malformed>;
    /// Reads a frame.
    ///
    /// # Errors
    /// It is none of these messages.
    fn parse(kind: u8, payload: &[u8]) -> Result<Self, Malformed>;
}

/// The frames of a stream, as its bytes come.
#[derive(Debug, Default)]
pub struct FrameDecoder {
    bytes: Vec<u8>,
}

impl FrameDecoder {
    /// Adds what was read.
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole message.
    ///
    /// # Errors
    /// The stream is not to be read on.
    pub fn take<M: Message>(&mut self) -> Result<Option<M>, Malformed> {
        let Some((header, rest)) = self.bytes.split_first_chunk::<HEADER>() else { return Ok(None) };
        let [a, b, c, d, kind] = *header;
        let length = u32::from_le_bytes([a, b, c, d]) as usize;
        if length > MAX_PAYLOAD {
            return Err(Malformed::TooLong);
        }
        let Some(payload) = rest.get(..length) else { return Ok(None) };
        let message = M::parse(kind, payload)?;
        self.bytes.drain(..HEADER + length);
        Ok(Some(message))
    }

    /// Whether all that was added has been taken.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }
}

fn frame(kind: u8, payload: &[u8]) -> Result<Vec<u8>, Malformed> {
    if payload.len() > MAX_PAYLOAD {
        return Err(Malformed::TooLong);
    }
    let mut bytes = Vec::with_capacity(HEADER + payload.len());
    bytes.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    bytes.push(kind);
    bytes.extend_from_slice(payload);
    Ok(bytes)
}

fn json_frame(kind: u8, value: &impl Serialize) -> Result<Vec<u8>, Malformed> {
    // Maps with text for keys, text and numbers always have a JSON form.
    frame(kind, &serde_json::to_vec(value).unwrap_or_default())
}

fn from_json<T: DeserializeOwned>(payload: &[u8]) -> Result<T, Malformed> {
    serde_json::from_slice(payload).map_err(|_| Malformed::Payload)
}

fn empty<T>(payload: &[u8], message: T) -> Result<T, Malformed> {
    if payload.is_empty() { Ok(message) } else { Err(Malformed::Payload) }
}

fn number(payload: &[u8]) -> Result<u64, Malformed> {
    payload.try_into().map(u64::from_le_bytes).map_err(|_| Malformed::Payload)
}

/// What the front tells a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToWorker {
    /// A run. As many bytes of its request follow as this says.
    Begin(Begin),
    /// Bytes of the request.
    Request(Vec<u8>),
    /// The run is to end, begun or not.
    Cancel,
    /// To a keeper: an operation of its session. As many bytes of its line follow, as [`Self::Request`], and
    /// the answer comes as a result.
    Line(u64),
}

/// A run, as the front names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Begin {
    /// Its number at the front.
    pub run: String,
    /// The key that asks.
    pub key: String,
    /// The policy that it is to run under.
    pub policy: String,
    /// Bytes of the request.
    pub length: u64,
    /// What the program prints is to be told as it comes.
    pub output: bool,
}

impl Message for ToWorker {
    fn to_frame(&self) -> Result<Vec<u8>, Malformed> {
        match self {
            ToWorker::Begin(begin) => json_frame(1, begin),
            ToWorker::Request(bytes) => frame(2, bytes),
            ToWorker::Cancel => frame(3, &[]),
            ToWorker::Line(length) => frame(4, &length.to_le_bytes()),
        }
    }

    fn parse(kind: u8, payload: &[u8]) -> Result<Self, Malformed> {
        match kind {
            1 => from_json(payload).map(ToWorker::Begin),
            2 => Ok(ToWorker::Request(payload.to_vec())),
            3 => empty(payload, ToWorker::Cancel),
            4 => number(payload).map(ToWorker::Line),
            _ => Err(Malformed::Kind(kind)),
        }
    }
}

/// What a worker tells the front.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FromWorker {
    /// It takes a run, and has this prepared for it. A worker says so again when that has changed.
    Idle(Option<Prepared>),
    /// The program may run from now on.
    Started,
    /// What the program has printed.
    Output(OutputStream, Vec<u8>),
    /// So many bytes of a stream are missing here, as the front did not take them in time.
    LeftOut(OutputStream, u64),
    /// Bytes of the result.
    Result(Vec<u8>),
    /// The result is whole.
    End,
}

impl Message for FromWorker {
    fn to_frame(&self) -> Result<Vec<u8>, Malformed> {
        match self {
            FromWorker::Idle(None) => frame(128, &[]),
            FromWorker::Idle(Some(prepared)) => json_frame(128, prepared),
            FromWorker::Result(bytes) => frame(129, bytes),
            FromWorker::End => frame(130, &[]),
            FromWorker::Started => frame(131, &[]),
            FromWorker::Output(OutputStream::Stdout, bytes) => frame(132, bytes),
            FromWorker::Output(OutputStream::Stderr, bytes) => frame(133, bytes),
            FromWorker::LeftOut(OutputStream::Stdout, bytes) => frame(134, &bytes.to_le_bytes()),
            FromWorker::LeftOut(OutputStream::Stderr, bytes) => frame(135, &bytes.to_le_bytes()),
        }
    }

    fn parse(kind: u8, payload: &[u8]) -> Result<Self, Malformed> {
        match kind {
            128 if payload.is_empty() => Ok(FromWorker::Idle(None)),
            128 => from_json(payload).map(|prepared| FromWorker::Idle(Some(prepared))),
            129 => Ok(FromWorker::Result(payload.to_vec())),
            130 => empty(payload, FromWorker::End),
            131 => empty(payload, FromWorker::Started),
            132 => Ok(FromWorker::Output(OutputStream::Stdout, payload.to_vec())),
            133 => Ok(FromWorker::Output(OutputStream::Stderr, payload.to_vec())),
            134 => number(payload).map(|bytes| FromWorker::LeftOut(OutputStream::Stdout, bytes)),
            135 => number(payload).map(|bytes| FromWorker::LeftOut(OutputStream::Stderr, bytes)),
            _ => Err(Malformed::Kind(kind)),
        }
    }
}

/// Whose requests would take what a worker has prepared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prepared {
    /// Those of this key; none: of every key.
    pub key: Option<String>,
    /// Under this policy.
    pub policy: String,
    /// In a language that has one of these names, in small letters. The empty one: of a request that names
    /// none.
    pub languages: Vec<String>,
}

/// All that a run that comes from the front may be.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerTable {
    /// The policies that each key may use.
    pub policies: BTreeMap<String, Vec<String>>,
    /// What this worker has always prepared; none: what its last request was like.
    #[serde(default)]
    pub ready_for: Option<ReadyFor>,
}

/// What the supervisor tells the front, workers and keepers. With some of it comes a descriptor.
#[derive(Clone, Debug, PartialEq)]
pub enum FromSupervisor {
    /// A socket that listens; its descriptor comes along.
    Listener(ListenerKind),
    /// The socket of a worker; its descriptor comes along.
    Worker,
    /// For the front: a part of its [`Settings`], which are JSON and may be longer than a frame.
    SettingsPart(Vec<u8>),
    /// The settings are whole, and replace those before.
    SettingsEnd,
    /// It is to take no more requests, and to end when those that it has are answered.
    Drain,
    /// An image for a worker; its descriptor comes along, and that of a file with what is known of it.
    Template(TemplateLent),
    /// There is no image for a worker.
    NoTemplate(TemplateRefused),
    /// The socket of a keeper, for the front; its descriptor comes along.
    Keeper(KeeperOf),
    /// There is no keeper, for the front.
    NoKeeper(NoKeeper),
    /// The socket of a front, for a keeper; its descriptor comes along.
    Front,
    /// Nothing: the supervisor looks whether it is read.
    Ping,
    /// For a worker: its [`WorkerTable`] is another. The descriptor of a file with its JSON comes along.
    Table,
    /// For a worker: the table that was sent last no longer holds. The next comes when it has read that one.
    TableOutdated,
}

/// What a socket listens at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ListenerKind {
    /// A UNIX socket, whose peers the kernel names.
    Unix,
    /// TCP, where browsers may be peers.
    Tcp,
}

impl Message for FromSupervisor {
    fn to_frame(&self) -> Result<Vec<u8>, Malformed> {
        match self {
            FromSupervisor::Listener(kind) => json_frame(16, kind),
            FromSupervisor::Worker => frame(17, &[]),
            FromSupervisor::SettingsPart(bytes) => frame(18, bytes),
            FromSupervisor::SettingsEnd => frame(19, &[]),
            FromSupervisor::Drain => frame(20, &[]),
            FromSupervisor::Template(lent) => json_frame(21, lent),
            FromSupervisor::NoTemplate(refused) => json_frame(22, refused),
            FromSupervisor::Keeper(of) => json_frame(23, of),
            FromSupervisor::NoKeeper(none) => json_frame(24, none),
            FromSupervisor::Front => frame(25, &[]),
            FromSupervisor::Ping => frame(26, &[]),
            FromSupervisor::Table => frame(27, &[]),
            FromSupervisor::TableOutdated => frame(28, &[]),
        }
    }

    fn parse(kind: u8, payload: &[u8]) -> Result<Self, Malformed> {
        match kind {
            16 => from_json(payload).map(FromSupervisor::Listener),
            17 => empty(payload, FromSupervisor::Worker),
            18 => Ok(FromSupervisor::SettingsPart(payload.to_vec())),
            19 => empty(payload, FromSupervisor::SettingsEnd),
            20 => empty(payload, FromSupervisor::Drain),
            21 => from_json(payload).map(FromSupervisor::Template),
            22 => from_json(payload).map(FromSupervisor::NoTemplate),
            23 => from_json(payload).map(FromSupervisor::Keeper),
            24 => from_json(payload).map(FromSupervisor::NoKeeper),
            25 => empty(payload, FromSupervisor::Front),
            26 => empty(payload, FromSupervisor::Ping),
            27 => empty(payload, FromSupervisor::Table),
            28 => empty(payload, FromSupervisor::TableOutdated),
            _ => Err(Malformed::Kind(kind)),
        }
    }
}

/// What the front may know.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// The keys.
    pub keys: Vec<Key>,
    /// What `Host` may say over TCP.
    pub hosts: Vec<String>,
    /// What the runs together may use, and how long they may wait.
    pub capacity: Capacity,
    /// The most bytes of a request.
    pub max_body: u64,
    /// The most bytes of all requests and answers in memory.
    pub max_buffers: u64,
    /// The most bytes of output that the events of a run have.
    pub stream_size: u64,
    /// What a run of each policy takes where its request does not say.
    pub policies: BTreeMap<String, RunSize>,
    /// Names and aliases of the languages that each policy compiles first, in lower case; an empty one
    /// where a request that names none is in such a language.
    pub compiled: BTreeMap<String, Vec<String>>,
    /// What this host lacks for them.
    pub lacks: Vec<Lack>,
    /// What each policy allows, as `policy explain --json` has it.
    pub explained: BTreeMap<String, serde_json::Value>,
    /// What a sandbox of each policy has, as `runtimes --prompt` words it; of those policies alone that a key
    /// may keep sessions under.
    pub inventories: BTreeMap<String, String>,
    /// How many workers there are.
    pub workers: u32,
    /// The interfaces of other services that are spoken here.
    pub facades: Facades,
}

/// What the host lacks for a policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lack {
    /// The policy.
    pub policy: String,
    /// In words, with the remedy.
    pub what: String,
    /// No run of the policy can be started; otherwise they go without, as it permits.
    pub prevents: bool,
}

impl Lack {
    /// The same without what follows from it, where a line has to do.
    pub fn in_short(&self) -> Self {
        let short = self.what.split_once("; ").map_or(self.what.as_str(), |(short, _)| short);
        Lack { what: String::from(short), ..self.clone() }
    }
}

impl fmt::Display for Lack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Lack { policy, what, prevents } = self;
        if *prevents {
            write!(f, "policy {policy} cannot be enforced here: {what}")
        } else {
            write!(f, "policy {policy} goes without {what}")
        }
    }
}

/// Interfaces of other services; none: its paths answer 404.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facades {
    /// SandboxFusion's.
    pub sandbox_fusion: Option<SandboxFusionFacade>,
    /// `POST /execute`.
    pub execute: Option<ExecuteFacade>,
}

/// SandboxFusion's interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxFusionFacade {
    /// The policy of its runs; absent: the key's first.
    pub policy: Option<String>,
    /// How often a client that waits is sent a byte, in milliseconds.
    pub heartbeat_ms: u64,
}

/// The interface of `POST /execute`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExecuteFacade {
    /// The policy of its runs; absent: the key's first.
    pub policy: Option<String>,
}

/// A key, as the front needs it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Key {
    /// Its name.
    pub id: String,
    /// Who has it.
    pub credential: Credential,
    /// The policies that it may use, the first of which is taken where a request names none.
    pub policies: Vec<String>,
    /// What it may do.
    pub scopes: Vec<Scope>,
    /// Runs at a time.
    pub running: u32,
    /// Requests that wait.
    pub waiting: u32,
    /// Requests that it may begin in a minute.
    pub runs_per_minute: Option<u32>,
    /// The CPU time that its runs may use in an hour, in milliseconds.
    pub cpu_per_hour: Option<u64>,
    /// Its share, beside the other keys'.
    pub weight: u32,
    /// When it ends, in seconds since 1970.
    pub expires: Option<i64>,
    /// Sessions at a time.
    pub sessions: u32,
}

impl Key {
    /// Whether its time is over at this one, in seconds since 1970.
    pub fn has_expired(&self, now: i64) -> bool {
        self.expires.is_some_and(|end| end <= now)
    }
}

/// Who has a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Credential {
    /// The one who knows the token with this SHA-256, in hexadecimal digits.
    Sha256(String),
    /// The user of this uid, over the UNIX socket.
    Uid(u32),
}

/// What a key may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Run programs.
    Run,
    /// Keep sessions.
    Keep,
    /// Run programs by the interfaces of other services.
    Facade,
    /// See the runs of all keys.
    Watch,
}

/// What the runs together may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capacity {
    /// Their size.
    pub size: RunSize,
    /// Requests that wait.
    pub waiting: u32,
    /// How long one waits, in milliseconds.
    pub queue_ms: u64,
    /// Sessions at a time.
    pub sessions: u32,
}

/// What a run takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunSize {
    /// Thousandths of a CPU.
    pub cpus: u64,
    /// Bytes.
    pub memory: u64,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;
    use alloc::{string::ToString, vec};

    fn begin() -> Begin {
        Begin { run: "7".to_string(), key: "rl".to_string(), policy: "default".to_string(), length: 3, output: false }
    }

    #[test]
    fn messages_come_out_as_they_went_in_however_their_bytes_come() {
        let messages = [ToWorker::Begin(begin()), ToWorker::Request(vec![0, 255, 10]), ToWorker::Cancel, ToWorker::Request(Vec::new())];
        let bytes: Vec<u8> = messages.iter().flat_map(|message| message.to_frame().unwrap()).collect();
        for piece in 1..=bytes.len() {
            let (mut decoder, mut found) = (FrameDecoder::default(), Vec::new());
            for piece in bytes.chunks(piece) {
                decoder.push(piece);
                while let Ok(Some(message)) = decoder.take::<ToWorker>() {
                    found.push(message);
                }
            }
            assert_eq!(found, messages);
            assert!(decoder.is_empty());
        }
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let cases: [(&[u8], Malformed); 6] = [
            (&[1, 0, 1, 0, 1], Malformed::TooLong),
            (&[255, 255, 255, 255, 2], Malformed::TooLong),
            (&[0, 0, 0, 0, 9], Malformed::Kind(9)),
            (&[0, 0, 0, 0, 128], Malformed::Kind(128)),
            (&[2, 0, 0, 0, 1, b'{', b'}'], Malformed::Payload),
            (&[1, 0, 0, 0, 3, 0], Malformed::Payload),
        ];
        for (bytes, why) in cases {
            let mut decoder = FrameDecoder::default();
            decoder.push(bytes);
            assert_eq!(decoder.take::<ToWorker>(), Err(why), "{bytes:?}");
        }
        // The longest is one.
        let mut decoder = FrameDecoder::default();
        decoder.push(&ToWorker::Request(vec![7; MAX_PAYLOAD]).to_frame().unwrap());
        assert_eq!(decoder.take(), Ok(Some(ToWorker::Request(vec![7; MAX_PAYLOAD]))));
    }

    #[test]
    fn what_its_reader_would_refuse_as_too_long_is_no_frame() {
        assert_eq!(ToWorker::Request(vec![7; MAX_PAYLOAD + 1]).to_frame(), Err(Malformed::TooLong));
        let with_key = |length: usize| ToWorker::Begin(Begin { key: "k".repeat(length), ..begin() }).to_frame();
        let rest = with_key(0).unwrap().len() - HEADER;
        assert_eq!(with_key(MAX_PAYLOAD - rest + 1), Err(Malformed::TooLong));
        assert_eq!(with_key(MAX_PAYLOAD - rest).unwrap().len(), HEADER + MAX_PAYLOAD);
    }

    #[test]
    fn a_field_that_no_run_has_is_refused() {
        let mut decoder = FrameDecoder::default();
        decoder.push(&frame(1, br#"{"run":"1","key":"a","policy":"p","length":1,"output":true,"root":true}"#).unwrap());
        assert_eq!(decoder.take::<ToWorker>(), Err(Malformed::Payload));
    }
}
