//! System calls that nix and rustix lack, one function each.
//!
//! The only crate with `unsafe`. No function allocates, panics or touches
//! thread-local storage, so all may be called between clone and exec. Nothing here
//! decides: a wrapper passes on what the kernel answered.
//!
//! Numbers and structure layouts are those of x86_64, from the kernel's
//! `include/uapi`; other architectures are refused at compile time.
#![no_std]

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
compile_error!("stockade supports x86_64 Linux only");

pub mod arena;
mod call;
pub mod clone;
pub mod cred;
pub mod descriptors;
pub mod early;
pub mod entry;
pub mod landlock;
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

pub use rustix::io::Errno;
/// The result of a system call.
pub type Result<T> = core::result::Result<T, Errno>;
