//! Ordinary programs, which a naive filter would break. All run under `default`, with
//! its default limits, unless said otherwise.

use std::{fs, path::PathBuf};

use base64::{Engine, prelude::BASE64_STANDARD};
use serde_json::json;

use crate::support::{
    exec::{ExecResult, exec, exec_with, python, scratch, text, write_file},
    policy_dir::{PolicyDirectory, derived},
    runner::test,
    timeouts::scaled_limit,
};

/// The program succeeds, prints `done` last, and nothing was refused to it.
#[track_caller]
fn works(done: &ExecResult) {
    done.succeeded();
    assert_eq!(done.output().lines().last(), Some("done"), "{}", done.brief());
    assert_eq!(done["denials"], json!([]), "{}", done.brief());
}

test!(Both, asyncio_runs_threads_processes_and_sockets);
fn asyncio_runs_threads_processes_and_sockets() {
    works(&python(
        r#"
import asyncio, time
async def main():
    assert await asyncio.gather(*(asyncio.to_thread(lambda n=n: n * n) for n in range(8))) == [n * n for n in range(8)]
    process = await asyncio.create_subprocess_exec("sort", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate(b"b\na\n")
    assert out == b"a\nb\n" and process.returncode == 0
    async def echo(reader, writer):
        writer.write((await reader.readline()).upper()); await writer.drain(); writer.close()
    for server, connect in (
        (await asyncio.start_server(echo, "127.0.0.1", 0), lambda s: asyncio.open_connection(*s.sockets[0].getsockname())),
        (await asyncio.start_unix_server(echo, "/tmp/sock"), lambda s: asyncio.open_unix_connection("/tmp/sock")),
    ):
        reader, writer = await connect(server)
        writer.write(b"hello\n")
        assert await reader.readline() == b"HELLO\n"
        writer.close(); server.close()
    try:
        await asyncio.wait_for(asyncio.sleep(10), 0.05)
    except asyncio.TimeoutError:
        pass
    loop = asyncio.get_running_loop()
    event = asyncio.Event()
    import os, signal
    loop.add_signal_handler(signal.SIGUSR1, event.set)
    os.kill(os.getpid(), signal.SIGUSR1)
    await asyncio.wait_for(event.wait(), 5)
asyncio.run(main())
print("done")
"#,
    ));
}

fn multiprocessing_by(method: &str) {
    let code = r#"
import multiprocessing as mp, os
def work(n):
    return n * n, os.getpid()
def child(queue, pipe):
    queue.put("queued"); pipe.send("piped")
if __name__ == "__main__":
    context = mp.get_context("METHOD")
    with context.Pool(4) as pool:
        results = pool.map(work, range(20))
    assert [r for r, _ in results] == [n * n for n in range(20)] and os.getpid() not in {p for _, p in results}
    queue, (ours, theirs) = context.Queue(), context.Pipe()
    process = context.Process(target=child, args=(queue, theirs))
    process.start()
    assert (queue.get(timeout=10), ours.recv()) == ("queued", "piped")
    process.join()
    assert process.exitcode == 0
    print("done")
"#;
    works(&python(&code.replace("METHOD", method)));
}

test!(Both, multiprocessing_forks);
fn multiprocessing_forks() {
    multiprocessing_by("fork");
}

test!(Both, multiprocessing_spawns);
fn multiprocessing_spawns() {
    multiprocessing_by("spawn");
}

test!(Both, multiprocessing_uses_a_forkserver);
fn multiprocessing_uses_a_forkserver() {
    multiprocessing_by("forkserver");
}

test!(Both, multiprocessing_shares_memory_and_locks);
fn multiprocessing_shares_memory_and_locks() {
    works(&python(
        r#"
import multiprocessing as mp
from multiprocessing import shared_memory
def add(value, lock, name):
    for _ in range(200):
        with lock: value.value += 1
    memory = shared_memory.SharedMemory(name); memory.buf[0] = 7; memory.close()
if __name__ == "__main__":
    memory = shared_memory.SharedMemory(create=True, size=1 << 20)
    value, lock = mp.Value("i", 0), mp.Lock()
    processes = [mp.Process(target=add, args=(value, lock, memory.name)) for _ in range(4)]
    for p in processes: p.start()
    for p in processes: p.join()
    assert value.value == 800 and memory.buf[0] == 7
    memory.close(); memory.unlink()
    with mp.Manager() as manager:
        shared = manager.dict(); shared["k"] = 1
        assert dict(shared) == {"k": 1}
    print("done")
"#,
    ));
}

test!(Both, executors_run_threads_and_processes);
fn executors_run_threads_and_processes() {
    works(&python(
        r#"
from concurrent.futures import ThreadPoolExecutor, ProcessPoolExecutor
import math, threading
if __name__ == "__main__":
    with ThreadPoolExecutor(16) as pool:
        assert sum(pool.map(math.sqrt, [4] * 100)) == 200
    with ProcessPoolExecutor(3) as pool:
        assert list(pool.map(math.factorial, range(5))) == [1, 1, 2, 6, 24]
    barrier = threading.Barrier(10)
    threads = [threading.Thread(target=barrier.wait) for _ in range(10)]
    for t in threads: t.start()
    for t in threads: t.join()
    print("done")
"#,
    ));
}

test!(Both, sqlite_keeps_a_database_with_a_journal);
fn sqlite_keeps_a_database_with_a_journal() {
    let scratch = scratch();
    let code = r#"
import sqlite3
for path in ("data.db", "/tmp/data.db", ":memory:"):
    db = sqlite3.connect(path)
    mode = db.execute("pragma journal_mode=wal").fetchone()[0]
    assert mode == ("memory" if path == ":memory:" else "wal"), mode
    db.execute("create table t (n integer primary key, s text)")
    with db: db.executemany("insert into t (s) values (?)", [(str(i),) for i in range(2000)])
    try:
        with db:
            db.execute("delete from t"); raise RuntimeError
    except RuntimeError: pass
    assert db.execute("select count(*), max(n) from t").fetchone() == (2000, 2000)
    db.execute("vacuum"); db.close()
print("done")
"#;
    works(&python(code));
    works(&exec(json!({"code": code, "scratch": text(&scratch)})));
    let again = "import sqlite3\nprint(sqlite3.connect('data.db').execute('select count(*) from t').fetchone()[0])\nprint('done')";
    works(&exec(json!({"code": again, "scratch": text(&scratch)})));
}

test!(Both, subprocesses_are_piped);
fn subprocesses_are_piped() {
    works(&python(
        r#"
import os, subprocess, sys
a = subprocess.Popen(["printf", "c\\na\\nb\\n"], stdout=subprocess.PIPE)
b = subprocess.Popen(["sort"], stdin=a.stdout, stdout=subprocess.PIPE)
a.stdout.close()
assert subprocess.run(["tr", "a-c", "A-C"], stdin=b.stdout, capture_output=True, text=True).stdout == "A\nB\nC\n"
assert subprocess.check_output("seq 1000 | grep -c 9", shell=True, text=True) == "271\n"
try: subprocess.run(["sleep", "60"], timeout=0.1); assert False
except subprocess.TimeoutExpired: pass
assert subprocess.run(["false"]).returncode == 1 and subprocess.run("kill -9 $$", shell=True).returncode == -9
p = subprocess.Popen([sys.executable, "-c", "import os; os.write(3, b'inherited')"], pass_fds=(), stdout=subprocess.PIPE, preexec_fn=lambda: os.dup2(1, 3), close_fds=False)
assert p.communicate()[0] == b"inherited"
assert os.system("exit 3") >> 8 == 3
pid = os.posix_spawn("/bin/true", ["true"], {})
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
print("done")
"#,
    ));
}

test!(Both, temporary_files_come_and_go);
fn temporary_files_come_and_go() {
    works(&python(
        r#"
import os, tempfile
with tempfile.TemporaryDirectory() as d:
    assert d.startswith("/tmp/")
    open(os.path.join(d, "f"), "w").write("x")
assert not os.path.exists(d)
with tempfile.NamedTemporaryFile("w+") as f:
    f.write("x" * 100000); f.seek(0); assert len(f.read()) == 100000
with tempfile.TemporaryFile() as f: f.write(b"x")
with tempfile.SpooledTemporaryFile(10) as f: f.write(b"x" * 100)
fd, path = tempfile.mkstemp(dir="."); os.close(fd); os.unlink(path)
print("done")
"#,
    ));
}

test!(Both, signals_timers_and_resources_work);
fn signals_timers_and_resources_work() {
    works(&python(
        r#"
import os, resource, signal, select, time
hits = []
signal.signal(signal.SIGALRM, lambda *a: hits.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
while len(hits) < 3: signal.pause()
signal.setitimer(signal.ITIMER_REAL, 0)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 1024)); assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 100
os.nice(1); os.sched_yield(); os.sched_setaffinity(0, os.sched_getaffinity(0))
r, w = os.pipe(); poll = select.epoll(); poll.register(r, select.EPOLLIN); os.write(w, b"x"); assert poll.poll(1)
child = os.fork()
if child == 0: time.sleep(60)
fd = os.pidfd_open(child); signal.pidfd_send_signal(fd, signal.SIGTERM); os.waitpid(child, 0)
os.umask(0o027); os.setsid() if os.getpid() != os.getsid(0) else None
print("done")
"#,
    ));
}

test!(Both, a_web_server_and_its_client_talk_over_lo);
fn a_web_server_and_its_client_talk_over_lo() {
    works(&python(
        r#"
import http.server, json, threading, urllib.request, xmlrpc.client, ssl, socket
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(json.dumps({"path": self.path}).encode())
    def log_message(self, *a): pass
for host in ("127.0.0.1", "localhost"):
    server = http.server.ThreadingHTTPServer((host, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with urllib.request.urlopen(f"http://{host}:{server.server_port}/x?y") as answer:
        assert json.load(answer) == {"path": "/x?y"}
    server.shutdown()
ssl.create_default_context()
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.bind(("127.0.0.1", 0)); u.sendto(b"x", u.getsockname()); assert u.recv(9) == b"x"
a, b = socket.socketpair(); socket.send_fds(a, [b"f"], [0]); assert len(socket.recv_fds(b, 1, 1)[1]) == 1
print("done")
"#,
    ));
}

test!(Both, archives_hashes_and_compression_work);
fn archives_hashes_and_compression_work() {
    works(&python(
        r#"
import bz2, gzip, hashlib, io, lzma, os, secrets, shutil, tarfile, zipfile, zlib, uuid, random, decimal, datetime, zoneinfo
data = b"x" * 100000
for m in (bz2, gzip, lzma, zlib): assert m.decompress(m.compress(data)) == data
os.makedirs("tree/deep"); open("tree/deep/f", "wb").write(data)
for kind in ("zip", "gztar", "xztar"):
    name = shutil.make_archive("a", kind, "tree"); shutil.unpack_archive(name, "out-" + kind)
    assert open(f"out-{kind}/deep/f", "rb").read() == data
assert len(secrets.token_bytes(16)) == 16 and uuid.uuid4() != uuid.uuid1()
assert hashlib.sha256(data).hexdigest() and hashlib.scrypt(b"p", salt=b"s", n=1024, r=8, p=1)
assert datetime.datetime.now().astimezone().utcoffset() == datetime.timedelta(0)
print("done")
"#,
    ));
}

test!(Both, a_program_of_many_files_imports_its_own);
fn a_program_of_many_files_imports_its_own() {
    let scratch = scratch();
    for directory in ["shop", "shop/reports", "data"] {
        fs::create_dir(scratch.join(directory)).unwrap();
        crate::support::exec::chown_to_owner(&scratch.join(directory));
    }
    write_file(&scratch.join("shop/__init__.py"), "from .core import total\n");
    write_file(
        &scratch.join("shop/core.py"),
        "import csv\nfrom .reports.text import render\ndef total(path):\n    rows = list(csv.DictReader(open(path)))\n    return render(sum(int(r['n']) for r in rows))\n",
    );
    write_file(&scratch.join("shop/reports/__init__.py"), "");
    write_file(&scratch.join("shop/reports/text.py"), "def render(n): return f'total {n}'\n");
    write_file(&scratch.join("data/in.csv"), "n\n1\n2\n39\n");
    let code = "import shop, importlib\nprint(shop.total('data/in.csv'))\nopen('data/out.txt','w').write(shop.total('data/in.csv'))\nassert importlib.import_module('shop.reports.text').__file__.startswith('/')\nprint('done')";
    works(&exec(json!({"code": code, "scratch": text(&scratch)})));
    assert_eq!(fs::read_to_string(scratch.join("data/out.txt")).unwrap(), "total 42");
    // No compiled files beside the caller's.
    assert!(!scratch.join("shop/__pycache__").exists());
    let module = exec(
        json!({"language": "bash", "code": "python3 -c 'import shop; print(shop.total(\"data/in.csv\"))'; echo done", "scratch": text(&scratch)}),
    );
    works(&module);
}

test!(Both, files_can_be_locked_mapped_copied_and_moved);
fn files_can_be_locked_mapped_copied_and_moved() {
    let code = r#"
import fcntl, mmap, os, pathlib, shutil, stat
p = pathlib.Path("a/b"); p.mkdir(parents=True); (p / "f").write_text("x" * 70000)
shutil.copy2("a/b/f", "g"); shutil.copytree("a", "c", symlinks=True); shutil.move("c", "d"); os.rename("d/b/f", "moved"); os.replace("g", "moved")
os.link("moved", "hard"); os.symlink("moved", "soft"); assert os.path.samefile("hard", "soft")
with open("moved", "r+b") as f:
    fcntl.flock(f, fcntl.LOCK_EX); fcntl.lockf(f, fcntl.LOCK_EX)
    m = mmap.mmap(f.fileno(), 0); m[0:1] = b"y"; m.flush(); os.fsync(f.fileno()); f.truncate(10); os.posix_fadvise(f.fileno(), 0, 0, 0)
os.chmod("moved", 0o640); os.utime("moved", (1, 2)); assert stat.S_IMODE(os.stat("moved").st_mode) == 0o640
os.mkfifo(os.environ["TMPDIR"] + "/fifo")
assert sorted(os.listdir("/proc/self/fd"))[:3] == ["0", "1", "2"] and os.statvfs(".").f_bavail > 0
for n in range(500): open(f"many{n}", "w").close()
shutil.rmtree("a"); print("done")
"#;
    works(&python(code));
    works(&exec(json!({"code": code, "scratch": text(&scratch())})));
}

test!(Both, a_test_suite_runs);
fn a_test_suite_runs() {
    let tests = "import unittest\nclass T(unittest.TestCase):\n    def test_sum(self): self.assertEqual(1 + 1, 2)\n    def test_error(self):\n        with self.assertRaises(ZeroDivisionError): 1 / 0\n";
    works(&exec(
        json!({"code": "import subprocess, sys\nr = subprocess.run([sys.executable, '-m', 'unittest', '-v'], capture_output=True, text=True)\nassert r.returncode == 0 and 'Ran 2 tests' in r.stderr, r.stderr\nprint('done')", "files": {"test_it.py": tests}}),
    ));
}

test!(Both, a_traceback_names_a_familiar_file);
fn a_traceback_names_a_familiar_file() {
    let done = python("def f():\n    raise RuntimeError('why')\nf()");
    done.expect(json!({"code": 1}));
    assert!(done.error().contains(".py\", line 2, in f") && done.error().contains("raise RuntimeError('why')"), "{}", done.error());
}

fn node(code: &str) -> ExecResult {
    exec(json!({"language": "node", "code": code}))
}

test!(Both, node_uses_promises_of_files_and_worker_threads, needs[Program("node")]);
fn node_uses_promises_of_files_and_worker_threads() {
    works(&node(
        r#"
const fs = require("fs/promises"), { Worker, isMainThread, parentPort } = require("worker_threads"), assert = require("assert"), crypto = require("crypto"), zlib = require("zlib"), util = require("util"), os = require("os");
(async () => {
  await fs.mkdir("a/b", { recursive: true });
  await Promise.all([...Array(50).keys()].map(i => fs.writeFile(`a/b/${i}`, "x".repeat(i))));
  assert.equal((await fs.readdir("a/b")).length, 50);
  await fs.cp("a", "c", { recursive: true }); await fs.rename("c", "d"); await fs.rm("d", { recursive: true });
  const sums = await Promise.all([1, 2, 3].map(n => new Promise((ok, no) => {
    const w = new Worker(`const { parentPort, workerData } = require("worker_threads"); let s = 0; for (let i = 0; i < 1e6; i++) s += workerData; parentPort.postMessage(s)`, { eval: true, workerData: n });
    w.on("message", ok); w.on("error", no);
  })));
  assert.deepEqual(sums, [1e6, 2e6, 3e6]);
  assert.equal((await util.promisify(crypto.pbkdf2)("p", "s", 1000, 16, "sha256")).length, 16);
  assert.equal((await util.promisify(zlib.gunzip)(await util.promisify(zlib.gzip)("x"))).toString(), "x");
  const handle = await fs.open("a/f", "w+"); await handle.write("text"); await handle.sync(); await handle.close();
  assert(os.cpus().length >= 0 && Object.keys(os.networkInterfaces()).join() === "lo");
  const memory = new WebAssembly.Memory({ initial: 1 }); assert.equal(memory.buffer.byteLength, 65536);
  console.log("done");
})();
"#,
    ));
}

test!(Both, node_starts_programs_and_servers, needs[Program("node")]);
fn node_starts_programs_and_servers() {
    works(&node(
        r#"
const { execFileSync, spawn, fork } = require("child_process"), http = require("http"), net = require("net"), assert = require("assert"), fs = require("fs");
assert.equal(execFileSync("sort", { input: "b\na\n" }).toString(), "a\nb\n");
fs.writeFileSync("child.js", `process.on("message", m => { process.send(m * 2); process.disconnect(); })`);
const server = http.createServer((q, r) => r.end(JSON.stringify({ url: q.url })));
server.listen(0, "127.0.0.1", async () => {
  const answer = await (await fetch(`http://127.0.0.1:${server.address().port}/x`)).json();
  assert.equal(answer.url, "/x"); server.close(); server.closeAllConnections();
  const child = fork("./child.js"); child.send(21);
  const [twice] = await require("events").once(child, "message"); assert.equal(twice, 42);
  const unix = net.createServer(s => s.end("unix")).listen("/tmp/n.sock", () => {
    const c = net.connect("/tmp/n.sock"); let got = ""; c.on("data", d => got += d);
    c.on("end", () => { assert.equal(got, "unix"); unix.close(); fs.watch(".", () => {}).close(); console.log("done"); });
  });
});
"#,
    ));
}

fn bash(code: &str) -> ExecResult {
    exec(json!({"language": "bash", "code": code}))
}

test!(Both, bash_substitutes_processes_and_runs_jobs);
fn bash_substitutes_processes_and_runs_jobs() {
    works(&bash(
        r#"
set -euo pipefail
[ "$(comm -12 <(printf 'a\nb\n') <(printf 'b\nc\n'))" = b ]
seq 5 | tee >(sort -r >reversed) >/dev/null; for _ in $(seq 200); do [ "$(wc -l <reversed)" = 5 ] && break; sleep 0.01; done
head -1 reversed | grep -qx 5
sleep 0.05 & sleep 0.05 & wait
coproc C { cat; }; echo through >&"${C[1]}"; read -r line <&"${C[0]}"; [ "$line" = through ]
eval "exec ${C[1]}>&-"; wait
declare -A map=([a]=1); mapfile -t lines < <(seq 3); [ "${#lines[@]}${map[a]}" = 31 ]
[[ abc =~ ^a(.)c$ && ${BASH_REMATCH[1]} = b ]]
trap 'echo trapped' USR1; kill -USR1 $$
(exit 3) || [ $? = 3 ]
timeout 0.1 sleep 60 || [ $? = 124 ]
echo done
"#,
    ));
}

test!(Both, sh_pipes_and_reads_here_documents);
fn sh_pipes_and_reads_here_documents() {
    works(&exec(
        json!({"language": "sh", "code": "set -e\ncat <<E | tr a-z A-Z | grep -q HELLO\nhello\nE\nx=$(mktemp); echo x >\"$x\"; rm \"$x\"\nfor f in a b; do : >\"$f\"; done; [ \"$(ls | grep -c '^[ab]$')\" = 2 ]\nset -- 1 2; shift; [ $1 = 2 ]\necho done"}),
    ));
}

test!(Both, ordinary_tools_work);
fn ordinary_tools_work() {
    works(&bash(
        r#"
set -euo pipefail
seq 1000 | sort -R | sort -n | awk '{s += $1} END {print s}' | grep -qx 500500
printf 'a,b\n1,2\n' | cut -d, -f2 | sed 's/2/two/' | xargs -n1 echo | tail -1 | grep -qx two
find /usr/bin -name 'python3*' | head -3 >/dev/null || true
dd if=/dev/zero of=z bs=1k count=64 status=none; cp --reflink=auto -a z y; cmp z y; stat -c %s y | grep -qx 65536
md5sum z >sums; md5sum -c --quiet sums; split -b 16k z part.; cat part.* | cmp - z
date -u +%Z | grep -qx UTC; id -un | grep -qx sandbox; hostname 2>/dev/null || cat /etc/hostname >/dev/null
df -P . /tmp >/dev/null; du -s . >/dev/null; ls -laR . >/dev/null; ps >/dev/null 2>&1 || true; nproc | grep -qx 1
mkdir -p a/b && touch a/b/c && ln -s b a/l && mv a d && rm -r d
diff <(seq 3) <(seq 3); join <(echo 1 a) <(echo 1 b) >/dev/null; paste -sd+ <(seq 3) >/dev/null; od -c z | head -1 >/dev/null
env -i sh -c 'echo clean' | grep -qx clean; yes | head -1 >/dev/null || true
echo done
"#,
    ));
}

const TAR: &str = "set -e\nmkdir -p src/deep; echo text >src/deep/f; ln -s deep src/l; chmod 750 src/deep; touch -d 2020-01-01 src/deep/f\ntar -czf a.tgz src; mkdir out; tar -xzf a.tgz -C out; diff -r src out/src; [ -L out/src/l ]\n[ \"$(stat -c '%a %Y' out/src/deep)\" = \"750 $(stat -c %Y src/deep)\" ]; [ \"$(stat -c %Y out/src/deep/f)\" = 1577836800 ]\ntar -cf - src | (cd out; rm -r src; tar -xf -); cp -a src out2; gzip -k out/src/deep/f; gunzip -c out/src/deep/f.gz\necho done";

test!(Both, tar_packs_and_unpacks);
fn tar_packs_and_unpacks() {
    works(&bash(TAR));
    works(&exec(json!({"language": "bash", "code": TAR, "scratch": text(&scratch())})));
}

test!(Both, git_commits_in_scratch, needs[Program("git")]);
fn git_commits_in_scratch() {
    let scratch = scratch();
    let code = "set -e\nexport GIT_PAGER=cat\ngit init -q -b main repo; cd repo\ngit config user.name Agent; git config user.email agent@example.com\nmkdir src; for i in $(seq 50); do echo $i >src/f$i; done; git add .; git commit -q -m first\ngit checkout -q -b topic; echo changed >src/f1; git commit -q -a -m second; git checkout -q main; echo other >src/f2; git commit -q -a -m third\ngit merge -q --no-edit topic; git gc -q; git fsck --strict 2>/dev/null; git stash list; git status --short | grep . && exit 1\ngit clone -q . ../clone; git -C ../clone log --oneline | wc -l | grep -qx 4\necho done";
    works(&bash(code));
    works(&exec(json!({"language": "bash", "code": code, "scratch": text(&scratch)})));
    assert!(scratch.join("clone/src/f1").exists());
}

test!(Both, perl_runs_by_its_example_policy, needs[Program("perl")]);
fn perl_runs_by_its_example_policy() {
    let repo = std::env::var("CARGO_MANIFEST_DIR").map(PathBuf::from).unwrap_or_else(|_| PathBuf::from(env!("CARGO_MANIFEST_DIR")));
    let policies = PolicyDirectory::new();
    let policy = policies.write("perl", &fs::read_to_string(repo.join("../policies/examples/perl.toml")).unwrap());
    let code = "use strict; use warnings; use List::Util qw(sum); use JSON::PP;\nmy %h = (a => 1); open(my $f, '>', 'out') or die; print $f encode_json(\\%h); close $f;\nprint sum(map { $_ * 2 } 1..6), \" $ARGV[0]\\n\"; my @l = `ls`; print \"done\\n\";";
    for language in ["perl", "PL"] {
        let done = exec_with(&["--policy", &policy], json!({"language": language, "code": code, "args": ["arg"], "collect": ["out"]}));
        works(&done);
        assert!(done.output().starts_with("42 arg\n"));
        assert_eq!(done.file("out")["text"], "{\"a\":1}");
    }
    exec(json!({"language": "perl", "code": ""})).refused("unknown_language", &["perl"]);
}

test!(Both, java_compiles_and_runs, needs [Program("javac")], seconds 120);
fn java_compiles_and_runs() {
    let source = "class Hello {\n    public static void main(String[] words) {\n        System.out.println(java.util.stream.IntStream.range(0, 4).parallel().sum());\n    }\n}\n";
    let request = json!({
        "language": "sh", "code": "javac -d /tmp Hello.java && java -cp /tmp Hello && java Hello.java", "files": {"Hello.java": source},
        "limits": {"wall": scaled_limit(100_000)},
    });
    exec(request).succeeded().expect(json!({"output": "6\n6\n"}));
}

test!(Both, go_builds_and_runs, needs [Program("go")], seconds 120);
fn go_builds_and_runs() {
    let source = "package main\n\nimport \"fmt\"\n\nfunc main() {\n\tsums := make(chan int)\n\tfor n := range []int{1, 2, 3, 4} {\n\t\tgo func(n int) { sums <- n * n }(n)\n\t}\n\tfmt.Println(<-sums + <-sums + <-sums + <-sums)\n}\n";
    let request = json!({
        "language": "sh", "code": "go build -o sum . && ./sum", "files": {"sum.go": source, "go.mod": "module sum\n\ngo 1.19\n"},
        "limits": {"wall": scaled_limit(100_000)},
    });
    exec(request).succeeded().expect(json!({"output": "30\n"}));
}

test!(Both, awk_runs_by_a_policy_of_three_lines, needs[Program("awk")]);
fn awk_runs_by_a_policy_of_three_lines() {
    let policies = PolicyDirectory::new();
    let policy = policies.write("awk", &derived("[runtimes.awk]\ncommand = [\"/usr/bin/awk\", \"-f\", \"{file}\"]\nextension = \"awk\""));
    let done = exec_with(
        &["--policy", &policy],
        json!({"language": "awk", "code": "{ s += $1 } END { print s; print \"done\" }", "stdin": "40\n2\n"}),
    );
    works(&done);
    assert!(done.output().starts_with("42\n"));
}

const INTERPRETER: &str = "python=/opt/stockade/data-science/bin/python3";

test!(Both, numpy_and_pandas_run_with_threads_under_default, needs [DataScience], seconds 90);
fn numpy_and_pandas_run_with_threads_under_default() {
    let code = r#"
import threading, os
import numpy as np, pandas as pd
a = np.random.default_rng(7).random((400, 400))
results = []
threads = [threading.Thread(target=lambda: results.append(np.linalg.norm(a @ a.T))) for _ in range(4)]
for t in threads: t.start()
for t in threads: t.join()
assert len({round(r, 6) for r in results}) == 1
assert np.linalg.svd(a, compute_uv=False)[0] > 0 and np.fft.fft(a).shape == a.shape
frame = pd.DataFrame({"k": np.arange(100000) % 7, "v": np.arange(100000.0)})
frame.to_csv("f.csv", index=False); frame.to_pickle("f.pkl"); np.save("a.npy", a); assert np.load("a.npy", mmap_mode="r").shape == a.shape
assert pd.read_csv("f.csv").groupby("k").v.sum().sum() == frame.v.sum()
print("done")
"#;
    works(&exec_with(&["--runtime", INTERPRETER], json!({"code": code})));
    works(&exec_with(&["--policy", "data-science"], json!({"code": code})));
}

fn sales() -> String {
    let repo = std::env::var("CARGO_MANIFEST_DIR").map(PathBuf::from).unwrap_or_else(|_| PathBuf::from(env!("CARGO_MANIFEST_DIR")));
    fs::read_to_string(repo.join("data/sales.csv")).unwrap()
}

const TOTALS: &str = r#"{"month": {"2026-01": 25600, "2026-02": 29300, "2026-03": 36200}, "product": {"Gadget Lite": 17800, "Widget Pro": 73300}, "region": {"East": 18500, "North": 31800, "South": 20200, "West": 20600}, "total": 91100}"#;

test!(Both, the_sales_analysis_finds_the_right_totals, needs [DataScience], seconds 120);
fn the_sales_analysis_finds_the_right_totals() {
    let scratch = scratch();
    write_file(&scratch.join("sales.csv"), sales());
    let code = r##"
import json
import pandas as pd
import matplotlib.pyplot as plt
sales = pd.read_csv("sales.csv", parse_dates=["date"])
by = lambda key: {str(k): int(v) for k, v in sales.groupby(key).revenue.sum().items()}
totals = {"product": by("product"), "region": by("region"), "month": by(sales.date.dt.strftime("%Y-%m")), "total": int(sales.revenue.sum())}
print(json.dumps(totals, sort_keys=True))
mean = sales.groupby("product").revenue.agg(["count", "mean"]).round(2)
assert mean.loc["Widget Pro"].tolist() == [6, 12216.67] and mean.loc["Gadget Lite"].tolist() == [4, 4450.0]
ax = pd.Series(totals["region"]).sort_values().plot.barh(title="Revenue by region")
ax.figure.tight_layout(); ax.figure.savefig("chart.png")
open("report.md", "w").write("# Sales\n\n" + "".join(f"- {k}: {v:,}\n" for k, v in sorted(totals["region"].items(), key=lambda i: -i[1])))
"##;
    let done = exec_with(&["--policy", "data-science"], json!({"code": code, "scratch": text(&scratch), "collect": ["chart.png", "*.md"]}));
    done.succeeded().expect(json!({"output": format!("{TOTALS}\n"), "denials": []}));
    let chart = BASE64_STANDARD.decode(done.file("chart.png")["base64"].as_str().unwrap()).unwrap();
    assert!(chart.starts_with(b"\x89PNG\r\n\x1a\n") && chart.len() > 5000, "{} bytes", chart.len());
    assert_eq!(chart.len() as u64, done.file("chart.png")["size"].as_u64().unwrap());
    assert_eq!(done.file("report.md")["text"], "# Sales\n\n- North: 31,800\n- West: 20,600\n- South: 20,200\n- East: 18,500\n");
    assert_eq!(fs::read(scratch.join("chart.png")).unwrap(), chart);
}

test!(Both, the_sales_analysis_in_plain_python);
fn the_sales_analysis_in_plain_python() {
    let code = r#"
import collections, csv, json
rows = list(csv.DictReader(open("sales.csv")))
def by(key):
    totals = collections.Counter()
    for row in rows: totals[key(row)] += int(row["revenue"])
    return dict(totals)
print(json.dumps({"product": by(lambda r: r["product"]), "region": by(lambda r: r["region"]), "month": by(lambda r: r["date"][:7]), "total": sum(int(r["revenue"]) for r in rows)}, sort_keys=True))
"#;
    exec(json!({"code": code, "files": {"sales.csv": sales()}})).succeeded().expect(json!({"output": format!("{TOTALS}\n")}));
}

test!(Both, two_runs_build_on_each_other_in_one_scratch);
fn two_runs_build_on_each_other_in_one_scratch() {
    let scratch = scratch();
    let ask = |language: &str, code: &str| exec(json!({"language": language, "code": code, "scratch": text(&scratch)}));
    works(&ask("python", "import json; json.dump({'n': 40}, open('state.json','w')); print('done')"));
    works(&ask("bash", "sed -i 's/40/42/' state.json; echo done"));
    ask("python", "import json; print(json.load(open('state.json'))['n'])").succeeded().expect(json!({"output": "42\n"}));
}
