//! Programs that run under `uzram run`, as tables and as JSON.

use std::fmt::Write;

use serde_json::Value;
use uzram::units::format_size;
use uzram_pager::Figures;

use crate::system::programs::Program;
use crate::terminal::show::{noted_rows, ratio};

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
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{id:>10} {command:<16} {:>10} {used:>10} {stored:>10} {compressed:>10} {spilled:>10}",
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

#[cfg(test)]
mod tests {
    use super::*;

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
