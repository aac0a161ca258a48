//! Statistics of devices, and of programs under `uzram run`, as tables and as JSON.

use std::time::Duration;

use serde_json::{Value, json};
use uzram::device::{BackingState, DeviceStats};
use uzram::units::{format_size, pages_to_bytes};
use uzram_pager::Figures;
use uzram_serve::control::{DeviceJson, MeasureJson};

use crate::system::programs::Program;

/// Formats `stored / memory` with two decimals, or `-` if either is 0.
pub fn ratio(stored_bytes: u64, memory_bytes: u64) -> String {
    if stored_bytes == 0 || memory_bytes == 0 {
        "-".to_owned()
    } else {
        format!("{:.2}", stored_bytes as f64 / memory_bytes as f64)
    }
}

pub fn rows_text<'a>(rows: impl Iterator<Item = (&'a str, String)>) -> String {
    rows.map(|(what, value)| format!("{what:<24} {value}\n")).collect()
}

pub fn protection_rows(protection: &[MeasureJson]) -> impl Iterator<Item = (&str, String)> {
    let done = |measure: &MeasureJson| match &measure.refused {
        None => "yes".to_owned(),
        Some(why) => format!("no: {why}"),
    };
    protection.iter().map(move |measure| (measure.what.as_str(), done(measure)))
}

pub fn per_second(count: u64, elapsed: Duration) -> f64 {
    if elapsed.is_zero() { 0.0 } else { count as f64 / elapsed.as_secs_f64() }
}

pub fn stats_table(name: &str, stats: &DeviceStats) -> String {
    let limit = match stats.mem_limit_bytes {
        0 => "no limit".to_owned(),
        bytes => format!("limit {}", format_size(bytes)),
    };
    let charged = format!("pool, metadata, free pages kept; {limit}");
    let is_backed = stats.backing_bytes > 0;
    let (buffers, compression) = match is_backed {
        true => (", buffers", "stored in memory / compressed"),
        false => ("", "stored / compressed"),
    };
    let [pool_max, fixed] = [stats.mem_used_max_bytes, stats.mem_fixed_bytes].map(format_size);
    let tables = format!("slot table, LRU, streams{buffers}: {fixed} at most; page table");
    let in_memory_bytes = stats.orig_data_bytes.saturating_sub(pages_to_bytes(stats.pages_backed));
    let mut rows = vec![
        ("size", format_size(stats.disksize_bytes), String::new()),
        ("stored", format_size(stats.orig_data_bytes), "pages that hold data, as written".to_owned()),
        ("compressed", format_size(stats.compr_data_bytes), String::new()),
        ("pool memory", format_size(stats.mem_used_bytes), format!("at most {pool_max} so far")),
        ("charged", format_size(stats.mem_charged_bytes), charged),
        ("tables", format_size(stats.mem_tables_bytes), tables),
        (
            "ratio",
            ratio(stats.orig_data_bytes, stats.memory_bytes()),
            "stored / (charged + tables)".to_owned(),
        ),
        ("compression", ratio(in_memory_bytes, stats.compr_data_bytes), compression.to_owned()),
        ("same-filled", pages(stats.same_pages), String::new()),
        ("huge", pages(stats.huge_pages), format!("{} so far", stats.huge_pages_since)),
        ("read", pages(stats.pages_read), failed(stats.failed_reads)),
        ("written", pages(stats.pages_written), failed_writes(stats)),
        ("discarded", pages(stats.notify_free), String::new()),
        ("compacted", pages(stats.pages_compacted), String::new()),
        ("recompressed", pages(stats.pages_recompressed), String::new()),
    ];
    if stats.reserve_bytes > 0 {
        let drained = match stats.reserve_drained {
            0 => String::new(),
            count => format!("; {count} writes found none"),
        };
        let target = format_size(stats.reserve_bytes);
        rows.push(("reserve", format_size(stats.reserve_free_bytes), format!("ready of {target}{drained}")));
    }
    if is_backed {
        rows.extend(backing_rows(stats));
    }
    format!("{name}\n{}", noted_rows(rows))
}

/// Formats figures, each with a note that may be empty, a line each.
fn noted_rows(rows: Vec<(&str, String, String)>) -> String {
    let row = |(what, value, note)| format!("  {what:<12} {value:>14}  {note}").trim_end().to_owned() + "\n";
    rows.into_iter().map(row).collect()
}

fn backing_rows(stats: &DeviceStats) -> [(&'static str, String, String); 3] {
    let (held, all) = (format_size(stats.backing_held_bytes), format_size(stats.backing_bytes));
    let damaged = match stats.backing_corrupted {
        0 => String::new(),
        count => format!("; {count} came back damaged"),
    };
    [
        ("backed", pages(stats.pages_backed), format!("not in memory: {held} of {all}{damaged}")),
        ("written back", pages(stats.pages_written_back), failed(stats.backing_failed_writes)),
        ("returned", pages(stats.pages_returned), failed(stats.backing_failed_reads)),
    ]
}

pub fn device_details(device: &DeviceJson) -> String {
    let uris = device.uris.iter().map(|uri| format!("  served at    {uri}\n"));
    let wrong = device.backing_state.iter().filter(|state| *state != BackingState::Ok.name());
    let wrong = wrong.map(|state| format!("  warning      the backing device is {state}\n"));
    stats_table(&device.name, &device.stats) + &uris.chain(wrong).collect::<String>()
}

/// Formats one line for each device, and one for each further URI.
pub fn device_table(devices: &[DeviceJson]) -> String {
    let mut text =
        format!("{:<12} {:>10} {:>10} {:>10} {:>6}  URI\n", "NAME", "SIZE", "STORED", "USED", "RATIO");
    for DeviceJson { name, uris, stats, .. } in devices {
        let mut uris = uris.iter();
        text += &format!(
            "{name:<12} {:>10} {:>10} {:>10} {:>6}  {}\n",
            format_size(stats.disksize_bytes),
            format_size(stats.orig_data_bytes),
            format_size(stats.memory_bytes()),
            ratio(stats.orig_data_bytes, stats.memory_bytes()),
            uris.next().map_or("-", String::as_str),
        );
        for uri in uris {
            text += &format!("{:52}  {uri}\n", "");
        }
    }
    text
}

pub fn program_table(programs: &[Program]) -> String {
    let mut text = format!(
        "{:>10} {:<16} {:>10} {:>10} {:>10} {:>10} {:>10}\n",
        "PROCESS", "COMMAND", "LIMIT", "IN MEMORY", "COMPRESSED", "TO", "SPILLED"
    );
    for Program { id, command, figures } in programs {
        let sizes =
            [figures.used_bytes, figures.stored_bytes, figures.compressed_bytes, figures.spilled_bytes];
        let [used, stored, compressed, spilled] = sizes.map(|bytes| match figures.runs {
            0 => "-".to_owned(),
            _ => format_size(bytes),
        });
        text += &format!(
            "{id:>10} {command:<16} {:>10} {used:>10} {stored:>10} {compressed:>10} {spilled:>10}\n",
            format_size(figures.limit_bytes),
        );
    }
    text
}

pub fn program_details(program: &Program) -> String {
    let Program { id, command, figures } = program;
    let most = |bytes: u64| format!("at most {} so far", format_size(bytes));
    let mut rows = vec![("limit", format_size(figures.limit_bytes), limit_note(figures))];
    if figures.runs == 0 {
        rows.push(("in memory", "-".to_owned(), "nothing is compressed, or was so far".to_owned()));
    } else {
        let compressed = format!(
            "to {}, ratio {}; at most {} to {} so far",
            format_size(figures.compressed_bytes),
            ratio(figures.stored_bytes, figures.compressed_bytes),
            format_size(figures.stored_max_bytes),
            format_size(figures.compressed_max_bytes),
        );
        let spilled = format!(
            "{}, {} written",
            most(figures.spilled_max_bytes),
            format_size(figures.spill_written_bytes)
        );
        rows.extend([
            ("in memory", format_size(figures.used_bytes), most(figures.used_max_bytes)),
            ("as it is", format_size(figures.resident_bytes), "of that".to_owned()),
            ("compressed", format_size(figures.stored_bytes), compressed),
            ("spilled", format_size(figures.spilled_bytes), spilled),
            ("faults", figures.faults.to_string(), format!("{:.2} s", figures.fault_us as f64 / 1e6)),
        ]);
    }
    format!("process {id} ({command})\n{}", noted_rows(rows))
}

/// Says what limit is in force, if that is another one.
fn limit_note(figures: &Figures) -> String {
    // It is kept in whole pages.
    match figures.limit_bytes.abs_diff(figures.limit_now_bytes) {
        0..4096 => String::new(),
        _ => format!("now {}, by --pressure", format_size(figures.limit_now_bytes)),
    }
}

pub fn program_json(program: &Program) -> Value {
    // What the pager writes is an object.
    let mut json: Value = serde_json::from_str(&program.figures.to_json(program.id)).unwrap_or_default();
    json["command"] = program.command.clone().into();
    json
}

pub fn block_states(text: &str) -> Value {
    let page = |line: &str| {
        let mut words = line.split_whitespace();
        let page: u64 = words.next()?.parse().ok()?;
        let used_at_s: u64 = words.next()?.split('.').next()?.parse().ok()?;
        Some(json!({ "page": page, "used_at_s": used_at_s, "flags": words.next()?.replace('.', "") }))
    };
    text.lines().filter_map(page).collect()
}

fn pages(count: u64) -> String {
    if count == 1 { "1 page".to_owned() } else { format!("{count} pages") }
}

fn failed_writes(stats: &DeviceStats) -> String {
    match stats.limit_refused {
        0 => failed(stats.failed_writes),
        count => format!("{}, {count} of them at the limit", failed(stats.failed_writes)),
    }
}

fn failed(count: u64) -> String {
    format!("{count} failed")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_device_with_a_backing_device_says_what_it_has_there() {
        let rows = ["backed", "written back", "returned"].map(|row| format!("\n  {row} "));
        let text = stats_table("zram0", &DeviceStats::default());
        assert!(rows.iter().all(|row| !text.contains(row)), "{text}");
        let mut stats = DeviceStats::default();
        (stats.orig_data_bytes, stats.compr_data_bytes) = (2010 << 12, 4 << 12);
        (stats.backing_bytes, stats.backing_held_bytes) = (1 << 30, 3 << 20);
        stats.pages_backed = 2000;
        (stats.backing_failed_writes, stats.backing_corrupted) = (5, 1);
        let text = stats_table("zram0", &stats);
        assert!(rows.iter().all(|row| text.contains(row)), "{text}");
        for note in [
            "2000 pages  not in memory: 3 MiB of 1 GiB; 1 came back damaged",
            "5 failed",
            " 2.50  stored in memory",
        ] {
            assert!(text.contains(note), "{text}");
        }
    }

    #[test]
    fn only_a_device_with_a_reserve_says_what_is_left_of_it() {
        let row = |stats: &DeviceStats| {
            let text = stats_table("zram0", stats);
            text.lines().find(|line| line.starts_with("  reserve ")).map(str::to_owned)
        };
        let mut stats = DeviceStats::default();
        assert_eq!(row(&stats), None);
        (stats.reserve_bytes, stats.reserve_free_bytes) = (8 << 20, 10 << 20);
        assert_eq!(row(&stats).as_deref(), Some("  reserve              10 MiB  ready of 8 MiB"));
        (stats.reserve_free_bytes, stats.reserve_drained) = (0, 3);
        let drained = row(&stats);
        assert!(drained.is_some_and(|row| row.ends_with("ready of 8 MiB; 3 writes found none")));
    }

    fn program(figures: Figures) -> Program {
        Program { id: 17, command: "hungry".to_owned(), figures }
    }

    #[test]
    fn any_figures_can_be_shown() {
        let most = program_json(&program(Figures::default()));
        let names = most.as_object().map(|object| object.len());
        assert_eq!(names, Some(Figures::default().all().count() + 1));
        let figures = Figures {
            limit_bytes: u64::MAX,
            runs: u64::MAX,
            used_bytes: u64::MAX,
            stored_bytes: u64::MAX,
            compressed_bytes: 1,
            fault_us: u64::MAX,
            ..Figures::default()
        };
        let text = program_details(&program(figures)) + &program_table(&[program(figures)]);
        assert!(text.contains("16777216.0 TiB") && text.contains("now 0 B, by --pressure"), "{text}");
    }
}
