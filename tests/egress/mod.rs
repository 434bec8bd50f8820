//! Egress: a sandbox, its host and all other hosts in namespaces of the test's own. Every denial
//! is proved where it counts: no packet arrived at the other side, and with the rule in place it
//! does. Needs python3, ip and no outside network.

pub mod bench;
mod bypass;
mod clients;
mod gate;
mod gate_attacks;
mod names;
mod programs;
mod rules;
mod side_channels;
mod sockets;
mod speech;
pub mod testbed;
