//! The pager and the keeper of the program that executed this one: they end soon after, and are children of
//! this process, which does not know of them. So they are waited for here. A variable of the environment
//! tells their ids, in place: it has the ids of a program's own pager from its start on, and exec(2) passes
//! it on.

use core::ffi::CStr;
use core::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::control::{Control, PREFIX};
use crate::sys::{self, nr};

pub const NAME: &[u8] = b"PROCESSES=";
const DIGITS: usize = 10;
/// The name, two numbers with a comma between, and the end.
pub const SETTING_BYTES: usize = NAME.len() + 2 * (DIGITS + 1);
/// How long they may take, in steps of a millisecond.
const STEPS: usize = 50;

/// Where the digits are; 0 if nowhere.
static PLACE: AtomicUsize = AtomicUsize::new(0);

/// Waits for those whose ids a variable tells, if they are children of this process.
pub fn reap(variable: Option<&CStr>) {
    const P_PID: usize = 1;
    const WNOHANG: usize = 1;
    const WEXITED: usize = 4;
    const WALL: usize = 0x4000_0000;
    let Some(variable) = variable else { return };
    PLACE.store(variable.as_ptr() as usize + PREFIX.len() + NAME.len(), Relaxed);
    for nth in 0..2 {
        let digits = &variable.to_bytes()[PREFIX.len() + NAME.len() + nth * (DIGITS + 1)..][..DIGITS];
        let id = digits.iter().fold(0usize, |id, digit| id * 10 + usize::from(digit.wrapping_sub(b'0') % 10));
        for _ in 0..STEPS {
            let mut info = [0u32; 32];
            let arguments = [P_PID, id, info.as_mut_ptr() as usize, WNOHANG | WEXITED | WALL, 0];
            // SAFETY: the kernel writes to the room that it is given.
            if id == 0 || unsafe { sys::call(nr::WAITID, arguments) }.is_err() || info[0] != 0 {
                break;
            }
            sys::sleep_ms(1);
        }
    }
}

/// Notes the ids of this process's own.
pub fn note(control: &Control) {
    let digits = core::ptr::with_exposed_provenance_mut::<u8>(PLACE.load(Relaxed));
    // A program may have put other text there, as for its title.
    // SAFETY: the strings of the environment that a program starts with stay mapped, on its stack.
    let is_there = |(nth, byte): (usize, &u8)| unsafe { *digits.sub(nth + 1) } == *byte;
    if digits.is_null() || !NAME.iter().rev().enumerate().all(is_there) {
        return;
    }
    for (nth, id) in [&control.pager, &control.keeper].into_iter().enumerate() {
        let mut id = id.load(Relaxed).cast_unsigned();
        for at in (0..DIGITS).rev() {
            // SAFETY: as above.
            unsafe { *digits.add(nth * (DIGITS + 1) + at) = b'0' + (id % 10) as u8 };
            id /= 10;
        }
    }
}
