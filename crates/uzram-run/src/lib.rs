//! The library that `uzram run` has loaded into a program (LD_PRELOAD). It starts the pager as a process of
//! its own in the program's memory, and stands by at forks. It has no libc, exports nothing, and interposes
//! nothing.
//!
//! A start (`start.rs`): the dynamic linker calls `begin`. With a limit in the environment (`settings.rs`),
//! address space is reserved. In it lie the control page ([`control`]), two stacks, the pages of calls, and
//! the image (`image.rs`); the image's own memory follows. Clone(2) starts the image: the memory is shared,
//! and nothing else is. Its end kills the program, as the memory that is away is lost with it.
//!
//! A fork (`fork.rs`): docs/internals/run.md has it step by step.
#![cfg(target_arch = "x86_64")]
#![cfg_attr(uzram_stub, no_std)]
#![cfg_attr(not(uzram_stub), allow(dead_code))]

pub mod control;
mod fork;
mod image;
mod predecessor;
#[cfg(uzram_stub)]
mod runtime;
mod settings;
mod start;
pub mod sys;

#[cfg(uzram_stub)]
mod entry {
    //! What the dynamic linker and libc call.

    use crate::settings::Settings;
    use crate::{fork, predecessor, start};
    use core::arch::{asm, global_asm};
    use core::ffi::{c_char, c_int};
    use core::sync::atomic::Ordering::{Relaxed, Release};

    #[used]
    #[unsafe(link_section = ".init_array")]
    static BEGIN: extern "C" fn(c_int, *const *const c_char, *const *const c_char) = begin;
    #[used]
    #[unsafe(link_section = ".fini_array")]
    static END: extern "C" fn() = end;

    // Symbols of libc which are null where there are none.
    global_asm!(
        ".weak __register_atfork",
        ".weak gnu_get_libc_version",
        ".weak __rseq_offset",
        ".weak environ"
    );

    macro_rules! address_of {
        ($symbol:literal) => {{
            let address: usize;
            // SAFETY: it reads an entry of the table that the dynamic linker has filled.
            unsafe {
                asm!(concat!("mov {}, qword ptr [rip + ", $symbol, "@GOTPCREL]"), out(reg) address,
                     options(nostack, readonly, preserves_flags));
            }
            address
        }};
    }

    extern "C" fn begin(_: c_int, _: *const *const c_char, environment: *const *const c_char) {
        let is_glibc = address_of!("gnu_get_libc_version") != 0;
        let list = match address_of!("environ") as *const *const *const c_char {
            // Other linkers pass no arguments.
            // SAFETY: libc's variable, which is set before libraries begin.
            environ if !is_glibc && !environ.is_null() => unsafe { *environ },
            _ if !is_glibc => return,
            _ => environment,
        };
        // SAFETY: libc's list; no other thread runs that could change it.
        let Some(settings) = (unsafe { Settings::read(list) }) else { return };
        let register = address_of!("__register_atfork");
        if !is_glibc || register == 0 {
            return start::refuse(&settings, Some("the C library of this program is not glibc"));
        }
        let control = start::start(&settings);
        predecessor::reap(settings.processes);
        let Some(control) = control else { return };
        predecessor::note(control);
        if let rseq @ 1.. = address_of!("__rseq_offset") {
            // SAFETY: glibc's constant.
            fork::RSEQ_OFFSET.store(unsafe { *(rseq as *const usize) }, Relaxed);
        }
        fork::CONTROL.store((&raw const *control).cast_mut(), Release);
        type Handler = extern "C" fn();
        // SAFETY: glibc's function, of this type since 2.3; it is what pthread_atfork calls.
        let register: extern "C" fn(Handler, Handler, Handler, *const u8) -> c_int =
            unsafe { core::mem::transmute(register) };
        register(fork::prepare, fork::parent, fork::child, core::ptr::null());
    }

    extern "C" fn end() {
        fork::end();
    }
}
