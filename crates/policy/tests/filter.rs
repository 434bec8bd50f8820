//! The filter against libseccomp's own: two compilers, one set of rules.
//!
//! Both programs run in a small interpreter of classic BPF, for every system call number
//! and every combination of telling arguments, and must answer alike. It also holds the
//! promises that a policy cannot change.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation, reason = "a test may panic")]

use std::io::{Read, Seek};

use libseccomp::{ScmpAction, ScmpArgCompare, ScmpCompareOp, ScmpFilterContext, ScmpSyscall};
use stockade_policy::{
    filter::{Action, Check, FilterError, Filters, MAX_IOCTLS, Rules, callers_programs, names},
    model::{Seccomp, SocketFamily},
};

const ALLOW: u32 = 0x7fff_0000;
const NOTIFY: u32 = 0x7fc0_0000;
const EPERM: u32 = 0x0005_0001;
const ENOSYS: u32 = 0x0005_0026;
const X86_64: u32 = 0xc000_003e;

/// Runs a filter as the kernel does (Documentation/networking/filter.rst).
fn answer(program: &[u64], architecture: u32, number: u32, arguments: [u64; 6]) -> u32 {
    let mut data = [0u8; 64];
    data[0..4].copy_from_slice(&number.to_le_bytes());
    data[4..8].copy_from_slice(&architecture.to_le_bytes());
    for (index, argument) in arguments.iter().enumerate() {
        data[16 + 8 * index..24 + 8 * index].copy_from_slice(&argument.to_le_bytes());
    }
    let (mut at, mut a) = (0usize, 0u32);
    loop {
        let instruction = program[at];
        let (code, when_true, when_false, k) =
            (instruction as u16, (instruction >> 16) as u8, (instruction >> 24) as u8, (instruction >> 32) as u32);
        at += 1;
        let jump = |taken: bool| usize::from(if taken { when_true } else { when_false });
        match code {
            0x00 => a = k,
            0x20 => a = u32::from_le_bytes(data[k as usize..k as usize + 4].try_into().unwrap()),
            0x54 => a &= k,
            0x05 => at += k as usize,
            0x15 => at += jump(a == k),
            0x25 => at += jump(a > k),
            0x35 => at += jump(a >= k),
            0x45 => at += jump(a & k != 0),
            0x06 => return k,
            _ => panic!("instruction {code:#x}"),
        }
    }
}

fn default_policy() -> Seccomp {
    stockade_policy::load_shipped("default").unwrap().seccomp
}

fn compiled(policy: &Seccomp) -> (Rules, Vec<u64>) {
    let rules = Rules::new(policy, false).unwrap();
    let program = rules.compile().unwrap();
    (rules, program)
}

/// The same rules through libseccomp, whose default stands for our notification.
fn by_libseccomp(rules: &Rules, policy: &Seccomp) -> Vec<u64> {
    let mut filter = ScmpFilterContext::new(ScmpAction::Errno(1)).unwrap();
    let equal = |argument: u32, value: u32| ScmpArgCompare::new(argument, ScmpCompareOp::MaskedEqual(0xffff_ffff), u64::from(value));
    let masked =
        |argument: u32, mask: u32, value: u32| ScmpArgCompare::new(argument, ScmpCompareOp::MaskedEqual(u64::from(mask)), u64::from(value));
    for number in 0..names::END {
        let call = ScmpSyscall::from(number as i32);
        let allow = |filter: &mut ScmpFilterContext, conditions: &[ScmpArgCompare]| {
            filter.add_rule_conditional_exact(ScmpAction::Allow, call, conditions).unwrap();
        };
        let action = names::name(number).and_then(|name| rules.action(&name)).unwrap_or(Action::NoSuchCall);
        match action {
            Action::Allow => {
                filter.add_rule_exact(ScmpAction::Allow, call).unwrap();
            }
            Action::Deny => {}
            Action::NoSuchCall => {
                filter.add_rule_exact(ScmpAction::Errno(38), call).unwrap();
            }
            Action::Unsupported(errno) => {
                filter.add_rule_exact(ScmpAction::Errno(i32::try_from(errno).unwrap()), call).unwrap();
            }
            Action::Check(check) => match check {
                Check::Clone => allow(&mut filter, &[masked(0, 0x7e02_0000, 0)]),
                Check::Mode(argument) => allow(&mut filter, &[masked(argument.into(), 0o6000, 0)]),
                Check::Open(argument) => {
                    let flags = u32::from(argument);
                    allow(&mut filter, &[masked(flags, 0o20_000_100, 0)]);
                    // Either creating flag, or both.
                    for creating in [0o100, 0o20_000_000, 0o20_000_100] {
                        allow(&mut filter, &[masked(flags, 0o20_000_100, creating), masked(flags + 1, 0o6000, 0)]);
                    }
                }
                Check::Mknod(argument) => {
                    for kind in [0, 0o100_000, 0o010_000, 0o140_000] {
                        allow(&mut filter, &[masked(argument.into(), 0o176_000, kind)]);
                    }
                }
                Check::PidIsSelf(argument) => allow(&mut filter, &[equal(argument.into(), 0)]),
                Check::Priority(which) => allow(&mut filter, &[equal(0, which), equal(1, 0)]),
                Check::Personality => {
                    allow(&mut filter, &[equal(0, 0)]);
                    allow(&mut filter, &[equal(0, u32::MAX)]);
                }
                Check::SocketPair => allow(&mut filter, &[equal(0, 1)]),
                Check::Rename => allow(&mut filter, &[masked(4, 4, 0)]),
                Check::NoHugePages(argument, bit) => allow(&mut filter, &[masked(argument.into(), bit, 0)]),
                // Compared in a test of their own: libseccomp wants a rule for each value.
                Check::Prctl | Check::Madvise | Check::SetSockOpt | Check::Fcntl { .. } | Check::SetRlimit | Check::PrlimitSelf => continue,
                Check::Ioctl => policy.ioctl.iter().for_each(|request| allow(&mut filter, &[equal(1, *request)])),
                Check::Socket => {
                    for family in &policy.socket_families {
                        let (number, protocols): (u32, &[u32]) = match family {
                            SocketFamily::Unix => (1, &[]),
                            SocketFamily::Inet => (2, &[0, 6, 17]),
                            SocketFamily::Inet6 => (10, &[0, 6, 17]),
                            SocketFamily::Netlink => (16, &[0]),
                        };
                        if protocols.is_empty() {
                            allow(&mut filter, &[equal(0, number)]);
                        }
                        // Types without their flags: streams and datagrams, as no other is TCP or UDP.
                        let types: &[Option<u32>] = if *family == SocketFamily::Netlink { &[None] } else { &[Some(1), Some(2)] };
                        for protocol in protocols {
                            for kind in types {
                                let of_type = kind.map(|kind| masked(1, 0xf, kind));
                                let all: Vec<_> = [equal(0, number), equal(2, *protocol)].into_iter().chain(of_type).collect();
                                allow(&mut filter, &all);
                            }
                        }
                    }
                }
            },
        }
    }
    let path = std::env::temp_dir().join(format!("stockade-filter-test-{}", std::process::id()));
    let mut file = std::fs::File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    filter.export_bpf(&mut file).unwrap();
    file.rewind().unwrap();
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).unwrap();
    bytes.chunks_exact(8).map(|chunk| u64::from_le_bytes(chunk.try_into().unwrap())).collect()
}

/// Values around every limit that a rule compares with, and some with high bits set.
fn telling_values(policy: &Seccomp) -> Vec<u64> {
    let mut values = vec![
        0, 1, 2, 3, 6, 10, 16, 17, 38, 40, 0o644, 0o4755, 0o2755, 0o1777, 0o100, 0o100_644, 0o010_600, 0o060_600, 0o020_600, 0o140_755,
        0o104_755,
    ];
    values.extend([
        0o20_000_000,
        0o20_000_102,
        0x0120_0011,
        0x1000_0011,
        0x0202_0000,
        0x4_0022,
        0x5412,
        0x541c,
        0xffff_ffff,
        0x1_0000_0000,
        0x1_0000_5412,
        u64::MAX,
    ]);
    values.extend(policy.ioctl.iter().take(4).map(|request| u64::from(*request)));
    values
}

#[test]
fn libseccomp_compiles_the_same_answers() {
    let policy = default_policy();
    let (rules, ours) = compiled(&policy);
    let theirs = by_libseccomp(&rules, &policy);
    let values = telling_values(&policy);
    let mut compared = 0u64;
    for number in 0..names::END {
        // These are compared in tests of their own.
        if matches!(
            names::name(number).and_then(|name| rules.action(&name)),
            Some(Action::Check(
                Check::Prctl | Check::Madvise | Check::SetSockOpt | Check::Fcntl { .. } | Check::SetRlimit | Check::PrlimitSelf
            ))
        ) {
            continue;
        }
        let checked = names::name(number).is_some_and(|name| matches!(rules.action(&name), Some(Action::Check(_))));
        let firsts: &[u64] = if checked { &values } else { &[0] };
        for &first in firsts {
            for &second in firsts {
                for &third in firsts {
                    // The fourth argument matters to openat alone; it follows the second.
                    let arguments = [first, second, third, second, 0, 0];
                    let ours = match answer(&ours, X86_64, number, arguments) {
                        NOTIFY => EPERM,
                        other => other,
                    };
                    assert_eq!(ours, answer(&theirs, X86_64, number, arguments), "{number} {:?} {arguments:x?}", names::name(number));
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 500_000, "{compared}");
}

#[test]
fn the_rules_that_remedies_print_are_those_of_the_filter() {
    let mut policy = default_policy();
    policy.socket_families = vec![SocketFamily::Unix, SocketFamily::Inet];
    let (rules, program) = compiled(&policy);
    let mut values = telling_values(&policy);
    values.extend([1024, 1026, 22, 26, 4]);
    let mut refused = 0;
    for number in 0..names::END {
        let Some(Action::Check(check)) = names::name(number).and_then(|name| rules.action(&name)) else { continue };
        for &first in &values {
            for &second in &values {
                for &third in &values {
                    let arguments = [first, second, third, second, third, 0];
                    let denied = answer(&program, X86_64, number, arguments) == NOTIFY;
                    let judged = check.judge(&policy, &arguments);
                    assert_eq!(judged.is_err(), denied, "{:?} {arguments:x?} {judged:?}", names::name(number));
                    refused += usize::from(denied);
                }
            }
        }
    }
    assert!(refused > 100_000, "{refused}");
}

#[test]
fn pages_are_not_shared_with_other_runs() {
    let (_, program) = compiled(&default_policy());
    let madvise = names::number("madvise").unwrap();
    for advice in 0..110u64 {
        let expected = if advice == 12 { NOTIFY } else { ALLOW };
        assert_eq!(answer(&program, X86_64, madvise, [0, 0, 1 << 32 | advice, 0, 0, 0]), expected, "madvise {advice}");
    }
}

#[test]
fn the_code_can_load_no_bpf_of_its_own_and_set_no_option_that_nothing_counts() {
    let (_, program) = compiled(&default_policy());
    let prctl = names::number("prctl").unwrap();
    let setsockopt = names::number("setsockopt").unwrap();
    for option in 0..80u64 {
        let allowed = [1, 2, 3, 4, 7, 8, 13, 15, 16, 21, 23, 24, 27, 29, 30, 36, 37, 38, 39, 40, 42, 47, 52, 53, 65, 66];
        let expected = if allowed.contains(&option) { ALLOW } else { NOTIFY };
        assert_eq!(answer(&program, X86_64, prctl, [1 << 32 | option, 0, 0, 0, 0, 0]), expected, "prctl {option}");
        for level in [0, 1, 6, 17, 41, 270] {
            let forbidden = match level {
                0 => option == 35 || (39..=48).contains(&option),
                1 => [26, 50, 51, 52].contains(&option),
                6 => [14, 32, 38].contains(&option),
                41 => [6, 20, 32, 54, 55, 57, 59].contains(&option) || (42..=48).contains(&option),
                _ => false,
            };
            let expected = if forbidden { NOTIFY } else { ALLOW };
            assert_eq!(answer(&program, X86_64, setsockopt, [0, level, option, 0, 0, 0]), expected, "setsockopt {level} {option}");
        }
    }
}

#[test]
fn the_limit_of_core_dumps_stays_and_every_other_may_go_down() {
    // SECCOMP_RET_ERRNO with 0.
    const DONE: u32 = 0x0005_0000;
    let (_, program) = compiled(&default_policy());
    let (setrlimit, prlimit) = (names::number("setrlimit").unwrap(), names::number("prlimit64").unwrap());
    for high in [0, 1 << 32] {
        for resource in 0..16u64 {
            let expected = if resource == 4 { DONE } else { ALLOW };
            assert_eq!(answer(&program, X86_64, setrlimit, [high | resource, 0, 0, 0, 0, 0]), expected, "setrlimit {resource}");
            // A new one's address has any bits; without one it only asks.
            for new in [1, 1 << 32, 0x7fff_0000_1234] {
                assert_eq!(answer(&program, X86_64, prlimit, [high, high | resource, new, 1, 0, 0]), expected, "prlimit64 {resource}");
            }
            assert_eq!(answer(&program, X86_64, prlimit, [high, high | resource, 0, 1, 0, 0]), ALLOW);
            assert_eq!(answer(&program, X86_64, prlimit, [high | 7, high | resource, 0, 1, 0, 0]), NOTIFY);
        }
    }
}

#[test]
fn directories_are_watched_by_both_calls_or_by_none() {
    let watching = default_policy();
    let mut blind = default_policy();
    blind.allow.retain(|name| name != "inotify_add_watch");
    let fcntl = names::number("fcntl").unwrap();
    for (policy, expected) in [(watching, ALLOW), (blind, NOTIFY)] {
        let (_, program) = compiled(&policy);
        for high in [0, 1 << 32] {
            assert_eq!(answer(&program, X86_64, fcntl, [3, high | 1026, 1, 0, 0, 0]), expected);
            for other in [0, 1, 1025, 1027, 0xffff_ffff] {
                assert_eq!(answer(&program, X86_64, fcntl, [1026, high | other, 1026, 0, 0, 0]), ALLOW);
            }
        }
    }
}

#[test]
fn leases_are_taken_under_no_policy() {
    let mut blind = default_policy();
    blind.allow.retain(|name| name != "inotify_add_watch");
    let fcntl = names::number("fcntl").unwrap();
    for policy in [default_policy(), blind] {
        let (_, program) = compiled(&policy);
        for high in [0, 1 << 32] {
            // F_SETLEASE and F_SETDELEG; then F_GETLEASE, F_GETDELEG and what else is near.
            for lease in [1024, 1040] {
                assert_eq!(answer(&program, X86_64, fcntl, [3, high | lease, 1, 0, 0, 0]), NOTIFY);
            }
            for other in [1025, 1023, 1039, 1041] {
                assert_eq!(answer(&program, X86_64, fcntl, [1024, high | other, 1040, 0, 0, 0]), ALLOW);
            }
        }
    }
}

#[test]
fn locks_of_open_files_are_taken_under_no_policy() {
    let fcntl = names::number("fcntl").unwrap();
    let (_, program) = compiled(&default_policy());
    for high in [0, 1 << 32] {
        // F_OFD_SETLK and F_OFD_SETLKW; then F_OFD_GETLK, F_SETLK, F_SETLKW and what is beside.
        for lock in [37, 38] {
            assert_eq!(answer(&program, X86_64, fcntl, [3, high | lock, 1, 0, 0, 0]), NOTIFY);
        }
        for other in [36, 6, 7, 39] {
            assert_eq!(answer(&program, X86_64, fcntl, [37, high | other, 38, 0, 0, 0]), ALLOW);
        }
    }
}

#[test]
fn every_listed_ioctl_request_passes_up_to_the_span_of_a_jump() {
    let ioctl = names::number("ioctl").unwrap();
    let mut policy = default_policy();
    policy.ioctl = (0x9000..).take(MAX_IOCTLS).collect();
    let (_, program) = compiled(&policy);
    for request in 0x8ff0..0x9110u64 {
        let expected = if (0x9000..0x90ff).contains(&request) { ALLOW } else { NOTIFY };
        assert_eq!(answer(&program, X86_64, ioctl, [0, request, 0, 0, 0, 0]), expected, "{request:#x}");
    }
    policy.ioctl.push(0x90ff);
    assert_eq!(Rules::new(&policy, false).unwrap().compile(), Err(FilterError::JumpTooFar(256)));
}

#[test]
fn high_bits_of_an_argument_change_no_answer() {
    let (_, program) = compiled(&default_policy());
    let ioctl = names::number("ioctl").unwrap();
    const TIOCSTI: u64 = 0x5412;
    for high in [0, 1 << 32, 0xdead_beef << 32] {
        assert_eq!(answer(&program, X86_64, ioctl, [0, high | TIOCSTI, 0, 0, 0, 0]), NOTIFY);
        assert_eq!(answer(&program, X86_64, ioctl, [0, high | 0x5401, 0, 0, 0, 0]), ALLOW);
    }
}

#[test]
fn foreign_architectures_and_unknown_numbers_do_not_exist() {
    let (_, program) = compiled(&default_policy());
    const I386: u32 = 0x4000_0003;
    for number in [0, 1, 11, 500] {
        assert_eq!(answer(&program, I386, number, [0; 6]), ENOSYS);
    }
    // x32 marks its numbers by bit 30.
    for number in [0x4000_0000, 0x4000_003b, 400, 511, 9999, u32::MAX] {
        assert_eq!(answer(&program, X86_64, number, [0; 6]), ENOSYS);
    }
}

#[test]
fn what_lies_in_memory_cannot_be_allowed() {
    let mut policy = default_policy();
    policy.allow.extend(["clone3".to_owned(), "openat2".to_owned()]);
    let (rules, _) = compiled(&policy);
    assert_eq!(rules.action("clone3"), Some(Action::NoSuchCall));
    assert_eq!(rules.action("openat2"), Some(Action::NoSuchCall));
}

#[test]
fn a_policy_that_starves_the_executor_is_refused() {
    let mut policy = default_policy();
    policy.allow.retain(|name| name != "execveat");
    assert!(Rules::new(&policy, false).unwrap_err().to_string().contains("`execveat`"));
}

#[test]
fn what_no_count_of_a_host_scratch_finds_is_not_supported_there() {
    let mut policy = default_policy();
    for name in ["fallocate", "landlock_create_ruleset", "landlock_add_rule"] {
        assert_eq!(Rules::new(&policy, true).unwrap().action(name), Some(Action::Unsupported(95)));
        assert_eq!(Rules::new(&policy, false).unwrap().action(name), Some(Action::Allow));
        // What a policy does not allow is denied in any scratch.
        policy.allow.retain(|allowed| allowed != name);
        assert_eq!(Rules::new(&policy, true).unwrap().action(name), Some(Action::Deny));
    }
}

#[test]
fn attributes_are_set_on_files_under_no_policy() {
    let mut policy = default_policy();
    for name in ["setxattr", "lsetxattr", "fsetxattr"] {
        for growing in [false, true] {
            assert_eq!(Rules::new(&policy, growing).unwrap().action(name), Some(Action::Unsupported(95)));
        }
        policy.allow.retain(|allowed| allowed != name);
        assert_eq!(Rules::new(&policy, false).unwrap().action(name), Some(Action::Deny));
    }
}

#[test]
fn no_page_of_a_file_goes_into_a_pipe_or_socket_under_any_policy() {
    let mut policy = default_policy();
    for name in ["sendfile", "splice", "tee"] {
        assert_eq!(Rules::new(&policy, false).unwrap().action(name), Some(Action::Unsupported(22)));
        policy.allow.retain(|allowed| allowed != name);
        assert_eq!(Rules::new(&policy, false).unwrap().action(name), Some(Action::Deny));
    }
}

#[test]
fn every_shipped_filter_loads_within_the_kernels_limit() {
    for (name, _) in stockade_policy::SHIPPED {
        let policy = stockade_policy::load_shipped(name).unwrap().seccomp;
        assert!(compiled(&policy).1.len() < 4096, "{name}");
    }
}

/// No check answers ENOSYS, so that is the tree's own, but for one before it.
#[test]
fn an_answer_stands_once_as_far_as_jumps_reach() {
    const ANSWER: u64 = 0x06;
    let (_, program) = compiled(&default_policy());
    let answers = program.iter().filter(|instruction| **instruction == ANSWER | u64::from(ENOSYS) << 32).count();
    assert!((2..=1 + program.len().div_ceil(255)).contains(&answers), "{answers} in {} instructions", program.len());
}

#[test]
fn a_callers_filter_is_loaded_by_who_has_the_key_alone() {
    let key = 0x1234_5678_9abc_def0;
    let load = |flags: u64, key: u64| [1, flags, 0x7000, key, 0, 0];
    let seccomp = names::number("seccomp").unwrap();
    let allow = u64::from(ALLOW) << 32 | 6;
    // It answers EPERM to the calls of odd numbers, and looks at the accumulator before it loads anything.
    let own = [0x15 | 1 << 24, 0x20, 0x45 | 1 << 24 | 1 << 32, u64::from(EPERM) << 32 | 6, allow];
    let programs = callers_programs(&[own.to_vec(), vec![allow]], key);
    let words = |bytes: &[u8]| bytes.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect::<Vec<_>>();
    let [first, second] = [&programs[0], &programs[1]].map(|bytes| words(bytes));
    assert_eq!(second, [allow], "it is the caller's, unchanged");
    for wrong in [0, key ^ 1, key ^ 1 << 63, key & 0xffff_ffff, key << 32] {
        assert_eq!(answer(&first, X86_64, seccomp, load(0, wrong)), EPERM, "{wrong:#x}");
    }
    assert_eq!(answer(&first, X86_64, seccomp, load(0, key)), answer(&own, X86_64, seccomp, load(0, key)));
    for number in (0..names::END).filter(|number| *number != seccomp) {
        assert_eq!(answer(&first, X86_64, number, [0; 6]), answer(&own, X86_64, number, [0; 6]), "{number}");
    }
}

#[test]
fn the_sandboxs_filter_lets_a_callers_be_loaded_and_is_else_the_same() {
    let seccomp = names::number("seccomp").unwrap();
    let filters = Filters::new(&default_policy()).unwrap();
    for filter in [filters.private_scratch, filters.host_scratch] {
        let open = filter.taking_callers();
        assert_ne!(open.sha256, filter.sha256);
        for number in 0..names::END {
            for arguments in [[0; 6], [1, 0, 0, 0, 0, 0], [1, 8, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0], [0xffff_ffff; 6]] {
                let may_load = number == seccomp && arguments[..2] == [1, 0];
                let expected = if may_load { ALLOW } else { answer(&filter.program, X86_64, number, arguments) };
                assert_eq!(answer(&open.program, X86_64, number, arguments), expected, "{number} {arguments:?}");
                let foreign = answer(&filter.program, 0x4000_0003, number, arguments);
                assert_eq!(answer(&open.program, 0x4000_0003, number, arguments), foreign, "{number} {arguments:?}");
            }
        }
    }
}
