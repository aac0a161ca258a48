//! The figures of a process as text, which other processes read: `uzram list` and `uzram stat`.
//!
//! The text has a line with the version of its form, and one for each figure, in this order: a name, and a
//! number that is filled up with spaces to 20 characters. So each is always at the same place.

use std::io::Write;

/// The first line.
const HEAD: &str = "uzram-run 1\n";
/// What the largest number takes.
const NUMBER_BYTES: usize = 20;

macro_rules! figures {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The figures of a process that runs under `uzram run`.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Figures {
            $($(#[$doc])* pub $name: u64,)*
        }

        const NAMES: &[&str] = &[$(stringify!($name),)*];

        impl Figures {
            /// Returns each figure with its name.
            pub fn all(&self) -> impl Iterator<Item = (&'static str, u64)> {
                NAMES.iter().copied().zip([$(self.$name,)*])
            }

            fn all_mut(&mut self) -> impl Iterator<Item = (&'static str, &mut u64)> {
                NAMES.iter().copied().zip([$(&mut self.$name,)*])
            }
        }
    };
}

figures! {
    /// The process, by the number that it has in its own namespace.
    process,
    /// The limit that was asked for.
    limit_bytes,
    /// The limit in force: with a goal for pressure it is found.
    limit_now_bytes,
    /// 1 if the pager runs. Without it the following are 0.
    runs,
    /// What counts against the limit: pages in memory as they are, compressed memory, and tables.
    used_bytes,
    /// The most of that so far.
    used_max_bytes,
    /// Pages in memory as they are.
    resident_bytes,
    /// What is compressed in memory, as it was before.
    stored_bytes,
    /// What that takes.
    compressed_bytes,
    /// When most was stored: how much that was.
    stored_max_bytes,
    /// And what it took.
    compressed_max_bytes,
    /// What is in the spill file, as it was before.
    spilled_bytes,
    /// The most of that so far.
    spilled_max_bytes,
    /// All bytes that were written to the spill file so far.
    spill_written_bytes,
    /// Touches of memory that was not there.
    faults,
    /// Microseconds that these took.
    fault_us,
}

impl Figures {
    /// The name of the memfd in which a process has its figures.
    pub const FILE_NAME: &str = "uzram-run";
    /// The length of the text.
    pub const TEXT_BYTES: usize = {
        let (mut bytes, mut nth) = (HEAD.len(), 0);
        while nth < NAMES.len() {
            bytes += NAMES[nth].len() + " ".len() + NUMBER_BYTES + "\n".len();
            nth += 1;
        }
        bytes
    };

    /// Returns the text.
    pub fn to_text(&self) -> [u8; Figures::TEXT_BYTES] {
        let mut text = [0; Figures::TEXT_BYTES];
        let mut rest = &mut text[..];
        // There is room for all of it.
        let _ = rest.write_all(HEAD.as_bytes());
        for (name, value) in self.all() {
            let _ = writeln!(rest, "{name} {value:>NUMBER_BYTES$}");
        }
        text
    }

    /// Returns all figures as one line of JSON, with the process as `pid`.
    pub fn to_json(&self, pid: u32) -> String {
        let figures = self.all().filter(|(name, _)| *name != "process").map(|(name, value)| match name {
            "runs" => format!(",\"{name}\":{}", value != 0),
            _ => format!(",\"{name}\":{value}"),
        });
        format!("{{\"pid\":{pid}{}}}", figures.collect::<String>())
    }

    /// Returns the figures of which [`Figures::to_text`] makes exactly these bytes, if there are any.
    pub fn parse(bytes: &[u8]) -> Option<Figures> {
        let mut lines = str::from_utf8(bytes).ok()?.strip_prefix(HEAD)?.lines();
        let mut figures = Figures::default();
        for (name, value) in figures.all_mut() {
            let number = lines.next()?.strip_prefix(name)?.trim_start_matches(' ');
            *value = number.parse().ok()?;
        }
        (figures.to_text() == bytes).then_some(figures)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_read_as_it_was_written_and_no_other() {
        for value in [0, 17, u64::MAX] {
            let mut figures = Figures::default();
            figures.all_mut().for_each(|(_, figure)| *figure = value);
            assert_eq!(Figures::parse(&figures.to_text()), Some(figures));
        }
        let figures = Figures { process: 17, ..Figures::default() }.to_text();
        let text = str::from_utf8(&figures).unwrap();
        for changed in [
            &text[..text.len() - 1],
            &format!("{text}\n"),
            &text.replace(HEAD, "uzram-run 2\n"),
            &text.replace(" 17", "+17"),
            &text.replace("  17", "017 "),
            &text.replace("faults", "faulty"),
            &text.replacen('\n', "\r\n", 1),
        ] {
            assert_ne!(changed, text);
            assert_eq!(Figures::parse(changed.as_bytes()), None, "{changed}");
        }
        assert_eq!(Figures::parse(&[0xff; Figures::TEXT_BYTES]), None);
    }
}
