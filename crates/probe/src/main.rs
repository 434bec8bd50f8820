//! The probe's program: the entry point and nothing else.
#![cfg_attr(freestanding, no_std, no_main)]

stockade_sys::program!(stockade_probe::run);
