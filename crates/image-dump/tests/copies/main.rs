//! Copies of CPython, made from images, against cold starts of the same program.
//!
//! `/usr/bin/python3` is the one under test, or `STOCKADE_TEST_PYTHON`. Nothing here is in a
//! sandbox: images need no privilege, and what confines a copy is tested elsewhere.
#![allow(clippy::unwrap_used, clippy::print_stderr, clippy::print_stdout, reason = "a test may panic, and prints why it is skipped")]

mod programs;
mod support;

use std::{
    fs::{self, File},
    os::{fd::OwnedFd, unix::fs::FileExt},
    path::Path,
    process::Command,
    thread,
};

use programs::PROGRAMS;
use rustix::{
    fs::{SeekFrom, seek},
    io::Errno,
};
use stockade_protocol::memory_image::{HEADER_LENGTH, HostFacts, PAGE, VdsoParts, check, parse, protection, set_hot};
use stockade_sys::seccomp::{
    Instruction,
    program::{ALLOW, NUMBER, answer, equal, load, load_argument},
};
use support::{Recipe, Site, Start, or_skip, pid_namespaces, text};

/// The programs that end differently in a copy, with how.
fn differences(site: &Site, start: &Start<'_>, besides: &[&str]) -> Vec<String> {
    let compared = PROGRAMS.iter().filter(|(name, _)| !besides.contains(name));
    compared.filter_map(|(name, code)| Some(format!("{name}\n{}", site.difference(code, start)?))).collect()
}

fn assert_none(differences: &[String]) {
    assert!(differences.is_empty(), "{} programs differ:\n{}", differences.len(), differences.join("\n"));
}

#[test]
fn programs_end_as_in_a_cold_start() {
    let site = or_skip!(Site::new());
    site.make(&Recipe::default());
    assert_none(&differences(&site, &Start::default(), &[]));
}

#[test]
fn programs_end_as_in_a_cold_start_with_modules_imported() {
    let site = or_skip!(Site::new());
    let imports = "json,re,ssl,random,tempfile,uuid,secrets,sqlite3,logging,asyncio,subprocess,threading,multiprocessing.pool,\
        concurrent.futures.thread,decimal,datetime,ctypes,inspect,typing,dataclasses,csv,urllib.request,unittest";
    site.make(&Recipe { imports, warm: "import logging\nlogging.getLogger('x').debug('y')\n", ..Recipe::default() });
    // The one documented difference is what is in `sys.modules`; and what is calls functions when the program
    // ends (`logging`, `multiprocessing`), which lack what it has taken away and are seen by what it has added.
    let besides = ["interpreter", "builtins replaced", "tracer", "audit hook at the end", "audit hook and tracer"];
    assert_none(&differences(
        &site,
        &Start::default(),
        &[&besides[..], &["no depth left", "tracer and exit handlers called early"]].concat(),
    ));
}

#[test]
fn programs_end_as_in_a_cold_start_without_checkpoint_restore() {
    let mut site = or_skip!(Site::new());
    site.filtered = true;
    site.make(&Recipe::default());
    // The kernel keeps the restorer's place of the arguments, which is unmapped.
    assert_none(&differences(&site, &Start::default(), &["process"]));
}

/// A kernel without CONFIG_CHECKPOINT_RESTORE, as far as images notice.
fn without_checkpoint_restore() -> [Instruction; 7] {
    const PRCTL: u32 = 157;
    const PR_SET_MM: u32 = 35;
    const PR_GET_TID_ADDRESS: u32 = 40;
    const EINVAL: u32 = 0x0005_0000 | 22;
    [
        load(NUMBER),
        equal(PRCTL, 0, 3),
        load_argument(0),
        equal(PR_SET_MM, 2, 0),
        equal(PR_GET_TID_ADDRESS, 1, 0),
        answer(ALLOW),
        answer(EINVAL),
    ]
}

#[test]
fn streams_that_are_files_are_those_of_a_cold_start() {
    let site = or_skip!(Site::new());
    site.make(&Recipe::default());
    let program = b"import sys\nprint(sys.stdin.seekable(), sys.stdout.seekable(), sys.stdin.readline(), sys.stdin.tell())\nsys.stdin.seek(0)\nprint(sys.stdin.read(), sys.stdout.tell(), sys.stdout.line_buffering, sys.stderr)\n";
    site.write_program(program);
    let outputs: Vec<_> = [false, true]
        .map(|copy| {
            let (input, output) = (site.directory.join("input"), site.directory.join(format!("output-{copy}")));
            fs::write(&input, "one\ntwo\n").unwrap();
            let status = site.run_with_files(copy, File::open(input).unwrap(), File::create(&output).unwrap());
            (status, fs::read_to_string(output).unwrap())
        })
        .into();
    assert!(outputs[0].0.success() && outputs[0].1.contains("True True one"), "{outputs:?}");
    assert_eq!(outputs[0], outputs[1]);
}

#[test]
fn an_interpreter_that_ends_does_not_take_its_image_apart() {
    let site = or_skip!(Site::new());
    or_skip!(site.ends_early());
    let imports = "json,re,logging,asyncio,decimal,inspect,typing,dataclasses,unittest";
    site.make(&Recipe { imports, ..Recipe::default() });
    let mut head = vec![0; HEADER_LENGTH];
    site.image.read_exact_at(&mut head, 0).unwrap();
    let image = parse(&head, site.image.metadata().unwrap().len()).unwrap();
    let writable = image.segments().filter(|segment| segment.protection & protection::WRITE != 0);
    let all: u64 = writable.map(|segment| (segment.end() - segment.address) / PAGE).sum();
    let written: u64 = image.hot().map(|(_, length)| length / PAGE).sum();
    assert!(written > 0, "the rehearsal ended otherwise: it has noted no page");
    assert!(5 * written < all, "{written} of {all} pages are written");
}

#[test]
fn functions_for_the_end_that_a_pth_file_registers_are_called() {
    let mut site = or_skip!(Site::new());
    // A virtual environment is an interpreter with such files of its own.
    let environment = site.directory.join("environment");
    let command = [&site.python, Path::new("-m"), Path::new("venv"), Path::new("--without-pip"), &environment];
    let output = Command::new(command[0]).args(&command[1..]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let version = Command::new(&site.python).args(["-c", "import sys; print('python%d.%d' % sys.version_info[:2])"]).output().unwrap();
    let packages = environment.join("lib").join(text(&version.stdout).trim_end()).join("site-packages");
    fs::write(packages.join("own.pth"), "import atexit, os; atexit.register(lambda write=os.write: write(1, b'called'))\n").unwrap();
    site.python = environment.join("bin/python3");
    site.make(&Recipe::default());
    for name in ["tracer", "exit handlers called by one", "many objects"] {
        let (_, code) = PROGRAMS.iter().find(|(known, _)| *known == name).unwrap();
        assert_none(&site.difference(code, &Start::default()).into_iter().collect::<Vec<_>>());
    }
    site.write_program(b"print('end')\n");
    let ends = [site.cold(&Start::default()), site.copy(&Start::default())].map(|output| text(&output.stdout).into_owned());
    assert!(ends[0].starts_with("end\ncalled") && ends[0] == ends[1], "{ends:?}");
}

#[test]
fn closed_streams_are_none_as_in_a_cold_start() {
    let site = or_skip!(Site::new());
    site.make(&Recipe::default());
    site.write_program(b"import os, sys\nos.write(1, repr((sys.stdin, sys.__stdin__, sys.stderr)).encode())\n");
    let outputs = [false, true].map(|copy| site.run_without_streams(copy));
    assert!(outputs[0].starts_with("(None, None, None"), "{outputs:?}");
    assert_eq!(outputs[0], outputs[1]);
}

#[test]
fn options_of_the_interpreter_are_those_of_the_template() {
    for options in [&["-u"][..], &["-B", "-O", "-X", "dev"], &["-W", "error", "-S"]] {
        let site = or_skip!(Site::new());
        if options.contains(&"-S") {
            // No site, no template: the interpreter ends as without a program.
            assert_eq!(site.template_with(options).status.code(), Some(2));
            continue;
        }
        let output = site.template_with(options);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let start = Start { options, ..Start::default() };
        let names = ["streams", "interpreter", "traceback", "frames", "warning"];
        let compared = PROGRAMS.iter().filter(|(name, _)| names.contains(name));
        assert_none(&compared.filter_map(|(_, code)| site.difference(code, &start)).collect::<Vec<_>>());
    }
}

#[test]
fn archives_directories_and_missing_programs_end_as_in_a_cold_start() {
    let site = or_skip!(Site::new());
    site.make(&Recipe::default());
    let start = Start::default();
    let both = || {
        [site.cold(&start), site.copy(&start)]
            .map(|output| (output.status.code(), text(&output.stdout).into_owned(), text(&output.stderr).into_owned()))
    };
    let missing = both();
    assert_eq!((missing[0].0, &missing[0]), (Some(2), &missing[1]));

    fs::create_dir(site.program()).unwrap();
    fs::write(site.program().join("__main__.py"), "import sys\nprint(__name__, __file__, sys.path[0], sys.argv)\n").unwrap();
    let directory = both();
    assert_eq!((directory[0].0, &directory[0]), (Some(0), &directory[1]));
    fs::remove_dir_all(site.program()).unwrap();

    site.write_program(b"import zipfile\nwith zipfile.ZipFile(__file__ + '.zip', 'w') as z:\n    z.writestr('__main__.py', 'print(__file__, __loader__)')\n");
    assert!(site.cold(&start).status.success());
    fs::rename(site.directory.join("main.py.zip"), site.program()).unwrap();
    let archive = both();
    assert_eq!((archive[0].0, &archive[0]), (Some(0), &archive[1]));
}

#[test]
fn many_copies_of_one_image_run_at_once() {
    let site = or_skip!(Site::new());
    site.make(&Recipe::default());
    site.write_program(b"import os, sys, time\nblock = bytearray(os.getpid().to_bytes(4, 'little') * 100000)\ntime.sleep(0.05)\nprint(os.getpid(), block == os.getpid().to_bytes(4, 'little') * 100000)\n");
    let outputs: Vec<_> = thread::scope(|scope| {
        let copies: Vec<_> = (0..40).map(|_| scope.spawn(|| site.copy(&Start::default()))).collect();
        copies.into_iter().map(|copy| copy.join().unwrap()).collect()
    });
    let mut lines: Vec<_> = outputs.iter().map(|output| text(&output.stdout).into_owned()).collect();
    lines.sort();
    lines.dedup();
    assert_eq!(lines.len(), 40, "{outputs:?}");
    assert!(lines.iter().all(|line| line.ends_with(" True\n")), "{lines:?}");
}

/// Modules with random numbers, all of which the warm-up has used.
const RANDOM_IMPORTS: &str = "random,ssl,hashlib,tempfile,uuid,secrets,sqlite3,multiprocessing.process";
const RANDOM_WARM: &str = "
import random, sqlite3, ssl, tempfile
random.random(); ssl.RAND_bytes(4); next(tempfile._get_candidate_names())
db = sqlite3.connect(':memory:'); db.execute('select random()').fetchone(); db.close(); del db
";
const RANDOM_DRAWS: &[u8] = b"
import json, multiprocessing.process, os, random, secrets, sqlite3, ssl, sys, tempfile, uuid
draws = {
    'random': random.random(), 'uuid4': uuid.uuid4().hex, 'secrets': secrets.token_hex(8), 'urandom': os.urandom(8).hex(),
    'ssl': ssl.RAND_bytes(8).hex(), 'tempfile': next(tempfile._get_candidate_names()), 'mkdtemp': tempfile.mkdtemp(),
    'sqlite3': sqlite3.connect(':memory:').execute('select random()').fetchone()[0],
    'authkey': bytes(multiprocessing.process.current_process().authkey).hex(),
}
os.rmdir(draws['mkdtemp'])
if 'numpy' in sys.modules:
    import numpy
    draws['numpy'] = float(numpy.random.random())
    draws['numpy default_rng'] = float(numpy.random.default_rng().random())
print(os.getpid(), *(f'{name}={value}' for name, value in draws.items()), sep='\\n')
";

/// The names of draws that are the same in two copies that are both pid 1.
fn repeated(site: &Site) -> Vec<String> {
    site.write_program(RANDOM_DRAWS);
    let draws = [(); 2].map(|()| {
        let output = site.copy_in_pid_namespace(&Start::default());
        assert!(output.status.success(), "{output:?}");
        text(&output.stdout).lines().map(String::from).collect::<Vec<_>>()
    });
    assert_eq!((&draws[0][0], &draws[1][0]), (&String::from("1"), &String::from("1")), "the pids must be equal");
    assert!(draws[0].len() >= 10, "{draws:?}");
    let same = draws[0].iter().zip(&draws[1]).skip(1).filter(|(one, other)| one == other);
    same.filter_map(|(one, _)| Some(one.split_once('=')?.0.to_string())).collect()
}

fn random_recipe(site: &Site) -> (String, String) {
    let numpy = std::process::Command::new(&site.python).args(["-c", "import numpy"]).output().is_ok_and(|output| output.status.success());
    if numpy {
        (format!("{RANDOM_IMPORTS},numpy"), format!("{RANDOM_WARM}\nimport numpy\nnumpy.random.random()\n"))
    } else {
        (RANDOM_IMPORTS.into(), RANDOM_WARM.into())
    }
}

#[test]
fn two_copies_with_one_pid_draw_different_random_numbers() {
    let site = or_skip!(Site::new());
    or_skip!(pid_namespaces());
    let (imports, warm) = random_recipe(&site);
    site.make(&Recipe {
        imports: &imports,
        warm: &warm,
        in_pid_namespace: true,
        variables: &[("OPENBLAS_NUM_THREADS", "1")],
        ..Recipe::default()
    });
    assert_eq!(repeated(&site), Vec::<String>::new());
}

#[test]
fn without_reseeding_two_copies_repeat_random_numbers() {
    let site = or_skip!(Site::new());
    or_skip!(pid_namespaces());
    let (imports, warm) = random_recipe(&site);
    // What a template that forgot it would do: neither a fork's child nor a new seed.
    let without = Some(("PyOS_AfterFork_Child()\n            reseeding.reseed()", "PyOS_AfterFork_Parent()"));
    site.make(&Recipe { imports: &imports, warm: &warm, without, in_pid_namespace: true, variables: &[("OPENBLAS_NUM_THREADS", "1")] });
    let repeated = repeated(&site);
    // The template's pid is theirs, as in a sandbox: OpenSSL and tempfile notice another one.
    for name in ["random", "ssl", "tempfile", "sqlite3", "authkey"] {
        assert!(repeated.iter().any(|found| found == name), "{name} is not among {repeated:?}");
    }
    assert!(!repeated.iter().any(|name| matches!(name.as_str(), "urandom" | "secrets" | "uuid4")), "{repeated:?}");
}

#[test]
fn a_template_is_refused_for_what_an_image_cannot_hold() {
    let refusals = [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "2 threads"),
        ("import os\nos.open('/dev/null', 0)", "is open: /dev/null"),
        ("import subprocess\nsubprocess.x = subprocess.Popen(['sleep', '9'], stdout=-3, stderr=-3)", "a child process"),
        ("import signal\nsignal.setitimer(signal.ITIMER_VIRTUAL, 1000)", "an interval timer"),
        ("import mmap, builtins\nbuiltins.x = mmap.mmap(-1, 4096)", "an object of more than memory: mmap.mmap"),
        ("import ctypes\nctypes.CDLL(None).mmap(None, 4096, 3, 0x21, -1, 0)", "shared writable memory: "),
        ("import random, builtins\nbuiltins.x = random.Random(1)", "a generator that would repeat: random.Random"),
        ("import random, builtins\nclass Own(random.Random): pass\nbuiltins.x = Own()", "a generator that would repeat: stockade_warm.Own"),
        ("import sqlite3, builtins\nbuiltins.x = sqlite3.connect(':memory:')", "an object of more than memory: sqlite3.Connection"),
        // Hidden from the collector, or never known to it.
        ("import builtins, gc, random\nbuiltins.x = random.Random(1)\ngc.freeze()", "a generator that would repeat: random.Random"),
        (
            "import builtins, gc, sqlite3\nbuiltins.x = sqlite3.connect(':memory:')\ngc.freeze()",
            "an object of more than memory: sqlite3.Connection",
        ),
        (
            "import builtins, gc, random\nbuiltins.x = random.Random(1)\ngc.get_objects = gc.get_referents = lambda *all: []",
            "a generator that would repeat: random.Random",
        ),
        ("import builtins, _random\nbuiltins.x = _random.Random(1)", "a generator that would repeat: _random.Random"),
        (
            "import builtins, gc, _random\nbuiltins.x = {1: ((_random.Random(1),),)}\ngc.collect()\ngc.freeze()",
            "a generator that would repeat: _random.Random",
        ),
        ("import ctypes\nctypes.CDLL(None).mmap(ctypes.c_void_p(0x130000000000), 4096, 3, 0x32, -1, 0)", "lies where the restorer works"),
        ("1 / 0", "ZeroDivisionError"),
        ("import no_such_module", "ModuleNotFoundError"),
    ];
    for (warm, reason) in refusals {
        let site = or_skip!(Site::new());
        let output = site.template(&Recipe { warm, ..Recipe::default() });
        let error = text(&output.stderr);
        assert_eq!((output.status.code(), text(&output.stdout).as_ref()), (Some(125), ""), "{warm}: {error}");
        assert!(error.starts_with("stockade: template refused: ") && error.contains(reason) && error.ends_with('\n'), "{warm}: {error}");
    }
}

#[test]
fn what_a_program_left_open_is_written_at_its_end() {
    let site = or_skip!(Site::new());
    site.make(&Recipe { imports: "json,tempfile", ..Recipe::default() });
    let code = "import beside, json, tempfile\nglobal_file = open('global', 'w')\nglobal_file.write('one')\n\
        beside.file = open('module', 'w')\nbeside.file.write('two')\n\n\
        class Held:\n    pass\nheld = Held()\nheld.itself, held.file = held, open('held', 'w')\nheld.file.write('three')\nkept = tempfile.NamedTemporaryFile(dir='.', prefix='temporary')\n";
    site.write_program(code.as_bytes());
    let output = site.copy(&Start::default());
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let read = |name| fs::read_to_string(site.directory.join(name)).unwrap();
    assert_eq!([read("global"), read("module"), read("held")], ["one", "two", "three"]);
    let left = fs::read_dir(&site.directory)
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("temporary"));
    assert_eq!(left.count(), 0);
}

#[test]
fn a_template_never_runs_a_program() {
    let site = or_skip!(Site::new());
    site.write_program(b"print('ran')\n");
    let output = site.template(&Recipe::default());
    assert_eq!((output.status.code(), text(&output.stdout).as_ref()), (Some(125), ""));
    assert!(text(&output.stderr).contains("no program may be there"), "{output:?}");
}

#[test]
fn a_copy_is_refused_what_was_decided_in_the_template() {
    let site = or_skip!(Site::new());
    site.make(&Recipe::default());
    site.write_program(b"print('ran')\n");
    let with = |name, value| [Start::default().variables, &[(name, value)]].concat();
    for (start, reason) in [
        (Start { options: &["-O"], ..Start::default() }, "started with"),
        (Start { variables: &with("PYTHONHASHSEED", "0"), ..Start::default() }, "other values of PYTHONHASHSEED"),
        (Start { variables: &with("LC_ALL", "C"), ..Start::default() }, "other values of LC_ALL"),
    ] {
        let output = site.copy(&start);
        let error = text(&output.stderr);
        assert_eq!((output.status.code(), text(&output.stdout).as_ref()), (Some(125), ""), "{error}");
        assert!(error.contains(reason), "{error}");
    }
    let zone = with("TZ", "XYZ-3");
    let start = Start { variables: &zone, ..Start::default() };
    assert_eq!(site.difference(b"import time\nprint(time.tzname, time.strftime('%z %Z', time.localtime(0)))\n", &start), None);
}

#[test]
fn an_image_passes_the_launchers_check_and_bad_ones_end_the_restorer() {
    let mut site = or_skip!(Site::new());
    or_skip!(site.ends_early());
    let output = site.template(&Recipe::default());
    assert!(output.status.success(), "{output:?}");
    let host = HostFacts { vdso: VdsoParts::from_maps(&fs::read("/proc/self/maps").unwrap()).unwrap() };
    let length = site.image.metadata().unwrap().len();
    let mut header = vec![0; HEADER_LENGTH];
    site.image.read_exact_at(&mut header, 0).unwrap();
    let image = check(&header, length, &host).unwrap();
    assert!(image.segments().count() > 10);

    // The template's rehearsal noted what every copy writes; a copy then faults less often. What a
    // program sees is the same.
    let pages: u64 = image.hot().map(|(_, length)| length / PAGE).sum();
    assert!((100..5000).contains(&pages), "{pages} pages");
    site.write_program(b"import resource\nprint(resource.getrusage(resource.RUSAGE_SELF).ru_minflt, 'faults')\n");
    let faults =
        |site: &Site| text(&site.copy(&Start::default()).stdout).split(' ').next().and_then(|count| count.parse::<u64>().ok()).unwrap();
    let with = faults(&site);
    assert_eq!(set_hot(&mut header, length, std::iter::empty()), Ok(0));
    site.image.write_all_at(&header, 0).unwrap();
    let without = faults(&site);
    println!("{with} faults with the list of {pages} pages, {without} without");
    assert!(without > 100);

    // What the caller is told, and what the restorer says where it cannot tell.
    let refusal = |site: &Site| {
        let output = site.copy(&Start::default());
        assert_eq!((output.status.code(), output.stdout.as_slice()), (Some(125), &b""[..]), "{output:?}");
        (seek(&site.image, SeekFrom::Current(0)), text(&output.stderr).into_owned())
    };
    assert_eq!(seek(&site.image, SeekFrom::Current(0)), Ok(0), "copies were made");
    let malformed = Ok(u64::from(Errno::BADMSG.raw_os_error().unsigned_abs()));
    site.image.write_all_at(&[0], 0).unwrap();
    assert_eq!(refusal(&site), (malformed, String::new()));
    seek(&site.image, SeekFrom::Start(0)).unwrap();
    site.image.set_len(100).unwrap();
    assert_eq!(refusal(&site), (malformed, String::new()));
    let (reader, _writer) = std::io::pipe().unwrap();
    site.image = File::from(OwnedFd::from(reader));
    let (position, said) = refusal(&site);
    assert!(position == Err(Errno::SPIPE) && said.starts_with("stockade-restore: map the header: errno "), "{position:?} {said}");
}
