//! What a swap area in compressed memory needs besides its device: checks of memory for its contents and for
//! swapoff, fresh cgroup statistics, how many pages the kernel reads at once, and whether the machine may
//! hibernate.

pub mod cgroups;
pub mod hibernation;
pub mod room;
pub mod fresh_counts;
pub mod page_cluster;
pub mod switch_off;
