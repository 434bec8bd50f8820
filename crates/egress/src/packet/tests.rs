//! Valid and invalid packets. The sum over a packet with its checksum must be 0 (RFC 1071).
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use super::*;

/// A SYN of Linux from 198.18.0.9:40000 to 10.0.5.7:443, without checksums.
fn v4(data: &[u8]) -> Vec<u8> {
    let length = u16::try_from(20 + 24 + data.len()).unwrap().to_be_bytes();
    [&[0x45, 0, length[0], length[1], 0x12, 0x34, 0x40, 0, 64, 6, 0xaa, 0xbb, 198, 18, 0, 9, 10, 0, 5, 7][..], &tcp(), data].concat()
}

fn v6(data: &[u8]) -> Vec<u8> {
    let length = u16::try_from(24 + data.len()).unwrap().to_be_bytes();
    let ends: Vec<u8> = ["fd00::1", "2001:db8:5::7"].iter().flat_map(|text| text.parse::<Ipv6Addr>().unwrap().octets()).collect();
    [&[0x60, 0, 0, 0, length[0], length[1], 6, 64][..], &ends, &tcp(), data].concat()
}

fn tcp() -> Vec<u8> {
    [&[0x9c, 0x40, 1, 187, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 6 << 4, SYN, 0xff, 0xff, 0xde, 0xad, 0, 0][..], &[2, 4, 5, 0xb4]].concat()
}

fn sum(bytes: &[u8]) -> u32 {
    let mut sum: u32 = bytes.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0))).sum();
    while sum > 0xffff {
        sum = (sum >> 16) + (sum & 0xffff);
    }
    sum
}

/// Whether all checksums of a packet are correct.
fn sums_are_right(packet: &[u8]) -> bool {
    let (ends, protocol, begin) = match packet[0] >> 4 {
        4 => (&packet[12..20], packet[9], usize::from(packet[0] & 15) * 4),
        _ => (&packet[8..40], packet[6], 40),
    };
    let body = &packet[begin..];
    let pseudo = [ends, &[0, protocol], &u32::try_from(body.len()).unwrap().to_be_bytes(), body].concat();
    let own = if protocol == ICMP { sum(body) } else { sum(&pseudo) };
    own == 0xffff && (begin == 40 || sum(&packet[..begin]) == 0xffff)
}

#[test]
fn a_syn_is_sent_on_unchanged_but_for_its_checksums() {
    for (packet, from, to) in [(v4(&[]), "198.18.0.9:40000", "10.0.5.7:443"), (v6(&[]), "[fd00::1]:40000", "[2001:db8:5::7]:443")] {
        let syn = Syn::read(&packet).unwrap();
        assert_eq!(syn.key(), Key { from: from.parse().unwrap(), to: to.parse().unwrap() });
        let again = syn.again();
        assert!(sums_are_right(&again) && !sums_are_right(&packet));
        let differ: Vec<usize> = (0..packet.len()).filter(|at| packet[*at] != again[*at]).collect();
        let tcp = if packet[0] >> 4 == 4 { 20 } else { 40 };
        assert!(differ.iter().all(|at| [10, 11, tcp + 16, tcp + 17].contains(at)), "{differ:?}");
        // Bytes that the kernel put after the packet are dropped.
        assert_eq!(Syn::read(&[&packet[..], &[0; 6]].concat()).unwrap(), syn);
    }
}

#[test]
fn data_in_a_syn_is_dropped() {
    for (with, without) in [(v4(b"early"), v4(&[])), (v6(&[7; 3000]), v6(&[]))] {
        let syn = Syn::read(&with).unwrap();
        assert_eq!(syn, Syn::read(&without).unwrap());
        assert_eq!(Syn::read(&with[..without.len()]).unwrap(), syn, "the log has its beginning only");
        assert_eq!(syn.again().len(), without.len());
        assert!(sums_are_right(&syn.again()));
    }
}

#[test]
fn a_reset_answers_the_very_syn() {
    for (packet, tcp) in [(v4(&[]), 20), (v6(&[]), 40), (v4(b"12345"), 20)] {
        let reset = Syn::read(&packet).unwrap().reset();
        assert!(sums_are_right(&reset));
        assert_eq!(reset.len(), tcp + 20);
        let ends = |packet: &[u8]| {
            let outer = Outer::read(packet).unwrap();
            let port = |at: usize| u16::from_be_bytes([packet[tcp + at], packet[tcp + at + 1]]);
            ((outer.from, port(0)), (outer.to, port(2)))
        };
        let (from, to) = ends(&packet);
        assert_eq!(ends(&reset), (to, from));
        assert_eq!(reset[tcp + 13], RST | ACK);
        // 0xffffffff and 1 for the SYN wrap around.
        assert_eq!(reset[tcp + 8..tcp + 12], [0; 4]);
    }
}

#[test]
fn an_unreachable_peer_is_reported_by_icmp() {
    for (packet, why, kind, code) in [
        (v4(&[]), Unreachable::Network, 3, 0),
        (v4(&[]), Unreachable::Host, 3, 1),
        (v6(&[]), Unreachable::Network, 1, 0),
        (v6(&[]), Unreachable::Host, 1, 3),
    ] {
        let error = Syn::read(&packet).unwrap().unreachable(why);
        assert!(sums_are_right(&error));
        let begin = if packet[0] >> 4 == 4 { 20 } else { 40 };
        assert_eq!(error[begin..begin + 2], [kind, code]);
        assert_eq!(packet, error[begin + 8..], "ports and sequence are quoted");
    }
}

#[test]
fn anything_but_a_plain_complete_syn_is_refused() {
    for good in [v4(&[]), v6(&[])] {
        let tcp = if good[0] >> 4 == 4 { 20 } else { 40 };
        for end in 0..good.len() {
            assert_eq!(Syn::read(&good[..end]), Err(PacketFault::Length), "{end}");
        }
        let change = |at: usize, to: u8| {
            let mut bytes = good.clone();
            bytes[at] = to;
            Syn::read(&bytes).map(|_| ())
        };
        assert_eq!(change(tcp + 13, SYN | 0xc0), Ok(()), "with ECN");
        for flags in [0, ACK, SYN | ACK, SYN | RST, SYN | FIN, RST] {
            assert_eq!(change(tcp + 13, flags), Err(PacketFault::Flags), "{flags}");
        }
        assert_eq!(change(tcp + 12, 4 << 4), Err(PacketFault::Length));
        assert_eq!(change(tcp + 12, 7 << 4), Err(PacketFault::Length), "options beyond the packet");
        assert_eq!(change(0, 0x55), Err(PacketFault::Version));
    }
    let change = |at: usize, to: u8| {
        let mut bytes = v4(&[]);
        bytes[at] = to;
        Syn::read(&bytes).map(|_| ())
    };
    assert_eq!(change(9, UDP), Err(PacketFault::Protocol));
    assert_eq!(change(6, 0x20), Err(PacketFault::Fragment));
    assert_eq!(change(7, 1), Err(PacketFault::Fragment));
    assert_eq!(change(0, 0x44), Err(PacketFault::Length), "a header of 16 bytes");
    assert_eq!(change(0, 0x4f), Err(PacketFault::Length), "a header of 60 bytes");
    assert_eq!(change(3, 43), Err(PacketFault::Length), "it ends within its options");
    let mut behind = v6(&[]);
    behind[6] = 0;
    assert_eq!(Syn::read(&behind), Err(PacketFault::Protocol), "behind hop-by-hop options");
}

#[test]
fn ip_options_are_kept() {
    let plain = v4(&[]);
    let mut packet = [&plain[..20], &[1, 1, 1, 0], &plain[20..]].concat();
    packet[0] = 0x46;
    packet[3] += 4;
    let syn = Syn::read(&packet).unwrap();
    assert!(sums_are_right(&syn.again()) && sums_are_right(&syn.reset()));
    assert_eq!(syn.key(), Syn::read(&plain).unwrap().key());
}

#[test]
fn other_packets_are_recorded_by_protocol() {
    let with = |protocol: u8| {
        let mut packet = v4(&[]);
        packet[9] = protocol;
        Attempt::read(&packet).unwrap()
    };
    let to: IpAddr = "10.0.5.7".parse().unwrap();
    assert_eq!(with(TCP), Attempt { protocol: String::from("tcp"), to, port: Some(443) });
    assert_eq!(with(UDP), Attempt { protocol: String::from("udp"), to, port: Some(443) });
    assert_eq!(with(ICMP), Attempt { protocol: String::from("icmp"), to, port: None });
    assert_eq!(with(132), Attempt { protocol: String::from("protocol 132"), to, port: None });
    let mut fragment = v4(&[]);
    fragment[7] = 9;
    assert_eq!(Attempt::read(&fragment).unwrap().port, None);
    for large in [v4(&[0; 1200]), v6(&[0; 1200])] {
        assert_eq!(Attempt::read(&large[..128]), Attempt::read(&large), "the log has its beginning only");
    }
    assert_eq!(Attempt::read(&v4(&[])[..19]), Err(PacketFault::Length));
    assert_eq!(Attempt::read(&[]), Err(PacketFault::Length));
}
