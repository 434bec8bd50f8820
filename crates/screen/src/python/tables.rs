//! Names of Python that tell what a program does.
//!
//! Dotted names, after aliases are resolved. A module in a table stands for all names below it. It
//! does not resolve names.

use stockade_protocol::screen::Rule;

/// Modules of which every use falls under one rule.
const MODULES: [(Rule, &[&str]); 6] = [
    (
        Rule::Process,
        &[
            "subprocess",
            "_posixsubprocess",
            "pty",
            "pexpect",
            "ptyprocess",
            "sh",
            "plumbum",
            "invoke",
            "commands",
            "popen2",
            "asyncio.subprocess",
            "trio.run_process",
        ],
    ),
    (Rule::Fork, &["multiprocessing", "_multiprocessing", "billiard", "loky"]),
    (
        Rule::Network,
        &[
            "socket",
            "_socket",
            "ssl",
            "socketserver",
            "http.client",
            "http.server",
            "urllib.request",
            "urllib2",
            "httplib",
            "ftplib",
            "smtplib",
            "poplib",
            "imaplib",
            "nntplib",
            "telnetlib",
            "xmlrpc",
            "xmlrpclib",
            "requests",
            "urllib3",
            "httpx",
            "aiohttp",
            "websockets",
            "websocket",
            "paramiko",
            "fabric",
            "asyncssh",
            "pycurl",
            "dns",
            "scapy",
            "boto3",
            "botocore",
            "psycopg",
            "psycopg2",
            "pymysql",
            "MySQLdb",
            "asyncpg",
            "redis",
            "pymongo",
            "flask",
            "fastapi",
            "uvicorn",
            "gunicorn",
            "tornado",
            "twisted",
            "bottle",
            "starlette",
            "django",
            "grpc",
            "zmq",
            "paho",
            "pika",
            "kafka",
            "ldap3",
            "docker",
            "kubernetes",
            "google.cloud",
            "openai",
            "anthropic",
            "webbrowser",
        ],
    ),
    (Rule::Native, &["ctypes", "_ctypes", "cffi", "_cffi_backend", "numpy.ctypeslib", "llvmlite", "pythonnet", "clr"]),
    (Rule::Eval, &["code", "codeop", "runpy"]),
    (Rule::System, &["pwd.struct_passwd", "spwd", "crypt"]),
];

/// Single names.
const NAMES: [(Rule, &[&str]); 8] = [
    (
        Rule::Process,
        &[
            "os.system",
            "os.popen",
            "os.popen2",
            "os.popen3",
            "os.popen4",
            "os.startfile",
            "os.execl",
            "os.execle",
            "os.execlp",
            "os.execlpe",
            "os.execv",
            "os.execve",
            "os.execvp",
            "os.execvpe",
            "os.spawnl",
            "os.spawnle",
            "os.spawnlp",
            "os.spawnlpe",
            "os.spawnv",
            "os.spawnve",
            "os.spawnvp",
            "os.spawnvpe",
            "os.posix_spawn",
            "os.posix_spawnp",
            "os.kill",
            "os.killpg",
            "os.pidfd_open",
            "psutil.Popen",
            "signal.pidfd_send_signal",
            "asyncio.create_subprocess_exec",
            "asyncio.create_subprocess_shell",
        ],
    ),
    (Rule::Fork, &["os.fork", "os.forkpty", "concurrent.futures.ProcessPoolExecutor", "concurrent.futures.process"]),
    (
        Rule::Network,
        &[
            "asyncio.open_connection",
            "asyncio.start_server",
            "asyncio.open_unix_connection",
            "asyncio.start_unix_server",
            "logging.handlers.SocketHandler",
            "logging.handlers.HTTPHandler",
            "logging.handlers.SysLogHandler",
        ],
    ),
    (Rule::Native, &["mmap.PROT_EXEC", "sys.setdlopenflags", "importlib.machinery.ExtensionFileLoader", "imp.load_dynamic"]),
    (
        Rule::Eval,
        &[
            "builtins.eval",
            "builtins.exec",
            "builtins.compile",
            "timeit.timeit",
            "timeit.repeat",
            "types.FunctionType",
            "types.CodeType",
            "sys.ps1",
            "builtins.execfile",
            "cProfile.run",
            "profile.run",
            "pdb.run",
            "pdb.runeval",
            "trace.Trace",
        ],
    ),
    (
        Rule::Internals,
        &[
            "sys._getframe",
            "sys._current_frames",
            "sys.settrace",
            "sys.setprofile",
            "threading.settrace",
            "threading.setprofile",
            "sys.addaudithook",
            "sys.meta_path",
            "sys.path_hooks",
            "sys.path_importer_cache",
            "gc.get_objects",
            "gc.get_referrers",
            "gc.get_referents",
            "inspect.currentframe",
            "inspect.stack",
            "builtins.__build_class__",
            "builtins.__loader__",
            "builtins.__spec__",
            "sys.monitoring",
            "sys.activate_stack_trampoline",
        ],
    ),
    (
        Rule::System,
        &[
            "os.setuid",
            "os.setgid",
            "os.seteuid",
            "os.setegid",
            "os.setreuid",
            "os.setregid",
            "os.setresuid",
            "os.setresgid",
            "os.setgroups",
            "os.initgroups",
            "os.chroot",
            "os.unshare",
            "os.setns",
            "os.mknod",
            "os.reboot",
            "os.sethostname",
            "socket.sethostname",
        ],
    ),
    (
        Rule::Deserialize,
        &[
            "pickle.load",
            "pickle.loads",
            "pickle.Unpickler",
            "_pickle.load",
            "_pickle.loads",
            "_pickle.Unpickler",
            "cPickle.load",
            "cPickle.loads",
            "dill.load",
            "dill.loads",
            "cloudpickle.load",
            "cloudpickle.loads",
            "marshal.load",
            "marshal.loads",
            "shelve.open",
            "joblib.load",
            "yaml.unsafe_load",
            "yaml.unsafe_load_all",
            "yaml.full_load",
            "yaml.UnsafeLoader",
            "yaml.load_all",
            "pandas.read_pickle",
            "jsonpickle.decode",
            "jsonpickle.loads",
            "torch.load",
        ],
    ),
];

/// Attributes that only an escape needs.
const STRONG: [&str; 21] = [
    "__subclasses__",
    "__globals__",
    "__builtins__",
    "__code__",
    "__closure__",
    "func_globals",
    "func_code",
    "f_globals",
    "f_locals",
    "f_builtins",
    "f_back",
    "gi_frame",
    "gi_code",
    "cr_frame",
    "ag_frame",
    "tb_frame",
    "co_consts",
    "__loader__",
    "__getattribute__",
    "__import__",
    "__bases__",
];
/// Those of them that are reported in strings too.
const TELLING: [&str; 6] = ["__subclasses__", "__globals__", "__builtins__", "__import__(", "__code__", "f_globals"];

/// Names that no honest program builds from parts.
const FORBIDDEN: [&str; 40] = [
    "system",
    "popen",
    "subprocess",
    "ctypes",
    "socket",
    "eval",
    "exec",
    "compile",
    "__import__",
    "__builtins__",
    "__class__",
    "__base__",
    "__bases__",
    "__mro__",
    "__subclasses__",
    "__globals__",
    "__dict__",
    "__code__",
    "builtins",
    "importlib",
    "import_module",
    "execve",
    "execvp",
    "spawn",
    "fork",
    "pickle",
    "marshal",
    "posix",
    "_posixsubprocess",
    "pty",
    "rmtree",
    "os.system",
    "check_output",
    "Popen",
    "multiprocessing",
    "runpy",
    "setuid",
    "unlink",
    "requests",
    "urllib.request",
];

/// Functions that decode.
const DECODERS: [&str; 31] = [
    "base64.b64decode",
    "base64.standard_b64decode",
    "base64.urlsafe_b64decode",
    "base64.b32decode",
    "base64.b32hexdecode",
    "base64.b16decode",
    "base64.b85decode",
    "base64.a85decode",
    "base64.z85decode",
    "base64.decodebytes",
    "base64.decodestring",
    "binascii.a2b_base64",
    "binascii.unhexlify",
    "binascii.a2b_hex",
    "binascii.a2b_uu",
    "codecs.decode",
    "codecs.getdecoder",
    "zlib.decompress",
    "zlib.decompressobj",
    "gzip.decompress",
    "bz2.decompress",
    "lzma.decompress",
    "marshal.loads",
    "pickle.loads",
    "builtins.bytes.fromhex",
    "builtins.bytearray.fromhex",
    "cryptography.fernet.Fernet",
    "urllib.parse.unquote",
    "Crypto.Cipher.AES.new",
    "html.unescape",
    "quopri.decodestring",
];

/// Functions that fetch data.
const FETCHERS: [&str; 8] = ["requests", "urllib.request", "urllib2", "httpx", "aiohttp", "socket", "http.client", "urllib3"];

fn below(name: &str, top: &str) -> bool {
    name.strip_prefix(top).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// The rules for a dotted name.
pub(super) fn rules(name: &str) -> impl Iterator<Item = Rule> + '_ {
    let modules = MODULES.iter().filter(move |(_, tops)| tops.iter().any(|top| below(name, top))).map(|(rule, _)| *rule);
    let names = NAMES.iter().filter(move |(_, names)| names.contains(&name)).map(|(rule, _)| *rule);
    modules.chain(names)
}

/// The names of a module with a rule of their own.
pub(super) fn names_of(module: &str) -> impl Iterator<Item = &'static str> {
    let of = move |name: &'static str| name.strip_prefix(module)?.strip_prefix('.').filter(|rest| !rest.contains('.'));
    NAMES.iter().flat_map(|(_, names)| names.iter().copied()).filter_map(of)
}

/// Whether an attribute of this name reaches into the interpreter.
pub(super) fn is_strong(attribute: &str) -> bool {
    STRONG.contains(&attribute)
}

/// Whether a string contains such an attribute.
pub(super) fn names_internals(text: &str) -> bool {
    text.len() < 4096 && TELLING.iter().any(|name| text.contains(name))
}

/// Whether building this name from parts hides it.
pub(super) fn is_forbidden(name: &str) -> bool {
    FORBIDDEN.contains(&name)
}

/// Whether hiding this module is reported: one of which a rule knows something.
pub(super) fn is_watched(module: &str) -> bool {
    let top = module.split('.').next().unwrap_or_default();
    let mut known = MODULES.iter().flat_map(|(_, tops)| *tops).chain(NAMES.iter().flat_map(|(_, names)| *names));
    known.any(|name| below(name, top))
}

/// Whether this function decodes.
pub(super) fn decodes(name: &str) -> bool {
    DECODERS.contains(&name)
}

/// Whether this function fetches data.
pub(super) fn fetches(name: &str) -> bool {
    FETCHERS.iter().any(|top| below(name, top))
}

/// The built-in names of Python 3.
const BUILTINS: [&str; 82] = [
    "abs",
    "aiter",
    "all",
    "anext",
    "any",
    "ascii",
    "bin",
    "bool",
    "breakpoint",
    "bytearray",
    "bytes",
    "callable",
    "chr",
    "classmethod",
    "compile",
    "complex",
    "copyright",
    "credits",
    "delattr",
    "dict",
    "dir",
    "divmod",
    "enumerate",
    "eval",
    "exec",
    "execfile",
    "exit",
    "filter",
    "float",
    "format",
    "frozenset",
    "getattr",
    "globals",
    "hasattr",
    "hash",
    "help",
    "hex",
    "id",
    "input",
    "int",
    "isinstance",
    "issubclass",
    "iter",
    "len",
    "license",
    "list",
    "locals",
    "map",
    "max",
    "memoryview",
    "min",
    "next",
    "object",
    "oct",
    "open",
    "ord",
    "pow",
    "print",
    "property",
    "quit",
    "range",
    "raw_input",
    "reload",
    "repr",
    "reversed",
    "round",
    "set",
    "setattr",
    "slice",
    "sorted",
    "staticmethod",
    "str",
    "sum",
    "super",
    "tuple",
    "type",
    "unichr",
    "vars",
    "zip",
    "__import__",
    "__build_class__",
    "__debug__",
];

/// Whether a name is built in.
pub(super) fn is_builtin(name: &str) -> bool {
    BUILTINS.contains(&name)
}
