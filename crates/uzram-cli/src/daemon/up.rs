//! `uzram up`: a daemon that serves devices until it is told to end. It is several processes, of which one
//! serves (`worker`) and one outlives all others ([`holder`]).

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args as _, FromArgMatches};

use crate::config::config_file::{self, ConfigFile};
use crate::config::device_options::DeviceOptions;
use crate::config::listen_args::ListenArgs;
use crate::config::plan::{Attached, DaemonPlan, DevicePlan, ExportArgs, FilesArgs, SurviveArgs};
use crate::config::settings::parse_name;
use crate::daemon::holder;
use crate::daemon::memory_cgroup;
use crate::daemon::survive::lives::Watched;
use crate::failure::{Context, Failure, Result};
use crate::system::runtime_dir::RuntimeArgs;
use crate::terminal::live::{self, LogLevel};

/// Create a compressed RAM disk and serve it, in the foreground.
///
/// NBD clients use the disk at the URI printed at the start. With --mount it is also a file, and with
/// --attach also a block device; `uzram stat`, `set`, `reset` and `down` control it. The disk is memory: its
/// contents are lost when this command ends, and flush and fsync only order writes. They are not lost when
/// the process that serves dies: another one goes on.
#[derive(clap::Args)]
#[command(after_help = "Examples: uzram up --size 4G --algorithm zstd:3 --mem-limit 1G
          uzram up --size 4G --mem-limit 1G --backing /var/lib/uzram/cold.img:4G --recompress zstd:3:10m
          uzram up --size 8G --mem-limit 1G --backing /var/lib/uzram/cold.img:2G --backing redis://cache:6379
          uzram up --listen tcp:127.0.0.1:10809
          uzram up --size 64M --exec 'nbdinfo \"$uri\"'
          uzram up --size 4G --attach --exec 'mkfs.ext4 -q $device && mount $device /mnt && bash; umount /mnt'")]
pub struct UpArgs {
    /// Serve the devices described by a TOML file instead of one described by options (dist/uzram.toml is an
    /// example, and `uzram check --config` checks a file). SIGHUP then reloads the TLS files, as `uzram
    /// reload` does, and does not end the daemon
    #[arg(long, value_name = "FILE.toml", conflicts_with_all = ["name", "attach", "exec"])]
    pub config: Option<PathBuf>,
    /// The device's name
    #[arg(long, value_name = "NAME", default_value = "zram0", value_parser = parse_name)]
    name: String,
    #[command(flatten)]
    device: DeviceOptions,
    #[command(flatten)]
    export: ExportArgs,
    #[command(flatten)]
    pub listen: ListenArgs,
    /// Show each device as a file, DIR/NAME/disk, and its attributes beside it; needs FUSE
    #[arg(long, value_name = "DIR")]
    mount: Option<PathBuf>,
    #[command(flatten)]
    files: FilesArgs,
    #[command(flatten)]
    survive: SurviveArgs,
    /// Make the device a block device, /dev/loopN, as `uzram attach` does; needs root
    #[arg(long)]
    attach: bool,
    /// Run a shell command with $uri, $uris, $socket, $name and $UZRAM_RUNTIME_DIR set, with --attach also
    /// $device, then end with its status
    #[arg(long, value_name = "CMD")]
    exec: Option<String>,
    /// How much to log on standard error
    #[arg(long, value_name = "LEVEL", value_enum, default_value = "info")]
    pub log: LogLevel,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

impl UpArgs {
    pub fn plan(&self) -> Result<DaemonPlan> {
        let read = |path| config_file::read(path, self.listen.clone());
        let config = self.config.as_deref().map(read).transpose()?;
        self.plan_with(config, self.runtime.path()?)
    }

    /// Parses the options from words of a command line.
    pub fn from_words(words: impl IntoIterator<Item = OsString>) -> Result<UpArgs> {
        let command = UpArgs::augment_args(clap::Command::new("up").no_binary_name(true));
        let args = command.try_get_matches_from(words).and_then(|matches| UpArgs::from_arg_matches(&matches));
        args.map_err(|error| crate::failure::usage_failure(&error))
    }

    /// Returns the plan of these options and of `config`, the file of `--config`, read with their `listen`.
    pub fn plan_with(&self, config: Option<ConfigFile>, runtime_dir: PathBuf) -> Result<DaemonPlan> {
        if let (Some(path), Some(option)) = (&self.config, self.of_device()) {
            return Err(Failure::usage(format!(
                "{option} cannot be used with --config {0}: write it into the device's table in {0}",
                path.display()
            )));
        }
        let ConfigFile { mount, cpu_latency, nbd, devices, left_out } = match config {
            Some(config) => config,
            None => {
                let (devices, nbd) = (vec![self.device_plan()?], self.listen.clone());
                ConfigFile { devices, nbd, ..ConfigFile::default() }
            }
        };
        let plan = DaemonPlan::new(runtime_dir, devices)?;
        let nbd = nbd.config(plan.nbd)?;
        let absolute =
            |dir: &PathBuf| std::path::absolute(dir).context(|| format!("--mount {}", dir.display()));
        Ok(self.survive.applied_to(DaemonPlan {
            nbd,
            left_out,
            files: self.files.options(cpu_latency),
            mount: self.mount.as_ref().map(absolute).transpose()?.or(mount),
            exec: self.exec.clone(),
            reloads_on_hang_up: self.config.is_some(),
            ..plan
        }))
    }

    /// Returns an option that was given and describes a device, if any.
    fn of_device(&self) -> Option<String> {
        let ExportArgs { export, read_only } = self.export;
        let export = export.map(|_| "--export").or(read_only.then_some("--read-only"));
        self.device.first().or(export.map(str::to_owned))
    }

    fn device_plan(&self) -> Result<DevicePlan> {
        let attached = if self.attach { Attached::Block } else { Attached::No };
        let device = DevicePlan::new(&self.name, self.device.settings(false)?);
        Ok(DevicePlan { attached, export: self.export, ..device })
    }
}

pub fn run(args: &UpArgs) -> Result<u8> {
    live::start_log(args.log)?;
    serve(args.plan()?)
}

/// Runs a daemon until it is told to end; returns the exit status. The caller has started the log.
pub fn serve(plan: DaemonPlan) -> Result<u8> {
    let mut plan = memory_cgroup::fit(plan)?;
    if plan.survives
        && let Some(why) = plan.mortal().or_else(|| Watched::check().err())
    {
        tracing::warn!("contents are lost if the process that serves dies: {why}");
        plan.survives = false;
    }
    holder::run(plan)
}
