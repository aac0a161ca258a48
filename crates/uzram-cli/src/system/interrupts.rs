//! ^C during an operation that needs an orderly end.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::flag;

use crate::failure::{Context, Result};

/// While this exists, the first SIGINT is only recorded, for [`Interrupts::came`]. It interrupts only system
/// calls that are never restarted (swapoff(2), or a read with a time-out: `SA_RESTART`, signal(7)). A second
/// one kills the process.
pub struct Interrupts(Arc<AtomicBool>);

impl Interrupts {
    /// Installs the signal handler, unless SIGINT is ignored.
    pub fn catch() -> Result<Interrupts> {
        let interrupts = Interrupts(Arc::default());
        if !is_ignored(SIGINT) {
            // In this order: handlers run in order of registration, so the first takes the default action
            // only from the second signal on.
            flag::register_conditional_default(SIGINT, Arc::clone(&interrupts.0))
                .and_then(|_| flag::register(SIGINT, Arc::clone(&interrupts.0)))
                .context(|| "cannot handle signals")?;
        }
        Ok(interrupts)
    }

    /// Returns one that handles no signal, for tests.
    #[cfg(test)]
    pub fn pretend(came: bool) -> Interrupts {
        Interrupts(Arc::new(AtomicBool::new(came)))
    }

    pub fn came(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for Interrupts {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Makes a write beyond RLIMIT_FSIZE fail with EFBIG: SIGXFSZ would kill this process. Programs that it
/// starts are killed as usual: handlers are not inherited.
pub fn catch_size_limit() -> io::Result<()> {
    if !is_ignored(libc::SIGXFSZ) {
        // SAFETY: the handler does nothing.
        unsafe { signal_hook::low_level::register(libc::SIGXFSZ, || {}) }?;
    }
    Ok(())
}

pub const ENDING_SIGNALS: [i32; 4] = [SIGINT, SIGTERM, SIGQUIT, SIGHUP];

fn no_signals() -> libc::sigset_t {
    // SAFETY: a set of zeros is valid.
    let mut none: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is valid; the call is async-signal-safe.
    unsafe { libc::sigemptyset(&raw mut none) };
    none
}

/// Has a program start with no signal blocked: it would inherit those that this process reads from a
/// descriptor.
pub fn unblock_signals_of(command: &mut Command) -> &mut Command {
    let unblock = || {
        // SAFETY: the set is valid; the call is async-signal-safe, and the old mask is not asked for.
        unsafe { libc::sigprocmask(libc::SIG_SETMASK, &no_signals(), std::ptr::null_mut()) };
        Ok(())
    };
    // SAFETY: between fork and exec it makes only async-signal-safe calls.
    unsafe { command.pre_exec(unblock) }
}

/// Signals that a process reads from a descriptor.
pub struct SignalFd(OwnedFd);

pub struct Caught {
    pub signal: i32,
    /// Whether the kernel sent it, that is, the terminal to its whole foreground group.
    pub from_kernel: bool,
}

impl SignalFd {
    /// Blocks signals for this thread, and those that it starts, and the processes that it forks, and makes a
    /// descriptor to read them from.
    pub fn new(signals: impl Iterator<Item = i32>) -> io::Result<SignalFd> {
        let mut set = no_signals();
        for signal in signals {
            // SAFETY: the set is valid, and so are the numbers of signals.
            unsafe { libc::sigaddset(&raw mut set, signal) };
        }
        // SAFETY: the set is valid, and the old one is not asked for. Fails only for another operation.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
        // SAFETY: the set is valid.
        let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor, which nothing else has.
        Ok(SignalFd(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub fn next(&self) -> Option<Caught> {
        // SAFETY: all fields are integers: zeros are valid.
        let mut info: libc::signalfd_siginfo = unsafe { std::mem::zeroed() };
        let len = size_of::<libc::signalfd_siginfo>();
        // SAFETY: the kernel writes at most `len` bytes to the struct, which is as long.
        let read = unsafe { libc::read(self.0.as_raw_fd(), (&raw mut info).cast(), len) };
        // Positive codes are the kernel's own, sigaction(2); processes send 0 or less.
        let (signal, from_kernel) = (info.ssi_signo.cast_signed(), info.ssi_code > 0);
        (read == len as isize).then_some(Caught { signal, from_kernel })
    }
}

impl AsFd for SignalFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

pub fn is_ignored(signal: i32) -> bool {
    // SAFETY: all fields of the structure are integers, a bit set and a nullable pointer: zeros are valid.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: with a null new action, the call only writes the current one to `action`, which is valid for
    // that.
    let asked = unsafe { libc::sigaction(signal, std::ptr::null(), &raw mut action) };
    asked == 0 && action.sa_sigaction == libc::SIG_IGN
}
