//! `uzram up`: a daemon, from its plan to its end.

pub mod notify;
pub mod confine;
pub mod exec;
pub mod episodes;
pub mod survive;
pub mod attendant;
pub mod started;
pub mod attachments;
pub mod conditions;
pub mod memory_cgroup;
pub mod held;
pub mod worker;
pub mod standby;
pub mod holder;
pub mod up;
pub mod start;
