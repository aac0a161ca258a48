//! The commands that need no daemon, or start one.

pub mod check;
pub mod corpus;
pub mod run;
pub mod sibling;
pub mod swap;
pub mod train;
