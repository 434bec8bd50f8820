//! System calls that nix and rustix lack, one function each.
//!
//! Nearly all `unsafe` of the workspace: `tests/lints` lists the exceptions. Outside `start`,
//! no function allocates, panics or touches thread-local storage, so all may be called between
//! clone and exec. Wrappers decide nothing: they return the kernel's result.
//!
//! Numbers and structure layouts are those of x86_64, from the kernel's
//! `include/uapi`; other architectures are refused at compile time.
#![no_std]

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
compile_error!("stockade supports x86_64 Linux only");

mod call;
pub mod clone;
pub mod cred;
pub mod descriptors;
pub mod landlock;
pub mod lockdown;
#[cfg(feature = "image")]
pub mod memory;
pub mod mount;
pub mod net;
#[cfg(feature = "probe")]
pub mod probe;
pub mod process;
pub mod seccomp;
pub mod socket;
#[cfg(feature = "start")]
pub mod start;
#[cfg(feature = "streams")]
pub mod streams;
#[cfg(feature = "image")]
pub mod thread_state;

pub use rustix::io::Errno;
/// The result of a system call.
pub type Result<T> = core::result::Result<T, Errno>;
