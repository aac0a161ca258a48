//! Users and groups of the machine, by name or number, and permissions as people write them.

use std::ffi::CString;
use std::ptr;

/// The most bytes of what the system knows of a user or group: groups may have many members.
const MAX_ENTRY_BYTES: usize = 1 << 20;

/// The number of a user.
///
/// # Errors
/// The system knows none of that name.
pub fn parse_user(text: &str) -> Result<u32, String> {
    number_of(text, "user", |name, buffer| {
        // SAFETY: a structure of numbers and addresses that may be null.
        let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
        let (mut found, len) = (ptr::null_mut(), buffer.len());
        // SAFETY: the name ends with a zero, the buffer has `len` bytes, and all live through the call.
        let errno = unsafe {
            libc::getpwnam_r(name.as_ptr(), &raw mut entry, buffer.as_mut_ptr().cast(), len, &raw mut found)
        };
        (errno, (!found.is_null()).then_some(entry.pw_uid))
    })
}

/// The number of a group.
///
/// # Errors
/// The system knows none of that name.
pub fn parse_group(text: &str) -> Result<u32, String> {
    number_of(text, "group", |name, buffer| {
        // SAFETY: a structure of numbers and addresses that may be null.
        let mut entry: libc::group = unsafe { std::mem::zeroed() };
        let (mut found, len) = (ptr::null_mut(), buffer.len());
        // SAFETY: the name ends with a zero, the buffer has `len` bytes, and all live through the call.
        let errno = unsafe {
            libc::getgrnam_r(name.as_ptr(), &raw mut entry, buffer.as_mut_ptr().cast(), len, &raw mut found)
        };
        (errno, (!found.is_null()).then_some(entry.gr_gid))
    })
}

/// Permissions in octal digits, as in 0660.
///
/// # Errors
/// They are none.
pub fn parse_mode(text: &str) -> Result<u32, String> {
    let digits = (1..=4).contains(&text.len()) && text.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| digits && *mode <= 0o777);
    mode.ok_or_else(|| "write permissions in octal, from 0000 to 0777, as in 0660".to_owned())
}

/// A number as it is, or that of a name by `look_up`: an errno, and the number if there is one.
fn number_of(
    text: &str,
    what: &str,
    look_up: impl Fn(&CString, &mut [u8]) -> (i32, Option<u32>),
) -> Result<u32, String> {
    let unknown = || format!("there is no {what} '{text}'");
    if text.bytes().all(|byte| byte.is_ascii_digit()) {
        // The last one means nobody, chown(2).
        return text.parse().ok().filter(|number| *number != u32::MAX).ok_or_else(unknown);
    }
    let name = CString::new(text).map_err(|_| unknown())?;
    let mut buffer = vec![0; 4096];
    loop {
        match look_up(&name, &mut buffer) {
            (libc::ERANGE, _) if buffer.len() < MAX_ENTRY_BYTES => buffer.resize(2 * buffer.len(), 0),
            (libc::EINTR, _) => {}
            (_, Some(number)) => return Ok(number),
            _ => return Err(unknown()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_are_understood() {
        assert_eq!((parse_user("root"), parse_group("root")), (Ok(0), Ok(0)));
        assert_eq!((parse_user("65534"), parse_group("65534")), (Ok(65534), Ok(65534)));
        for text in ["", "no such", "-1", "4294967295", "4294967296", "a\0b"] {
            assert_eq!(parse_user(text), Err(format!("there is no user '{text}'")));
            assert_eq!(parse_group(text), Err(format!("there is no group '{text}'")));
        }
    }

    #[test]
    fn permissions_are_octal() {
        for (text, mode) in [("0660", 0o660), ("660", 0o660), ("0777", 0o777), ("0", 0)] {
            assert_eq!(parse_mode(text), Ok(mode));
        }
        for text in ["", "0o660", "888", "1777", "01777", "rw", "+66", "-1", "00660"] {
            assert!(parse_mode(text).is_err(), "{text}");
        }
    }
}
