//! What the front reads and writes for clients of other services: values to values.
//!
//! Bytes of a client are hostile. Nothing here panics on any input, waits, or decides who may run
//! what; the worker judges the request that comes out, as it judges every other.
#![forbid(unsafe_code)]

pub mod facade;
