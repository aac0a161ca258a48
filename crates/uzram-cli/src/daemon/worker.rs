//! The process that serves: it makes the devices or takes them over, and serves them until it is told to end.
//!
//! The main thread owns everything and waits for [`Order`]s from the holder and the control API. It releases
//! what it owns in reverse order: first the servers stop, last the devices are freed.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::json;
use uzram::device::{Device, NamedBacking};
use uzram::machine_memory;
use uzram_serve::control::{self, About, Api, Ending, FilesJson, MeasureJson, in_use_by_clients};
use uzram_serve::record::Recorder;
use uzram_serve::{ExportPolicy, Exports, fuse, nbd};

use crate::config::plan::DaemonPlan;
use crate::daemon::attachments::{Attachments, RETRY};
use crate::daemon::attendant::Attendant;
use crate::daemon::conditions::Reporter;
use crate::daemon::confine::{Needs, confine};
use crate::daemon::exec::Address;
use crate::daemon::held::Held;
use crate::daemon::memory_cgroup;
use crate::daemon::started::{Started, StartedDevice, all_warnings};
use crate::daemon::survive::home::{Home, Registry};
use crate::daemon::survive::link::{End, Order, Request, Served};
use crate::failure::{Context, Failure, Result, print};
use crate::output;
use crate::swap::fresh_counts::FreshCounts;
use crate::swap::{hibernation, room};
use crate::system::protect::touch_heap;
use crate::system::runtime_dir::{CONTROL_SOCKET, socket_path};
use crate::terminal::live::{self, LiveLine};
use crate::terminal::show;

/// A second ^C ends the daemon if it comes within this time of the first.
const SECOND_WITHIN: Duration = Duration::from_secs(30);

pub type Exported = (Arc<Device>, ExportPolicy);

pub struct Start {
    pub home: Arc<Home>,
    /// The process that attaches and detaches; `None` if the daemon is not root's or shows no files.
    pub attendant: Option<Attendant>,
    /// The devices of the worker before; none for the first.
    pub devices: Vec<Exported>,
    /// Whether a worker before has made all devices of the plan, and has printed what it serves.
    pub has_started: bool,
    pub protection: Vec<MeasureJson>,
    /// Whether it has given up its privileges.
    pub is_confined: bool,
    /// Called when the files are served.
    pub on_files_served: Box<dyn FnOnce()>,
}

/// Serves until told to end; returns the exit status, of which everything is released.
pub fn serve(held: &Held, mut start: Start) -> Result<u8> {
    let (plan, has_started) = (&held.plan, start.has_started);
    let (sender, orders) = mpsc::channel();
    let listens = start.home.listen(sender.clone(), plan.nbd.tls.clone());
    listens.context(|| "cannot listen to the holder")?;
    if !has_started {
        make(plan, &start.home, &mut start.devices)?;
    }
    let mut worker = Worker::start(held, start, sender)?;
    worker.attachments.adopt(&plan.devices, has_started);
    let text = if has_started { None } else { Some(worker.attach_planned()?) };
    worker.announce(text)?;
    let ending = match (&plan.exec, worker.devices.first()) {
        (Some(_), Some(device)) => {
            worker.wait_for_command(&orders);
            let (name, stats) = (&plan.devices[0].name, device.stats());
            let summary = json!({ "name": name, "stats": stats });
            live::note(&output::rendered(&summary, |_| show::stats_table(name, &stats))?);
            Ending::WhenFree
        }
        _ => worker.wait_for_end(&orders),
    };
    worker.let_go(ending, &orders);
    worker.end();
    Ok(0)
}

/// What serves. If a start fails, all is released in the order of the fields.
struct Worker<'a> {
    _fresh_counts: Option<FreshCounts>,
    attachments: Attachments,
    control: control::Server,
    nbd: nbd::ServerThread,
    reporter: Reporter,
    files: Files,
    exports: Exports,
    uris: Arc<Uris>,
    devices: Vec<Arc<Device>>,
    about: About,
    home: Arc<Home>,
    plan: &'a DaemonPlan,
}

impl<'a> Worker<'a> {
    /// Serves these devices: as files, over NBD, to control clients.
    fn start(held: &'a Held, start: Start, sender: Sender<Order>) -> Result<Worker<'a>> {
        let Start { home, attendant, devices, has_started, mut protection, is_confined, on_files_served } =
            start;
        let plan = &held.plan;
        let recorder = Arc::new(Recorder::resume(held.dir.descriptor()?, &plan.runtime_dir)?);
        let all: Vec<_> = devices.iter().map(|(device, _)| Arc::clone(device)).collect();
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
        let no_nbd = || "cannot serve NBD";
        let server = nbd::Server::on(&held.nbd, plan.nbd.clone(), exports.clone());
        let server = server.context(no_nbd)?;
        let (uris, clients) = (Arc::new(uris(server.endpoints(), exports.clone())), server.clients());
        let no_thread = || "cannot start a thread";
        let reporter = Reporter::start(exports.clone(), clients.clone(), Arc::clone(&held.lives));
        let reporter = reporter.context(no_thread)?;
        let nbd = server.spawn().context(no_nbd)?;
        // From here on this process binds no socket, mounts nothing and runs no program.
        if !is_confined {
            let backings = all.iter().filter_map(|device| device.backing());
            protection.extend(confine(&needs(held, backings.map(|backing| backing.name().to_owned()))));
        }
        let about = About {
            pid: home.survival().holder_pid,
            files: files.mount.as_ref().map(FilesJson::from),
            ends_with_swap: plan.ends_with_swap,
            protection,
            attach_refused: plan.attach_refused(),
            survival: None,
        };
        let uris_of = Arc::clone(&uris);
        let api = Api {
            tls: plan.nbd.tls.clone(),
            admission: Box::new(room::check),
            clients,
            registrar: Some(Arc::new(Registry(Arc::clone(&home)))),
            ..Api::new(exports.clone(), Box::new(move |name| uris_of(name)), about.clone())
        };
        let no_control = || "cannot serve the control API";
        let control = control::Server::start(
            held.control.try_clone().context(no_control)?,
            api,
            // An error means that the daemon is ending already.
            move |ending| _ = sender.send(Order::End(End::Client { force: ending == Ending::Forced })),
        );
        let control = control.context(no_control)?;
        let attachments = Attachments::new(exports.clone(), recorder, attendant);
        let fresh_counts = plan.swaps().then(|| FreshCounts::start(swapped_to(plan, &all))).transpose();
        let _fresh_counts = fresh_counts.context(no_thread)?;
        if plan.is_protected() {
            touch_heap();
        }
        let devices = all;
        Ok(Worker {
            _fresh_counts,
            attachments,
            control,
            nbd,
            reporter,
            files,
            exports,
            uris,
            devices,
            about,
            home,
            plan,
        })
    }

    /// Attaches what is planned to be; returns what to print when that is done.
    fn attach_planned(&mut self) -> Result<String> {
        let warnings = warnings(self.plan, &self.devices);
        warnings.iter().for_each(|line| tracing::warn!("{line}"));
        // What the worker before began to attach may still be on its way.
        self.home.ask(&Request::Settle, &[]).context(|| "the holder")?;
        self.plan.devices.iter().try_for_each(|device| self.attachments.attach(device))?;
        let started = Started {
            exports: self.devices.iter().flat_map(|device| (self.uris)(device.name())).collect(),
            control_socket: socket_path(&self.plan.runtime_dir, CONTROL_SOCKET)?,
            files: self.about.files.clone(),
            warnings: all_warnings(&self.about, warnings),
            devices: self.devices.iter().zip(&self.plan.devices).map(StartedDevice::from).collect(),
            attached: self.attachments.all(),
        };
        output::rendered(&started, Started::text)
    }

    /// Tells that the devices are served: the holder, and the user, for the first time. The holder first: it
    /// takes the death of a process that it has not heard of for a failed start, and who reads the text may
    /// send a request that kills.
    fn announce(&self, text: Option<String>) -> Result<()> {
        let name = self.plan.devices.first().map(|device| device.name.clone()).unwrap_or_default();
        let (uris, block_device) = ((self.uris)(&name), self.attachments.device(&name));
        let address = Address { uris, block_device, name };
        let status = format!("serving {} devices", self.devices.len());
        let (for_user, for_terminal) = match text {
            // Standard output belongs to the command, which the holder starts.
            Some(text) if self.plan.exec.is_some() => (None, Some(text)),
            text => (text, None),
        };
        for_terminal.iter().for_each(|text| live::note(text));
        self.home.ask(&Request::Serving(Served { status, address }), &[]).context(|| "the holder")?;
        // Serve even if standard output is closed.
        for_user.iter().for_each(|text| drop(print(text)));
        Ok(())
    }

    /// Waits until the command has ended, which the holder runs. Requests to end go to the command.
    fn wait_for_command(&self, orders: &Receiver<Order>) {
        while let Ok(order) = orders.recv() {
            match order {
                Order::CommandEnded => return,
                Order::End(_) | Order::Interrupt => {
                    if let Err(error) = self.home.ask(&Request::EndCommand, &[]) {
                        tracing::warn!(%error, "cannot signal the command");
                    }
                }
                // These do not come here: see `Home::listen`.
                Order::Device(_) | Order::Forget { .. } | Order::Reload => {}
            }
        }
    }

    /// Waits for an order that ends the daemon, with a live line on a terminal.
    fn wait_for_end(&self, orders: &Receiver<Order>) -> Ending {
        let stats = || self.exports.devices().iter().map(|device| device.stats()).sum();
        let mut live = LiveLine::new(stats());
        let mut asked = None;
        let end = loop {
            let order = match &mut live {
                Some(live) => {
                    live.draw(stats());
                    orders.recv_timeout(LiveLine::PERIOD)
                }
                None => orders.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            match order {
                Ok(Order::Interrupt) if !asks_again(&self.exports, &mut asked) => {
                    let end = End::Signal(libc::SIGINT);
                    // If the holder does not hear of it and this process dies, the next one goes on.
                    let _ = self.home.ask(&Request::WillEnd(end), &[]);
                    break end;
                }
                Ok(Order::End(end)) => break end,
                Ok(Order::CommandEnded) | Err(RecvTimeoutError::Disconnected) => return Ending::WhenFree,
                Ok(Order::Interrupt | Order::Device(_) | Order::Forget { .. } | Order::Reload)
                | Err(RecvTimeoutError::Timeout) => {}
            }
        };
        drop(live);
        match end {
            End::Signal(signal) => {
                let signal = if signal == libc::SIGINT { Signal::INT } else { Signal::TERM };
                tracing::info!(?signal, "ending");
                Ending::WhenFree
            }
            End::Client { force } => {
                tracing::info!("ending, as a control client asks");
                if force { Ending::Forced } else { Ending::WhenFree }
            }
        }
    }

    /// Detaches all devices, and waits until no process uses a device's file, as the contents are lost
    /// afterwards. If forced, waits only for swap areas: without them programs would be killed.
    fn let_go(&mut self, mut ending: Ending, orders: &Receiver<Order>) {
        // If the holder cannot be told, the service manager's line is old.
        let tell = |home: &Home, status: &str| drop(home.ask(&Request::Status(status.to_owned()), &[]));
        loop {
            tell(&self.home, "detaching what is attached");
            let Err(why) = self.attachments.detach().map_err(Failure::into_line) else { break };
            let has_swap = self.attachments.have_swap();
            if ending == Ending::Forced && !has_swap {
                tracing::warn!("{why}; ending anyway, as --force was given");
                break;
            }
            // A process may end meanwhile and free memory or a file.
            let force = if has_swap { "" } else { "; `uzram down --force` ends it all the same" };
            tracing::error!("not ending yet: {why} (tried again every {} s{force})", RETRY.as_secs());
            tell(&self.home, &format!("not ending yet: {why}"));
            if let Ok(Order::End(End::Client { force: true })) = orders.recv_timeout(RETRY) {
                ending = Ending::Forced;
            }
        }
        tell(&self.home, "giving memory back");
    }

    /// Stops the servers, and gives back what is elsewhere.
    fn end(self) {
        let Worker { files, nbd, control, reporter, exports, .. } = self;
        // Whoever still reads is told that the server ends, before pages are gone.
        drop((files, nbd, control, reporter));
        // What is in stores on other machines would stay there.
        exports.devices().iter().for_each(|device| device.erase_backing());
    }
}

/// Returns the URIs of a device; none if it is not exported now.
type Uris = dyn Fn(&str) -> Vec<String> + Send + Sync;

fn uris(endpoints: Vec<nbd::Endpoint>, exports: Exports) -> impl Fn(&str) -> Vec<String> + Send + Sync {
    move |name| {
        let is_exported = exports.exported().iter().any(|other| other == name);
        let serving = endpoints.iter().filter(|endpoint| is_exported && endpoint.serves(name));
        serving.map(|endpoint| endpoint.uri(name)).collect()
    }
}

fn swapped_to(plan: &DaemonPlan, all: &[Arc<Device>]) -> Vec<Arc<Device>> {
    let is_swap = |device: &&Arc<Device>| {
        plan.devices.iter().any(|planned| planned.is_swap() && planned.name == device.name())
    };
    all.iter().filter(is_swap).cloned().collect()
}

/// Makes the devices of the plan that are not there yet.
fn make(plan: &DaemonPlan, home: &Arc<Home>, devices: &mut Vec<Exported>) -> Result<()> {
    for planned in &plan.devices {
        if devices.iter().any(|(device, _)| device.name() == planned.name && device.size_bytes() > 0) {
            continue;
        }
        devices.retain(|(device, _)| device.name() != planned.name);
        let policy = planned.export_policy();
        let added = Request::Added { name: planned.name.clone(), policy };
        home.ask(&added, &[]).context(|| "the holder")?;
        devices.push((planned.make(home.keeper())?, policy));
    }
    let all: Vec<_> = devices.iter().map(|(device, _)| Arc::clone(device)).collect();
    Ok(room::check(&all)?)
}

fn warnings(plan: &DaemonPlan, all: &[Arc<Device>]) -> Vec<String> {
    let memory = machine_memory::read().ok();
    let room = memory.and_then(|memory| {
        room::swap_warning(&swapped_to(plan, all), &memory).or_else(|| room::fixed_warning(all, &memory))
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
        runs_programs: has_files && !rustix::process::geteuid().is_root(),
    }
}

/// The mount of the devices' files, if any. Dropping it first interrupts long operations of the devices:
/// unmounting would wait for a process that started one by writing to an attribute's file.
struct Files {
    mount: Option<fuse::Mount>,
    exports: Exports,
}

impl Drop for Files {
    fn drop(&mut self) {
        self.exports.devices().iter().for_each(|device| device.interrupt());
    }
}

/// Returns whether ^C has to be pressed again, and says so, if NBD clients are connected: what they wrote
/// would be lost. Other users of a device keep the daemon from ending. `asked` is when it was said last.
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
