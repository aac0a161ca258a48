//! The commands that need no daemon, or bring their own.

pub mod check;
pub mod sibling;
pub mod swap;
pub mod train;
