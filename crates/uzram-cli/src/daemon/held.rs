//! What a daemon holds as long as it exists, whichever of its processes serves: locks, sockets, the
//! connection of its files.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;

use uzram::check_file_size;
use uzram::machine_memory;
use uzram::mem::keep_memory_out_of_swap;
use uzram_serve::control::MeasureJson;
use uzram_serve::record::{MountRecord, Recorder};
use uzram_serve::{fuse, nbd};

use crate::client::attach::require_root;
use crate::config::plan::{Attached, Charging, DaemonPlan};
use crate::daemon::attendant::Attendant;
use crate::daemon::confine::hide;
use crate::daemon::survive::handover::{Number, State};
use crate::daemon::survive::lives::Lives;
use crate::failure::{Context, Failure, Result};
use crate::system::descriptors;
use crate::system::protect::{self, measure, protect};
use crate::system::runtime_dir::RuntimeDir;

/// No lock, record or table of a daemon is longer; what its devices need is checked when they are made.
const OWN_FILES_BYTES: u64 = 1 << 20;

/// Dropping it unmounts, removes the sockets and gives the directory free.
pub struct Held {
    pub plan: DaemonPlan,
    /// What protects this process; those that it forks repeat some of it ([`Held::protect`]).
    pub protection: Vec<MeasureJson>,
    pub connection: Option<Arc<fuse::Connection>>,
    /// Connections that failed, of files that other programs may still have open.
    pub failed: Vec<Arc<fuse::Connection>>,
    pub lives: Arc<Lives>,
    pub ledger: Arc<fuse::Ledger>,
    pub nbd: nbd::Sockets,
    pub control: UnixListener,
    pub dir: RuntimeDir,
}

impl Held {
    /// Takes everything that a plan needs: nothing of it can fail later.
    pub fn claim(plan: DaemonPlan) -> Result<Held> {
        plan.check()?;
        check_file_size("a daemon's lock, records and tables: one", OWN_FILES_BYTES)?;
        let mut protection = Held::protect(&plan);
        if plan.swaps() && plan.survives {
            protection.push(stay_out_of_swap());
        }
        plan.left_out.iter().for_each(|line| tracing::info!("{line}"));
        if plan.devices.iter().any(|device| device.attached != Attached::No) {
            require_root()?;
        }
        let mut dir = RuntimeDir::claim(plan.runtime_dir.clone())?;
        let recorder = Recorder::start(dir.descriptor()?, &plan.runtime_dir)?;
        descriptors::allow(plan.nbd.descriptors());
        let nbd = nbd::Sockets::bind(&plan.nbd.listen).context(|| "cannot serve NBD")?;
        let ledger = fuse::Ledger::new()?;
        let lives = Lives::new().context(|| "cannot share memory")?;
        let lives = Arc::new(lives);
        let control = dir.bind()?;
        let mounted =
            plan.mount_dir().map(|mount_dir| mount(&mount_dir, &plan, plan.mount_options(), &recorder));
        let mounted = mounted.transpose()?;
        let connection = mounted.map(Arc::new);
        let ledger = Arc::new(ledger);
        Ok(Held { plan, protection, connection, failed: Vec::new(), lives, ledger, nbd, control, dir })
    }

    /// Takes what another program of this process left.
    ///
    /// # Safety
    /// As [`Number::take`].
    pub unsafe fn adopt(plan: DaemonPlan, state: &State) -> Result<Held> {
        let what = || "cannot take over from the program before";
        // The options of its files depend on it.
        let plan = DaemonPlan { charging: state.charging.clone(), ..plan };
        if plan.swaps() {
            stay_out_of_swap();
        }
        // SAFETY: the caller's promise.
        let take = |number: &Number| unsafe { number.take() }.context(what);
        let [dir, lock] = state.dir.each_ref().map(take);
        let nbd = state.nbd.iter().map(take).collect::<Result<Vec<_>>>()?;
        let [lives, ledger] = state.shared.each_ref().map(take);
        let connection = match &state.connection {
            Some((record, numbers)) => {
                let fds = numbers.iter().map(take).collect::<Result<Vec<_>>>()?;
                Some(Arc::new(fuse::Connection::from_parts(record.clone(), fds)?))
            }
            None => None,
        };
        Ok(Held {
            connection,
            failed: Vec::new(),
            lives: Arc::new(Lives::from_fd(lives?).context(what)?),
            ledger: Arc::new(fuse::Ledger::from_fd(ledger?)?),
            nbd: nbd::Sockets::adopt(&plan.nbd.listen, nbd)?,
            control: take(&state.control)?.into(),
            dir: RuntimeDir::adopt(plan.runtime_dir.clone(), dir?, lock?),
            protection: state.protection.clone(),
            plan,
        })
    }

    /// Fails all requests for files, now and later, as far as this process can.
    pub fn fail_files(&mut self) -> Result<()> {
        match self.connection.as_mut().and_then(Arc::get_mut) {
            Some(connection) => Ok(connection.abort()?),
            None => Ok(()),
        }
    }

    /// Returns the connection of the files, if they can be served.
    pub fn served(&self) -> Option<&Arc<fuse::Connection>> {
        self.connection.as_ref().filter(|connection| !connection.is_aborted())
    }

    /// Makes a new connection for files, on another directory, in the place of one that failed.
    pub fn recover(&mut self) -> Result<()> {
        let Some(failed) = &self.connection else { return Err(Failure::line("this daemon shows no files")) };
        let mut dir = failed.dir().as_os_str().to_owned();
        dir.push(".recovered");
        let ledger = fuse::Ledger::new()?;
        let recorder = Recorder::resume(self.dir.descriptor()?, &self.plan.runtime_dir)?;
        let connection = mount(Path::new(&dir), &self.plan, *failed.options(), &recorder)?;
        self.failed.extend(self.connection.replace(Arc::new(connection)));
        self.ledger = Arc::new(ledger);
        Ok(())
    }

    /// Starts a process that attaches and detaches, if the daemon is root's and shows files.
    pub fn attendant(&self) -> Result<Option<Attendant>> {
        let is_needed = self.connection.is_some() && rustix::process::geteuid().is_root();
        let attendant = is_needed.then(|| Attendant::start(&self.plan.runtime_dir)).transpose();
        attendant.context(|| "cannot start the process that attaches and detaches")
    }

    /// Protects this process for a plan, before it starts threads: they inherit it. Returns the outcome of
    /// each measure.
    pub fn protect(plan: &DaemonPlan) -> Vec<MeasureJson> {
        let mut protection = if plan.is_protected() {
            protect()
        } else if plan.mount_dir().is_some() && machine_memory::version_1_limit().is_some() {
            vec![protect::become_io_flusher()]
        } else {
            Vec::new()
        };
        let charged = |refused| measure("memory charged in advance", refused);
        match &plan.charging {
            Charging::AsUsed => {}
            Charging::InAdvance => protection.push(charged(None)),
            Charging::Unsafe(why) => protection.push(charged(Some(why.clone()))),
        }
        if plan.swaps() || plan.nbd.tls.is_some() {
            protection.push(hide());
        }
        protection
    }
}

/// Mounts the files on `dir`, and records that. After a failure nothing is mounted.
fn mount(
    dir: &Path,
    plan: &DaemonPlan,
    options: fuse::MountOptions,
    recorder: &Recorder,
) -> Result<fuse::Connection> {
    let mut connection = fuse::Connection::mount(dir, &plan.runtime_dir, options)?;
    let mut prepare = || {
        if plan.survives {
            connection.outlives()?;
        }
        recorder.set_mount(MountRecord { dir: connection.dir().to_owned(), identity: connection.identity() })
    };
    if let Err(error) = prepare() {
        // The first failure is the one to report.
        let _ = connection.unmount();
        return Err(error.into());
    }
    Ok(connection)
}

/// Has the memory that outlives processes never be swapped out: it would come back only through a swap area
/// that is in it.
fn stay_out_of_swap() -> MeasureJson {
    measure("contents kept out of swap", keep_memory_out_of_swap().err().map(|error| error.to_string()))
}

impl Drop for Held {
    /// Unmounts what no process serves any more.
    fn drop(&mut self) {
        if self.connection.is_none() {
            return;
        }
        for connection in self.failed.iter().chain(&self.connection) {
            if let Err(error) = connection.unmount() {
                tracing::warn!("{error}");
            }
        }
        // Removes the record of the mount, if that is gone.
        if let Ok(dir) = self.dir.descriptor() {
            drop(Recorder::resume(dir, &self.plan.runtime_dir));
        }
    }
}
