//! The commands that talk to a daemon, and what it leaves to its clients: block devices.

pub mod daemon_client;
pub mod attach;
pub mod control;
pub mod clients;
