//! `uzram up`: a daemon that serves devices from this process until it is told to end: one from the
//! start, others as control clients add and remove them.
//!
//! The main thread owns everything and waits for [`Event`]s; servers and signals only send them. What
//! it owns is given back in reverse order: first the servers stop, then the sockets go, last the lock.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;

use rustix::process::Signal;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithRawSiginfo;
use uzram::base::units::format_size;
use uzram::device::Device;
use uzram::slab;
use uzram_serve::control::{self, Api, StatsJson};
use uzram_serve::{Exports, nbd};

use crate::device_args::{DeviceArgs, Setting, parse_name};
use crate::exec;
use crate::failure::{Context, Result, print};
use crate::listen_args::ListenArgs;
use crate::live::{self, LiveLine, LogLevel};
use crate::runtime_dir::{CONTROL_SOCKET, NBD_SOCKET, RuntimeArgs, RuntimeDir, socket_path};

/// Create a compressed RAM disk and serve it, in the foreground.
///
/// NBD clients use the disk at the URI printed at the start; `uzram stat`, `set`, `reset` and `down`
/// control it. It is memory: when this command ends, its contents are gone.
#[derive(clap::Args)]
#[command(after_help = "Examples: uzram up --size 4G --algorithm zstd:3 --mem-limit 1G
          uzram up --size 4G --mem-limit 1G --backing /var/tmp/cold.img:4G --recompress zstd:3:10m
          uzram up --listen tcp:127.0.0.1:10809
          uzram up --size 64M --exec 'nbdinfo \"$uri\"'")]
pub struct Args {
    /// The device's name
    #[arg(long, value_name = "NAME", default_value = "zram0", value_parser = parse_name)]
    name: String,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    listen: ListenArgs,
    /// Run a shell command with $uri, $uris, $socket and $name set, and UZRAM_RUNTIME_DIR, then end with
    /// its status
    #[arg(long, value_name = "CMD")]
    exec: Option<String>,
    /// Measure for how long each slab cache's list_lock is held, at two clock readings a time: what
    /// `uzram slabinfo --stats` shows as list_lock_hold_ns
    #[arg(long)]
    slab_timing: bool,
    /// How much to log on standard error
    #[arg(long, value_name = "LEVEL", value_enum, default_value = "info")]
    log: LogLevel,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

/// Something the main thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// SIGINT or SIGTERM.
    Signal {
        /// Which.
        signal: Signal,
        /// Sent by the kernel, which means from the terminal, to its whole foreground group.
        from_terminal: bool,
    },
    /// A control client asks the daemon to end.
    Shutdown,
    /// The command of `--exec` has ended.
    CommandEnded,
}

/// Where the device can be reached.
pub struct Address {
    /// The device's name.
    pub name: String,
    /// Where the sockets are.
    pub runtime_dir: PathBuf,
    /// The NBD socket.
    pub socket: PathBuf,
    /// The control socket.
    pub control_socket: PathBuf,
    /// The NBD URIs; the first is that of the NBD socket.
    pub uris: Vec<String>,
}

/// Runs the daemon; returns the status to exit with.
///
/// # Errors
/// It cannot start.
pub fn run(args: &Args) -> Result<u8> {
    live::start_log(args.log)?;
    let (sender, events) = mpsc::channel();
    watch_signals(sender.clone()).context(|| "cannot handle signals".to_owned())?;
    let dir_path = args.runtime.path()?;
    let socket = socket_path(&dir_path, NBD_SOCKET)?;
    let control_socket = socket_path(&dir_path, CONTROL_SOCKET)?;
    let config = args.listen.config(&socket)?;
    let mut dir = RuntimeDir::claim(dir_path.clone())?;
    // It costs only slow paths, and a little; without it `uzram slabinfo --stats` had little to show.
    slab::set_counting(true);
    slab::set_timing(args.slab_timing);
    let device = make_device(args)?;

    let exports = Exports::new([Arc::clone(&device)]);
    let server = nbd::Server::bind(config, exports.clone()).context(|| "cannot serve NBD".to_owned())?;
    let endpoints = server.endpoints();
    let uris = move |name: &str| endpoints.iter().map(|endpoint| endpoint.uri(name)).collect::<Vec<_>>();
    let address = Address {
        name: args.name.clone(),
        runtime_dir: dir_path,
        socket,
        control_socket,
        uris: uris(&args.name),
    };
    let _nbd = server.spawn().context(|| "cannot serve NBD".to_owned())?;
    let on_shutdown = sender.clone();
    let _control = control::Server::start(
        dir.bind(CONTROL_SOCKET)?,
        Api::new(exports.clone(), Box::new(uris)),
        control::Limits::default(),
        move || {
            // A failure to send means that the daemon is ending already.
            let _ = on_shutdown.send(Event::Shutdown);
        },
    )
    .context(|| "cannot serve the control API".to_owned())?;

    let facts = announcement(args, &address, &device);
    match &args.exec {
        Some(command) => {
            // Standard output belongs to the command.
            live::note(&facts);
            exec::run(command, &address, &device, &sender, &events)
        }
        None => {
            // Serving is the point; whether anyone reads where is not.
            let _ = print(&facts);
            wait(&exports, &events);
            Ok(0)
        }
    }
}

fn make_device(args: &Args) -> Result<Arc<Device>> {
    let device = Device::new(&args.name).context(|| format!("--name {}", args.name))?;
    for Setting { origin, attribute, value } in args.device.settings()? {
        device.set(attribute, &value).context(|| origin)?;
    }
    Ok(device)
}

fn announcement(args: &Args, address: &Address, device: &Device) -> String {
    let stats = device.stats();
    let algorithm = args.device.algorithm.clone().or_else(|| {
        // The kernel's form is a list with the chosen one in brackets.
        let list = device.get("comp_algorithm").ok()?;
        Some(list.split_once('[')?.1.split_once(']')?.0.to_owned())
    });
    let exports = address.uris.iter().map(|uri| ("export", Some(uri.clone())));
    let backing = device.backing();
    let fixed = match backing {
        Some(_) => "slot table, LRU, streams, buffers of the backing device",
        None => "slot table, LRU, streams",
    };
    let facts = [
        ("control", Some(address.control_socket.display().to_string())),
        ("size", Some(format_size(stats.disksize_bytes))),
        ("algorithm", algorithm),
        ("backing", backing.as_ref().map(ToString::to_string)),
        ("fixed cost", Some(format!("{} at most: {fixed}", format_size(stats.mem_fixed_bytes)))),
    ];
    exports.chain(facts).filter_map(|(what, value)| Some(format!("{what:<11} {}\n", value?))).collect()
}

/// Waits until someone wants the daemon to end.
fn wait(exports: &Exports, events: &Receiver<Event>) {
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
}

/// Turns SIGINT and SIGTERM into events, from now on and for the rest of the process's life.
fn watch_signals(events: Sender<Event>) -> std::io::Result<()> {
    let mut signals = SignalsInfo::<WithRawSiginfo>::new([SIGINT, SIGTERM])?;
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for info in signals.forever() {
            let signal = if info.si_signo == SIGINT { Signal::INT } else { Signal::TERM };
            // Positive codes are the kernel's own, sigaction(2); processes send 0 or less.
            if events.send(Event::Signal { signal, from_terminal: info.si_code > 0 }).is_err() {
                return;
            }
        }
    })?;
    Ok(())
}
