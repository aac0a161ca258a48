//! Terminal output: tables of statistics, the live line, the log.

pub mod show;
pub mod live;
