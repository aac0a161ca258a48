//! What a daemon is told: settings of devices and how they are served, from options and files.

pub mod toml_text;
pub mod settings;
pub mod policy_file;
pub mod listen_args;
pub mod plan;
pub mod config_file;
