//! The executor's program: the entry point and nothing else.
#![no_std]
#![no_main]

stockade_sys::program!(stockade_executor::run);
