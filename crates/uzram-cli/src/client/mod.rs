//! The commands that talk to a daemon, and `attach` and `detach`, which clients do for it.

pub mod daemon_client;
pub mod attach;
pub mod control;
pub mod survival;
