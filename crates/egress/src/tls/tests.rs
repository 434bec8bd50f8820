//! Valid and invalid hellos. Each invalid one differs from a valid one only in the cause of its
//! refusal.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use super::*;

fn vector8(body: &[u8]) -> Vec<u8> {
    [&[u8::try_from(body.len()).unwrap()], body].concat()
}

fn vector16(body: &[u8]) -> Vec<u8> {
    [&u16::try_from(body.len()).unwrap().to_be_bytes(), body].concat()
}

fn extension(kind: u16, body: &[u8]) -> Vec<u8> {
    [&kind.to_be_bytes()[..], &vector16(body)].concat()
}

fn server_name(name: &str) -> Vec<u8> {
    extension(SERVER_NAME, &vector16(&[&[0], &vector16(name.as_bytes())[..]].concat()))
}

/// A hello with these extensions, without records.
fn message(extensions: &[Vec<u8>]) -> Vec<u8> {
    let body = [&[3, 3][..], &[7; 32], &vector8(&[9; 32]), &vector16(&[0x13, 1, 0x13, 2]), &vector8(&[0]), &vector16(&extensions.concat())]
        .concat();
    let length = u32::try_from(body.len()).unwrap().to_be_bytes();
    [&[CLIENT_HELLO, length[1], length[2], length[3]], &body[..]].concat()
}

fn record(kind: u8, body: &[u8]) -> Vec<u8> {
    [&[kind, 3, 1][..], &vector16(body)].concat()
}

/// A valid hello in one record, with the extensions that clients send.
pub(crate) fn hello(name: &str) -> Vec<u8> {
    record(HANDSHAKE, &usual(name))
}

fn usual(name: &str) -> Vec<u8> {
    message(&[extension(0x0a0a, &[]), server_name(name), extension(43, &[4, 3, 4, 3, 3]), extension(16, &vector16(b"\x02h2"))])
}

fn name() -> Name {
    Name::new("api.internal").unwrap()
}

fn examined(bytes: &[u8]) -> Result<usize, DenialReason> {
    ClientHelloInspector::default().examine(bytes, &name()).map_err(|refused| refused.reason)
}

fn of_extensions(extensions: &[Vec<u8>]) -> Result<usize, DenialReason> {
    examined(&record(HANDSHAKE, &message(extensions)))
}

#[test]
fn the_right_server_name_passes_and_no_other() {
    assert_eq!(examined(&hello("api.internal")), Ok(hello("api.internal").len()));
    assert_eq!(examined(&hello("API.Internal")), Ok(hello("api.internal").len()));
    assert_eq!(examined(&hello("api.internal.")), Ok(hello("api.internal.").len()));
    for other in [
        "evil.example",
        "api.internal.evil.example",
        "xapi.internal",
        "internal",
        "www.api.internal",
        "api.internal\0",
        "api.internal\0.evil.example",
        "api.internal%00",
        "api.internal ",
        "api.internal..",
        "10.0.5.7",
        "аpi.internal",
    ] {
        assert_eq!(examined(&hello(other)), Err(DenialReason::SniMismatch), "{other:?}");
    }
    let refused = ClientHelloInspector::default().examine(&hello("evil\0.example"), &name()).unwrap_err();
    assert_eq!(refused.said, None, "it is no name");
}

/// Captured on a loopback interface, each asked for https://api.internal.
const SAMPLES: [&[u8]; 4] = [
    include_bytes!("samples/python.bin"),
    include_bytes!("samples/node.bin"),
    include_bytes!("samples/curl.bin"),
    include_bytes!("samples/openssl.bin"),
];

#[test]
fn hellos_of_real_programs_pass_and_with_one_letter_changed_do_not() {
    for sample in SAMPLES {
        assert_eq!(examined(sample), Ok(sample.len()));
        let at = sample.windows(12).position(|window| window == b"api.internal").unwrap();
        let mut forged = sample.to_vec();
        forged[at] = b'b';
        assert_eq!(examined(&forged), Err(DenialReason::SniMismatch));
    }
}

#[test]
fn a_hello_names_one_server_once() {
    let good = server_name("api.internal");
    let other = extension(43, &[2, 3, 4]);
    assert!(of_extensions(&[good.clone(), other.clone()]).is_ok());
    assert_eq!(of_extensions(std::slice::from_ref(&other)), Err(DenialReason::SniMissing));
    assert_eq!(of_extensions(&[]), Err(DenialReason::SniMissing));
    assert_eq!(of_extensions(&[good.clone(), good.clone()]), Err(DenialReason::TlsMalformed));
    assert_eq!(of_extensions(&[server_name("evil.example"), good.clone()]), Err(DenialReason::TlsMalformed));
    assert_eq!(of_extensions(&[good.clone(), other.clone(), other]), Err(DenialReason::TlsMalformed));
    let entry = |kind: u8, name: &[u8]| [&[kind], &vector16(name)[..]].concat();
    let list = |entries: &[Vec<u8>]| extension(SERVER_NAME, &vector16(&entries.concat()));
    assert!(of_extensions(&[list(&[entry(0, b"api.internal")])]).is_ok());
    for bad in [
        list(&[]),
        list(&[entry(0, b"")]),
        list(&[entry(1, b"api.internal")]),
        list(&[entry(0, b"api.internal"), entry(0, b"evil.example")]),
        list(&[entry(0, b"api.internal"), entry(7, b"x")]),
        extension(SERVER_NAME, b""),
        extension(SERVER_NAME, &[&vector16(&entry(0, b"api.internal"))[..], b"x"].concat()),
    ] {
        assert_eq!(of_extensions(&[bad]), Err(DenialReason::TlsMalformed));
    }
}

#[test]
fn an_encrypted_name_is_refused_even_beside_the_right_one() {
    for kind in ENCRYPTED {
        assert_eq!(of_extensions(&[server_name("api.internal"), extension(kind, &[0; 40])]), Err(DenialReason::Ech));
    }
    assert!(of_extensions(&[server_name("api.internal"), extension(0xfe0e, &[0; 40])]).is_ok());
}

#[test]
fn nothing_is_released_before_the_hello_is_complete() {
    let whole = hello("api.internal");
    let mut check = ClientHelloInspector::default();
    for end in 0..whole.len() {
        assert_eq!(check.examine(&whole[..end], &name()), Ok(0));
    }
    assert_eq!(check.examine(&whole, &name()), Ok(whole.len()));
    // Over several records, split at every place.
    let (good, bad) = (usual("api.internal"), usual("evil.internal"));
    for cut in 1..good.len() {
        let split = |message: &[u8]| [record(HANDSHAKE, &message[..cut]), record(HANDSHAKE, &message[cut..])].concat();
        assert_eq!(examined(&split(&good)), Ok(good.len() + 10));
        assert_eq!(examined(&split(&bad)), Err(DenialReason::SniMismatch));
    }
    let crumbs: Vec<u8> = good.chunks(3).flat_map(|chunk| record(HANDSHAKE, chunk)).collect();
    assert_eq!(examined(&crumbs), Ok(crumbs.len()));
    let dust: Vec<u8> = good.chunks(1).flat_map(|chunk| record(HANDSHAKE, chunk)).collect();
    assert_eq!(examined(&dust), Err(DenialReason::TlsMalformed), "more than 64 records");
}

#[test]
fn malformed_records_and_messages_are_refused() {
    let good = usual("api.internal");
    let change = |at: usize, to: u8| {
        let mut bytes = hello("api.internal");
        bytes[at] = to;
        examined(&bytes)
    };
    assert!(change(2, 3).is_ok(), "the record's minor version is free");
    assert_eq!(change(1, 2), Err(DenialReason::TlsMalformed));
    assert_eq!(change(2, 5), Err(DenialReason::TlsMalformed));
    assert_eq!(change(5, 2), Err(DenialReason::TlsMalformed), "a server's hello");
    assert_eq!(change(3, 0x41), Err(DenialReason::TlsMalformed), "a record of more than 16 KiB");
    assert_eq!(change(6, 1), Err(DenialReason::TlsMalformed), "a hello of more than 16 KiB");
    assert_eq!(examined(&[22, 3, 1, 0, 0]), Err(DenialReason::TlsMalformed), "an empty record");
    let behind = record(HANDSHAKE, &[&good[..], &[0]].concat());
    assert_eq!(examined(&behind), Err(DenialReason::TlsMalformed));
    let between = [record(HANDSHAKE, &good[..9]), record(CHANGE_CIPHER_SPEC, &[1]), record(HANDSHAKE, &good[9..])].concat();
    assert_eq!(examined(&between), Err(DenialReason::TlsMalformed));
}

#[test]
fn every_shortened_length_inside_is_refused() {
    let good = usual("api.internal");
    let mut refused = 0;
    for at in 4 + 34..good.len() {
        for less in [1, 2, 4] {
            let mut bytes = good.clone();
            bytes[at] = bytes[at].wrapping_sub(less);
            // A hello that passes still has the right server name.
            match examined(&record(HANDSHAKE, &bytes)) {
                Ok(_) => assert!(bytes.windows(12).any(|window| window.eq_ignore_ascii_case(b"api.internal"))),
                Err(_) => refused += 1,
            }
        }
    }
    assert!(refused > 50, "{refused}");
}

#[test]
fn a_second_hello_is_held_to_the_same_name() {
    let first = hello("api.internal");
    let spare = record(CHANGE_CIPHER_SPEC, &[1]);
    let whole = [&first[..], &spare, &first].concat();
    let mut check = ClientHelloInspector::default();
    assert_eq!(check.examine(&first, &name()), Ok(first.len()));
    assert!(!check.is_through());
    assert_eq!(check.examine(&[&spare[..], &first].concat(), &name()), Ok(spare.len() + first.len()));
    assert!(check.is_through());
    assert_eq!(examined(&whole), Ok(whole.len()));
    let warning = record(ALERT, &[1, 90]);
    for between in [&spare[..], b"", &warning] {
        let forged = [&first[..], between, &hello("evil.example")].concat();
        assert_eq!(examined(&forged), Err(DenialReason::SniMismatch));
        // When it arrives in pieces, no byte of it is released.
        let mut check = ClientHelloInspector::default();
        let mut released = 0;
        let ended = (0..=forged.len()).find_map(|end| match check.examine(&forged[released..end], &name()) {
            Ok(more) => {
                released += more;
                None
            }
            Err(refused) => Some(refused.reason),
        });
        assert_eq!((ended, released), (Some(DenialReason::SniMismatch), first.len() + between.len()));
    }
}

#[test]
fn early_data_does_not_hide_a_second_hello() {
    let with = |early: &[Vec<u8>]| record(HANDSHAKE, &message(&[&[server_name("api.internal")], early].concat()));
    let data = record(APPLICATION_DATA, &[0; 300]);
    let announced = [with(&[extension(EARLY_DATA, &[])]), data.clone(), data.clone(), hello("evil.example")].concat();
    assert_eq!(examined(&announced), Err(DenialReason::SniMismatch));
    // Without the announcement no server accepts early data; application data follows.
    let unannounced = [with(&[]), data, hello("evil.example")].concat();
    assert_eq!(examined(&unannounced), Ok(unannounced.len()));
}

#[test]
fn what_follows_the_hello_passes() {
    let first = hello("api.internal");
    for next in [record(HANDSHAKE, &[16, 0, 0, 0]), record(APPLICATION_DATA, &[1; 50])] {
        let whole = [&first[..], &next, &next].concat();
        let mut check = ClientHelloInspector::default();
        assert_eq!(check.examine(&whole, &name()), Ok(whole.len()));
        assert!(check.is_through());
    }
    // Some servers skip an empty record and read the next one.
    for next in [[22, 9, 9, 0, 1, 1].to_vec(), record(HANDSHAKE, &[]), record(24, &[1])] {
        for cut in 0..=next.len() {
            let mut check = ClientHelloInspector::default();
            let whole = [&first[..], &next].concat();
            let early = check.examine(&whole[..first.len() + cut], &name());
            let ended = early.and_then(|released| check.examine(&whole[released..], &name()));
            assert_eq!(ended.map_err(|refused| refused.reason), Err(DenialReason::TlsMalformed), "{next:?}");
        }
    }
}
