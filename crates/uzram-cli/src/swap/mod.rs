//! What a swap area in compressed memory needs beside its device: room to grow, room to come back, fresh counts.

pub mod cgroups;
pub mod room;
pub mod fresh_counts;
pub mod switch_off;
