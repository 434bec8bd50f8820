"""Makes an image of a CPython that is about to open its program, for stockade-restore.

Run as the module `sitecustomize`, first on PYTHONPATH or in the place of the installation's own,
by `python3 OPTIONS /path/of/program`. It imports what most programs import and asks CPython to
call it back when it looks at the program's path, which is the last thing before it opens the
program. There the image is written and this process ends. A copy goes on from there with its own
arguments and environment: CPython itself opens the program and runs it, with no frame, module,
path entry, variable or hook of this file left, but for what atexit calls and what
some functions note (`EarlyEnd`).
No code of a request ever runs in this process.

Refused, with a line on stderr and status 125: whatever an image cannot hold (threads, open
descriptors, children, timers, shared memory) and whatever must not be the same in two copies
(generators of random numbers that it cannot reseed). The list of known generators is not
complete: two copies with the same pid must be compared before an image is used.

What the image depends on goes to stdout between the lines `stockade: made from` and `end`: `module
NAME` for each module at the top that a copy has and a fresh start has not, and for each file that was
mapped, or that such a module was read from, `file DEVICE INODE SIZE SECONDS NANOSECONDS PATH`, with
the time of its last change. Packages with compiled code are refused unless they were tried in copies
(PACKAGES).

A child of the template then rehearses a copy's life with no program in it. Which pages it
writes is noted in the image, and the restorer copies them at once.

Not the same as in a fresh start: `hash` of strings, addresses and the like are those of the image
in every copy; imported modules are in `sys.modules`; the collector does not look at the objects of
the image (`gc.freeze`), and the interpreter is not taken apart at the end, where nothing of that
would be seen outside. Standard library only;
CPython 3.10 to 3.13 on glibc.

Parameters, which are not part of the image:
STOCKADE_TEMPLATE_FD        descriptor of an empty file: the image
STOCKADE_TEMPLATE_LIBRARY   path of the library that writes images
STOCKADE_TEMPLATE_IMPORTS   modules to import, separated by commas
STOCKADE_TEMPLATE_WARM      path of Python code to run after these imports, or nothing
"""

import builtins
import os
import posix
import sys
import time

import _io
import _signal
import _thread
import _warnings

# Functions of this file run at the end of a program, which may have replaced those that it shares.
__builtins__ = dict(vars(builtins))

PRESENT = set(sys.modules)

# Forgotten again below, since a fresh start has not imported them.
import atexit  # noqa: E402
import gc  # noqa: E402
from _weakref import ref as weak_reference  # noqa: E402
from gc import callbacks, collect, garbage, get_debug, get_objects, get_referents, is_tracked, unfreeze  # noqa: E402
from itertools import compress  # noqa: E402

REFUSED = 125

# What CPython and libc read once, before a copy begins: it must be as in the template.
READ_AT_START = (b"PYTHON", b"LC_", b"LANG", b"LD_", b"MALLOC_", b"GLIBC_TUNABLES")

# Libraries that generate random numbers, but are not known how to reseed.
UNKNOWN_GENERATORS = (
    "libgnutls", "libnss3", "libsoftokn3", "libfreebl3", "libgcrypt", "libsodium", "libmbedcrypto", "libwolfssl", "libbotan",
    "libtorch", "libtensorflow", "libmkl_rt", "_sodium.", "_rust.",
)  # fmt: skip

# Packages with compiled code that were tried in copies, and the first major version that was not. What
# else is compiled may keep something outside Python that must not be the same in two copies.
PACKAGES = {
    "numpy": 3, "pandas": 3, "matplotlib": 4, "contourpy": 2, "kiwisolver": 2, "pillow": 14,
    "fonttools": 5, "charset-normalizer": 4, "markupsafe": 4, "pyyaml": 7,
}  # fmt: skip

# Libraries that start threads when they are loaded, by variables that say how many. A copy has the
# one thread of the template, and starts the others when its own variables become known.
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")

# Classes whose objects live partly outside memory, by the module that defines them.
OUTSIDE = {
    "socket.socket", "subprocess.Popen", "threading.Thread", "mmap.mmap", "asyncio.BaseEventLoop", "sqlite3.Connection",
    "multiprocessing.BaseProcess", "select.epoll", "_io.FileIO",
}  # fmt: skip
OF_MAIN = {"threading._MainThread", "multiprocessing.process._MainProcess"}
GENERATORS = {"_random.Random", "random.Random", "numpy.Generator", "numpy.RandomState", "numpy.BitGenerator", "numpy.SeedSequence"}

# The flag of a class whose objects may refer to others.
HAVE_GC = 1 << 14
# Free bytes that glibc keeps at the end of its heap, as it does itself.
TOP_PAD = 128 << 10


def refuse(*reasons):
    """Ends the template."""
    sys.stderr.write("stockade: template refused: " + "; ".join(reasons) + "\n")
    sys.stderr.flush()
    os._exit(REFUSED)


def fail(reason):
    """Ends a copy that cannot be what it is asked for."""
    os.write(2, f"stockade: restored interpreter: {reason}\n".encode())
    os._exit(REFUSED)


# What an image cannot hold ---------------------------------------------------------------------


def census(image):
    """All reasons that the kernel's view of this process gives to refuse."""
    tasks = os.listdir("/proc/self/task")
    if len(tasks) != 1:
        names = sorted({read(f"/proc/self/task/{task}/comm").strip() for task in tasks})
        yield f"{len(tasks)} threads: {' '.join(names)}"
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue  # that of the listing itself
        if int(number) > 2 and int(number) != image:
            yield f"descriptor {number} is open: {target}"
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        yield "a child process"
    except ChildProcessError:
        pass
    for timer in (_signal.ITIMER_REAL, _signal.ITIMER_VIRTUAL, _signal.ITIMER_PROF):
        if _signal.getitimer(timer)[0]:
            yield "an interval timer"
    if read("/proc/self/timers").strip():
        yield "a POSIX timer"
    # Shared writable memory, shadow stacks and the like: the library that writes the image.


def read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def live_objects():
    """Objects that must not be the same in two copies, or are more than memory."""
    numpy = getattr(sys.modules.get("numpy.random"), "mtrand", None)
    # Those that are reseeded, and the standard streams.
    names = getattr(sys.modules.get("tempfile"), "_name_sequence", None)
    known = {id(getattr(sys.modules.get("random"), "_inst", None)), id(getattr(names, "_rng", None))}
    if numpy:
        known |= {id(numpy._rand), id(numpy._rand._bit_generator), id(getattr(numpy._rand._bit_generator, "_seed_seq", None))}
    for stream in (sys.__stdin__, sys.__stdout__, sys.__stderr__):
        known.add(id(getattr(stream.buffer, "raw", stream.buffer)))
    for thing in objects_of(lambda kind: names_of(kind) & (GENERATORS | OUTSIDE)):
        if id(thing) in known:
            continue
        kinds, name = names_of(type(thing)), f"{type(thing).__module__}.{type(thing).__qualname__}"
        if not kinds & GENERATORS:
            if name not in OF_MAIN and not getattr(thing, "closed", False):
                yield f"an object of more than memory: {name}"
        elif "random.SystemRandom" not in kinds:
            yield f"a generator that would repeat: {name}"


def names_of(kind):
    """Those of a class and of what it derives from, each behind the package that defines it."""
    return {f"{str(part.__module__).partition('.')[0]}.{part.__qualname__}" for part in kind.__mro__}


def objects_of(is_wanted):
    """All objects whose class is wanted. The collector does not show those that were kept from it, nor
    those of classes that it never looks at, nor a tuple of such: they are found as what others refer to."""
    unfreeze()
    found = get_objects()
    kinds, seen, parts = kinds_of(found), set(), [found]
    while found:
        referred = get_referents(*found)
        parts.append(referred)
        kinds.update(kinds_of(referred))
        may_refer = {key for key, kind in kinds.items() if kind.__flags__ & HAVE_GC}
        hidden = {id(thing): thing for thing in of_kinds(may_refer, referred) if not is_tracked(thing)}
        found = [hidden[key] for key in hidden.keys() - seen]
        seen |= hidden.keys()
    wanted = {key for key, kind in kinds.items() if is_wanted(kind)}
    return list({id(thing): thing for part in parts for thing in of_kinds(wanted, part)}.values())


def kinds_of(things):
    """Their classes, by address: a class may have no hash."""
    kinds = list(map(type, things))
    return dict(zip(map(id, kinds), kinds))


def of_kinds(keys, things):
    return compress(things, map(keys.__contains__, map(id, map(type, things))))


# What must differ between copies -----------------------------------------------------------------


def unknown_packages():
    """All packages with compiled code that were not tried in copies."""
    files = {}
    for name, module in list(sys.modules.items()):
        path, top = getattr(module, "__file__", None) or "", name.partition(".")[0]
        if path.endswith(".so") and top not in sys.stdlib_module_names:
            files.setdefault(top, path)
    if not files:
        return
    from importlib import metadata

    owners = metadata.packages_distributions()
    for top, path in sorted(files.items()):
        known = {owner.lower().replace("_", "-") for owner in owners.get(top, ())}
        if not known:
            yield f"{path} has compiled code and belongs to no package"
        for owner in sorted(known):
            version = metadata.version(owner)
            if int(version.partition(".")[0]) >= PACKAGES.get(owner, 0):
                yield f"{owner} {version} has compiled code that was not tried in copies"


def what_it_depends_on(modules):
    """Lines that name these modules, and the files that made the image."""
    tops = {name.partition(".")[0] for name in modules}
    files = {line.split(None, 5)[5].rstrip("\n") for line in read("/proc/self/maps").splitlines(True) if " /" in line}
    files |= {getattr(sys.modules.get(top), "__file__", None) or "" for top in tops}
    lines = [f"module {top}" for top in sorted(tops)] + [f"file {stamp(path)} {path}" for path in sorted(files) if path.startswith("/")]
    lines = ["", "stockade: made from", *lines, "end", ""]
    return "\n".join(lines).encode(errors="surrogateescape")


def stamp(path):
    """What tells a file from another. Who reads it compares it with what the host has at this path, and
    learns nothing of a file that this process cannot see."""
    try:
        found = os.stat(path)
    except OSError:
        return "0 0 0 0 0"  # there is none
    return f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_ctime_ns // 10**9} {found.st_ctime_ns % 10**9}"


class Threads:
    """The threads of libraries that a copy is to have, which the template must not."""

    NAMES = ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads", "openblas_set_num_threads64_", "openblas_set_num_threads")

    def __init__(self, ctypes):
        paths = sorted({line.split(None, 5)[5].strip() for line in read("/proc/self/maps").splitlines() if "openblas" in line})
        libraries = [ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD) for path in paths]
        found = [(name, library) for library in libraries for name in self.NAMES if hasattr(library, name)]
        self.calls = [getattr(library, name) for name, library in found]

    def start(self):
        """As OpenBLAS reads its variables when it is loaded."""
        said = (os.environ.get(name, "") for name in THREADS)
        wanted = next((int(text) for text in said if text.isdecimal() and int(text)), len(os.sched_getaffinity(0)))
        for call in self.calls:
            call(min(wanted, len(os.sched_getaffinity(0))))


class Reseeding:
    """Calls that give a copy its own random numbers. They are found in the template: a copy's
    memory has no file names."""

    def __init__(self, ctypes):
        self.ctypes = ctypes
        self.calls = []
        self.unknown = []
        self.libuuid = []
        names = {line.split(None, 5)[5] for line in read("/proc/self/maps").splitlines() if "/" in line}
        unknown = (name for name in sorted(names) if os.path.basename(name).startswith(UNKNOWN_GENERATORS))
        self.unknown += [f"random numbers of {name} cannot be reseeded" for name in unknown]
        self.find_libcrypto(sorted(name for name in names if "libcrypto" in os.path.basename(name)))
        self.find_sqlite(sorted(name for name in names if "sqlite3" in os.path.basename(name)))
        self.find_libuuid(sorted(name for name in names if os.path.basename(name).startswith("libuuid")))
        if "numpy.random" in sys.modules:
            self.calls.append(sys.modules["numpy.random"].seed)

    def library(self, path):
        return self.ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_NOLOAD)

    def find_libcrypto(self, paths):
        if not paths and sys.modules.keys() & {"_ssl", "_hashlib"}:
            self.unknown.append("OpenSSL is part of another library, and cannot be reseeded")
        for path in paths:
            library = self.library(path)
            if hasattr(library, "EVP_RAND_reseed"):
                get = [library.RAND_get0_primary, library.RAND_get0_public, library.RAND_get0_private]
                generators = [self.pointer(function, None) for function in get]
                self.calls += [lambda g=g, f=library.EVP_RAND_reseed: self.reseed_3(f, g) for g in generators]
            elif hasattr(library, "RAND_DRBG_reseed"):
                get = [library.RAND_DRBG_get0_master, library.RAND_DRBG_get0_public, library.RAND_DRBG_get0_private]
                generators = [self.pointer(function) for function in get]
                self.calls += [lambda g=g, f=library.RAND_DRBG_reseed: self.reseed_1(f, g) for g in generators]
            else:
                self.unknown.append(f"{path} has no call that reseeds it")

    def pointer(self, function, *arguments):
        function.restype = self.ctypes.c_void_p
        return self.ctypes.c_void_p(function(*arguments))

    def reseed_3(self, function, generator):
        fresh, size = os.urandom(48), self.ctypes.c_size_t
        if function(generator, 0, None, size(0), fresh, size(len(fresh))) != 1:
            fail("OpenSSL was not reseeded")

    def reseed_1(self, function, generator):
        fresh = os.urandom(48)
        if function(generator, fresh, self.ctypes.c_size_t(len(fresh)), 0) != 1:
            fail("OpenSSL was not reseeded")

    def find_sqlite(self, paths):
        # A length of 0 makes it take a new seed from the system when it is next used.
        libraries = [library for library in map(self.library, paths) if hasattr(library, "sqlite3_randomness")]
        self.calls += [lambda f=library.sqlite3_randomness: f(0, None) for library in libraries]
        if not libraries and "_sqlite3" in sys.modules:
            self.unknown.append("SQLite is part of another library, and cannot be reseeded")

    def find_libuuid(self, paths):
        # It draws the address of a host that has none, and its clock's number, once in a process.
        self.libuuid = [self.library(path) for path in paths]
        if not paths and getattr(sys.modules.get("_uuid"), "generate_time_safe", None):
            self.unknown.append("libuuid is part of another library, and cannot be made to forget what it has drawn")

    def forget(self):
        """In the template: makes what libuuid has drawn unknown to it, as in a fresh start."""
        for library in self.libuuid:
            reset_variables(self.ctypes, library)

    def reseed(self):
        """Of `random` and of what registered itself for fork, PyOS_AfterFork_Child takes care."""
        for call in self.calls:
            call()
        loaded = sys.modules.get
        if process := loaded("multiprocessing.process"):
            process._current_process._config["authkey"] = process.AuthenticationString(os.urandom(32))
        if tempfile := loaded("tempfile"):
            tempfile._name_sequence = tempfile.tempdir = None
        if uuid := loaded("uuid"):
            uuid._node = uuid._last_timestamp = None


def reset_variables(ctypes, library):
    """Gives a library's variables that start as zeros, and those of its own for each thread, what they
    start with."""
    word, number, half = ctypes.c_size_t.from_address, ctypes.c_uint32.from_address, ctypes.c_uint16.from_address

    def ask(what):
        found = ctypes.c_size_t()
        if ctypes.pythonapi.dlinfo(ctypes.c_void_p(library._handle), what, ctypes.byref(found)):
            refuse(f"{library._name} does not say where its variables are")
        return found.value

    # Where the library's file begins, with its ELF header; and where this thread's variables are, if any.
    start, own = word(ask(RTLD_DI_LINKMAP)).value, ask(RTLD_DI_TLS_DATA)
    table, size, count = word(start + 32).value, half(start + 54).value, half(start + 56).value
    headers = range(start + table, start + table + size * count, size)
    parts = [(number(header).value, *(word(header + at).value for at in (16, 32, 40))) for header in headers]
    if not any(kind == PT_LOAD and place == 0 and in_file >= table + size * count for kind, place, in_file, _ in parts):
        refuse(f"{library._name} has its program headers elsewhere than behind its ELF header")
    for kind, place, in_file, in_memory in parts:
        if kind == PT_LOAD:
            ctypes.memset(start + place + in_file, 0, in_memory - in_file)
        elif kind == PT_TLS and own:
            ctypes.memmove(own, start + place, in_file)
            ctypes.memset(own + in_file, 0, in_memory - in_file)


# Of `dlinfo` and of ELF's program headers.
RTLD_DI_LINKMAP, RTLD_DI_TLS_DATA, PT_LOAD, PT_TLS = 2, 10, 1, 7


# A copy --------------------------------------------------------------------------------------------


def take_arguments(ctypes, library, template):
    """The arguments and the environment that the copy was started with."""
    word = ctypes.c_size_t
    library.stockade_image_inbox.restype = ctypes.POINTER(word * 3)
    argc, argv, envp = library.stockade_image_inbox().contents

    def strings(address):
        while pointer := word.from_address(address).value:
            yield ctypes.string_at(pointer)
            address += ctypes.sizeof(word)

    arguments = [os.fsdecode(argument) for argument in strings(argv)]
    if arguments[: len(template.fixed)] != template.fixed:
        fail(f"made for {template.fixed}, started with {arguments[: len(template.fixed)]}")
    environ = variables(strings(envp))
    read_at_start = template.read_at_start(environ)
    if read_at_start != template.variables:
        names = {name for name, _ in read_at_start.items() ^ template.variables.items()}
        fail(f"made with other values of {', '.join(sorted(map(os.fsdecode, names)))}")
    environ.update(template.coerced)
    had_zone = posix.environ.get(b"TZ")
    for data in (posix.environ, os.environ._data):
        data.clear()
        data.update(environ)
    ctypes.c_void_p.in_dll(ctypes.pythonapi, "environ").value = envp
    for name, value in template.coerced.items():
        os.putenv(name, value)
    if environ.get(b"TZ") != had_zone:
        time.tzset()
    sys.orig_argv[:] = arguments
    sys.argv[:] = arguments[len(template.fixed) - 1 :]


def variables(strings):
    """An environment as CPython reads it: the first of a name counts."""
    found = {}
    for variable in strings:
        name, equals, value = variable.partition(b"=")
        if equals:
            found.setdefault(name, value)
    return found


def open_streams():
    """Makes the standard streams anew, as `create_stdio` of CPython does: what they are buffered
    by depends on what the descriptors are. The text objects stay the same."""
    all_unbuffered = sys.__stdout__.write_through
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        stream = getattr(sys, f"__{name}__")
        try:
            os.fstat(number)
        except OSError:
            setattr(sys, name, None)
            setattr(sys, f"__{name}__", None)
            continue
        unbuffered = all_unbuffered and mode == "w"
        buffer = open(number, mode + "b", buffering=0 if unbuffered else -1, closefd=False)
        raw = buffer if unbuffered else buffer.raw
        raw.name = f"<{name}>"
        by_line = not all_unbuffered and (number == 2 or raw.isatty())
        stream.__init__(buffer, stream.encoding, stream.errors, "\n", by_line, all_unbuffered)
        stream.mode = mode


def start_clocks():
    """What modules noted of the process and the time when they were imported."""
    loaded = sys.modules.get
    if (threading := loaded("threading")) and hasattr(threading.main_thread(), "_set_native_id"):
        threading.main_thread()._set_native_id()
    if logging := loaded("logging"):
        logging._startTime = time.time_ns() if isinstance(logging._startTime, int) else time.time()


def freeze(ctypes):
    """Keeps the collector off the image: it writes to each object that it looks at, and a copy
    would then have a page of its own for each."""
    gc.freeze()
    # But for the program's module, or what belongs to it would not be collected at the end.
    main = sys.modules["__main__"]
    for thing in (main, main.__dict__):
        ctypes.pythonapi.PyObject_GC_UnTrack(ctypes.py_object(thing))
        ctypes.pythonapi.PyObject_GC_Track(ctypes.py_object(thing))


def forget_imports(modules, places):
    """Forgets what was imported since these were all."""
    for name in sys.modules.keys() - modules:
        del sys.modules[name]
    for name in sys.path_importer_cache.keys() - places:
        del sys.path_importer_cache[name]


def warnings_filters():
    """What CPython looks at before it warns."""
    warnings = sys.modules.get("warnings")
    return list(warnings.filters if warnings else _warnings.filters)


def parts(stream):
    """A standard stream and what it is made of."""
    buffer = getattr(stream, "buffer", None)
    return [stream, buffer, getattr(buffer, "raw", None)]


def keep_openssl(ctypes):
    """Has OpenSSL not free all that it has allocated at the end, when the kernel takes it anyway: a
    copy would first get a page of its own for each piece. It is told so before it begins."""
    from importlib.util import find_spec

    no_atexit = 0x80000  # OPENSSL_INIT_NO_ATEXIT
    spec = find_spec("_hashlib")
    try:
        if spec and spec.origin:
            # Loads libcrypto, and runs nothing of the module.
            ctypes.CDLL(spec.origin).OPENSSL_init_crypto(ctypes.c_uint64(no_atexit), None)
    except (OSError, AttributeError):
        pass  # another library, or none


# The early end -------------------------------------------------------------------------------------

# Classes of C whose objects free memory, and nothing else, when they are freed. A capsule may do more,
# but is made by a module of C: see UNSEEN.
FREE_MEMORY = frozenset(
    """
    object type super property classmethod staticmethod mappingproxy function builtin_function_or_method method code cell
    frame traceback module ellipsis NoneType NotImplementedType int bool float complex str bytes bytearray tuple list dict set
    frozenset range slice enumerate reversed zip map filter dict_keys dict_values dict_items list_iterator tuple_iterator
    getset_descriptor member_descriptor wrapper_descriptor method_descriptor classmethod_descriptor method-wrapper
    weakref weakref.ReferenceType types.SimpleNamespace types.GenericAlias types.UnionType typing.TypeVar
    _thread.lock _thread.RLock _abc._abc_data functools.partial functools._lru_cache_wrapper functools.KeyWrapper
    collections.deque collections.defaultdict collections.OrderedDict odict_keys odict_values odict_items
    re.Pattern re.Match _struct.Struct _random.Random _json.Scanner _json.Encoder array.array
    decimal.Decimal decimal.Context datetime.date datetime.datetime datetime.time datetime.timedelta datetime.timezone
    datetime.tzinfo zoneinfo.ZoneInfo operator.itemgetter operator.attrgetter operator.methodcaller
    itertools.count itertools.chain itertools.repeat itertools.cycle itertools.islice
    builtin_method moduledef PyCapsule sys.version_info _collections._tuplegetter functools._lru_list_elem
    _contextvars.ContextVar hamt hamt_bitmap_node
    """.split()
)
# The same of packages that were tried in copies, by how these names begin.
FREE_MEMORY_TOO = ("numpy.", "pandas.")
# But for this one, which may warn.
WARNS = "numpy.nditer"
# Files, with what each has its descriptor in. A closed one frees memory.
FILES = {
    id(_io.TextIOWrapper): "buffer", id(_io.BufferedReader): "raw", id(_io.BufferedWriter): "raw",
    id(_io.BufferedRandom): "raw", id(_io.FileIO): None,
}  # fmt: skip
# Their finalizer calls `close`, which does nothing more than their end, unless the object has its own.
BUFFERS = (id(_io.StringIO), id(_io.BytesIO))
# Functions of weak references that only forget what they refer to, with their modules; the first is of `_abc`.
FORGET = frozenset(
    ((None, "_destroy"), ("weakref", "remove"), ("_weakrefset", "_remove"), ("logging", "_removeHandlerRef"))
)
# Modules of C whose objects do more when they are freed, and which the collector does not show.
UNSEEN = frozenset(("_ctypes", "_dbm", "_gdbm"))
BUILTIN, FUNCTION = type(len), type(refuse)
# Of libgcc, as `early_return.rs` wants them.
UNWINDER = ("_Unwind_GetIP", "_Unwind_GetCFA", "_Unwind_GetGR")
# Of `struct link_map`: the library's path, and the next one.
L_NAME, L_NEXT = 8, 24
# Where an object of class `type` has its name, and the function that frees its objects.
NAME, DEALLOC = 24, 48
# Where a function of C has its `struct PyMethodDef`, which begins with its name, and where that has the function.
METHOD, FUNCTION_OF_METHOD = 16, 8
# Functions that note that they are called, each with its module and the one of the library in its place.
# What an audit hook or a tool adds would see the look at the program's end; `sys.monitoring` is of CPython 3.12.
NOTED = (
    (sys, "addaudithook", "stockade_image_add_hook"),
    (getattr(sys, "monitoring", None), "use_tool_id", "stockade_image_use_tool"),
    (gc, "freeze", "stockade_image_freeze"),
)
# Of the structure in `at_end.rs`, in words: the note of `gc.freeze`, the functions of CPython that are noted,
# those that it calls, the function for the end, and, behind that, `gc.unfreeze`.
FREEZES, ORIGINALS, CALLED_FUNCTIONS, END = 2, 3, 6, 11


class EarlyEnd:
    """At its end CPython takes the interpreter apart, object by object: a copy would first get a page
    of its own for each. It ends at once, and libc after it, where each object that the program has made
    frees only memory when it is freed: any other could have been hung into the image, as an open file
    into `logging`. What CPython does before that it has done: the program's threads have ended, and its
    functions for the end have been called.

    No code of the program runs here: its classes are looked at past their own attributes, its tracers
    are taken away, and where it has an audit hook or a monitoring tool, which would see all this, nothing is
    looked at."""

    MANY = 20_000  # to look at them takes longer than to take the image apart

    mro = staticmethod(type.__dict__["__mro__"].__get__)
    attributes = staticmethod(type.__dict__["__dict__"].__get__)
    callback = staticmethod(weak_reference.__dict__["__callback__"].__get__)
    names = staticmethod(type(sys).__dict__["__dict__"].__get__)
    threads = staticmethod(_thread._count)

    def __init__(self, ctypes, library):
        self.word, self.text = ctypes.c_size_t.from_address, ctypes.string_at
        self.address = lambda function: ctypes.cast(function, ctypes.c_void_p).value
        api = ctypes.pythonapi
        functions = [api.PyEval_GetFrame, api.PyEval_SetTrace, api.PyEval_SetProfile, api.PyObject_CallNoArgs, api.PyErr_Clear]
        # As `at_end.rs` has it.
        self.at_end = (ctypes.c_size_t * (END + 2))(*[0] * END, 0, id(unfreeze))
        self.at_end[CALLED_FUNCTIONS : CALLED_FUNCTIONS + len(functions)] = list(map(self.address, functions))
        library.stockade_image_set_end(self.at_end)
        # C has addresses alone: the notes stay as long as the process, also while CPython takes itself apart,
        # and what is called at the end as long as `atexit` has the function.
        api.Py_IncRef(ctypes.py_object(self.at_end))
        at_end = library.stockade_image_at_end
        at_end.restype, at_end.keeps = None, self
        # The first that is registered is called last: files named `*.pth` may have registered functions,
        # which must be called, and CPython then ends as always.
        self.is_called_last = atexit._ncallbacks() == 0
        # No argument: ctypes would make an object of it, of a class that UNSEEN means.
        atexit.register(at_end)
        self.are_noted = all([self.notes(library, *noted) for noted in enumerate(NOTED)])
        # `gc.freeze` was called to see whether it is noted.
        unfreeze()
        # None: no call of CPython's can be ended here, and it ends as always.
        self.return_early = None

    def prepare(self, ctypes, library):
        if not (self.is_called_last and self.are_noted):
            return
        self.dealloc = self.word(id(EarlyEnd) + DEALLOC).value
        # To glibc it is the `struct link_map` of the program itself, the first of all libraries.
        self.first_library = ctypes.pythonapi._handle
        try:
            # It holds the lock of the interpreter, as CPython does at its end.
            unwinder = ctypes.PyDLL("libgcc_s.so.1")
            functions = [*(getattr(unwinder, name) for name in UNWINDER), ctypes.pythonapi.on_exit]
            addresses = map(self.address, functions)
        except (OSError, AttributeError):
            return
        finalize = self.address(ctypes.pythonapi.Py_FinalizeEx)
        wanted = (ctypes.c_size_t * 8)(finalize, 0, *library_at(finalize), *addresses)
        flush = ctypes.pythonapi.fflush

        def return_early():
            flush(None)  # what libraries of C have written, which do nothing more either
            unwinder._Unwind_Backtrace(library.stockade_image_return_early, wanted)

        self.return_early, self.bound = return_early, self.end
        self.at_end[END] = id(self.bound)

    def notes(self, library, index, noted):
        """Has a function of C note that it is called. Whether it does, or there is none."""
        module, name, by = noted
        called = vars(module).get(name) if module else None
        if called is None:
            return not module
        method = self.word(id(called) + METHOD).value
        if self.text(self.word(method).value) != name.encode():
            return False
        function = self.word(method + FUNCTION_OF_METHOD)
        self.at_end[ORIGINALS + index] = function.value
        function.value = self.address(getattr(library, by))
        try:
            called()
        except TypeError:
            pass  # it asks for an argument
        is_noted, self.at_end[index] = self.at_end[index], 0
        return bool(is_noted)

    def begin(self):
        """The program begins, when all that is there already is kept from the collector."""
        self.at_end[FREEZES] = 0
        if not self.return_early:
            return
        self.own_streams = self.standard_streams()
        self.streams = self.with_attributes(self.own_streams)
        self.filters = warnings_filters()
        self.places = {self.place_of(library) for library in self.libraries()}
        self.places.update(os.fsencode(place) for place in sys.path if place.endswith("/lib-dynload"))

    def libraries(self):
        """The addresses of what describes each loaded library."""
        library = self.first_library
        while library:
            yield library
            library = self.word(library + L_NEXT).value

    def place_of(self, library):
        """The directory of a library."""
        return self.text(self.word(library + L_NAME).value).rpartition(b"/")[0]

    def frees_only_memory(self, kind):
        """Whether an object of this class does, when it is freed."""
        for part in self.mro(kind):
            if "__del__" in self.attributes(part):
                return False
            # Those of Python free their attributes, which are looked at themselves.
            name = self.name(part)
            is_of_python = self.word(id(part) + DEALLOC).value == self.dealloc
            is_known = name in FREE_MEMORY or (name.startswith(FREE_MEMORY_TOO) and name != WARNS)
            if not (is_of_python or is_known or self.is_exception(part)):
                return False
        return True

    def standard_streams(self):
        """All six names of them."""
        own = self.names(sys)
        return [own.get(mark + name + mark) for mark in ("", "__") for name in ("stdin", "stdout", "stderr")]

    def with_attributes(self, streams):
        """Each with what it is made of, and the attributes that the program could have given it."""
        return [(part, tuple(getattr(part, "__dict__", ()))) for stream in streams for part in parts(stream)]

    def warns_of_nothing(self):
        """Whether CPython warns of nothing that is left open, as it does unless it is asked to."""
        added = len(filters := warnings_filters()) - len(self.filters)
        if added < 0 or any(now is not then for now, then in zip(filters[added:], self.filters)):
            return False
        # Comparing what else is in a filter could run code of the program.
        actions = [first[0] if type(first) is tuple and first else None for first in filters[:added]]
        if any(type(action) is not str or action != "ignore" for action in actions):
            return False
        return ("ignore", None, ResourceWarning, None, 0) in self.filters

    def is_closed(self, thing):
        """Whether it is a closed file. Classes of the program's are none."""
        while (kind := id(type(thing))) in FILES:
            if FILES[kind] is None:
                return thing.closed
            thing = getattr(thing, FILES[kind])
        return False

    def name(self, kind):
        """That of a class of C has its module in it; the class cannot change it."""
        return self.text(self.word(id(kind) + NAME).value).decode(errors="replace")

    def is_exception(self, kind):
        return any(part is BaseException for part in self.mro(kind))

    def leaves_nothing_undone(self):
        """Whether all objects of the program free only memory. The collector does not show those of the
        image, nor those that the program has hidden from it."""
        modules = sys.modules
        # CPython collects once more at its end, and says what it finds; and it stops threads before it
        # flushes the streams.
        if type(modules) is not dict or callbacks or garbage or get_debug() or self.threads() or not self.warns_of_nothing():
            return False
        # The collector does not show what was kept from it.
        if self.at_end[FREEZES] or any(type(name) is not str for name in modules):
            return False
        # A library of the program's may have a function for the end of the process.
        if any(self.place_of(library) not in self.places for library in self.libraries()):
            return False
        for name in modules.keys() - self.imported:
            path = self.names(modules[name]).get("__file__")
            top = name.partition(".")[0]
            if name in UNSEEN or (type(path) is str and path.endswith(".so") and top not in sys.stdlib_module_names):
                return False
        made = get_objects()
        if len(made) > self.MANY:
            return False
        streams = {id(part) for part, _ in self.streams}
        own = {id(thing) for thing in made}
        kinds = {}
        for thing in made:
            kind = type(thing)
            if any(part is type for part in self.mro(kind)) and "__del__" in self.attributes(thing):
                return False  # an object of this class, which the collector may not see
            if any(part is weak_reference for part in self.mro(kind)):
                call = self.callback(thing)
                if call is not None and not self.forgets(call, own):
                    return False
            if id(thing) not in streams and not self.is_closed(thing) and not (id(kind) in BUFFERS and not thing.__dict__):
                kinds[id(kind)] = kind
        for thing in get_referents(*made):
            # What is tracked and not among the program's is the image's.
            if not is_tracked(thing) and id(thing) not in streams:
                kinds[id(type(thing))] = type(thing)
        return all(self.frees_only_memory(kind) for kind in kinds.values())

    def forgets(self, call, own):
        """Whether a function of a weak reference only forgets it."""
        if type(call) is BUILTIN:
            name = call.__name__
        elif type(call) is FUNCTION and id(call) not in own:
            name = call.__code__.co_name
        else:
            return False
        module = call.__module__
        return (module is None or type(module) is str) and (module, name) in FORGET

    def are_flushed(self):
        """Whether the standard streams are those of the start, and have written all that they hold. Where
        that fails CPython finds it again, and says so."""
        streams = self.standard_streams()
        if any(a is not b for a, b in zip(streams, self.own_streams)):
            return False  # what is the program's own is not asked
        now = self.with_attributes(streams)
        if len(now) != len(self.streams) or any(a is not b or has != had for (a, has), (b, had) in zip(now, self.streams)):
            return False
        _, stdout, stderr = streams[:3]
        if stdout is None or stderr is None:
            return False
        stdout.flush()
        stderr.flush()
        return True

    def end(self):
        try:
            if self.leaves_nothing_undone() and self.are_flushed():
                self.return_early()
        except BaseException:  # the program has changed what this looks at, or cannot write
            pass


def library_at(address):
    """From where to where the file is mapped that is mapped there."""
    mapped = {}
    for line in read("/proc/self/maps").splitlines():
        place, _, _, device, inode = line.split()[:5]
        begin, end = (int(part, 16) for part in place.split("-"))
        mapped.setdefault((device, inode), []).append((begin, end))
    (parts,) = (parts for parts in mapped.values() if any(begin <= address < end for begin, end in parts))
    return parts[0][0], parts[-1][1]


# The template --------------------------------------------------------------------------------------


class Template:
    """What the parameters ask for, and what a copy must have in common with this process."""

    def __init__(self):
        with open("/proc/self/environ", "rb") as file:
            initial = variables(file.read().split(b"\0"))
        # CPython sets it where the locale is "C" (PEP 538), for itself and its children.
        self.coerced = {
            name: posix.environ[name] for name in posix.environ.keys() - initial.keys() if name == b"LC_CTYPE"
        }

        # Out of the environment first: nothing that is imported shall see them.
        def take(name):
            return os.environ.pop(f"STOCKADE_TEMPLATE_{name}", "")

        self.image = int(take("FD") or -1)
        self.library = take("LIBRARY")
        self.imports = [name for name in take("IMPORTS").split(",") if name]
        self.warm = take("WARM")
        self.program = sys.argv[0]
        self.is_copy = False
        # The interpreter, its options and the program.
        self.fixed = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
        # Where this file is: first on PYTHONPATH, or in the place of the installation's own.
        self.place = os.path.dirname(os.path.abspath(__file__))
        first, _, rest = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
        self.on_path = bool(first) and os.path.abspath(first) == self.place
        if self.on_path:
            del os.environ["PYTHONPATH"]
            if rest:
                os.environ["PYTHONPATH"] = rest
        self.variables = {
            name: value for name, value in self.read_at_start(posix.environ).items() if name not in self.coerced
        }

    @staticmethod
    def read_at_start(environ):
        return {name: value for name, value in environ.items() if name.startswith(READ_AT_START)}

    def check(self):
        if sys.implementation.name != "cpython" or not (3, 10) <= sys.version_info < (3, 14) or "t" in sys.abiflags:
            refuse(
                f"{sys.implementation.name} {sys.version.split()[0]}{sys.abiflags} is not one of CPython 3.10 to 3.13"
            )
        if self.image < 0:
            refuse("no descriptor for the image is given")
        if None in (sys.__stdin__, sys.__stdout__, sys.__stderr__):
            refuse("a standard stream is closed")
        if not os.path.isabs(self.program):
            refuse("the program must be an absolute path")
        # CPython would open it while it looks for an archive.
        if os.path.isfile(self.program) or os.path.isdir(self.program):
            refuse(f"{self.program} exists: no program may be there in a template")

    def leave_path(self):
        """Undoes how this module was found."""
        if self.on_path:
            sys.path.remove(self.place)
            sys.path_importer_cache.pop(self.place, None)
        del sys.modules["sitecustomize"]
        forget_imports(PRESENT, set(sys.path_importer_cache))

    def open_library(self):
        before = set(sys.modules), set(sys.path_importer_cache)
        import ctypes

        forget_imports(*before)
        self.ctypes, self.opened = ctypes, ctypes.PyDLL(self.library)
        return self.ctypes, self.opened

    def warm_up(self):
        before = set(sys.modules), set(sys.path_importer_cache)
        if self.imports:
            keep_openssl(self.ctypes)
        forget_imports(*before)
        for name in self.imports:
            __import__(name)
        if self.warm:
            with open(self.warm, encoding="utf-8") as file:
                code = compile(file.read(), self.warm, "exec")
            exec(code, {"__name__": "stockade_warm", "__builtins__": builtins})
        # The compiler's and the interpreter's own first steps.
        exec(compile("x = sum(i * i for i in range(1000))\n", "<warm>", "exec"), {})

    def prepare(self, early_end):
        """Returns the function that writes the image."""
        before = set(sys.modules), set(sys.path_importer_cache)
        ctypes, library = self.ctypes, self.opened
        library.stockade_image_reason.restype = ctypes.c_char_p
        reseeding = Reseeding(ctypes)
        threads = Threads(ctypes)
        early_end.prepare(ctypes, library)
        unknown = [*reseeding.unknown, *unknown_packages()]
        depends = what_it_depends_on(before[0] - PRESENT)
        # A copy that imports them gets its own.
        forget_imports(*before)

        def write():
            collect()
            reasons = [*unknown, *census(self.image), *live_objects()]
            if reasons:
                refuse(*reasons)
            sys.stdout.flush()
            sys.stderr.flush()
            reseeding.forget()
            early_end.imported = set(sys.modules)
            freeze(ctypes)
            # What the census took, and all that was freed before, would be in the image.
            ctypes.pythonapi.malloc_trim(ctypes.c_size_t(TOP_PAD))
            # To CPython a copy is the child of a fork.
            ctypes.pythonapi.PyOS_BeforeFork()
            written = library.stockade_image_write(self.image)
            if written != 1:
                ctypes.pythonapi.PyOS_AfterFork_Parent()
            if written == -1:
                refuse(os.fsdecode(library.stockade_image_reason()))
            self.is_copy = written == 1
            if written == 0:
                os.write(1, depends)
                self.rehearse(ctypes, library)
            else:
                ctypes.pythonapi.PyOS_AfterFork_Child()
            reseeding.reseed()
            if self.is_copy:
                take_arguments(ctypes, library, self)
                threads.start()
            open_streams()
            start_clocks()
            # What a copy has made until here is not its program's.
            freeze(ctypes)
            early_end.begin()

        return write

    def rehearse(self, ctypes, library):
        """Ends this process, once a child has done as a copy does: its pages become known."""
        try:
            child = os.fork()
        except OSError:
            os._exit(0)  # the image is good without it
        if child:
            os.waitpid(child, 0)
            os._exit(0)
        # It finds no program and says so.
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        os.close(null)
        # At its end it notes what it has written.
        library.stockade_image_note_pages_at_end(self.image)

    def call_back(self, write):
        """Has CPython call `write` when it asks whether the program is an archive or a directory."""

        def hook(path):
            if path != self.program:
                raise ImportError(path=path)
            if sys.path_hooks[-1] is not hook:
                refuse("another hook was added to sys.path_hooks")
            # The last of the list may leave it while the list is gone through.
            sys.path_hooks.pop()
            try:
                write()
            except BaseException as error:
                report = fail if self.is_copy else refuse
                report(f"{type(error).__name__}: {error}")
            # The others have answered for the template, where no program was.
            for other in sys.path_hooks:
                try:
                    return other(path)
                except ImportError:
                    pass
            raise ImportError(path=path)

        sys.path_hooks.append(hook)


def make():
    template = Template()
    template.check()
    template.leave_path()
    try:
        early_end = EarlyEnd(*template.open_library())
    except BaseException as error:
        refuse(f"{type(error).__name__}: {error}")
    found = template.on_path
    try:
        if template.on_path:
            # The installation's own, which stood behind this one.
            import sitecustomize  # noqa: F401
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
        found = False
    try:
        template.warm_up()
        template.call_back(template.prepare(early_end))
    except BaseException as error:
        refuse(f"{type(error).__name__}: {error}")
    if not found:
        # To `site`, and to `sys.modules`, there was none.
        raise ImportError("no sitecustomize", name="sitecustomize")


make()
