//! A daemon's configuration from options and files: the settings of devices, and how they are served.

pub mod size_expr;
pub mod toml_text;
pub mod settings;
pub mod settings_file;
pub mod device_options;
pub mod listen_args;
pub mod plan;
pub mod config_file;
