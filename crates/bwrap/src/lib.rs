//! bubblewrap's command line as values, in its order.
//!
//! An option is taken, stands for what a sandbox of stockade has anyway, or is refused by name with
//! what to do instead: none is read and ignored that would have opened something. Nothing of the host is read
//! here but what `--args` names, through a function of the caller's. What an operation may show is
//! decided by the policy, but for what no policy allows and is refused here: a writable `/`, the host's
//! `/proc`, and devices of the host.
#![forbid(unsafe_code)]

mod options;
#[cfg(test)]
mod tests;

pub use options::{FlagKind, REFUSED};

/// The most words of one command line, those of `--args` among them; bubblewrap's own limit.
pub const MAX_WORDS: usize = 9000;

/// What a command line asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Parsed {
    /// `--help`.
    Help,
    /// `--version`.
    Version,
    /// A command in a sandbox.
    Run(Box<Invocation>),
}

/// A command in a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Invocation {
    /// What is shown, later ones over earlier ones.
    pub operations: Vec<Operation>,
    /// `--clearenv` was among them.
    pub clears_environment: bool,
    /// Variables that are set, or taken away, after that.
    pub environment: Vec<(String, Option<String>)>,
    /// `--chdir`.
    pub directory: Option<String>,
    /// `--uid`, never 0.
    pub uid: Option<u32>,
    /// `--gid`, never 0.
    pub gid: Option<u32>,
    /// `--hostname`.
    pub hostname: Option<String>,
    /// Descriptors of filters, `--seccomp` and `--add-seccomp-fd`.
    pub filters: Vec<i32>,
    /// `--block-fd`.
    pub block: Option<i32>,
    /// `--info-fd`.
    pub info: Option<i32>,
    /// `--json-status-fd`.
    pub status: Option<i32>,
    /// `--die-with-parent`.
    pub ends_with_parent: bool,
    /// Program and arguments.
    pub command: Vec<String>,
}

/// One operation on the file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// `--ro-bind`, and `-try`.
    ReadOnly {
        /// On the host.
        source: String,
        /// Inside.
        target: String,
        /// A missing source is left out.
        optional: bool,
    },
    /// `--bind`, and `-try`.
    Writable {
        /// On the host.
        source: String,
        /// Inside.
        target: String,
        /// A missing source is left out.
        optional: bool,
    },
    /// `--tmp-overlay` and `--ro-overlay`, with each `--overlay-src` before it.
    Overlay {
        /// On the host, bottom first.
        layers: Vec<String>,
        /// Inside.
        target: String,
        /// Code may write to it.
        writable: bool,
    },
    /// `--tmpfs`.
    Tmpfs {
        /// Inside.
        target: String,
        /// `--perms`.
        mode: u32,
    },
    /// `--dir`.
    Directory {
        /// Inside.
        target: String,
        /// `--perms`.
        mode: u32,
    },
    /// `--symlink`.
    Link {
        /// Its contents.
        to: String,
        /// Inside.
        target: String,
    },
    /// `--file`.
    File {
        /// Whose contents it gets.
        fd: i32,
        /// Inside.
        target: String,
        /// `--perms`.
        mode: u32,
    },
    /// `--chmod`.
    Mode {
        /// Inside.
        target: String,
        /// Its new permission bits.
        mode: u32,
    },
    /// `--bind-data` and `--ro-bind-data`.
    Data {
        /// Whose contents it gets.
        fd: i32,
        /// Inside.
        target: String,
        /// `--perms`.
        mode: u32,
        /// Code may write it.
        writable: bool,
    },
}

/// Why a command line is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "each is what its sentence says")]
pub enum ParseError {
    #[error("{flag} takes {count} argument{}, and {given} follow", if *count == 1 { "" } else { "s" })]
    Missing { flag: String, count: usize, given: usize },
    #[error("unknown option {0}; `stockade help bwrap` lists those that there are")]
    Unknown(String),
    #[error("{flag} is not taken: {why}")]
    Refused { flag: &'static str, why: &'static str },
    #[error("{flag} {value}: {why}")]
    Value { flag: String, value: String, why: &'static str },
    #[error(
        "--block-fd with --info-fd or --json-status-fd: the sandbox is made when --block-fd lets it, and has no pid before; leave --block-fd out"
    )]
    BlockedWithPid,
    #[error("no command is given; it stands behind the options: … -- COMMAND")]
    NoCommand,
    #[error("the command line has more than {MAX_WORDS} words")]
    TooManyWords,
    #[error("--args {fd}: {why}")]
    Arguments { fd: i32, why: String },
}

/// Reads what a descriptor has of further words, each with a NUL behind it.
pub type ReadWords<'a> = &'a mut dyn FnMut(i32) -> Result<Vec<String>, String>;

/// Reads a command line, without the program's name.
///
/// # Errors
/// An option is unknown, refused or malformed, or there is no command.
pub fn parse(words: Vec<String>, read: ReadWords<'_>) -> Result<Parsed, ParseError> {
    let mut parser =
        Parser { words: words.into_iter().rev().collect(), count: 0, mode: None, layers: Vec::new(), seen: Invocation::default() };
    parser.count = parser.words.len();
    parser.parse(read)
}

const PERMS: &str = "what follows it must be --dir, --tmpfs, --file, --bind-data or --ro-bind-data";

const LAYERS: &str = "what follows it must be --overlay-src, --tmp-overlay or --ro-overlay";

struct Parser {
    /// What is left, the next one last.
    words: Vec<String>,
    /// How many there were.
    count: usize,
    /// Of `--perms`, for the next operation.
    mode: Option<u32>,
    /// Of `--overlay-src`, for the next overlay.
    layers: Vec<String>,
    seen: Invocation,
}

impl Parser {
    fn parse(mut self, read: ReadWords<'_>) -> Result<Parsed, ParseError> {
        if self.count > MAX_WORDS {
            return Err(ParseError::TooManyWords);
        }
        while let Some(word) = self.words.pop_if(|word| word.starts_with('-')) {
            match word.as_str() {
                "--" => break,
                "--help" => return Ok(Parsed::Help),
                "--version" => return Ok(Parsed::Version),
                "--args" => {
                    let fd = self.descriptor(&word)?;
                    let more = read(fd).map_err(|why| ParseError::Arguments { fd, why })?;
                    self.count += more.len();
                    if self.count > MAX_WORDS {
                        return Err(ParseError::TooManyWords);
                    }
                    self.words.extend(more.into_iter().rev());
                }
                flag => {
                    let (mode, layers) = (self.mode, self.layers.len());
                    self.option(flag)?;
                    if mode.is_some() && self.mode == mode {
                        return Err(value("--perms", flag, PERMS));
                    }
                    if layers > 0 && self.layers.len() == layers {
                        return Err(value("--overlay-src", flag, LAYERS));
                    }
                }
            }
        }
        if self.mode.is_some() {
            return Err(value("--perms", "--", PERMS));
        }
        if !self.layers.is_empty() {
            return Err(value("--overlay-src", "--", LAYERS));
        }
        self.words.reverse();
        self.seen.command = self.words;
        if self.seen.block.is_some() && (self.seen.info.is_some() || self.seen.status.is_some()) {
            return Err(ParseError::BlockedWithPid);
        }
        if self.seen.command.is_empty() { Err(ParseError::NoCommand) } else { Ok(Parsed::Run(Box::new(self.seen))) }
    }

    fn option(&mut self, flag: &str) -> Result<(), ParseError> {
        if let Some(kind) = options::kind(flag) {
            return match kind {
                FlagKind::Inherent(count) => self.inherent(flag, count),
                FlagKind::Refused(flag, why) => Err(ParseError::Refused { flag, why }),
            };
        }
        let mode = |mode: Option<u32>, usual: u32| mode.unwrap_or(usual);
        let operation = match flag {
            "--bind" | "--bind-try" | "--ro-bind" | "--ro-bind-try" | "--dev-bind" | "--dev-bind-try" => self.bind(flag)?,
            "--tmp-overlay" | "--ro-overlay" => self.overlay(flag)?,
            "--chmod" => {
                let [octal, target] = self.two(flag)?;
                Operation::Mode { mode: permissions(flag, &octal)?, target }
            }
            "--tmpfs" => Operation::Tmpfs { mode: mode(self.mode.take(), 0o755), target: self.one(flag)? },
            "--dir" => Operation::Directory { mode: mode(self.mode.take(), 0o755), target: self.one(flag)? },
            "--symlink" => {
                let [to, target] = self.two(flag)?;
                Operation::Link { to, target }
            }
            "--file" => {
                let (fd, target) = self.contents(flag)?;
                Operation::File { fd, target, mode: mode(self.mode.take(), 0o666) }
            }
            "--bind-data" | "--ro-bind-data" => {
                let (fd, target) = self.contents(flag)?;
                Operation::Data { fd, target, mode: mode(self.mode.take(), 0o600), writable: flag == "--bind-data" }
            }
            flag => return self.setting(flag),
        };
        self.seen.operations.push(operation);
        Ok(())
    }

    /// An option that is no operation.
    fn setting(&mut self, flag: &str) -> Result<(), ParseError> {
        match flag {
            "--chdir" => self.seen.directory = Some(self.one(flag)?),
            "--setenv" => {
                let [name, value] = self.two(flag)?;
                self.variable(flag, name, Some(value))?;
            }
            "--unsetenv" => {
                let name = self.one(flag)?;
                self.variable(flag, name, None)?;
            }
            "--clearenv" => {
                self.seen.clears_environment = true;
                self.seen.environment.clear();
            }
            "--uid" => self.seen.uid = Some(self.id(flag)?),
            "--gid" => self.seen.gid = Some(self.id(flag)?),
            "--hostname" => {
                let name = self.one(flag)?;
                let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-');
                if name.is_empty() || name.len() > 64 || !name.chars().all(is_name) {
                    return Err(value(flag, &name, "letters, digits, `.` and `-`, at most 64"));
                }
                self.seen.hostname = Some(name);
            }
            "--seccomp" | "--add-seccomp-fd" => {
                let fd = self.descriptor(flag)?;
                self.seen.filters.push(fd);
            }
            "--block-fd" => self.seen.block = Some(self.descriptor(flag)?),
            "--info-fd" => self.seen.info = Some(self.descriptor(flag)?),
            "--json-status-fd" => self.seen.status = Some(self.descriptor(flag)?),
            "--die-with-parent" => self.seen.ends_with_parent = true,
            "--perms" => {
                let octal = self.one(flag)?;
                self.mode = Some(permissions(flag, &octal)?);
            }
            "--overlay-src" => {
                let layer = self.one(flag)?;
                self.layers.push(layer);
            }
            flag => return Err(ParseError::Unknown(flag.to_owned())),
        }
        Ok(())
    }

    /// An option for what every sandbox has. Its arguments are checked: another value than the usual
    /// one asks for something else.
    fn inherent(&mut self, flag: &str, count: usize) -> Result<(), ParseError> {
        let wanted = match flag {
            "--proc" => Some(("/proc", "the sandbox's proc is at /proc alone")),
            "--dev" => Some(("/dev", "the sandbox's devices are at /dev alone")),
            "--remount-ro" => Some(("/", "the root is read-only anyway; other directories are by --ro-bind")),
            _ => None,
        };
        let given = self.take(flag, count)?;
        match (wanted, given.first()) {
            (Some((usual, why)), Some(given)) if given.trim_end_matches('/') != usual.trim_end_matches('/') => Err(value(flag, given, why)),
            _ => Ok(()),
        }
    }

    fn overlay(&mut self, flag: &str) -> Result<Operation, ParseError> {
        let target = self.one(flag)?;
        let layers = std::mem::take(&mut self.layers);
        let writable = flag == "--tmp-overlay";
        match layers.len() {
            0 => Err(value(flag, &target, "name what it is made of by --overlay-src before it")),
            1 if !writable => {
                Err(value(flag, &target, "it is made of two directories or more, each by --overlay-src; show one by --ro-bind"))
            }
            _ => Ok(Operation::Overlay { layers, target, writable }),
        }
    }

    fn bind(&mut self, flag: &str) -> Result<Operation, ParseError> {
        let [source, target] = self.two(flag)?;
        let optional = flag.ends_with("-try");
        let plain = |path: &str| if path.len() > 1 { path.trim_end_matches('/').to_owned() } else { path.to_owned() };
        let (source, target) = (plain(&source), plain(&target));
        let whole = source == "/" && target == "/";
        Ok(match flag {
            // What srt tries before anything else. There are six devices, and nothing of it is writable.
            "--dev-bind" | "--dev-bind-try" if whole => Operation::ReadOnly { source, target, optional },
            "--dev-bind" | "--dev-bind-try" => {
                return Err(value(
                    flag,
                    &source,
                    "no devices of the host are shown; `--dev /dev` has null, zero, full, random, urandom and tty",
                ));
            }
            "--bind" | "--bind-try" if source == "/" => {
                return Err(value(
                    flag,
                    &source,
                    "the whole host is never writable; show it by --ro-bind / /, and bind the directories that code must write",
                ));
            }
            "--bind" | "--bind-try" if source == "/proc" => {
                return Err(value(flag, &source, "the host's processes are never shown; write --proc /proc"));
            }
            "--ro-bind" | "--ro-bind-try" => Operation::ReadOnly { source, target, optional },
            _ => Operation::Writable { source, target, optional },
        })
    }

    fn variable(&mut self, flag: &str, name: String, to: Option<String>) -> Result<(), ParseError> {
        if name.is_empty() || name.contains('=') {
            return Err(value(flag, &name, "the name of a variable is not empty and has no `=`"));
        }
        self.seen.environment.push((name, to));
        Ok(())
    }

    fn contents(&mut self, flag: &str) -> Result<(i32, String), ParseError> {
        let [fd, target] = self.two(flag)?;
        Ok((number(flag, &fd)?, target))
    }

    fn id(&mut self, flag: &str) -> Result<u32, ParseError> {
        let id = self.one(flag)?;
        match id.parse::<u32>() {
            Ok(0) => Err(value(flag, &id, "code is never root, not even inside; name another number")),
            Ok(number) if number < u32::MAX => Ok(number),
            _ => Err(value(flag, &id, "a number above 0")),
        }
    }

    fn descriptor(&mut self, flag: &str) -> Result<i32, ParseError> {
        let fd = self.one(flag)?;
        number(flag, &fd)
    }

    fn take(&mut self, flag: &str, count: usize) -> Result<Vec<String>, ParseError> {
        let given = self.words.len();
        if given < count {
            return Err(ParseError::Missing { flag: flag.to_owned(), count, given });
        }
        let mut taken = self.words.split_off(given - count);
        taken.reverse();
        match taken.iter().find(|word| word.contains('\0')) {
            Some(word) => Err(value(flag, word, "it holds a NUL byte")),
            None => Ok(taken),
        }
    }

    fn one(&mut self, flag: &str) -> Result<String, ParseError> {
        Ok(self.take(flag, 1)?.pop().unwrap_or_default())
    }

    fn two(&mut self, flag: &str) -> Result<[String; 2], ParseError> {
        let mut taken = self.take(flag, 2)?.into_iter();
        Ok([taken.next().unwrap_or_default(), taken.next().unwrap_or_default()])
    }
}

fn value(flag: &str, value: &str, why: &'static str) -> ParseError {
    ParseError::Value { flag: flag.to_owned(), value: value.to_owned(), why }
}

fn permissions(flag: &str, octal: &str) -> Result<u32, ParseError> {
    let mode = u32::from_str_radix(octal, 8).ok().filter(|mode| *mode <= 0o1777 && !octal.starts_with('+'));
    mode.ok_or_else(|| value(flag, octal, "an octal number up to 1777, without set-ID bits"))
}

fn number(flag: &str, fd: &str) -> Result<i32, ParseError> {
    fd.parse().ok().filter(|fd| *fd >= 0).ok_or_else(|| value(flag, fd, "the number of an open descriptor"))
}
