//! A worker's side of its ties to the holder.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread;

use uzram::device::{Device, Keeper, KeptPart, NamedBacking};
use uzram::sync::Mutex;
use uzram::{Error, ErrorKind, Result};
use uzram_serve::control::{Ending, Registrar, SurvivalJson};
use uzram_serve::{ExportPolicy, nbd};

use super::link::{Answer, End, KeptBacking, Link, Order, Request};
use super::lives::{Lives, Number};

/// What control clients read when the files were given up.
const GAVE_UP: &str = "the processes that served died of the same request for a file; `uzram recover` shows the contents as new files";

pub struct Home {
    /// Held from a request until its answer.
    requests: Mutex<Link>,
    orders: Arc<Link>,
    lives: Arc<Lives>,
    /// Whether the holder keeps the devices' memory.
    keeps: bool,
}

impl Home {
    pub fn new(requests: Link, orders: Arc<Link>, lives: Arc<Lives>, keeps: bool) -> Home {
        Home { requests: Mutex::unordered(requests), orders, lives, keeps }
    }

    /// Returns who keeps a device's memory; `None` if it ends with this process.
    pub fn keeper(self: &Arc<Self>) -> Option<Arc<dyn Keeper>> {
        self.keeps.then(|| Arc::clone(self) as Arc<dyn Keeper>)
    }

    /// Asks the holder; waits for its answer. Does not return if the holder is dead: the kernel kills this
    /// process, too. A caller told of a failure would let go of what it serves.
    pub fn ask(&self, request: &Request, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let requests = self.requests.lock();
        match requests.ask::<Answer>(request, descriptors)? {
            Some(answer) => answer.map_err(io::Error::other),
            None => loop {
                thread::park();
            },
        }
    }

    /// Starts the threads that pass the holder's orders on, and reload the TLS files.
    pub fn listen(self: &Arc<Self>, orders: Sender<Order>, tls: Option<nbd::Tls>) -> io::Result<()> {
        let (reload, reloads) = mpsc::sync_channel(1);
        // Reading may take long: orders do not wait for it. The result is in the log.
        let reloads = move || reloads.into_iter().for_each(|()| _ = nbd::reload_tls(tls.as_ref()));
        thread::Builder::new().name("reload".to_owned()).spawn(reloads)?;
        let home = Arc::clone(self);
        let listen = move || {
            loop {
                match home.orders.receive::<Order>() {
                    // If the channel is full, the pending reload serves this request, too.
                    Ok(Some((Order::Reload, _))) => drop(reload.try_send(())),
                    // For a stand-by, and late.
                    Ok(Some((Order::Device(_) | Order::Forget { .. }, _))) => {}
                    Ok(Some((order, _))) => {
                        if orders.send(order).is_err() {
                            return;
                        }
                    }
                    Err(error) => tracing::error!(%error, "an order of the holder cannot be read"),
                    // The holder is dead, and this process will be in a moment.
                    Ok(None) => return,
                }
            }
        };
        thread::Builder::new().name("orders".to_owned()).spawn(listen)?;
        Ok(())
    }

    pub fn survival(&self) -> SurvivalJson {
        let pid = |number| u32::try_from(self.lives.get(number)).unwrap_or(0);
        let (take_overs, outage_ns) = (self.lives.get(Number::TakeOvers), self.lives.get(Number::OutageNs));
        let standby_pid = Some(pid(Number::StandBy)).filter(|pid| *pid != 0);
        SurvivalJson {
            holder_pid: pid(Number::Holder),
            worker_pid: std::process::id(),
            standby_pid,
            standby_ready: standby_pid == Some(pid(Number::StandByReady)),
            take_overs,
            last_outage_ms: (take_overs > 0).then_some(outage_ns as f64 / 1e6),
            gave_up: (self.lives.get(Number::GaveUp) != 0).then(|| GAVE_UP.to_owned()),
        }
    }
}

fn refused(what: &str, error: &io::Error) -> Error {
    Error::new(ErrorKind::Io, format!("{what}: {error}"))
}

impl Keeper for Home {
    fn keep(&self, device: &str, memory: BorrowedFd<'_>, backing: Option<&NamedBacking>) -> Result<()> {
        let why = "its backing device is none that another process can take over";
        let refused_parts = || Error::new(ErrorKind::Unsupported, why);
        let parts = backing.map(|backing| backing.parts().ok_or_else(refused_parts)).transpose()?;
        let parts = parts.unwrap_or_default();
        let of = |part: &KeptPart<_>| KeptBacking { name: part.name.clone(), len_bytes: part.len_bytes };
        let request = Request::Keep { name: device.to_owned(), backing: parts.iter().map(of).collect() };
        let descriptors: Vec<_> =
            std::iter::once(memory).chain(parts.iter().map(|part| part.descriptor)).collect();
        let asked = self.ask(&request, &descriptors);
        asked.map_err(|error| refused("the holder cannot keep the device's memory", &error))
    }

    fn give_up(&self, device: &str) {
        if let Err(error) = self.ask(&Request::GiveUp { name: device.to_owned() }, &[]) {
            tracing::error!(device, %error, "the holder still keeps the device's memory");
        }
    }
}

pub struct Registry(pub Arc<Home>);

impl Registrar for Registry {
    fn added(&self, device: &Arc<Device>, policy: ExportPolicy) -> Result<()> {
        let name = device.name().to_owned();
        let told = self.0.ask(&Request::Added { name, policy }, &[]);
        told.map_err(|error| refused("the holder refuses the device", &error))?;
        self.0.keeper().map_or(Ok(()), |keeper| device.set_keeper(keeper))
    }

    fn removed(&self, name: &str) {
        if let Err(error) = self.0.ask(&Request::Removed { name: name.to_owned() }, &[]) {
            tracing::error!(device = name, %error, "the holder does not forget the device");
        }
    }

    fn will_end(&self, ending: Ending) {
        if let Err(error) =
            self.0.ask(&Request::WillEnd(End::Client { force: ending == Ending::Forced }), &[])
        {
            tracing::warn!(%error, "the holder does not know that the daemon ends");
        }
    }

    fn leave(&self) -> Result<()> {
        let asked = self.0.ask(&Request::Leave, &[]);
        asked.map_err(|error| Error::new(ErrorKind::Unsupported, error.to_string()))
    }

    fn upgrade(&self, program: Option<&str>) -> Result<()> {
        let asked = self.0.ask(&Request::Upgrade(program.map(Into::into)), &[]);
        asked.map_err(|error| Error::new(ErrorKind::Invalid, error.to_string()).with_setting("program"))
    }

    fn recover(&self) -> Result<()> {
        let asked = self.0.ask(&Request::Recover, &[]);
        asked.map_err(|error| Error::new(ErrorKind::Busy, error.to_string()))
    }

    fn survival(&self) -> SurvivalJson {
        self.0.survival()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn who_asks_a_dead_holder_gets_no_answer() {
        for dies_after_it_reads in [false, true] {
            let (requests, holder) = Link::pair().unwrap();
            let (orders, _holder_orders) = Link::pair().unwrap();
            let home = Home::new(requests, Arc::new(orders), Arc::new(Lives::new().unwrap()), false);
            let (tell, answers) = mpsc::channel();
            // This thread stays parked; in a worker the kernel ends it.
            thread::spawn(move || tell.send(home.ask(&Request::Settle, &[])));
            if dies_after_it_reads {
                holder.receive::<Request>().unwrap();
            }
            drop(holder);
            let answer = answers.recv_timeout(Duration::from_millis(50));
            assert!(matches!(answer, Err(mpsc::RecvTimeoutError::Timeout)), "{answer:?}");
        }
    }
}
