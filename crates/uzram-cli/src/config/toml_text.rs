//! What the files in TOML have in common: how they are read, what a value is, and how a failure says where it is.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::Path;

use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};

use crate::failure::Failure;

/// The largest file that is read.
const MAX_FILE_BYTES: u64 = 64 << 10;
/// How much of a line a message quotes.
const MAX_QUOTED_CHARS: usize = 60;

/// A value as an attribute takes it: a string, a whole number, or 1 for true and 0 for false.
pub struct Text(pub String);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct AnyValue;

        impl Visitor<'_> for AnyValue {
            type Value = Text;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a whole number, true or false")
            }

            fn visit_str<E: de::Error>(self, value: &str) -> Result<Text, E> {
                Ok(Text(value.to_owned()))
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Text, E> {
                Ok(Text(value.to_string()))
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Text, E> {
                Ok(Text(value.to_string()))
            }

            fn visit_bool<E: de::Error>(self, value: bool) -> Result<Text, E> {
                Ok(Text(u8::from(value).to_string()))
            }
        }

        deserializer.deserialize_any(AnyValue)
    }
}

/// A file's text.
///
/// # Errors
/// It cannot be read, is too large or no text.
pub fn read(path: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        let what = format!("it has more than {} KiB", MAX_FILE_BYTES >> 10);
        return Err(std::io::Error::other(what));
    }
    Ok(text)
}

/// A file's name, for messages, and its text.
#[derive(Clone, Copy)]
pub struct Source<'a> {
    /// As messages begin.
    pub name: &'a str,
    /// All of it.
    pub text: &'a str,
}

impl Source<'_> {
    /// The name and a line's number: `FILE:LINE`.
    pub fn at(&self, span: &Range<usize>) -> String {
        format!("{}:{}", self.name, line_number(self.text, span))
    }

    /// A failure that says where, shows the line, which has the key, and why.
    pub fn failure(&self, span: &Range<usize>, why: impl fmt::Display) -> Failure {
        let line = self.text.lines().nth(line_number(self.text, span) - 1).unwrap_or_default().trim();
        if line.is_empty() {
            return Failure::Usage(format!("{}: {why}", self.at(span)));
        }
        let quoted: String = line.chars().take(MAX_QUOTED_CHARS).collect();
        Failure::Usage(format!("{}: '{quoted}': {why}", self.at(span)))
    }

    /// What the parser says.
    pub fn parser_failure(&self, error: &toml::de::Error) -> Failure {
        match error.span() {
            Some(span) => self.failure(&span, error.message()),
            None => Failure::Usage(format!("{}: {}", self.name, error.message())),
        }
    }
}

/// Counted from 1.
fn line_number(text: &str, span: &Range<usize>) -> usize {
    let before = text.as_bytes().iter().take(span.start);
    1 + before.filter(|byte| **byte == b'\n').count()
}
