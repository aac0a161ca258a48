//! What the daemon's main thread waits for, and the threads that turn signals into it.

use std::sync::mpsc::{self, Sender, SyncSender};
use std::thread;

use rustix::process::Signal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithRawSiginfo;
use uzram_serve::control::Ending;
use uzram_serve::nbd;

use crate::system::interrupts::is_ignored;

/// Something the main thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// One of those by which it is told to end.
    Signal {
        /// Which.
        signal: Signal,
        /// Sent by the kernel, which means from the terminal, to its whole foreground group.
        from_terminal: bool,
    },
    /// A control client asks the daemon to end.
    Shutdown(Ending),
    /// The command of `--exec` has ended.
    CommandEnded,
}

/// Turns what tells a daemon to end into events, from now on and for the rest of the process's life: also that its
/// terminal is gone, unless it was started to outlive that (nohup(1)). Ended by it, it would leave what is attached.
///
/// With `reloads`, that is told of SIGHUP, which then does not end it.
pub fn watch_signals(events: Sender<Event>, reloads: Option<SyncSender<()>>) -> std::io::Result<()> {
    let hang_up = (reloads.is_some() || !is_ignored(SIGHUP)).then_some(SIGHUP);
    let signals = [SIGINT, SIGTERM, SIGQUIT].into_iter().chain(hang_up);
    let mut signals = SignalsInfo::<WithRawSiginfo>::new(signals)?;
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for info in signals.forever() {
            if let (SIGHUP, Some(reloads)) = (info.si_signo, &reloads) {
                // Where one waits to be done, it does for this one, too.
                let _ = reloads.try_send(());
                continue;
            }
            let signal = if info.si_signo == SIGINT { Signal::INT } else { Signal::TERM };
            // Positive codes are the kernel's own, sigaction(2); processes send 0 or less.
            if events.send(Event::Signal { signal, from_terminal: info.si_code > 0 }).is_err() {
                return;
            }
        }
    })?;
    Ok(())
}

/// Starts a thread that reads the files of TLS again each time it is told to. Reading may take long, and whoever tells
/// it to goes on meanwhile.
pub fn start_reloads(tls: Option<nbd::Tls>) -> std::io::Result<SyncSender<()>> {
    let (sender, reloads) = mpsc::sync_channel(1);
    thread::Builder::new().name("reload".to_owned()).spawn(move || {
        for () in reloads {
            // What came of it is in the log.
            let _ = nbd::reload_tls(tls.as_ref());
        }
    })?;
    Ok(sender)
}
