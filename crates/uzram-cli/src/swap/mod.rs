//! What a swap area in compressed memory needs besides its device: checks of memory for its contents and for swapoff,
//! and fresh cgroup statistics.

pub mod cgroups;
pub mod room;
pub mod fresh_counts;
pub mod switch_off;
