//! What people see: tables of statistics, lines that change, the log.

pub mod show;
pub mod slabinfo;
pub mod live;
