//! How the processes of a daemon that outlives its worker know of each other.

pub mod lives;
pub mod link;
pub mod home;
pub mod handover;
pub mod fd_store;
