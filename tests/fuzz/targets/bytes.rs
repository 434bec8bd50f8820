//! Binary formats: DNS questions and answers, captured packets, frames.

use std::{net::IpAddr, sync::OnceLock};

use stockade_egress::{
    decide::Decider,
    dns::{self, TcpFrame},
    names::Names,
    packet::{Attempt, Syn, Unreachable},
    resolve::read_answer,
};
use stockade_policy::whitelist::Whitelist;
use stockade_protocol::{
    frame::{Event, Evidence, FileToWrite, Job, ProcessStart},
    modules::{MAX_NAMES, Tally},
    screen::{Answer, Found, Grammar, MAX_FINDINGS, MAX_TEXT_LEN, Question, Rule, Rules, Source},
};

use super::Target;

pub const DNS: Target = Target {
    name: "dns",
    about: "a DNS question, over UDP and TCP",
    corpus: include_str!("../corpus/dns"),
    seeds: dns_seeds,
    words: &[
        b"\x04pypi\x03org\x00",
        b"\x05files\x0dpythonhosted\x03org\x00",
        b"\x07in-addr\x04arpa\x00",
        b"\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x00",
        b"\x00\x01\x00\x01",
        b"\xc0\x0c",
    ],
    longest: 2048,
    run: run_dns,
};

fn dns_seeds() -> Vec<Vec<u8>> {
    let question = |name: &[u8], kind: u8, edns: bool| {
        let extra: &[u8] = if edns { b"\0\0\x29\x04\xd0\0\0\0\0\0\x0c\0\x0a\0\x08abcdefgh" } else { b"" };
        [&[7, 7, 1, 0, 0, 1, 0, 0, 0, 0, 0, u8::from(edns)][..], name, &[0, kind, 0, 1], extra].concat()
    };
    vec![
        question(b"\x04pypi\x03org\0", 1, false),
        question(b"\x05files\x0dpythonhosted\x03org\0", 1, true),
        question(b"\x04evil\x07example\0", 28, true),
        question(b"\x011\x010\x0218\x03198\x07in-addr\x04arpa\0", 12, false),
        dns::frame(&question(b"\x04pypi\x03org\0", 65, false)),
    ]
}

fn decider() -> &'static Decider {
    static DECIDER: OnceLock<Decider> = OnceLock::new();
    DECIDER.get_or_init(|| {
        let rules = ["pypi.org:443", "*.pythonhosted.org:443"].iter().filter_map(|text| text.parse().ok()).collect();
        Decider::new(Whitelist::new(rules), Vec::new())
    })
}

fn run_dns(input: &[u8]) {
    let mut names = Names::default();
    let first = dns::answer(input, decider(), &mut names, 0);
    if let Some(reply) = &first.reply {
        assert_eq!(reply.get(..2), input.get(..2), "an answer has its question's number");
        assert!(reply[2] & 0x80 != 0 && reply.len() <= input.len() + 64, "and is not much longer");
        if reply[7] != 0 {
            let asked = input.to_ascii_lowercase();
            let known: [&[u8]; 3] = [b"pypi", b"pythonhosted", b"in-addr"];
            assert!(
                known.iter().any(|name| asked.windows(name.len()).any(|window| window == *name)),
                "only names of the rules have an address"
            );
        }
        assert_eq!(dns::answer(reply, decider(), &mut names, 0).reply, None, "an answer is never answered");
    }
    assert_eq!(dns::answer(input, decider(), &mut names, 0).reply, first.reply, "the same question has the same answer");
    let mut stream = input;
    while let TcpFrame::Message(message, taken) = dns::unframe(stream) {
        assert_eq!(message.len() + 2, taken);
        stream = &stream[taken..];
    }
}

pub const ANSWER: Target = Target {
    name: "answer",
    about: "a name server's answer, for both kinds of address",
    corpus: include_str!("../corpus/answer"),
    seeds: answer_seeds,
    words: &[
        b"\x03api\x08internal\x00",
        b"\x01b\x00",
        b"\xc0\x0c",
        b"\x00\x01\x00\x01\x00\x00\x00\x3c\x00\x04\x0a\x00\x05\x07",
        b"\x00\x05\x00\x01\x00\x00\x00\x3c\x00\x03\x01b\x00",
        b"\x81\x80",
    ],
    longest: 2048,
    run: run_answer,
};

fn answer_seeds() -> Vec<Vec<u8>> {
    let reply = |kind: u8, count: u8, records: &[u8]| {
        [&[7, 7, 0x81, 0x80, 0, 1, 0, count, 0, 0, 0, 0][..], b"\x03api\x08internal\0", &[0, kind, 0, 1], records].concat()
    };
    let record = |owner: &[u8], kind: u8, value: &[u8]| {
        let length = u8::try_from(value.len()).unwrap_or(0);
        [owner, &[0, kind, 0, 1, 0, 0, 0, 60, 0, length], value].concat()
    };
    let alias = [record(b"\xc0\x0c", 5, b"\x01b\0"), record(b"\x01b\0", 1, &[10, 0, 5, 8])].concat();
    vec![reply(1, 1, &record(b"\xc0\x0c", 1, &[10, 0, 5, 7])), reply(28, 1, &record(b"\xc0\x0c", 28, &[0x20; 16])), reply(1, 2, &alias)]
}

fn run_answer(input: &[u8]) {
    for v6 in [false, true] {
        let Some(addresses) = read_answer(input, "api.internal", v6) else { continue };
        assert!(addresses.len() <= 16, "no more addresses are kept than was promised");
        for address in addresses {
            let bytes = match address {
                IpAddr::V4(address) => address.octets().to_vec(),
                IpAddr::V6(address) => address.octets().to_vec(),
            };
            assert_eq!(address.is_ipv6(), v6, "an address is of the kind that was asked for");
            assert!(input.windows(bytes.len()).any(|window| window == bytes), "and was in the answer");
        }
        let echoed = input.get(12..).and_then(|rest| rest.get(..14)).map(<[u8]>::to_ascii_lowercase);
        assert_eq!(echoed.as_deref(), Some(&b"\x03api\x08internal\0"[..]), "only an answer to the question is read");
    }
}

pub const PACKET: Target = Target {
    name: "packet",
    about: "a captured IPv4 or IPv6 packet",
    corpus: include_str!("../corpus/packet"),
    seeds: packet_seeds,
    words: &[&[0x45, 0], &[0x60, 0], &[6, 64], &[0x50, 2], &[0x60, 2, 0xff, 0xff]],
    longest: 2048,
    run: run_packet,
};

fn packet_seeds() -> Vec<Vec<u8>> {
    let tcp = [0x9c, 0x40, 1, 187, 1, 2, 3, 4, 0, 0, 0, 0, 0x60, 2, 0xff, 0xff, 0, 0, 0, 0, 2, 4, 5, 0xb4];
    let v4 = [&[0x45, 0, 0, 44, 1, 2, 0x40, 0, 64, 6, 0, 0, 198, 18, 0, 9, 10, 0, 5, 7][..], &tcp].concat();
    let v6 = [&[0x60, 0, 0, 0, 0, 24, 6, 64][..], &[0xfd; 16], &[0x20; 16], &tcp].concat();
    let udp = [&[0x45, 0, 0, 28, 1, 2, 0, 0, 64, 17, 0, 0, 198, 18, 0, 9, 9, 9, 9, 9][..], &[0, 9, 0, 123, 0, 8, 0, 0]].concat();
    vec![v4, v6, udp]
}

fn run_packet(input: &[u8]) {
    let attempt = Attempt::read(input);
    let Ok(syn) = Syn::read(input) else { return };
    assert_eq!(attempt.map(|attempt| attempt.to), Ok(syn.key().to.ip()), "both readers see one destination");
    let again = syn.again();
    assert!(sums_are_right(&again), "a SYN goes on with right checksums");
    assert_eq!(Syn::read(&again).map(|syn| syn.key()), Ok(syn.key()));
    for answer in [syn.reset(), syn.unreachable(Unreachable::Host), syn.unreachable(Unreachable::Network)] {
        assert!(sums_are_right(&answer), "so does an answer");
        assert_eq!(Attempt::read(&answer).map(|attempt| attempt.to), Ok(syn.key().from.ip()));
    }
}

/// Summed with its checksum, everything is nothing (RFC 1071).
fn sums_are_right(packet: &[u8]) -> bool {
    let v4 = packet[0] >> 4 == 4;
    let (ends, protocol, begin) =
        if v4 { (&packet[12..20], packet[9], usize::from(packet[0] & 15) * 4) } else { (&packet[8..40], packet[6], 40) };
    let body = &packet[begin..];
    let length = u32::try_from(body.len()).unwrap_or(0).to_be_bytes();
    let whole = if protocol == 1 { body.to_vec() } else { [ends, &[0, protocol], &length, body].concat() };
    sum(&whole) == 0xffff && (!v4 || sum(&packet[..begin]) == 0xffff)
}

fn sum(bytes: &[u8]) -> u64 {
    let mut sum: u64 = bytes.chunks(2).map(|word| u64::from(word[0]) << 8 | u64::from(word.get(1).copied().unwrap_or(0))).sum();
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    sum
}

pub const JOB: Target = Target {
    name: "job",
    about: "what the launcher hands to the executor",
    corpus: include_str!("../corpus/job"),
    seeds: || {
        let mut job = Job {
            start: ProcessStart {
                argv: vec![b"/usr/bin/python3", b"/scratch/x.py"],
                envp: vec![b"A=b"],
                rlimits: vec![(9, None), (7, Some(1024))],
                payload_landlock: true,
                ..ProcessStart::default()
            },
            program_directory: b"/scratch",
            program: FileToWrite { path: b"x.py", offset: 0, length: 5 },
            files: vec![FileToWrite { path: b"d/f", offset: 0, length: 2 }],
            ..Job::default()
        };
        job.place_contents();
        vec![[&job.encode()[..], b"helloab"].concat(), Job::default().encode()]
    },
    words: &[&[0; 8], &[0xff; 8], &[1, 0, 0, 0]],
    longest: 4096,
    run: |input| {
        let Ok(job) = Job::decode(input) else { return };
        let encoded = job.encode();
        assert_eq!(Job::decode(&encoded).as_ref(), Ok(&job), "a job survives the crossing");
        for file in std::iter::once(&job.program).chain(&job.files) {
            if let Ok(contents) = Job::contents(input, file) {
                assert_eq!(contents.len() as u64, file.length);
            }
        }
    },
};

pub const EVENT: Target = Target {
    name: "event",
    about: "what the executor tells the launcher",
    corpus: include_str!("../corpus/event"),
    seeds: || {
        let ready = Event::Ready(Evidence { descriptors: 6, taken_us: Some(3), ..Evidence::default() });
        let failed = Event::Failed { step: 15, errno: 1, index: 4, detail: b"/usr".to_vec() };
        let ended = Event::Ended { status: 9, user_us: 1, system_us: 2, last: Some((3, 4)) };
        let all = [ready, Event::Started, ended, failed];
        all.iter().map(Event::encode).chain([all.iter().flat_map(Event::encode).collect()]).collect()
    },
    words: &[b"ES", &[0; 4], &[0xff; 4], &[4, 0]],
    longest: 32 << 10,
    run: |input| {
        let mut rest = input.to_vec();
        loop {
            let before = rest.len();
            match Event::take(&mut rest) {
                Ok(Some(event)) => {
                    assert!(rest.len() < before, "an event takes its bytes away");
                    assert_eq!(Event::take(&mut event.encode()), Ok(Some(event)), "and survives the crossing");
                }
                Ok(None) | Err(_) => {
                    assert_eq!(rest.len(), before);
                    return;
                }
            }
        }
    },
};

pub const FINDINGS: Target = Target {
    name: "findings",
    about: "what the screener answers, and what it is asked",
    corpus: include_str!("../corpus/findings"),
    seeds: findings_seeds,
    words: &[b"1ACS", b"1QCS", b"\x01\0\0\0\0\0\0\0", b"os.system"],
    longest: 4096,
    run: run_findings,
};

fn findings_seeds() -> Vec<Vec<u8>> {
    let found = |rule| Found { source: 0, rule, line: 2, column: 7, text: String::from("o.system"), what: String::from("os.system") };
    let question = Question {
        rules: Rules::ALL,
        modules: vec!["math"],
        builtins: vec!["print"],
        scratch: "/scratch",
        sources: vec![Source { grammar: Grammar::Python, code: "print(6*7)" }, Source { grammar: Grammar::Shell, code: "true" }],
    };
    vec![
        Answer::default().encode(),
        Answer { found: vec![found(Rule::Process), found(Rule::Screener)], omitted: 3 }.encode(),
        question.encode(),
    ]
}

fn run_findings(input: &[u8]) {
    if let Ok(answer) = Answer::decode(input) {
        assert!(answer.found.len() <= MAX_FINDINGS, "more than an answer may list");
        assert!(
            answer.found.iter().all(|found| found.text.len() <= MAX_TEXT_LEN && found.what.len() <= MAX_TEXT_LEN),
            "longer than it may be"
        );
        assert_eq!(answer.encode(), input, "one spelling of each answer");
    }
    if let Ok(question) = Question::decode(input) {
        assert_eq!(question.encode(), input, "one spelling of each question");
    }
}

pub const MODULES: Target = Target {
    name: "modules",
    about: "what watched interpreters say of modules",
    corpus: include_str!("../corpus/modules"),
    seeds: || {
        let all = "watch\nnote\timport\tctypes\t1\t3\t/scratch/x.py\ndeny\tevent\tos.system\t2\t0\t\n";
        let flood: String = (0..300).map(|number| format!("note\timport\tm{number}\t1\t1\t\n")).collect();
        vec![all.into(), flood.into()]
    },
    words: &[b"watch\n", b"note\timport\t", b"deny\tevent\t", b"\t1\t1\t\n", b"18446744073709551615", b"\x1b", b"\n\n"],
    longest: 8192,
    run: run_modules,
};

fn run_modules(input: &[u8]) {
    let mut whole = Tally::default();
    whole.take(input);
    let said = whole.finish();
    assert!(said.seen.len() <= MAX_NAMES, "more than is kept");
    let plain = |text: &str| text.len() <= 256 && text.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    for seen in &said.seen {
        assert!(plain(&seen.name) && plain(&seen.file), "nothing that a terminal acts on");
        assert!(input.windows(seen.name.len()).any(|window| window == seen.name.as_bytes()), "and nothing that was not said");
    }
    let mut cut = Tally::default();
    input.chunks(7).for_each(|piece| cut.take(piece));
    assert_eq!(cut.finish(), said, "however it is cut");
}
