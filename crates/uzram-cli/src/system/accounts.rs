//! Parsing of users and groups, by name or number, and of octal permissions.
//!
//! Names are looked up only in the files of passwd(5) and group(5): for others, a static program would have
//! to load glibc's libraries.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};

/// The longest line that is parsed: groups may have many members.
const MAX_LINE_BYTES: u64 = 1 << 20;

pub fn parse_user(text: &str) -> Result<u32, String> {
    number_of(text, "user", "/etc/passwd")
}

pub fn parse_group(text: &str) -> Result<u32, String> {
    number_of(text, "group", "/etc/group")
}

/// Parses permissions in octal digits, as in 0660.
pub fn parse_mode(text: &str) -> Result<u32, String> {
    let digits = (1..=4).contains(&text.len()) && text.bytes().all(|byte| (b'0'..=b'7').contains(&byte));
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| digits && *mode <= 0o777);
    mode.ok_or_else(|| "write permissions in octal, from 0000 to 0777, as in 0660".to_owned())
}

/// Parses a number, or looks a name up in a file of lines `NAME:PASSWORD:NUMBER:…`.
fn number_of(text: &str, what: &str, path: &str) -> Result<u32, String> {
    // The highest number means "no change", chown(2).
    let is_one = |number: &u32| *number != u32::MAX;
    if text.bytes().all(|byte| byte.is_ascii_digit()) {
        return text.parse().ok().filter(is_one).ok_or_else(|| format!("there is no {what} '{text}'"));
    }
    let file =
        File::open(path).map_err(|error| format!("cannot look up the {what} '{text}' in {path}: {error}"))?;
    find(BufReader::new(file), text)
        .filter(is_one)
        .ok_or_else(|| format!("there is no {what} '{text}' in {path}: write a number for others"))
}

/// Returns the number in the first valid line of that name.
fn find(mut lines: impl BufRead, name: &str) -> Option<u32> {
    let mut line = Vec::new();
    while lines.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line).ok()? > 0 {
        let mut fields = line.split(|byte| *byte == b':');
        if fields.next() == Some(name.as_bytes())
            && let Some(number) = fields.nth(1).and_then(|number| str::from_utf8(number).ok())
            && let Ok(number) = number.trim_end().parse()
        {
            return Some(number);
        }
        line.clear();
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_any_kind_are_looked_through() {
        let file = b"# root:x:7:\nroot\nadm:x\nx\xff:x:1:\nadm:x:4:syslog,me\nadm:x:5:\nlast:x:9";
        for (name, number) in [("adm", Some(4)), ("last", Some(9)), ("root", None), ("x", None), ("", None)] {
            assert_eq!(find(&file[..], name), number, "{name}");
        }
        let long = [&b"many:x:3:"[..], &b"me,".repeat(MAX_LINE_BYTES as usize), b"\nafter:x:6:\n"].concat();
        assert_eq!((find(&long[..], "many"), find(&long[..], "after")), (Some(3), Some(6)));
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
