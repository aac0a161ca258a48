//! The events that the daemon's main thread waits for, and the threads that handle signals.

use std::sync::mpsc::{self, Sender, SyncSender};
use std::thread;

use rustix::process::Signal;
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::iterator::SignalsInfo;
use signal_hook::iterator::exfiltrator::WithRawSiginfo;
use uzram_serve::control::Ending;
use uzram_serve::nbd;

use crate::system::interrupts::is_ignored;

/// An event for the main thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A signal that asks the daemon to end.
    Signal {
        /// The signal.
        signal: Signal,
        /// Whether the kernel sent it, that is, the terminal to its whole foreground group.
        from_terminal: bool,
    },
    /// A control client asks the daemon to end.
    Shutdown(Ending),
    /// The command of `--exec` has ended.
    CommandEnded,
}

/// Turns signals that end a daemon into events, for the rest of the process's life. That includes SIGHUP, unless the
/// daemon was started with it ignored (nohup(1)): its default action would leave devices attached.
///
/// With `reloads`, SIGHUP sends to that channel instead.
pub fn watch_signals(events: Sender<Event>, reloads: Option<SyncSender<()>>) -> std::io::Result<()> {
    let hang_up = (reloads.is_some() || !is_ignored(SIGHUP)).then_some(SIGHUP);
    let signals = [SIGINT, SIGTERM, SIGQUIT].into_iter().chain(hang_up);
    let mut signals = SignalsInfo::<WithRawSiginfo>::new(signals)?;
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for info in signals.forever() {
            if let (SIGHUP, Some(reloads)) = (info.si_signo, &reloads) {
                // If the channel is full, the pending reload serves this request, too.
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

/// Starts a thread that reloads the TLS files on each message. Reading may take long; the sender does not wait for it.
pub fn start_reloads(tls: Option<nbd::Tls>) -> std::io::Result<SyncSender<()>> {
    let (sender, reloads) = mpsc::sync_channel(1);
    thread::Builder::new().name("reload".to_owned()).spawn(move || {
        for () in reloads {
            // The result is in the log.
            let _ = nbd::reload_tls(tls.as_ref());
        }
    })?;
    Ok(sender)
}
