//! The process that serves: it makes the devices or takes them over, and serves them until it is told to end.
//!
//! The main thread owns everything and waits for [`Event`]s from servers, signals and the holder. It releases what it
//! owns in reverse order: first the servers stop, then the files are unmounted, last the devices are freed.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use uzram::device::{Device, Keeper, NamedBacking};
use uzram::machine_memory;
use uzram_serve::control::{self, About, Api, Ending, FilesJson, MeasureJson, StatsJson, in_use_by_clients};
use uzram_serve::record::Recorder;
use uzram_serve::{ExportPolicy, Exports, fuse, nbd};

use crate::config::plan::DaemonPlan;
use crate::daemon::attachments::{Attachments, RETRY};
use crate::daemon::attendant::Attendant;
use crate::daemon::conditions::Reporter;
use crate::daemon::confine::{Needs, confine};
use crate::daemon::events::{Event, start_reloads, watch_signals};
use crate::daemon::exec::{self, Address};
use crate::daemon::held::Held;
use crate::daemon::memory_cgroup;
use crate::daemon::notify;
use crate::daemon::started::{AttachedBlock, Started, StartedDevice, all_warnings};
use crate::daemon::survive::home::{Home, Registry};
use crate::daemon::survive::link::{End, Request, Served};
use crate::failure::{Context, Failure, Result, print};
use crate::output;
use crate::swap::fresh_counts::FreshCounts;
use crate::swap::{hibernation, room};
use crate::system::protect::touch_heap;
use crate::system::runtime_dir::{CONTROL_SOCKET, NBD_SOCKET, socket_path};
use crate::terminal::live::{self, LiveLine};

/// A second ^C ends the daemon if it comes within this time of the first.
const SECOND_WITHIN: Duration = Duration::from_secs(30);

/// A device, and who may open it over NBD.
pub type Exported = (Arc<Device>, ExportPolicy);

/// How a worker starts.
pub struct Start {
    /// Its ties to the holder; `None` if there is none.
    pub home: Option<Arc<Home>>,
    /// The process that attaches and detaches; `None` if the daemon is not root's or shows no files.
    pub attendant: Option<Attendant>,
    /// The devices of the worker before; none for the first.
    pub devices: Vec<Exported>,
    /// Whether a worker before has made all devices of the plan, and has printed what it serves.
    pub has_started: bool,
    /// The measures that protect this process.
    pub protection: Vec<MeasureJson>,
    /// Whether it has given up its privileges.
    pub is_confined: bool,
    /// Called when the files are served.
    pub on_files_served: Box<dyn FnOnce()>,
}

/// Serves until told to end; returns the exit status, of which everything is released.
///
/// # Errors
/// The daemon cannot start.
pub fn serve(held: &Held, start: Start) -> Result<u8> {
    let Start { home, attendant, mut devices, has_started, mut protection, is_confined, on_files_served } =
        start;
    let plan = &held.plan;
    let (sender, events) = mpsc::channel();
    handle_events(plan, home.as_ref(), &sender)?;
    let recorder = Arc::new(Recorder::resume(held.dir.descriptor()?, &plan.runtime_dir)?);
    if !has_started {
        make(plan, home.as_ref(), &mut devices)?;
    }
    let all: Vec<_> = devices.iter().map(|(device, _)| Arc::clone(device)).collect();
    let is_swap = |device: &&Arc<Device>| {
        plan.devices.iter().any(|planned| planned.is_swap() && planned.name == device.name())
    };
    let swapped_to: Vec<_> = all.iter().filter(is_swap).cloned().collect();

    let exports = Exports::with_policies(devices)
        .recorded_by(Arc::clone(&recorder))
        .checked_by(memory_cgroup::setting_check(plan));
    let mount = held.served().map(|connection| {
        fuse::Mount::serve(Arc::clone(connection), exports.clone(), Arc::clone(&held.ledger))
    });
    let files = Files { mount: mount.transpose()?, exports: exports.clone() };
    on_files_served();
    if has_started && plan.nbd.tls.is_some() {
        // The process before may have read other files than the holder. Its log says if that fails.
        let _ = nbd::reload_tls(plan.nbd.tls.as_ref());
    }
    let server = nbd::Server::on(Arc::clone(&held.nbd), plan.nbd.clone(), exports.clone());
    let server = server.context(|| "cannot serve NBD".to_owned())?;
    let (endpoints, clients) = (server.endpoints(), server.clients());
    let reporter = Reporter::start(exports.clone(), clients.clone(), Arc::clone(&held.lives))
        .context(|| "cannot start a thread".to_owned())?;
    let exported = exports.clone();
    // A device that is not exported now has no URIs.
    let uris = move |name: &str| {
        let is_exported = exported.exported().iter().any(|other| other == name);
        let serving = endpoints.iter().filter(|endpoint| is_exported && endpoint.serves(name));
        serving.map(|endpoint| endpoint.uri(name)).collect::<Vec<_>>()
    };
    let nbd = server.spawn().context(|| "cannot serve NBD".to_owned())?;
    let backings = all.iter().filter_map(|device| device.backing());
    let needs = needs(held, backings.map(|backing| backing.name().to_owned()));
    // From here on this process binds no socket, mounts nothing and runs no program; but for the command, if it starts
    // that itself.
    let starts_command = plan.exec.is_some() && home.is_none();
    if !is_confined && !starts_command {
        protection.extend(confine(&needs));
    }
    let about = About {
        pid: home.as_ref().map_or_else(std::process::id, |home| home.survival().holder_pid),
        files: files.mount.as_ref().map(FilesJson::from),
        ends_with_swap: plan.ends_with_swap,
        protection,
        attach_refused: plan.attach_refused(),
        survival: None,
    };
    let on_shutdown = sender.clone();
    let mut api = Api::new(exports.clone(), Box::new(uris.clone()), about.clone())
        .with_tls(plan.nbd.tls.clone())
        .with_admission(Box::new(room::check))
        .with_clients(clients);
    if let Some(home) = &home {
        api = api.with_registrar(Arc::new(Registry(Arc::clone(home))));
    }
    let control = held.control.try_clone().context(|| "cannot serve the control API".to_owned())?;
    let control = control::Server::start(control, api, control::Limits::default(), move |ending| {
        // An error means that the daemon is ending already.
        let _ = on_shutdown.send(Event::Shutdown(ending));
    })
    .context(|| "cannot serve the control API".to_owned())?;
    let mut attachments = Attachments::new(exports.clone(), Arc::clone(&recorder), attendant);
    let warnings = if has_started { Vec::new() } else { warnings(plan, &all, &swapped_to) };
    let fresh_counts = plan.swaps().then(|| FreshCounts::start(swapped_to)).transpose();
    let _fresh_counts = fresh_counts.context(|| "cannot start a thread".to_owned())?;
    if plan.is_protected() {
        touch_heap();
    }
    attachments.adopt(&plan.devices, has_started);
    if !has_started {
        warnings.iter().for_each(|line| tracing::warn!("{line}"));
        if let Some(home) = &home {
            // What the worker before began to attach may still be on its way.
            home.ask(&Request::Settle, &[]).context(|| "the holder".to_owned())?;
        }
        plan.devices.iter().try_for_each(|device| attachments.attach(device))?;
    }

    let text = match has_started {
        true => String::new(),
        false => {
            let started = Started {
                exports: all.iter().flat_map(|device| uris(device.name())).collect(),
                control_socket: socket_path(&plan.runtime_dir, CONTROL_SOCKET)?,
                files: about.files.clone(),
                warnings: all_warnings(&about, warnings),
                devices: all.iter().zip(&plan.devices).map(StartedDevice::from).collect(),
                attached: attachments.all().map(AttachedBlock::from).collect(),
            };
            output::rendered(&started, Started::text)?
        }
    };
    let address = address(plan, &uris, &attachments)?;
    let outcome = match (&plan.exec, &home, all.first()) {
        (Some(command), None, Some(device)) => {
            // Standard output belongs to the command.
            live::note(&text);
            let command = exec::start(command, &address, &sender)?;
            // The command keeps the privileges that this process now gives up.
            log_refused(&confine(&needs));
            let status = command.wait(&plan.devices[0].name, device, &events);
            let_go(Ending::WhenFree, &events, &mut attachments, None);
            status
        }
        _ => {
            let status = format!("serving {} devices", all.len());
            match &home {
                _ if has_started => {}
                Some(_) if plan.exec.is_some() => live::note(&text),
                // Serve even if standard output is closed.
                _ => drop(print(&text)),
            }
            match &home {
                Some(home) => home
                    .ask(&Request::Serving(Served { status, address }), &[])
                    .context(|| "the holder".to_owned())?,
                None => notify::ready(&status),
            }
            let ending = match (&plan.exec, &home, all.first()) {
                (Some(_), Some(home), Some(device)) => {
                    wait_for_command(home, &events);
                    live::note(&exec::summary(&plan.devices[0].name, device)?);
                    Ending::WhenFree
                }
                _ => wait_for_event(&exports, &events, home.as_deref()),
            };
            let_go(ending, &events, &mut attachments, home.as_deref());
            Ok(0)
        }
    };
    // Whoever still reads is told that the server ends, before pages are gone.
    drop((files, nbd, control, reporter));
    // What is in stores on other machines would stay there.
    exports.devices().iter().for_each(|device| device.erase_backing());
    outcome
}

/// Has events sent: by signals, or by the holder.
fn handle_events(plan: &DaemonPlan, home: Option<&Arc<Home>>, sender: &Sender<Event>) -> Result<()> {
    let handled = match home {
        Some(home) => home.listen(sender.clone(), plan.nbd.tls.clone()),
        None => {
            let reloads = plan.reloads_on_hang_up.then(|| start_reloads(plan.nbd.tls.clone())).transpose();
            reloads.and_then(|reloads| watch_signals(sender.clone(), reloads))
        }
    };
    handled.context(|| "cannot handle signals".to_owned())
}

/// Makes the devices of the plan that are not there yet.
fn make(plan: &DaemonPlan, home: Option<&Arc<Home>>, devices: &mut Vec<Exported>) -> Result<()> {
    for planned in &plan.devices {
        if devices.iter().any(|(device, _)| device.name() == planned.name && device.size_bytes() > 0) {
            continue;
        }
        devices.retain(|(device, _)| device.name() != planned.name);
        let policy = planned.export_policy();
        if let Some(home) = home {
            let added = Request::Added { name: planned.name.clone(), policy };
            home.ask(&added, &[]).context(|| "the holder".to_owned())?;
        }
        let keeper = home.map(|home| Arc::clone(home) as Arc<dyn Keeper>);
        devices.push((planned.make(keeper)?, policy));
    }
    let all: Vec<_> = devices.iter().map(|(device, _)| Arc::clone(device)).collect();
    Ok(room::check(&all)?)
}

/// Returns what may go wrong later, for who starts the daemon.
fn warnings(plan: &DaemonPlan, all: &[Arc<Device>], swapped_to: &[Arc<Device>]) -> Vec<String> {
    let memory = machine_memory::read().ok();
    let room = memory.and_then(|memory| {
        room::swap_warning(swapped_to, &memory).or_else(|| room::fixed_warning(all, &memory))
    });
    let hibernation = plan.swaps().then(|| hibernation::warning(Path::new("/"))).flatten();
    room.into_iter().chain(hibernation).collect()
}

/// Returns what a worker, whose devices have backing devices of these names, may need to do while it serves.
pub fn needs(held: &Held, backings: impl Iterator<Item = String>) -> Needs {
    let plan = &held.plan;
    let has_files = held.connection.is_some();
    let planned = plan.devices.iter().filter_map(|planned| planned.settings.get("backing_dev"));
    let backings: Vec<_> = backings.chain(planned.map(|setting| setting.value.clone())).collect();
    Needs {
        unmounts: has_files,
        locks_memory: plan.is_protected() || plan.survives,
        has_backing: !backings.is_empty(),
        has_remote: backings.iter().any(|name| NamedBacking::is_elsewhere(name)),
        reads_certificates: plan.nbd.tls.is_some(),
        survives: plan.survives,
        has_command: plan.exec.is_some() && !plan.survives,
        runs_programs: has_files && !rustix::process::geteuid().is_root(),
    }
}

fn address(
    plan: &DaemonPlan,
    uris: &dyn Fn(&str) -> Vec<String>,
    attachments: &Attachments,
) -> Result<Address> {
    let name = plan.devices.first().map(|device| device.name.clone()).unwrap_or_default();
    Ok(Address {
        runtime_dir: plan.runtime_dir.clone(),
        socket: socket_path(&plan.runtime_dir, NBD_SOCKET)?,
        uris: uris(&name),
        block_device: attachments.device(&name),
        name,
    })
}

/// Waits until the command has ended, which the holder runs. Requests to end go to the command.
fn wait_for_command(home: &Home, events: &Receiver<Event>) {
    while let Ok(event) = events.recv() {
        match event {
            Event::CommandEnded => return,
            Event::Signal { .. } | Event::Shutdown(_) => {
                if let Err(error) = home.ask(&Request::EndCommand, &[]) {
                    tracing::warn!(%error, "cannot signal the command");
                }
            }
        }
    }
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

/// Detaches all devices, and waits until no process uses a device's file, as the contents are lost afterwards. If
/// forced, waits only for swap areas: without them programs would be killed.
fn let_go(mut ending: Ending, events: &Receiver<Event>, attachments: &mut Attachments, home: Option<&Home>) {
    let tell = |status: &str| match home {
        // If it cannot be told, the service manager's line is old.
        Some(home) => drop(home.ask(&Request::Status(status.to_owned()), &[])),
        None => notify::status(status),
    };
    loop {
        tell("detaching what is attached");
        let Err(why) = attachments.detach().map_err(Failure::into_line) else { break };
        let has_swap = attachments.have_swap();
        if ending == Ending::Forced && !has_swap {
            tracing::warn!("{why}; ending anyway, as --force was given");
            break;
        }
        // A process may end meanwhile and free memory or a file.
        let force = if has_swap { "" } else { "; `uzram down --force` ends it all the same" };
        tracing::error!("not ending yet: {why} (tried again every {} s{force})", RETRY.as_secs());
        tell(&format!("not ending yet: {why}"));
        if let Ok(Event::Shutdown(Ending::Forced)) = events.recv_timeout(RETRY) {
            ending = Ending::Forced;
        }
    }
    match home {
        Some(_) => tell("giving memory back"),
        None => notify::stopping("giving memory back"),
    }
}

/// Waits for an event that ends the daemon, with a live line on a terminal.
fn wait_for_event(exports: &Exports, events: &Receiver<Event>, home: Option<&Home>) -> Ending {
    let stats = || exports.devices().iter().map(|device| StatsJson::from(device.stats())).sum();
    let mut live = LiveLine::new(stats());
    let mut asked = None;
    let event = loop {
        let event = match &mut live {
            Some(live) => {
                live.draw(stats());
                events.recv_timeout(LiveLine::PERIOD)
            }
            None => events.recv().map_err(|_| RecvTimeoutError::Disconnected),
        };
        match event {
            Ok(Event::Signal { signal: Signal::INT, from_terminal: true })
                if asks_again(exports, &mut asked) => {}
            Ok(event) => break Some(event),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break None,
        }
    };
    drop(live);
    match event {
        Some(Event::Signal { signal, from_terminal }) => {
            tracing::info!(?signal, "ending");
            if let Some(home) = home.filter(|_| from_terminal) {
                // If the holder does not hear of it and this process dies, the next one goes on.
                let _ = home.ask(&Request::WillEnd(End::Signal(signal.as_raw())), &[]);
            }
        }
        _ => tracing::info!("ending, as a control client asks"),
    }
    match event {
        Some(Event::Shutdown(ending)) => ending,
        _ => Ending::WhenFree,
    }
}

/// Returns whether ^C has to be pressed again, and says so, if NBD clients are connected: what they wrote would be lost.
/// Other users of a device keep the daemon from ending. `asked` is when it was said last.
fn asks_again(exports: &Exports, asked: &mut Option<Instant>) -> bool {
    let of_device = |device: &Arc<Device>| in_use_by_clients(exports, device.name());
    let Some(in_use) = exports.devices().iter().find_map(of_device) else { return false };
    if asked.is_some_and(|at| at.elapsed() < SECOND_WITHIN) {
        return false;
    }
    *asked = Some(Instant::now());
    live::error_line(&format!(
        "{in_use}, and its contents are lost when this daemon ends: press ^C again to end it"
    ));
    true
}
