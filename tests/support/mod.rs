//! What every suite shares: the runner and the helpers of tests. No test stands here, and no
//! helper here uses a module of tests.

pub mod audit_log;
pub mod control;
pub mod exec;
pub mod image_store;
pub mod images;
pub mod leftovers;
pub mod load;
pub mod needs;
pub mod policy_dir;
pub mod programs;
pub mod registry;
pub mod runner;
pub mod session;
pub mod starts;
pub mod timeouts;
pub mod tls;
pub mod tracer;
