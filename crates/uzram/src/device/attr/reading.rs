//! What an attribute shows: the text of the kernel's file, and the same as a value for programs.

/// What an attribute shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading {
    /// As the kernel's file shows it, without the last newline.
    pub text: String,
    /// The same for programs.
    pub value: Value,
}

/// A value for programs. Names of fields have their units: `used_bytes`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// A number, in the unit of the attribute.
    Number(u64),
    /// Text of one line.
    Text(String),
    /// Values of the same form.
    List(Vec<Value>),
    /// Values by name.
    Fields(Vec<(&'static str, Value)>),
}

impl Value {
    pub(super) fn counts(counts: &[(&'static str, u64)]) -> Value {
        Value::Fields(Value::fields(counts).collect())
    }

    pub(super) fn named(name: &'static str, text: String, counts: &[(&'static str, u64)]) -> Value {
        let name = std::iter::once((name, Value::Text(text)));
        Value::Fields(name.chain(Value::fields(counts)).collect())
    }

    fn fields(counts: &[(&'static str, u64)]) -> impl Iterator<Item = (&'static str, Value)> {
        counts.iter().map(|(name, count)| (*name, Value::Number(*count)))
    }
}

impl Reading {
    /// Shows counts in a row of columns, as the kernel does.
    pub(super) fn columns(counts: &[(&'static str, u64)]) -> Reading {
        let columns: Vec<_> = counts.iter().map(|(_, count)| format!("{count:8}")).collect();
        Reading { text: columns.join(" "), value: Value::counts(counts) }
    }

    pub(super) fn lines(counts: &[(&'static str, u64)]) -> Reading {
        let width = counts.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        let lines: Vec<_> = counts.iter().map(|(name, count)| format!("{name:width$} {count}")).collect();
        Reading { text: lines.join("\n"), value: Value::counts(counts) }
    }
}

impl From<String> for Reading {
    fn from(text: String) -> Reading {
        Reading { value: Value::Text(text.clone()), text }
    }
}

macro_rules! from_number {
    ($($type:ty),*) => {
        $(impl From<$type> for Reading {
            fn from(number: $type) -> Reading {
                Reading { text: number.to_string(), value: Value::Number(number as u64) }
            }
        })*
    };
}

from_number!(u8, u32, u64, usize);
