//! The frames between launcher and executor.
//!
//! Launcher to executor: [`ExecutorCommand`]s on the lifeline, and one [`Job`], in a file that is
//! sealed before the executor is told of it and that the executor maps then. Executor to launcher:
//! [`Event`]s on a pipe. Both are binary, because everything in them is ready-made: no text
//! is parsed behind the clone. What comes out of the sandbox is untrusted: every length is
//! checked, nothing here panics on any input.

use alloc::vec::Vec;

/// Why bytes are not a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

impl core::fmt::Display for Malformed {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("malformed frame")
    }
}

impl core::error::Error for Malformed {}

#[derive(Default)]
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.0
    }
    pub(crate) fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }
    pub(crate) fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }
    fn option(&mut self, value: Option<u64>) {
        self.u32(u32::from(value.is_some()));
        self.u64(value.unwrap_or(0));
    }
    pub(crate) fn string(&mut self, bytes: &[u8]) {
        self.u64(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }
    fn strings(&mut self, list: &[&[u8]]) {
        self.u32(list.len() as u32);
        list.iter().for_each(|item| self.string(item));
    }
}

pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Reader(bytes)
    }
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
    fn take(&mut self, n: usize) -> Result<&'a [u8], Malformed> {
        let (head, tail) = self.0.split_at_checked(n).ok_or(Malformed)?;
        self.0 = tail;
        Ok(head)
    }
    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        self.take(4)?.try_into().map(u32::from_le_bytes).map_err(|_| Malformed)
    }
    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        self.take(8)?.try_into().map(u64::from_le_bytes).map_err(|_| Malformed)
    }
    fn option(&mut self) -> Result<Option<u64>, Malformed> {
        let present = self.u32()?;
        let value = self.u64()?;
        match present {
            0 => Ok(None),
            1 => Ok(Some(value)),
            _ => Err(Malformed),
        }
    }
    pub(crate) fn string(&mut self) -> Result<&'a [u8], Malformed> {
        let length = usize::try_from(self.u64()?).map_err(|_| Malformed)?;
        self.take(length)
    }
    pub(crate) fn list<T>(&mut self, mut item: impl FnMut(&mut Self) -> Result<T, Malformed>) -> Result<Vec<T>, Malformed> {
        let count = self.u32()? as usize;
        // An item takes at least four bytes: a hostile count cannot reserve more than it brings.
        if count > self.0.len() / 4 {
            return Err(Malformed);
        }
        // Reserved once: the executor's allocator never takes memory back.
        let mut list = Vec::with_capacity(count);
        for _ in 0..count {
            list.push(item(self)?);
        }
        Ok(list)
    }
    fn strings(&mut self) -> Result<Vec<&'a [u8]>, Malformed> {
        self.list(Self::string)
    }
}

/// A file to write below the working directory before the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileToWrite<'a> {
    /// Relative path without `.` or `..`.
    pub path: &'a [u8],
    /// Where its bytes begin in the job's file.
    pub offset: u64,
    /// How many there are.
    pub length: u64,
}

/// A resource limit by the kernel's number; `None` is RLIM_INFINITY.
pub type ResourceLimit = (u32, Option<u64>);

/// What the launcher sends to the executor, each at most once and in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExecutorCommand {
    /// The job's file begins with an [`Prestart`]: that interpreter may start.
    Prestart {
        /// Bytes of that.
        length: u64,
    },
    /// The job is written, and its file sealed.
    Job {
        /// Where the job begins in its file.
        offset: u64,
    },
    /// The sandbox is as it should be, seen from outside: the program may start.
    Go {
        /// The signals that the executor ignores, as the launcher's parent did; the
        /// first is the lowest bit. The program gets them as they are by default.
        ignored_signals: u64,
    },
}

impl ExecutorCommand {
    /// Bytes of a command.
    pub const BYTES: usize = 9;

    /// The command's bytes.
    pub fn encode(self) -> [u8; ExecutorCommand::BYTES] {
        let (kind, value) = match self {
            ExecutorCommand::Prestart { length } => (b's', length),
            ExecutorCommand::Job { offset } => (b'j', offset),
            ExecutorCommand::Go { ignored_signals } => (b'g', ignored_signals),
        };
        let [a, b, c, d, e, f, g, h] = value.to_le_bytes();
        [kind, a, b, c, d, e, f, g, h]
    }

    /// The command of these bytes.
    ///
    /// # Errors
    /// They are none.
    pub fn decode(bytes: [u8; ExecutorCommand::BYTES]) -> Result<Self, Malformed> {
        let [kind, value @ ..] = bytes;
        match (kind, u64::from_le_bytes(value)) {
            (b's', length) => Ok(ExecutorCommand::Prestart { length }),
            (b'j', offset) => Ok(ExecutorCommand::Job { offset }),
            (b'g', ignored_signals) => Ok(ExecutorCommand::Go { ignored_signals }),
            _ => Err(Malformed),
        }
    }
}

/// How the payload's process is started.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessStart<'a> {
    /// The payload's argument list; its first is the path of the program to exec, or a
    /// name to seek in the payload's PATH.
    pub argv: Vec<&'a [u8]>,
    /// The payload's environment, `NAME=value`.
    pub envp: Vec<&'a [u8]>,
    /// The payload's resource limits.
    pub rlimits: Vec<ResourceLimit>,
    /// Whether the ruleset of the payload's own Landlock layer came by descriptor.
    pub payload_landlock: bool,
    /// Whether the payload's descriptors are a terminal, to become its controlling one.
    pub terminal: bool,
    /// Whether the program came by descriptor, and is not sought by name.
    pub by_descriptor: bool,
    /// Whether the program gets the file of a memory image, at [`crate::memory_image::DESCRIPTOR`].
    pub memory: bool,
    /// Filters of system calls that its process loads last, instructions as the kernel has them.
    pub filters: Vec<&'a [u8]>,
    /// What the first of them asks of a process that loads another.
    pub filters_key: u64,
}

impl<'a> ProcessStart<'a> {
    fn write(&self, w: &mut Writer) {
        w.strings(&self.argv);
        w.strings(&self.envp);
        w.u32(self.rlimits.len() as u32);
        for (resource, value) in &self.rlimits {
            w.u32(*resource);
            w.option(*value);
        }
        w.u32(u32::from(self.payload_landlock));
        w.u32(u32::from(self.terminal));
        w.u32(u32::from(self.by_descriptor));
        w.u32(u32::from(self.memory));
        w.strings(&self.filters);
        w.u64(self.filters_key);
    }

    fn read(r: &mut Reader<'a>) -> Result<Self, Malformed> {
        Ok(ProcessStart {
            argv: r.strings()?,
            envp: r.strings()?,
            rlimits: r.list(|r| Ok((r.u32()?, r.option()?)))?,
            payload_landlock: r.u32()? != 0,
            terminal: r.u32()? != 0,
            by_descriptor: r.u32()? != 0,
            memory: r.u32()? != 0,
            filters: r.strings()?,
            filters_key: r.u64()?,
        })
    }
}

/// An interpreter to start before the job is known. A fifo stands where its program will be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prestart<'a> {
    /// How it is started.
    pub start: ProcessStart<'a>,
    /// The fifo's directory.
    pub directory: &'a [u8],
    /// The fifo's name in it.
    pub name: &'a [u8],
}

const PRESTART_MAGIC: u32 = u32::from_le_bytes(*b"SE\x00\x02");

impl<'a> Prestart<'a> {
    /// The frame's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        w.u32(PRESTART_MAGIC);
        self.start.write(&mut w);
        w.string(self.directory);
        w.string(self.name);
        w.0
    }

    /// Reads the frame.
    ///
    /// # Errors
    /// The bytes are none.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let mut r = Reader(bytes);
        if r.u32()? != PRESTART_MAGIC {
            return Err(Malformed);
        }
        Ok(Prestart { start: ProcessStart::read(&mut r)?, directory: r.string()?, name: r.string()? })
    }
}

/// What the executor needs to know.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Job<'a> {
    /// How the program is started.
    pub start: ProcessStart<'a>,
    /// The directory in which the program's file is written; empty: none is.
    pub program_directory: &'a [u8],
    /// The program's file, by name in that directory.
    pub program: FileToWrite<'a>,
    /// Files below the working directory, which is scratch.
    pub files: Vec<FileToWrite<'a>>,
    /// Whether the Landlock probe must be refused.
    pub expect_landlock: bool,
    /// The layer that is left out, by its number and one; 0: none.
    #[cfg(feature = "ablation")]
    pub without: u32,
}

const JOB_MAGIC: u32 = u32::from_le_bytes(*b"SJ\x00\x06");

impl<'a> Job<'a> {
    /// The frame's bytes. File contents follow it, at the offsets that the job names:
    /// see [`Job::place_contents`].
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        w.u32(JOB_MAGIC);
        self.start.write(&mut w);
        w.string(self.program_directory);
        let file = |w: &mut Writer, file: &FileToWrite<'_>| {
            w.string(file.path);
            w.u64(file.offset);
            w.u64(file.length);
        };
        file(&mut w, &self.program);
        w.u32(self.files.len() as u32);
        self.files.iter().for_each(|f| file(&mut w, f));
        w.u32(u32::from(self.expect_landlock));
        #[cfg(feature = "ablation")]
        w.u32(self.without);
        w.0
    }

    /// Sets the offsets of program and files, whose contents are written behind the
    /// frame in this order: the program first. Returns the length of the whole.
    pub fn place_contents(&mut self) -> u64 {
        // Offsets have a fixed width, so the frame's length does not depend on them.
        let mut at = self.encode().len() as u64;
        for file in core::iter::once(&mut self.program).chain(&mut self.files) {
            file.offset = at;
            at += file.length;
        }
        at
    }

    /// Reads the frame at the start of `bytes`.
    ///
    /// # Errors
    /// The bytes are no job.
    pub fn decode(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let mut r = Reader(bytes);
        if r.u32()? != JOB_MAGIC {
            return Err(Malformed);
        }
        let file = |r: &mut Reader<'a>| Ok(FileToWrite { path: r.string()?, offset: r.u64()?, length: r.u64()? });
        Ok(Job {
            start: ProcessStart::read(&mut r)?,
            program_directory: r.string()?,
            program: file(&mut r)?,
            files: r.list(file)?,
            expect_landlock: r.u32()? != 0,
            #[cfg(feature = "ablation")]
            without: r.u32()?,
        })
    }

    /// A file's contents in the job's bytes.
    ///
    /// # Errors
    /// The range lies outside of them.
    pub fn contents(bytes: &'a [u8], file: &FileToWrite<'_>) -> Result<&'a [u8], Malformed> {
        let start = usize::try_from(file.offset).map_err(|_| Malformed)?;
        let length = usize::try_from(file.length).map_err(|_| Malformed)?;
        bytes.get(start..).and_then(|tail| tail.get(..length)).ok_or(Malformed)
    }
}

/// What the sandbox sends to the launcher, in this order: at most one of each but Failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Everything stands; the payload starts next. Carries what was read inside.
    Ready(Evidence),
    /// The payload's execve succeeded.
    Started,
    /// The payload ended.
    Ended {
        /// Status word of wait(2).
        status: i32,
        /// CPU time in user mode, microseconds.
        user_us: u64,
        /// CPU time in the kernel, microseconds.
        system_us: u64,
        /// Whether it was the last: every other process inside had ended and was waited for.
        /// Then what all of them used, user and kernel, microseconds.
        last: Option<(u64, u64)>,
    },
    /// A step failed; nothing was started.
    Failed {
        /// Number of the step.
        step: u16,
        /// The errno, 0 where there is none.
        errno: u16,
        /// Which of the step's parts: an index into the plan's list, or u32::MAX.
        index: u32,
        /// What was found instead, for the receipt's step.
        detail: Vec<u8>,
    },
}

/// What the executor has seen of its confinement before it started the payload. What the
/// kernel says of it in `/proc` the launcher reads from outside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evidence {
    /// Open descriptors of the executor.
    pub descriptors: u32,
    /// What clone3 answered (the filter's probe).
    pub clone3_errno: u32,
    /// What a forbidden mknod answered (Landlock's probe).
    pub landlock_errno: u32,
    /// How long the reading took, in microseconds; none where the filter refuses the clock.
    pub taken_us: Option<u64>,
    /// Whether the program's interpreter was started ahead of the job, and waits for the program.
    pub prestarted: bool,
}

const EVENT_MAGIC: u16 = 0x5345;
const HEADER: usize = 8;
/// The largest event; a longer one is malformed.
const MAX_EVENT_LEN: usize = 16 << 10;

/// [`Event::Failed`] without a detail, made without allocating: what the launcher's
/// child sends between clone and exec.
pub fn failed_frame(step: crate::step::Step, errno: u16, index: u32) -> [u8; 28] {
    let mut frame = [0; 28];
    let mut put = |at: usize, bytes: &[u8]| {
        if let Some(slot) = frame.get_mut(at..at + bytes.len()) {
            slot.copy_from_slice(bytes);
        }
    };
    put(0, &EVENT_MAGIC.to_le_bytes());
    put(2, &4u16.to_le_bytes());
    put(4, &20u32.to_le_bytes());
    put(8, &u32::from(step as u16).to_le_bytes());
    put(12, &u32::from(errno).to_le_bytes());
    put(16, &index.to_le_bytes());
    frame
}

impl Event {
    /// The event's bytes, header included.
    pub fn encode(&self) -> Vec<u8> {
        let mut w = Writer::default();
        let kind: u16 = match self {
            Event::Ready(e) => {
                w.u32(e.descriptors);
                w.u32(e.clone3_errno);
                w.u32(e.landlock_errno);
                w.option(e.taken_us);
                w.u32(u32::from(e.prestarted));
                1
            }
            Event::Started => 2,
            Event::Ended { status, user_us, system_us, last } => {
                w.u32(*status as u32);
                w.u64(*user_us);
                w.u64(*system_us);
                w.option(last.map(|(user_us, _)| user_us));
                w.option(last.map(|(_, system_us)| system_us));
                3
            }
            Event::Failed { step, errno, index, detail } => {
                w.u32(u32::from(*step));
                w.u32(u32::from(*errno));
                w.u32(*index);
                w.string(detail);
                4
            }
        };
        let mut frame = Vec::with_capacity(HEADER + w.0.len());
        frame.extend_from_slice(&EVENT_MAGIC.to_le_bytes());
        frame.extend_from_slice(&kind.to_le_bytes());
        frame.extend_from_slice(&(w.0.len() as u32).to_le_bytes());
        frame.append(&mut w.0);
        frame
    }

    /// Takes the first event off `bytes`; `None` while it is incomplete.
    ///
    /// # Errors
    /// The bytes are no event, and none can follow.
    pub fn take(bytes: &mut Vec<u8>) -> Result<Option<Event>, Malformed> {
        let mut head = Reader(bytes.as_slice());
        if head.0.len() < HEADER {
            return Ok(None);
        }
        let first = head.u32()?;
        if first as u16 != EVENT_MAGIC {
            return Err(Malformed);
        }
        let kind = (first >> 16) as u16;
        let length = head.u32()? as usize;
        if length > MAX_EVENT_LEN {
            return Err(Malformed);
        }
        if head.0.len() < length {
            return Ok(None);
        }
        let mut r = Reader(head.take(length)?);
        let event = match kind {
            1 => Event::Ready(Evidence {
                descriptors: r.u32()?,
                clone3_errno: r.u32()?,
                landlock_errno: r.u32()?,
                taken_us: r.option()?,
                prestarted: r.u32()? != 0,
            }),
            2 => Event::Started,
            3 => Event::Ended { status: r.u32()? as i32, user_us: r.u64()?, system_us: r.u64()?, last: r.option()?.zip(r.option()?) },
            4 => Event::Failed {
                step: u16::try_from(r.u32()?).map_err(|_| Malformed)?,
                errno: u16::try_from(r.u32()?).map_err(|_| Malformed)?,
                index: r.u32()?,
                detail: r.string()?.to_vec(),
            },
            _ => return Err(Malformed),
        };
        if !r.0.is_empty() {
            return Err(Malformed);
        }
        bytes.drain(..HEADER + length);
        Ok(Some(event))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;
    use alloc::vec;

    fn job() -> Job<'static> {
        let mut job = Job {
            start: ProcessStart {
                argv: vec![b"/usr/bin/python3", b"/scratch/x.py"],
                envp: vec![b"A=b"],
                rlimits: vec![(9, None), (7, Some(1024))],
                payload_landlock: true,
                filters: vec![b"eight by"],
                filters_key: 7,
                ..ProcessStart::default()
            },
            program_directory: b"/scratch",
            program: FileToWrite { path: b"x.py", offset: 0, length: 5 },
            files: vec![FileToWrite { path: b"d/f", offset: 0, length: 2 }],
            expect_landlock: true,
            #[cfg(feature = "ablation")]
            without: 0,
        };
        job.place_contents();
        job
    }

    #[test]
    fn a_job_survives_the_crossing_with_its_contents() {
        let job = job();
        let mut bytes = job.encode();
        bytes.extend_from_slice(b"helloab");
        let decoded = Job::decode(&bytes).unwrap();
        assert_eq!(decoded, job);
        assert_eq!(Job::contents(&bytes, &decoded.program).unwrap(), b"hello");
        assert_eq!(Job::contents(&bytes, &decoded.files[0]).unwrap(), b"ab");
    }

    #[test]
    fn an_prestarted_survives_the_crossing() {
        let job = job();
        let prestart = Prestart { start: job.start, directory: b"/scratch", name: b"x.py" };
        assert_eq!(Prestart::decode(&prestart.encode()).unwrap(), prestart);
        for length in 0..prestart.encode().len() {
            assert_eq!(Prestart::decode(&prestart.encode()[..length]), Err(Malformed));
        }
    }

    #[test]
    fn events_are_taken_one_by_one_from_a_stream() {
        let events = [
            Event::Ready(Evidence { descriptors: 6, taken_us: Some(3), ..Evidence::default() }),
            Event::Started,
            Event::Ended { status: 9, user_us: 1, system_us: 2, last: None },
            Event::Ended { status: 0, user_us: 1, system_us: 2, last: Some((3, 4)) },
            Event::Failed { step: 15, errno: 1, index: 4, detail: b"/usr".to_vec() },
        ];
        let whole: Vec<u8> = events.iter().flat_map(Event::encode).collect();
        let mut seen = Vec::new();
        let mut buffer = Vec::new();
        for byte in whole {
            buffer.push(byte);
            while let Some(event) = Event::take(&mut buffer).unwrap() {
                seen.push(event);
            }
        }
        assert_eq!(seen, events);
        assert!(buffer.is_empty());
    }

    #[test]
    fn words_survive_the_crossing_and_nothing_else_is_one() {
        for command in [
            ExecutorCommand::Prestart { length: 300 },
            ExecutorCommand::Job { offset: 0 },
            ExecutorCommand::Job { offset: 300 },
            ExecutorCommand::Go { ignored_signals: 0 },
            ExecutorCommand::Go { ignored_signals: 1 << 63 | 1 << 12 },
        ] {
            assert_eq!(ExecutorCommand::decode(command.encode()), Ok(command));
        }
        assert_eq!(ExecutorCommand::decode([b'x', 0, 0, 0, 0, 0, 0, 0, 0]), Err(Malformed));
    }

    #[test]
    fn the_frame_made_without_allocating_is_the_same_event() {
        let event = Event::Failed { step: 15, errno: 1, index: 4, detail: Vec::new() };
        assert_eq!(failed_frame(crate::step::Step::RootEntry, 1, 4).as_slice(), event.encode());
    }

    #[test]
    fn damaged_frames_are_refused_and_never_panic() {
        let good = job().encode();
        for at in 0..good.len() {
            for flip in [1u8, 0x80, 0xff] {
                let mut bad = good.clone();
                bad[at] ^= flip;
                let _may_be_either = Job::decode(&bad).is_ok();
                let _may_be_either = Job::decode(&good[..at]).is_ok();
            }
        }
        let event = Event::Failed { step: 15, errno: 1, index: 4, detail: b"/usr".to_vec() }.encode();
        for at in 0..event.len() {
            let mut bad = event.clone();
            bad[at] ^= 0xff;
            let _may_be_any = Event::take(&mut bad).is_ok();
        }
        assert_eq!(Event::take(&mut vec![0; 8]), Err(Malformed));
    }
}
