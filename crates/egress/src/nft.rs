//! The rules of the sandbox's network namespace, as one netfilter transaction.
//!
//! They are the same for every policy; the gate decides what is permitted. A SYN is logged and
//! dropped, which holds it until the gate has reached the peer and sends it again with [`MARK`].
//! Everything else that is not local to the sandbox, DNS or an accepted connection is refused.
//!
//! The rules give function, not containment: without them the namespace has no way out at all. They
//! belong to the outer user namespace, so no capability of the inner one can read or change them
//! (nfnetlink requires CAP_NET_ADMIN over the namespace's owner).
//!
//! Numbers are those of `linux/netfilter/nf_tables.h`. Each rule names the kernel option that it
//! needs, for the error where that is missing.

use crate::netlink::{ACKNOWLEDGED, APPEND, Body, CREATE, EXCLUSIVE, Messages, REQUEST};

/// The mark of packets that the gate sends. Setting it takes CAP_NET_ADMIN or
/// CAP_NET_RAW over the namespace, which nothing in the sandbox has.
pub(crate) const MARK: u32 = 0x57;
/// The port of the gate's listener: privileged, so that no program inside can hold it.
pub(crate) const LISTENER_PORT: u16 = 1;
/// The NFLOG group of all packets that are logged for the gate.
pub(crate) const LOG_GROUP: u16 = 5;
/// Prefixes of log records: a held SYN, a refused packet, and one of several refused packets of
/// which the others are not logged.
pub(crate) const HELD: &str = "h";
pub(crate) const REFUSED: &str = "r";
pub(crate) const UNSEEN: &str = "u";
/// Bytes of a packet that are logged: its headers, which have at most 120.
const HEADERS: u32 = 128;

/// SYNs per second. The kernel refuses more without logging them.
const SYN_RATE: u64 = 1000;
const SYN_BURST: u32 = 2000;
/// DNS queries per second. The kernel refuses more, because answers cost CPU time of the
/// host that no limit of the sandbox counts.
const QUESTION_RATE: u64 = 1000;
const QUESTION_BURST: u32 = 2000;
/// Refused packets per second that are reported.
const REPORT_RATE: u64 = 50;
const REPORT_BURST: u32 = 100;

const TABLE: &str = "stockade";
const CHAIN: &str = "from_sandbox";

const SUBSYSTEM: u16 = 10 << 8;
const NEW_TABLE: u16 = SUBSYSTEM;
const NEW_CHAIN: u16 = SUBSYSTEM | 3;
const NEW_RULE: u16 = SUBSYSTEM | 6;
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
/// `struct nfgenmsg`: family NFPROTO_INET, version 0, resource 0.
const INET: [u8; 4] = [1, 0, 0, 0];
/// The same for a batch: no family, the subsystem as resource.
const BATCH: [u8; 4] = [0, 0, 0, 10];

const TCP: u8 = 6;
const UDP: u8 = 17;
const NFPROTO_IPV4: u8 = 2;
const NFPROTO_IPV6: u8 = 10;

/// One expression of a rule.
#[derive(Clone, Copy)]
enum Expression<'a> {
    /// The packet's protocol is this.
    Protocol(u8),
    /// It is IPv4 or IPv6.
    Family(u8),
    /// It carries this mark.
    Mark(u32),
    /// Bytes of the network header.
    Network(u32, &'a [u8]),
    /// Bytes of the transport header.
    Transport(u32, &'a [u8]),
    /// Of FIN, SYN, RST and ACK only SYN is set; or not that.
    Syn(bool),
    /// It belongs to a connection that the gate has accepted.
    OfTransparentSocket,
    /// A rate per second and a burst.
    Limit(u64, u32),
    /// Log it: prefix, and how many of its bytes.
    Log(&'a str, u32),
    /// Deliver it to the listener, whatever its address.
    ToListener,
    RejectWithReset,
    RejectAsUnreachable,
    Accept,
    Drop,
}

use Expression::*;

/// A rule and the kernel option that it needs beyond nf_tables itself.
struct Rule<'a> {
    needs: &'static str,
    expressions: &'a [Expression<'a>],
}

/// Everything, from the addresses that the sandbox's own packets come from.
pub(crate) fn ruleset(own4: [u8; 4], own6: [u8; 16]) -> (Messages, Vec<&'static str>) {
    let loopback6 = {
        const LOOPBACK: [u8; 16] = std::net::Ipv6Addr::LOCALHOST.octets();
        LOOPBACK
    };
    let (question_port, listener_port) = (53u16.to_be_bytes(), LISTENER_PORT.to_be_bytes());
    let (questions, listeners) = (Transport(2, &question_port), Transport(2, &listener_port));
    let rules = [
        // A SYN that the gate releases, and no other, reaches the listener.
        Rule { needs: "nft_tproxy", expressions: &[Mark(MARK), Protocol(TCP), Syn(true), ToListener] },
        // A socket of the sandbox with the same two ends gets it before the listener: then it must
        // not be held and released again.
        Rule { needs: "nf_tables", expressions: &[Mark(MARK), Protocol(TCP), Syn(true), Drop] },
        // No other packet does, although packets inside are free.
        Rule {
            needs: "nf_tables_ipv4",
            expressions: &[Family(NFPROTO_IPV4), Network(16, &[127]), Protocol(TCP), listeners, Syn(true), RejectWithReset],
        },
        Rule {
            needs: "nf_tables_ipv4",
            expressions: &[Family(NFPROTO_IPV4), Network(16, &own4), Protocol(TCP), listeners, Syn(true), RejectWithReset],
        },
        Rule {
            needs: "nf_tables_ipv6",
            expressions: &[Family(NFPROTO_IPV6), Network(24, &loopback6), Protocol(TCP), listeners, Syn(true), RejectWithReset],
        },
        Rule {
            needs: "nf_tables_ipv6",
            expressions: &[Family(NFPROTO_IPV6), Network(24, &own6), Protocol(TCP), listeners, Syn(true), RejectWithReset],
        },
        // The gate answers DNS queries to any address.
        Rule { needs: "nft_limit", expressions: &[Protocol(UDP), questions, Limit(QUESTION_RATE, QUESTION_BURST), Accept] },
        Rule {
            needs: "nft_log, nfnetlink_log, nft_limit",
            expressions: &[Protocol(UDP), questions, Limit(REPORT_RATE, REPORT_BURST), Log(UNSEEN, HEADERS)],
        },
        Rule { needs: "nft_reject_inet", expressions: &[Protocol(UDP), questions, RejectAsUnreachable] },
        // Packets inside the sandbox are free, and answers take this rule.
        Rule { needs: "nf_tables_ipv4", expressions: &[Family(NFPROTO_IPV4), Network(16, &[127]), Accept] },
        Rule { needs: "nf_tables_ipv4", expressions: &[Family(NFPROTO_IPV4), Network(16, &own4), Accept] },
        Rule { needs: "nf_tables_ipv6", expressions: &[Family(NFPROTO_IPV6), Network(24, &loopback6), Accept] },
        Rule { needs: "nf_tables_ipv6", expressions: &[Family(NFPROTO_IPV6), Network(24, &own6), Accept] },
        Rule { needs: "nft_socket", expressions: &[Protocol(TCP), Syn(false), OfTransparentSocket, Accept] },
        Rule {
            needs: "nft_log, nfnetlink_log, nft_limit",
            expressions: &[Protocol(TCP), Syn(true), Limit(SYN_RATE, SYN_BURST), Log(HELD, HEADERS), Drop],
        },
        Rule { needs: "nft_log, nfnetlink_log, nft_limit", expressions: &[Protocol(TCP), Syn(true), Limit(1, 5), Log(UNSEEN, HEADERS)] },
        Rule { needs: "nft_reject_inet", expressions: &[Protocol(TCP), RejectWithReset] },
        Rule {
            needs: "nft_log, nfnetlink_log, nft_limit, nft_reject_inet",
            expressions: &[Protocol(UDP), Limit(REPORT_RATE, REPORT_BURST), Log(REFUSED, HEADERS), RejectAsUnreachable],
        },
        // Beyond that rate one log record a second says so.
        Rule { needs: "nft_log, nfnetlink_log, nft_limit", expressions: &[Protocol(UDP), Limit(1, 5), Log(UNSEEN, HEADERS)] },
        Rule { needs: "nft_reject_inet", expressions: &[Protocol(UDP), RejectAsUnreachable] },
        Rule { needs: "nft_log, nfnetlink_log, nft_limit", expressions: &[Limit(REPORT_RATE, REPORT_BURST), Log(REFUSED, HEADERS), Drop] },
        Rule { needs: "nft_log, nfnetlink_log, nft_limit", expressions: &[Limit(1, 5), Log(UNSEEN, HEADERS)] },
        Rule { needs: "nf_tables", expressions: &[Drop] },
    ];
    let mut batch = Messages::default();
    // By message: the kernel option that is missing where it is refused.
    let mut needs = vec!["nf_tables", "nf_tables_inet", "nf_tables_inet"];
    batch.message(BATCH_BEGIN, REQUEST, |body| {
        body.raw(&BATCH);
    });
    batch.message(NEW_TABLE, ACKNOWLEDGED | CREATE | EXCLUSIVE, |body| {
        body.raw(&INET).text(1, TABLE).number(2, 0);
    });
    batch.message(NEW_CHAIN, ACKNOWLEDGED | CREATE | EXCLUSIVE, |body| {
        const PREROUTING: u32 = 0;
        // At the priority of `mangle`: TPROXY must come before the routing decision.
        const PRIORITY: i32 = -150;
        const POLICY_DROP: u32 = 0;
        body.raw(&INET).text(1, TABLE).text(3, CHAIN);
        body.nest(4, |hook| {
            hook.number(1, PREROUTING).attribute(2, &PRIORITY.to_be_bytes());
        });
        body.number(5, POLICY_DROP).text(7, "filter");
    });
    for rule in rules {
        needs.push(rule.needs);
        batch.message(NEW_RULE, ACKNOWLEDGED | CREATE | APPEND, |body| {
            body.raw(&INET).text(1, TABLE).text(2, CHAIN);
            body.nest(4, |list| rule.expressions.iter().for_each(|expression| expression.write(list)));
        });
    }
    batch.message(BATCH_END, REQUEST, |body| {
        body.raw(&BATCH);
    });
    (batch, needs)
}

/// The one data register that all expressions use.
const REGISTER: u32 = 1;
const VERDICT_REGISTER: u32 = 0;

impl Expression<'_> {
    fn write(&self, list: &mut Body<'_>) {
        match self {
            Protocol(number) => meta(list, 16, &[*number]),
            Family(number) => meta(list, 15, &[*number]),
            Mark(mark) => meta(list, 3, &mark.to_ne_bytes()),
            Network(offset, bytes) => header(list, 1, *offset, bytes),
            Transport(offset, bytes) => header(list, 2, *offset, bytes),
            Syn(only) => {
                load(list, 2, 13, 1);
                element(list, "bitwise", |data| {
                    data.number(1, REGISTER).number(2, REGISTER).number(3, 1);
                    data.nest(4, |mask| {
                        mask.attribute(1, &[0x17]);
                    });
                    data.nest(5, |xor| {
                        xor.attribute(1, &[0]);
                    });
                });
                compare(list, *only, &[2]);
            }
            OfTransparentSocket => {
                element(list, "socket", |data| {
                    data.number(1, 0).number(2, REGISTER);
                });
                compare(list, true, &[1]);
            }
            Limit(rate, burst) => element(list, "limit", |data| {
                data.wide(1, *rate).wide(2, 1).number(3, *burst).number(4, 0).number(5, 0);
            }),
            Log(prefix, length) => element(list, "log", |data| {
                data.attribute(1, &LOG_GROUP.to_be_bytes()).text(2, prefix).number(3, *length);
            }),
            ToListener => {
                element(list, "immediate", |data| {
                    data.number(1, REGISTER);
                    data.nest(2, |value| {
                        value.attribute(1, &LISTENER_PORT.to_be_bytes());
                    });
                });
                element(list, "tproxy", |data| {
                    // Family 0: both.
                    data.number(1, 0).number(3, REGISTER);
                });
                verdict(list, 1);
            }
            RejectWithReset => element(list, "reject", |data| {
                data.number(1, 1).attribute(2, &[0]);
            }),
            RejectAsUnreachable => element(list, "reject", |data| {
                const ICMPX: u32 = 2;
                const PORT_UNREACHABLE: u8 = 1;
                data.number(1, ICMPX).attribute(2, &[PORT_UNREACHABLE]);
            }),
            Accept => verdict(list, 1),
            Drop => verdict(list, 0),
        }
    }
}

fn element(list: &mut Body<'_>, name: &str, data: impl FnOnce(&mut Body<'_>)) {
    list.nest(1, |element| {
        element.text(1, name).nest(2, data);
    });
}

fn meta(list: &mut Body<'_>, key: u32, value: &[u8]) {
    element(list, "meta", |data| {
        data.number(1, REGISTER).number(2, key);
    });
    compare(list, true, value);
}

fn load(list: &mut Body<'_>, base: u32, offset: u32, length: u32) {
    element(list, "payload", |data| {
        data.number(1, REGISTER).number(2, base).number(3, offset).number(4, length);
    });
}

fn header(list: &mut Body<'_>, base: u32, offset: u32, value: &[u8]) {
    load(list, base, offset, u32::try_from(value.len()).unwrap_or(u32::MAX));
    compare(list, true, value);
}

fn compare(list: &mut Body<'_>, equal: bool, value: &[u8]) {
    element(list, "cmp", |data| {
        data.number(1, REGISTER).number(2, u32::from(!equal)).nest(3, |operand| {
            operand.attribute(1, value);
        });
    });
}

fn verdict(list: &mut Body<'_>, code: u32) {
    element(list, "immediate", |data| {
        data.number(1, VERDICT_REGISTER).nest(2, |value| {
            value.nest(2, |verdict| {
                verdict.number(1, code);
            });
        });
    });
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]
    use super::*;

    #[test]
    fn the_batch_is_one_small_message_and_every_rule_names_its_need() {
        let (batch, needs) = ruleset([198, 19, 255, 254], [0xfd; 16]);
        assert!(batch.bytes().len() < 16 << 10, "{}", batch.bytes().len());
        let messages = crate::netlink::Received::new(batch.bytes()).count();
        // The closing message of the batch needs nothing.
        assert_eq!(messages, needs.len() + 1);
    }
}
