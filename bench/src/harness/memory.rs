//! Whether the machine has the memory that a measurement takes, and how much a process has.

use uzram::units::format_size;
use uzram::{Result, machine_memory};
use uzram_cli::process_status::status_field;

/// Returns the sum of fields of `/proc/PROCESS/status` that are in kB, in bytes; `None` without such a process or field.
pub fn status_bytes(process: &str, fields: &[&str]) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let bytes =
        |name: &&str| Some(status_field(&status, name)?.strip_suffix(" kB")?.parse::<u64>().ok()? << 10);
    fields.iter().map(bytes).sum()
}

/// Returns why `needed_bytes` of memory are not to be had now, in words; `None` if they are.
///
/// # Errors
/// The system does not tell how much there is.
pub fn lack_of_memory(needed_bytes: u64) -> Result<Option<String>> {
    let available_bytes = machine_memory::available_bytes()?.min(machine_memory::read()?.limit_bytes);
    Ok((needed_bytes > available_bytes).then(|| {
        let (needed, available) = (format_size(needed_bytes), format_size(available_bytes));
        format!("it takes {needed} of memory, and {available} is available")
    }))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn fields_are_added_up() {
        let of = |fields| status_bytes("self", fields);
        assert!(of(&["RssAnon"]).unwrap() > 0 && of(&["RssAnon", "RssFile"]) > of(&["RssAnon"]));
        assert_eq!((of(&["Name"]), of(&["RssAnon", "Nothing"]), status_bytes("0", &[])), (None, None, None));
    }

    #[test]
    fn what_is_too_much_is_said() {
        assert_eq!(lack_of_memory(1).unwrap(), None);
        let said = lack_of_memory(1 << 60).unwrap().unwrap();
        assert!(
            said.starts_with("it takes 1048576 TiB of memory, and ") && said.ends_with(" is available"),
            "{said}"
        );
    }
}
