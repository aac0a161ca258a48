//! The front ends of uzram, which serve a [`uzram::device::Device`] to other programs.

pub mod control;
mod device_pool;
mod exports;
pub mod fuse;
pub mod loop_device;
pub mod mounts;
pub mod nbd;
pub mod own_devices;
pub mod percent;
pub mod record;
pub mod swap_area;

pub use exports::{Access, Export, ExportPolicy, ExportedDevice, Exports, OpenFile, SettingCheck, Users};
