//! The probe's program: the entry point and nothing else.
#![no_std]
#![no_main]

stockade_sys::program!(stockade_probe::run);
