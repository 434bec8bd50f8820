//! Makes templates and images, runs copies and cold starts, and skips with a reason.
//!
//! Every process gets exactly the environment, the streams and the descriptors named here.

use std::{
    env,
    fs::{self, File},
    io::Write,
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Output, Stdio},
    sync::{
        atomic::{AtomicU32, Ordering::Relaxed},
        mpsc,
    },
    thread,
    time::Duration,
};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use stockade_protocol::memory_image::DESCRIPTOR;
use stockade_sys::seccomp::load_filter;

pub const RESTORER: &str = env!("STOCKADE_RESTORE");
const LIBRARY: &str = env!("STOCKADE_IMAGE_LIBRARY");
/// A program that takes longer hangs, and is killed.
const MAX_RUN: Duration = Duration::from_secs(120);
pub const TEMPLATE: &str = include_str!("../../src/template.py");

/// The interpreter under test, or the reason why there is none.
pub fn python() -> Result<PathBuf, String> {
    let name = env::var_os("STOCKADE_TEST_PYTHON").unwrap_or_else(|| "/usr/bin/python3".into());
    let ask = "import sys; print(sys.executable, sys.version_info >= (3, 10) and sys.implementation.name == 'cpython')";
    let output = Command::new(&name).args(["-I", "-c", ask]).output().map_err(|error| format!("{}: {error}", name.display()))?;
    let answer = String::from_utf8_lossy(&output.stdout).into_owned();
    match answer.trim().rsplit_once(' ') {
        Some((path, "True")) => Ok(PathBuf::from(path)),
        _ => Err(format!("{} is no CPython of at least 3.10", name.display())),
    }
}

/// Unwraps what a test needs, or ends the test with a printed reason.
macro_rules! or_skip {
    ($needed:expr) => {
        match $needed {
            Ok(found) => found,
            Err(reason) => {
                eprintln!("skipped: {reason}");
                return;
            }
        }
    };
}
pub(crate) use or_skip;

/// A directory with a template's files, and the path of its program.
pub struct Site {
    pub python: PathBuf,
    pub directory: PathBuf,
    /// A file of memory, as the launcher would give it.
    pub image: File,
    /// How its processes are started.
    pub filtered: bool,
}

/// What else a template is given.
#[derive(Default)]
pub struct Recipe<'a> {
    pub imports: &'a str,
    /// Code that the template runs.
    pub warm: &'a str,
    /// A text of the template's source, and what takes its place: a control.
    pub without: Option<(&'a str, &'a str)>,
    pub variables: &'a [(&'a str, &'a str)],
    /// Whether it is pid 1 of a namespace of its own.
    pub in_pid_namespace: bool,
}

/// What a program is started with.
#[derive(Clone, Copy)]
pub struct Start<'a> {
    pub arguments: &'a [&'a str],
    pub options: &'a [&'a str],
    pub variables: &'a [(&'a str, &'a str)],
    pub input: &'a [u8],
}

impl Default for Start<'_> {
    fn default() -> Self {
        let variables = &[("HOME", "/nonexistent"), ("PATH", "/usr/bin:/bin"), ("PYTHONDONTWRITEBYTECODE", "1"), ("EMPTY", "")];
        Start { arguments: &["a b", "", "c"], options: &[], variables, input: b"first\nsecond\nthird\r\n\nlast" }
    }
}

impl Site {
    pub fn new() -> Result<Site, String> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let python = python()?;
        let name = format!("stockade-copies-{}-{}", std::process::id(), COUNT.fetch_add(1, Relaxed));
        let directory = env::temp_dir().join(name);
        fs::create_dir_all(directory.join("site")).unwrap();
        fs::write(directory.join("beside.py"), "VALUE = 42\n").unwrap();
        let image =
            memfd_create("image", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(|error| format!("memfd_create: {error}"))?;
        Ok(Site { python, directory, image: image.into(), filtered: false })
    }

    /// Whether nothing but a program keeps this interpreter from ending early.
    pub fn ends_early(&self) -> Result<(), String> {
        let ask = "import atexit; print(atexit._ncallbacks())";
        let output = Command::new(&self.python).args(["-c", ask]).output().unwrap();
        if output.stdout == b"0\n" {
            Ok(())
        } else {
            Err(format!("{}: a `.pth` file registers functions for the end", self.python.display()))
        }
    }

    pub fn program(&self) -> PathBuf {
        self.directory.join("main.py")
    }

    /// Runs a template. Its image is complete where it ends with 0.
    pub fn template(&self, recipe: &Recipe<'_>) -> Output {
        self.template_of(recipe, &[])
    }

    /// That of an interpreter with these options.
    pub fn template_with(&self, options: &[&str]) -> Output {
        self.template_of(&Recipe::default(), options)
    }

    fn template_of(&self, recipe: &Recipe<'_>, options: &[&str]) -> Output {
        let (from, to) = recipe.without.unwrap_or_default();
        assert!(TEMPLATE.contains(from), "the template has no {from:?}");
        fs::write(self.directory.join("site/sitecustomize.py"), TEMPLATE.replacen(from, to, usize::from(!from.is_empty()))).unwrap();
        let warm = self.directory.join("warm.py");
        fs::write(&warm, recipe.warm).unwrap();
        let mut command = if recipe.in_pid_namespace {
            let mut command = self.command(Path::new("unshare"), Some(&self.image));
            command.args(namespace_options()).arg(&self.python);
            command
        } else {
            self.command(&self.python, Some(&self.image))
        };
        command.args(options).arg(self.program());
        self.set_variables(&mut command, Start::default().variables);
        command
            .env("PYTHONPATH", self.directory.join("site"))
            .env("STOCKADE_TEMPLATE_FD", DESCRIPTOR.to_string())
            .env("STOCKADE_TEMPLATE_LIBRARY", LIBRARY)
            .env("STOCKADE_TEMPLATE_IMPORTS", recipe.imports)
            .env("STOCKADE_TEMPLATE_WARM", warm)
            .envs(recipe.variables.iter().copied())
            .output()
            .unwrap()
    }

    /// The same, where it must succeed. Nothing can change the image afterwards.
    pub fn make(&self, recipe: &Recipe<'_>) {
        let output = self.template(recipe);
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        fcntl_add_seals(&self.image, SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL).unwrap();
    }

    pub fn write_program(&self, code: &[u8]) {
        fs::write(self.program(), code).unwrap();
    }

    pub fn cold(&self, start: &Start<'_>) -> Output {
        self.run(self.either(false), start)
    }

    pub fn copy(&self, start: &Start<'_>) -> Output {
        self.run(self.either(true), start)
    }

    /// A copy that is pid 1 of a namespace of its own.
    pub fn copy_in_pid_namespace(&self, start: &Start<'_>) -> Output {
        let mut command = self.command(Path::new("unshare"), Some(&self.image));
        // The interpreter in between has set LC_CTYPE for its children (PEP 538).
        let exec = "import os, sys; os.environ.pop('LC_CTYPE', 0); os.execv(sys.argv[1], sys.argv[2:])";
        command.args(namespace_options()).arg(&self.python).args(["-I", "-c", exec, RESTORER]).arg(&self.python);
        self.run(command, start)
    }

    /// A copy, or a cold start, with files for streams.
    pub fn run_with_files(&self, copy: bool, input: File, output: File) -> ExitStatus {
        let mut command = self.either(copy);
        command.arg(self.program()).stdin(input).stdout(output);
        self.set_variables(&mut command, Start::default().variables);
        command.status().unwrap()
    }

    /// What a copy, or a cold start, writes whose stdin and stderr are closed.
    pub fn run_without_streams(&self, copy: bool) -> String {
        let mut command = self.either(copy);
        self.set_variables(&mut command, Start::default().variables);
        // SAFETY: between fork and exec it makes system calls only, and std uses neither again.
        unsafe {
            command.pre_exec(|| {
                stockade_sys::process::close_range(0, 0)?;
                stockade_sys::process::close_range(2, 2).map_err(Into::into)
            });
        }
        text(&command.arg(self.program()).output().unwrap().stdout).into_owned()
    }

    fn either(&self, copy: bool) -> Command {
        if !copy {
            return self.command(&self.python, None);
        }
        let mut command = self.command(Path::new(RESTORER), Some(&self.image));
        command.arg0(&self.python);
        command
    }

    /// Runs a program cold and in a copy; `None` where both ended the same.
    pub fn difference(&self, code: &[u8], start: &Start<'_>) -> Option<String> {
        self.write_program(code);
        let (cold, copy) = (self.cold(start), self.copy(start));
        let all = |output: &Output| (output.stdout.clone(), output.stderr.clone(), output.status.into_raw());
        let shown = |output: &Output| format!("{:?}\n{}{}", output.status, text(&output.stdout), text(&output.stderr));
        (all(&cold) != all(&copy)).then(|| format!("--- cold: {}--- copy: {}", shown(&cold), shown(&copy)))
    }

    /// A command with nothing open but the standard streams and, at its number, the image.
    fn command(&self, program: &Path, image: Option<&File>) -> Command {
        let mut command = Command::new(program);
        command.env_clear().current_dir(&self.directory).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let image = image.map(|file| file.try_clone().unwrap());
        let filtered = self.filtered;
        // SAFETY: between fork and exec it makes system calls only.
        unsafe {
            command.pre_exec(move || {
                // A test that was started in the background ignores SIGINT, and so would its programs.
                stockade_sys::process::reset_signals(u64::MAX);
                stockade_sys::process::close_on_exec_from(3)?;
                if let Some(image) = &image {
                    stockade_sys::process::place_descriptor(image, DESCRIPTOR)?;
                }
                if filtered {
                    rustix::thread::set_no_new_privs(true)?;
                    load_filter(&super::without_checkpoint_restore())?;
                }
                Ok(())
            });
        }
        command
    }

    fn set_variables(&self, command: &mut Command, variables: &[(&str, &str)]) {
        command.envs(variables.iter().copied());
    }

    fn run(&self, mut command: Command, start: &Start<'_>) -> Output {
        command.args(start.options).arg(self.program()).args(start.arguments).stdin(Stdio::piped());
        self.set_variables(&mut command, start.variables);
        let mut child = command.spawn().unwrap();
        // A program that does not read its input may end before.
        let _unread = child.stdin.take().map(|mut stdin| stdin.write_all(start.input));
        let (ended, ends) = mpsc::channel::<()>();
        let process = rustix::process::Pid::from_child(&child);
        thread::spawn(move || {
            if ends.recv_timeout(MAX_RUN) == Err(mpsc::RecvTimeoutError::Timeout) {
                let _ended_meanwhile = rustix::process::kill_process(process, rustix::process::Signal::KILL);
            }
        });
        let output = child.wait_with_output().unwrap();
        drop(ended);
        output
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let _left_in_tmp = fs::remove_dir_all(&self.directory);
    }
}

pub fn text(bytes: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

fn namespace_options() -> &'static [&'static str] {
    if rustix::process::geteuid().is_root() { &["-pf"] } else { &["-Urpf"] }
}

/// Whether processes can have PID namespaces of their own here.
pub fn pid_namespaces() -> Result<(), String> {
    match Command::new("unshare").args(namespace_options()).arg("true").output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(format!("unshare: {}", text(&output.stderr).trim())),
        Err(error) => Err(format!("unshare: {error}")),
    }
}
