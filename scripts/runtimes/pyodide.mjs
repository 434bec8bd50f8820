//! Runs a program in CPython that was compiled to WebAssembly, as `python FILE ARGUMENT...` would.
//!
//! Python sees the working directory, HOME and /tmp at their paths, and of the host's files nothing
//! else. Before the program starts, its ways to Node are cut as far as they are known: modules `js` and
//! `pyodide_js` have no object of Node, no further directory can be mounted, no process started, and no
//! module of JavaScript loaded from a file.
//! This is no promise: code that finds another way has the rights of Node, which the sandbox confines.
//!
//! usage: pyodide [OPTION OF PYTHON]... [FILE | -c CODE] [ARGUMENT]...
//! Its exit status is that of Python; 134 if the interpreter itself breaks.

import childProcess from "node:child_process";
import fs from "node:fs";
import Module from "node:module";
import { fileURLToPath } from "node:url";
import { loadPyodide } from "./pyodide/pyodide.mjs";

const BROKEN = 134;
const root = fileURLToPath(new URL("..", import.meta.url));
const { info } = JSON.parse(fs.readFileSync(`${root}lib/pyodide/pyodide-lock.json`, "utf8"));

/// What Python's own modules need of JavaScript, without the objects of Node.
const harmless = Object.create(null);
for (const name of ["Object", "Array", "Map", "Set", "Promise", "Uint8Array", "Date", "Math", "JSON"]) {
  harmless[name] = globalThis[name];
}
// Node's timers are objects of its own, which it also calls back on. Python, and Pyodide for it, have
// their numbers.
const starting = (start) => (act, delay, ...values) => Number(start(() => act(...values), delay));
const ending = (end) => (number) => end(Number(number));
const immediate = setImmediate;
globalThis.setTimeout = harmless.setTimeout = starting(setTimeout);
globalThis.setInterval = harmless.setInterval = starting(setInterval);
globalThis.clearTimeout = harmless.clearTimeout = ending(clearTimeout);
globalThis.clearInterval = harmless.clearInterval = ending(clearInterval);
globalThis.setImmediate = (act, ...values) => void immediate(() => act(...values));

// Emscripten's system(3) starts a shell of the host by this module, which has one object for all.
const noProcess = () => {
  fs.writeSync(2, "pyodide: no process can be started\n");
  return { status: 127, signal: null };
};
for (const [name, value] of Object.entries(childProcess)) {
  if (typeof value === "function") childProcess[name] = noProcess;
}

// Emscripten asks for `ws` when a socket connects, and Node looks for that in HOME, where Python may write.
const load = Module._load;
Module._load = (name, ...others) => {
  if (!Module.isBuiltin(name)) throw new Error(`${name} is no module of Node`);
  return load(name, ...others);
};

/// Shows Python its packages, and what code may write in the sandbox, at the same paths.
function mountAll(FS, { sitePackages }) {
  const { NODEFS } = FS.filesystems;
  FS.mount(NODEFS, { root: `${root}site-packages` }, sitePackages);
  const shown = [];
  for (const path of ["/tmp", process.env.HOME, process.cwd()]) {
    // The root is Pyodide's own, and one directory may lie in another.
    const isShown = shown.some((above) => `${path}/`.startsWith(`${above}/`));
    if (!path || path === "/" || isShown || !fs.existsSync(path)) continue;
    FS.mkdirTree(path);
    FS.mount(NODEFS, { root: path }, path);
    shown.push(path);
  }
  FS.chdir(process.cwd());
}

/// What Node's own code calls must stay what it is: else Python, by a property or a function of its own
/// there, would be given Node's objects. A property of an object below may still be set, as it could be
/// before: that of a frozen prototype would otherwise forbid it.
function freeze(object) {
  for (const [name, { value, writable, configurable }] of Object.entries(Object.getOwnPropertyDescriptors(object))) {
    if (!writable || !configurable || !["constructor", "toString", "valueOf", "name", "message", "stack"].includes(name)) continue;
    Object.defineProperty(object, name, {
      get: () => value,
      set(own) {
        if (this === object) throw new TypeError(`${name} is frozen`);
        Object.defineProperty(this, name, { value: own, writable: true, enumerable: true, configurable: true });
      },
    });
  }
  Object.freeze(object);
}

function freezeIntrinsics() {
  const seen = new Set();
  const visit = (object) => {
    if ((typeof object !== "object" && typeof object !== "function") || object === null || seen.has(object)) return;
    seen.add(object);
    visit(Object.getPrototypeOf(object));
    for (const { value, get, set } of Object.values(Object.getOwnPropertyDescriptors(object))) [value, get, set].forEach(visit);
  };
  const names = [
    "Object", "Function", "Array", "String", "Number", "Boolean", "BigInt", "Symbol", "Date", "RegExp", "Promise", "Proxy", "Reflect",
    "Map", "Set", "WeakMap", "WeakSet", "WeakRef", "FinalizationRegistry", "ArrayBuffer", "SharedArrayBuffer", "DataView", "Atomics",
    "Uint8Array", "Int8Array", "Uint8ClampedArray", "Uint16Array", "Int16Array", "Uint32Array", "Int32Array", "Float32Array",
    "Float64Array", "BigInt64Array", "BigUint64Array", "JSON", "Math", "WebAssembly", "Error", "EvalError", "RangeError",
    "ReferenceError", "SyntaxError", "TypeError", "URIError", "AggregateError",
  ];
  names.forEach((name) => visit(globalThis[name]));
  // These have no name.
  [function* () {}, async function () {}, async function* () {}, [][Symbol.iterator](), new Map().entries(), new Set().values(), ""[Symbol.iterator]()].forEach((object) => visit(Object.getPrototypeOf(object)));
  // Node and Emscripten set its limit of frames, a number.
  seen.delete(Error);
  for (const name of Object.getOwnPropertyNames(Error)) {
    if (name !== "stackTraceLimit") Object.defineProperty(Error, name, { writable: false, configurable: false });
  }
  Object.preventExtensions(Error);
  seen.forEach(freeze);
}

/// What Pyodide itself uses of its inner interface while a program runs.
const needed = new Set([
  "_pyodide", "abortSignalAny", "capture_stderr", "config", "deserializeError", "errorConstructors", "fatal_error", "getTypeTag",
  "isPromise", "isPyProxy", "LiteralMap", "maybe_fatal_error", "NoGilError", "pyproxyIsAlive", "PythonError", "restore_stderr",
  "runPythonInternal", "scheduleCallback", "typedArrayAsUint8Array", "version",
]);

/// Takes from Python what leads to Node.
function cut(python) {
  const { FS } = python;
  for (const mount of FS.root.mount.mounts) Object.freeze(mount.opts);
  for (const [name, filesystem] of Object.entries(FS.filesystems)) {
    if (name !== "MEMFS") {
      filesystem.mount = () => { throw new FS.ErrnoError(1); };
      delete FS.filesystems[name];
    }
  }
  const api = python._api;
  for (const name of Object.getOwnPropertyNames(python)) delete python[name];
  // Code that changes its own memory, as by ctypes, reaches this object even where no name leads to it.
  for (const name of Object.getOwnPropertyNames(api)) {
    if (!needed.has(name)) delete api[name];
  }
  const { enableRunUntilComplete } = api.config;
  api.config = Object.freeze(Object.assign(Object.create(null), { enableRunUntilComplete }));
  python._api = api;
  freezeIntrinsics();
}

async function main() {
  const python = await loadPyodide({
    args: process.argv.slice(2),
    // Pyodide would stay in its prompt after the program.
    env: { ...process.env, PYTHONINSPECT: "" },
    jsglobals: harmless,
    fsInit: mountAll,
    // Packages are files, so nothing is ever to be loaded.
    lockFileContents: { info, packages: {} },
    packageBaseUrl: root,
    _sysExecutable: `${root}bin/pyodide`,
  });
  const { _module } = python;
  const run = _module.jspiSupported ? _module.promisingRunMain : _module._run_main;
  cut(python);
  return run();
}

function broken(error) {
  fs.writeSync(2, `pyodide: the interpreter broke: ${error?.message || JSON.stringify(error)}\n`);
  process.exit(BROKEN);
}

process.on("uncaughtException", broken);
try {
  process.exit(await main());
} catch (error) {
  // An exit is thrown, too.
  if (typeof error?.status === "number") process.exit(error.status);
  broken(error);
}
