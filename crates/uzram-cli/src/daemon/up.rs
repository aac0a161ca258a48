//! `uzram up`: a daemon that serves devices from this process until it is told to end. Control clients can add
//! and remove devices.
//!
//! The main thread owns everything and waits for [`Event`]s from servers and signals. It releases what it owns
//! in reverse order: first the servers stop, then the sockets are removed, last the lock.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};

use clap::{Args as _, FromArgMatches};
use uzram::device::Device;
use uzram::machine_memory;
use uzram::slab;
use uzram::units::format_size;
use uzram_serve::control::{self, About, Api, Ending, FilesJson, MeasureJson, StatsJson};
use uzram_serve::record::{MountRecord, Recorder};
use uzram_serve::{Exports, fuse, nbd};

use crate::client::attach::require_root;
use crate::config::config_file::{self, ConfigFile};
use crate::config::device_options::{self, DeviceOptions};
use crate::config::listen_args::ListenArgs;
use crate::config::plan::{Attached, DaemonPlan, DevicePlan, ExportArgs, FilesArgs};
use crate::config::settings::parse_name;
use crate::daemon::attachments::{Attachments, RETRY};
use crate::daemon::attendant::Attendant;
use crate::daemon::confine::{Needs, confine, hide};
use crate::daemon::events::{Event, start_reloads, watch_signals};
use crate::daemon::exec::{self, Address};
use crate::daemon::notify;
use crate::failure::{Context, Failure, Result, print};
use crate::swap::fresh_counts::FreshCounts;
use crate::swap::room;
use crate::system::descriptors;
use crate::system::protect::{protect, touch_heap};
use crate::system::runtime_dir::{CONTROL_SOCKET, NBD_SOCKET, RuntimeArgs, RuntimeDir, socket_path};
use crate::terminal::live::{self, LiveLine, LogLevel};

/// The first word of the last line that a swap daemon prints when it has begun to serve.
pub const READY: &str = "swap";

/// Create a compressed RAM disk and serve it, in the foreground.
///
/// NBD clients use the disk at the URI printed at the start. With --mount it is also a file, and with --attach also a
/// block device; `uzram stat`, `set`, `reset` and `down` control it. The disk is memory: its contents are lost when
/// this command ends, and flush and fsync only order writes.
#[derive(clap::Args)]
#[command(after_help = "Examples: uzram up --size 4G --algorithm zstd:3 --mem-limit 1G
          uzram up --size 4G --mem-limit 1G --backing /var/lib/uzram/cold.img:4G --recompress zstd:3:10m
          uzram up --listen tcp:127.0.0.1:10809
          uzram up --size 64M --exec 'nbdinfo \"$uri\"'
          uzram up --size 4G --attach --exec 'mkfs.ext4 -q $device && mount $device /mnt && bash; umount /mnt'")]
pub struct UpArgs {
    /// Serve the devices described by a TOML file instead of one described by options (dist/uzram.toml is an example,
    /// and `uzram check --config` checks a file). SIGHUP then reloads the TLS files, as `uzram reload` does, and does
    /// not end the daemon
    #[arg(long, value_name = "FILE.toml", conflicts_with_all = ["name", device_options::GROUP, "ExportArgs", "attach", "exec"])]
    config: Option<PathBuf>,
    /// The device's name
    #[arg(long, value_name = "NAME", default_value = "zram0", value_parser = parse_name)]
    name: String,
    #[command(flatten)]
    device: DeviceOptions,
    #[command(flatten)]
    export: ExportArgs,
    #[command(flatten)]
    listen: ListenArgs,
    /// Show each device as a file, DIR/NAME/disk, and its attributes beside it; needs FUSE
    #[arg(long, value_name = "DIR")]
    mount: Option<PathBuf>,
    #[command(flatten)]
    files: FilesArgs,
    /// Make the device a block device, /dev/loopN, as `uzram attach` does; needs root
    #[arg(long)]
    attach: bool,
    /// Run a shell command with $uri, $uris, $socket, $name and $UZRAM_RUNTIME_DIR set, with --attach also
    /// $device, then end with its status
    #[arg(long, value_name = "CMD")]
    exec: Option<String>,
    /// Measure how long each slab cache's list_lock is held (list_lock_hold_ns in `uzram slabinfo --stats`); costs
    /// two clock readings per acquisition
    #[arg(long)]
    slab_timing: bool,
    /// How much to log on standard error
    #[arg(long, value_name = "LEVEL", value_enum, default_value = "info")]
    log: LogLevel,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

impl UpArgs {
    fn plan(&self) -> Result<DaemonPlan> {
        let config = self.config.as_deref().map(config_file::read).transpose()?;
        self.plan_with(config, self.runtime.path()?)
    }

    /// Parses the options from words of a command line.
    ///
    /// # Errors
    /// The options are invalid.
    pub fn from_words(words: impl IntoIterator<Item = OsString>) -> Result<UpArgs> {
        let command = UpArgs::augment_args(clap::Command::new("up").no_binary_name(true));
        let args = command.try_get_matches_from(words).and_then(|matches| UpArgs::from_arg_matches(&matches));
        args.map_err(|error| Failure::Usage(crate::failure::usage_line(&error)))
    }

    /// Returns the file of `--config`.
    pub fn config(&self) -> Option<&Path> {
        self.config.as_deref()
    }

    /// Returns the plan of these options and of `config`, the file of `--config`.
    ///
    /// # Errors
    /// The options and the file contradict each other, or a file that they name cannot be read.
    pub fn plan_with(&self, config: Option<ConfigFile>, runtime_dir: PathBuf) -> Result<DaemonPlan> {
        let ConfigFile { mount, cpu_latency, nbd: keys, devices, left_out } = match config {
            Some(config) => config,
            None => ConfigFile { devices: vec![self.device_plan()?], ..ConfigFile::default() },
        };
        let listen = match &self.config {
            Some(path) => self.listen.clone().with_file(keys, path)?,
            None => self.listen.clone(),
        };
        let plan = DaemonPlan::new(runtime_dir, devices)?;
        let nbd = listen.config(plan.nbd)?;
        let absolute =
            |dir: &PathBuf| std::path::absolute(dir).context(|| format!("--mount {}", dir.display()));
        Ok(DaemonPlan {
            nbd,
            left_out,
            files: self.files.options(cpu_latency),
            mount: self.mount.as_ref().map(absolute).transpose()?.or(mount),
            exec: self.exec.clone(),
            reloads_on_hang_up: self.config.is_some(),
            slab_timing: self.slab_timing,
            ..plan
        })
    }

    /// The device that options describe.
    fn device_plan(&self) -> Result<DevicePlan> {
        let attached = if self.attach { Attached::Block } else { Attached::No };
        Ok(DevicePlan {
            name: self.name.clone(),
            settings: self.device.settings()?,
            attached,
            export: self.export,
        })
    }
}

/// Runs `uzram up`; returns the exit status.
///
/// # Errors
/// The daemon cannot start.
pub fn run(args: &UpArgs) -> Result<u8> {
    live::start_log(args.log)?;
    serve(args.plan()?)
}

/// Runs a daemon until it is told to end; returns the exit status. The caller has started the log.
///
/// # Errors
/// The daemon cannot start.
pub fn serve(plan: DaemonPlan) -> Result<u8> {
    plan.check()?;
    // Before any thread is started: threads inherit the protection.
    let mut protection = if plan.swaps() { protect() } else { Vec::new() };
    let mount_dir = plan.mount_dir();
    let is_root = rustix::process::geteuid().is_root();
    let attendant = (is_root && mount_dir.is_some()).then(|| Attendant::start(&plan.runtime_dir)).transpose();
    let attendant = attendant.context(|| "cannot start the process that attaches and detaches".to_owned())?;
    if plan.swaps() || plan.nbd.tls.is_some() {
        protection.push(hide());
    }
    plan.left_out.iter().for_each(|line| tracing::info!("{line}"));
    let (sender, events) = mpsc::channel();
    let reloads = plan.reloads_on_hang_up.then(|| start_reloads(plan.nbd.tls.clone())).transpose();
    let watched = reloads.and_then(|reloads| watch_signals(sender.clone(), reloads));
    watched.context(|| "cannot handle signals".to_owned())?;
    let control_socket = socket_path(&plan.runtime_dir, CONTROL_SOCKET)?;
    if plan.devices.iter().any(|device| device.attached != Attached::No) {
        require_root()?;
    }
    let mut dir = RuntimeDir::claim(plan.runtime_dir.clone())?;
    let recorder = Arc::new(Recorder::start(dir.descriptor()?, &plan.runtime_dir)?);
    // Costs little, and only on slow paths; `uzram slabinfo --stats` needs it.
    slab::set_counting(true);
    slab::set_timing(plan.slab_timing);
    let devices = plan.devices.iter().map(DevicePlan::make).collect::<Result<Vec<_>>>()?;
    room::check(&devices)?;
    let swapped_to = devices.iter().zip(&plan.devices).filter(|(_, plan)| plan.is_swap());
    let swapped_to: Vec<_> = swapped_to.map(|(device, _)| Arc::clone(device)).collect();
    let warning = machine_memory::read().ok().and_then(|memory| room::swap_warning(&swapped_to, &memory));
    warning.iter().for_each(|line| tracing::warn!("{line}"));

    let policies = plan.devices.iter().map(DevicePlan::export_policy);
    let exports = Exports::with_policies(devices.iter().cloned().zip(policies));
    descriptors::allow(plan.nbd.descriptors());
    let server =
        nbd::Server::bind(plan.nbd.clone(), exports.clone()).context(|| "cannot serve NBD".to_owned())?;
    let (endpoints, clients) = (server.endpoints(), server.clients());
    let exported = exports.clone();
    // A device that is not exported now has no URIs.
    let uris = move |name: &str| {
        let is_exported = exported.exported().iter().any(|other| other == name);
        let serving = endpoints.iter().filter(|endpoint| is_exported && endpoint.serves(name));
        serving.map(|endpoint| endpoint.uri(name)).collect::<Vec<_>>()
    };
    let _nbd = server.spawn().context(|| "cannot serve NBD".to_owned())?;
    let mount = mount_dir
        .map(|dir| fuse::Mount::new(&dir, &plan.runtime_dir, exports.clone(), plan.mount_options()))
        .transpose()?;
    let files = Files { mount, exports: exports.clone() };
    if let Some(mount) = &files.mount {
        recorder.set_mount(MountRecord { dir: mount.dir().to_owned(), identity: mount.identity() })?;
    }
    let needs = Needs {
        unmounts: files.mount.is_some(),
        locks_memory: plan.swaps(),
        has_backing: devices.iter().any(|device| device.backing().is_some()),
        reads_certificates: plan.nbd.tls.is_some(),
        has_command: plan.exec.is_some(),
        runs_programs: files.mount.is_some() && !is_root,
    };
    let control_listener = dir.bind(CONTROL_SOCKET)?;
    // From here on the daemon binds no socket, mounts nothing and runs no program.
    if plan.exec.is_none() {
        protection.extend(confine(&needs));
    }
    let about = About {
        pid: std::process::id(),
        files: files.mount.as_ref().map(FilesJson::from),
        ends_with_swap: plan.ends_with_swap,
        protection,
        survival: None,
    };
    let on_shutdown = sender.clone();
    let _control = control::Server::start(
        control_listener,
        Api::new(exports.clone(), Box::new(uris.clone()), about.clone())
            .with_recorder(Arc::clone(&recorder))
            .with_tls(plan.nbd.tls.clone())
            .with_admission(Box::new(room::check))
            .with_clients(clients),
        control::Limits::default(),
        move |ending| {
            // An error means that the daemon is ending already.
            let _ = on_shutdown.send(Event::Shutdown(ending));
        },
    )
    .context(|| "cannot serve the control API".to_owned())?;
    let mut attachments = Attachments::new(exports.clone(), Arc::clone(&recorder), attendant);
    let _fresh_counts = if plan.swaps() {
        let fresh_counts = FreshCounts::start(swapped_to).context(|| "cannot start a thread".to_owned())?;
        touch_heap();
        Some(fresh_counts)
    } else {
        None
    };
    for device in &plan.devices {
        attachments.attach(device)?;
    }

    let exports_of = devices.iter().flat_map(|device| uris(device.name()));
    let mut text = facts_text(exports_of.map(|uri| ("export", Some(uri))));
    text += &daemon_facts(&control_socket, &about, warning);
    for (device, planned) in devices.iter().zip(&plan.devices) {
        text += &device_facts(planned, device);
    }
    text += &attached_facts(&attachments);
    let outcome = match (&plan.exec, devices.first(), plan.devices.first()) {
        (Some(command), Some(device), Some(planned)) => {
            let address = Address {
                name: planned.name.clone(),
                runtime_dir: plan.runtime_dir.clone(),
                socket: socket_path(&plan.runtime_dir, NBD_SOCKET)?,
                uris: uris(&planned.name),
                block_device: attachments.device(&planned.name),
            };
            // Standard output belongs to the command.
            live::note(&text);
            let command = exec::start(command, &address, &sender)?;
            // The command keeps the privileges that this process now gives up.
            log_refused(&confine(&needs));
            let status = command.wait(&planned.name, device, &events);
            let_go(Ending::WhenFree, &events, &mut attachments);
            status
        }
        _ => {
            // Serve even if standard output is closed.
            let _ = print(&text);
            notify::ready(&format!("serving {} devices", devices.len()));
            let ending = wait_for_event(&exports, &events);
            let_go(ending, &events, &mut attachments);
            Ok(0)
        }
    };
    drop(files);
    outcome
}

/// The mount of the devices' files, if any. Dropping it first interrupts long operations of the devices: unmounting
/// would wait for a process that started one by writing to an attribute's file.
struct Files {
    mount: Option<fuse::Mount>,
    exports: Exports,
}

impl Drop for Files {
    fn drop(&mut self) {
        self.exports.devices().iter().for_each(|device| device.interrupt());
    }
}

fn log_refused(measures: &[MeasureJson]) {
    for MeasureJson { what, refused } in measures {
        if let Some(why) = refused {
            tracing::warn!("not {what}: {why}");
        }
    }
}

/// Formats the facts about the daemon that are printed at the start.
fn daemon_facts(control_socket: &Path, about: &About, warning: Option<String>) -> String {
    let of_files = |what: fn(&FilesJson) -> String| about.files.as_ref().map(what);
    let facts = [
        ("control", Some(control_socket.display().to_string())),
        ("files", of_files(|files| format!("{}, {} threads", files.dir.display(), files.threads))),
        ("CPU latency", of_files(|files| files.cpu_latency.clone())),
    ];
    let refused = about.protection.iter().filter_map(|measure| {
        let why = measure.refused.as_ref()?;
        Some(("warning", Some(format!("not {}: {why}", measure.what))))
    });
    facts_text(facts.into_iter().chain(refused).chain([("warning", warning)]))
}

/// Formats the facts about a device.
fn device_facts(plan: &DevicePlan, device: &Device) -> String {
    let stats = device.stats();
    let chosen = plan.settings.get("comp_algorithm");
    let algorithm = chosen.map(|setting| setting.value.clone()).or_else(|| {
        // The kernel's form is a list with the chosen one in brackets.
        let list = device.get("comp_algorithm").ok()?;
        Some(list.split_once('[')?.1.split_once(']')?.0.to_owned())
    });
    let backing = device.backing();
    let fixed = match backing {
        Some(_) => "slot table, LRU, streams, buffers of the backing device",
        None => "slot table, LRU, streams",
    };
    let facts = [
        ("size", Some(format_size(stats.disksize_bytes))),
        ("algorithm", algorithm),
        ("backing", backing.as_ref().map(ToString::to_string)),
        ("fixed cost", Some(format!("{} at most: {fixed}", format_size(stats.mem_fixed_bytes)))),
    ];
    facts_text(facts.into_iter())
}

/// Formats the block devices and swap areas of the devices.
fn attached_facts(attachments: &Attachments) -> String {
    facts_text(attachments.all().map(|(name, is_swap, path)| {
        let what = if is_swap { READY } else { "attached" };
        (what, Some(format!("{} ({name})", path.display())))
    }))
}

fn facts_text(facts: impl Iterator<Item = (&'static str, Option<String>)>) -> String {
    facts.filter_map(|(what, value)| Some(format!("{what:<11} {}\n", value?))).collect()
}

/// Detaches all devices, and waits until no process uses a device's file, as the contents are lost afterwards. If
/// forced, waits only for swap areas: without them programs would be killed.
fn let_go(mut ending: Ending, events: &Receiver<Event>, attachments: &mut Attachments) {
    loop {
        notify::status("detaching what is attached");
        let Err(Failure::Line(why)) = attachments.detach() else { break };
        let has_swap = attachments.have_swap();
        if ending == Ending::Forced && !has_swap {
            tracing::warn!("{why}; ending anyway, as --force was given");
            break;
        }
        // A process may end meanwhile and free memory or a file.
        let force = if has_swap { "" } else { "; `uzram down --force` ends it all the same" };
        tracing::error!("not ending yet: {why} (tried again every {} s{force})", RETRY.as_secs());
        notify::status(&format!("not ending yet: {why}"));
        if let Ok(Event::Shutdown(Ending::Forced)) = events.recv_timeout(RETRY) {
            ending = Ending::Forced;
        }
    }
    notify::stopping("giving memory back");
}

/// Waits for an event that ends the daemon, with a live line on a terminal.
fn wait_for_event(exports: &Exports, events: &Receiver<Event>) -> Ending {
    let stats = || exports.devices().iter().map(|device| StatsJson::from(device.stats())).sum();
    let mut live = LiveLine::new(stats());
    let event = loop {
        match &mut live {
            Some(live) => live.draw(stats()),
            None => break events.recv().ok(),
        }
        match events.recv_timeout(LiveLine::PERIOD) {
            Ok(event) => break Some(event),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break None,
        }
    };
    drop(live);
    match event {
        Some(Event::Signal { signal, .. }) => tracing::info!(?signal, "ending"),
        _ => tracing::info!("ending, as a control client asks"),
    }
    match event {
        Some(Event::Shutdown(ending)) => ending,
        _ => Ending::WhenFree,
    }
}
