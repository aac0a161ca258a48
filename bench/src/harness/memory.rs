//! Whether the machine has the memory that a measurement takes, and how much a process has.

use uzram::units::format_size;
use uzram::{Result, machine_memory};
use uzram_cli::process_status::status_field;

/// Returns the sum of fields of `/proc/PROCESS/FILE` that are in kB, in bytes; `None` without such a process
/// or field.
pub fn proc_bytes(process: &str, file: &str, fields: &[&str]) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{process}/{file}")).ok()?;
    let bytes =
        |name: &&str| Some(status_field(&text, name)?.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10);
    fields.iter().map(bytes).sum()
}

/// Returns the number on the line of a text that begins with a name.
pub(crate) fn named_count(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

/// Returns why `needed_bytes` of memory are not to be had now, in words; `None` if they are.
pub fn lack_of_memory(needed_bytes: u64) -> Result<Option<String>> {
    let available_bytes = machine_memory::available_bytes()?.min(machine_memory::read()?.limit_bytes);
    Ok((needed_bytes > available_bytes).then(|| {
        let (needed, available) = (format_size(needed_bytes), format_size(available_bytes));
        format!("it takes {needed} of memory, and {available} is available")
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_added_up() {
        let of = |fields| proc_bytes("self", "status", fields);
        assert!(of(&["RssAnon"]).unwrap() > 0 && of(&["RssAnon", "RssFile"]) > of(&["RssAnon"]));
        assert_eq!((of(&["Name"]), of(&["RssAnon", "Nothing"])), (None, None));
        assert!(proc_bytes("self", "smaps_rollup", &["Private_Dirty"]).unwrap() > 0);
        assert_eq!(proc_bytes("0", "status", &[]), None);
    }

    #[test]
    fn a_count_is_found_by_its_whole_name() {
        let text = "cache 1\nswapcached 4096\nswap 8192\ntotal_swap 5\n";
        assert_eq!(
            ["swap", "swapcached", "rss"].map(|name| named_count(text, name)),
            [Some(8192), Some(4096), None]
        );
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
