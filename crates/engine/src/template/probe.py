"""What an interpreter is: run in a fresh one and in copies of a template, which must answer alike.

stdout has what must be the same in all of them, stderr what must differ between any two; but for
`layout`, which copies of one template have in common.
"""

import atexit
import gc
import os
import sys
import threading

PRESENT = set(sys.modules)


def same(name, value):
    print(f"{name}: {value!r}")


# What the kernel knows of it.
with open("/proc/self/status", encoding="ascii") as file:
    status = dict(line.rstrip("\n").split(":\t", 1) for line in file)
for name in status:
    if name.startswith(("Uid", "Gid", "Groups", "Umask", "SigBlk", "SigIgn", "Cap", "NoNewPrivs", "Seccomp", "Speculation")):
        same(name, status[name])
# Signals 32 and 33 are those of libc's own, which takes them for the first thread.
same("SigCgt", int(status["SigCgt"], 16) & ~(3 << 31))
same("pid", (os.getpid(), threading.main_thread().native_id == os.getpid()))
same("descriptors", sorted(os.listdir("/proc/self/fd"), key=int)[:-1])
same("place", (os.getcwd(), sorted(os.environ.items())))

# What CPython made of its start.
same("start", (sys.argv, sys.orig_argv, sys.flags, sys.warnoptions, sys.path, sys.executable, sys.prefix))
same("program", (__name__, __file__, sorted(globals()), __builtins__ is sys.modules["builtins"]))
for stream in (sys.stdin, sys.stdout, sys.stderr):
    how = stream.mode, stream.encoding, stream.errors, stream.line_buffering, stream.write_through, stream.newlines
    same("stream", (stream.name, *how, stream.fileno(), type(stream.buffer).__name__))
same("collector", (gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)))
same("recursion", (sys.getrecursionlimit(), sys.getswitchinterval(), threading.active_count()))


def depth(frame):
    return 1 + depth(frame.f_back) if frame else 0


same("frames", depth(sys._getframe()))


# What programs do.
def nested(level):
    return nested(level - 1) if level else 1 / 0


try:
    nested(3)
except ZeroDivisionError:
    import traceback

    traceback.print_exc(file=sys.stdout)

import collections  # noqa: E402
import datetime  # noqa: E402
import decimal  # noqa: E402
import json  # noqa: E402
import re  # noqa: E402
import signal  # noqa: E402
import subprocess  # noqa: E402

same("words", collections.Counter(re.findall(r"\w+", "the fox and the hound and the end")).most_common())
same("numbers", (decimal.Decimal(1) / 3, 0.1 + 0.2, 5e-324, 2**100, json.dumps({"a": [1.5, None, "\u00e9"]})))
same("time", (datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.timezone.utc).isoformat(), os.environ.get("TZ")))
same("signal", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
found = []
thread = threading.Thread(target=lambda: found.append(sum(range(1000))))
thread.start()
thread.join()
same("thread", found)
same("child", subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, check=False).stdout)
try:
    os.kill(os.getpid(), signal.SIGINT)
    signal.sigtimedwait([], 5)
except KeyboardInterrupt:
    same("interrupt", True)
atexit.register(lambda: print("at the end"))

# What no two may have in common.
import random  # noqa: E402
import secrets  # noqa: E402
import tempfile  # noqa: E402
import uuid  # noqa: E402


def differs(name, value):
    sys.stderr.write(f"{name} {value!r}\n")


differs("layout", id(print))
differs("random", random.random())
differs("urandom", os.urandom(8))
differs("uuid4", uuid.uuid4())
if "uuid" in PRESENT and uuid.getnode() >> 40 & 1:
    # Drawn, since the sandbox shows no address of the host.
    differs("uuid1", uuid.uuid1().fields[3:])
differs("secrets", secrets.token_hex(8))
differs("tempfile", tempfile.mktemp())
try:
    import ssl

    differs("ssl", ssl.RAND_bytes(8))
except ImportError:
    pass
try:
    import sqlite3

    differs("sqlite", sqlite3.connect(":memory:").execute("select hex(randomblob(8))").fetchone())
except ImportError:
    pass
if "multiprocessing.process" in PRESENT:
    import multiprocessing.process

    differs("multiprocessing", bytes(multiprocessing.process.current_process().authkey))
if "numpy" in PRESENT:
    import numpy

    differs("numpy", numpy.random.random())
    differs("numpy_generator", numpy.random.default_rng().random())
