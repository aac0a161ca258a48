//! The commands that need no daemon, or start one.

#[cfg(feature = "remote")]
pub mod backing;
pub mod run;
pub mod check;
pub mod corpus;
pub mod sibling;
pub mod swap;
pub mod train;
