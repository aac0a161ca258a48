//! Common code of the TOML files: reading, keys and values, and errors with their position. In keys '-' and
//! '_' are the same.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt::Display;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::Path;

use serde::de::Unexpected;
use toml::Spanned;
use toml::de::{DeTable, DeValue};
use uzram::named::hint;

use crate::failure::{self, Failure};
use crate::other_words;

const MAX_FILE_BYTES: u64 = 64 << 10;
const MAX_QUOTED_CHARS: usize = 60;

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
    /// The file's name; messages begin with it.
    pub name: &'a str,
    pub text: &'a str,
}

impl Source<'_> {
    pub fn at(&self, span: &Range<usize>) -> String {
        format!("{}:{}", self.name, line_number(self.text, span))
    }

    fn line(&self, span: &Range<usize>) -> &str {
        self.text.lines().nth(line_number(self.text, span) - 1).unwrap_or_default().trim()
    }

    pub fn failure(&self, span: &Range<usize>, why: impl Display) -> Failure {
        let quoted: String = self.line(span).chars().take(MAX_QUOTED_CHARS).collect();
        let quoted = if quoted.is_empty() { quoted } else { format!("'{quoted}': ") };
        Failure::usage(format!("{}: {quoted}{why}", self.at(span)))
    }

    /// Returns advice for a line that is no TOML, if its value may lack quotes: files of other programs have
    /// none.
    fn unquoted(&self, span: &Range<usize>) -> String {
        let Some((key, value)) = self.line(span).split_once('=') else { return String::new() };
        let (key, value) = (key.trim(), value.trim());
        let of_other = other_words::of_key(key).map_or_else(String::new, |what| format!("; {what}"));
        let advice = match value {
            "yes" | "no" | "on" | "off" => "; write true or false",
            _ if value.is_empty() || value.starts_with(['"', '\'', '[', '{']) => "",
            _ => "; write the value in quotes",
        };
        format!("{advice}{of_other}")
    }

    pub fn parser_failure(&self, error: &toml::de::Error) -> Failure {
        match error.span() {
            Some(span) => self.failure(&span, format!("{}{}", error.message(), self.unquoted(&span))),
            None => Failure::usage(format!("{}: {}", self.name, error.message())),
        }
    }
}

pub fn parse(file: Source<'_>) -> failure::Result<Vec<Entry<'_>>> {
    let table = DeTable::parse(file.text).map_err(|error| file.parser_failure(&error))?;
    entries(file, table.into_inner())
}

pub struct Entry<'a> {
    pub file: Source<'a>,
    pub key: Cow<'a, str>,
    pub key_span: Range<usize>,
    pub value: DeValue<'a>,
}

fn entries<'a>(file: Source<'a>, table: DeTable<'a>) -> failure::Result<Vec<Entry<'a>>> {
    let entry = |(key, value): (Spanned<Cow<'a, str>>, Spanned<DeValue<'a>>)| Entry {
        file,
        key_span: key.span(),
        key: key.into_inner(),
        value: value.into_inner(),
    };
    let mut entries: Vec<_> = table.into_iter().map(entry).collect();
    entries.sort_by_key(|entry| entry.key_span.start);
    let mut seen: HashMap<String, String> = HashMap::new();
    for entry in entries.iter().filter(|entry| !entry.value.is_table()) {
        if let Some(other) = seen.insert(entry.dashed(), entry.place()) {
            return Err(entry.wrong(format!("{other} already sets it")));
        }
    }
    Ok(entries)
}

impl<'a> Entry<'a> {
    pub fn dashed(&self) -> String {
        self.key.replace('_', "-")
    }

    /// Returns a failure that says what another program's key is here, suggests a similar key, or lists all
    /// known keys.
    pub fn unknown<'n>(&self, known: impl Iterator<Item = &'n str>) -> Failure {
        let known: Vec<_> = known.collect();
        let hint = other_words::of_key(&self.key).unwrap_or_else(|| hint(&self.key, &known));
        self.file.failure(&self.key_span, format!("unknown key `{}`; {hint}", self.key))
    }

    /// Returns `FILE:LINE: KEY`.
    pub fn place(&self) -> String {
        self.place_of(&self.key)
    }

    /// Returns the same for `key`, which includes the keys of the enclosing tables.
    pub fn place_of(&self, key: &str) -> String {
        format!("{}: {key}", self.file.at(&self.key_span))
    }

    pub fn wrong(&self, why: impl Display) -> Failure {
        Failure::usage(format!("{}: {why}", self.place()))
    }

    /// Returns the value as an attribute takes it: a string, a whole number, or 1 for true and 0 for false.
    pub fn text(&self) -> failure::Result<String> {
        let unexpected = match &self.value {
            DeValue::String(text) => return Ok(text.to_string()),
            DeValue::Boolean(is_set) => return Ok(u8::from(*is_set).to_string()),
            DeValue::Integer(number) => match i128::from_str_radix(number.as_str(), number.radix()) {
                Ok(number) => return Ok(number.to_string()),
                Err(_) => return Err(self.wrong("integer number overflowed")),
            },
            DeValue::Float(number) => Unexpected::Float(number.as_str().parse().unwrap_or(f64::NAN)),
            DeValue::Array(_) => Unexpected::Seq,
            DeValue::Table(_) | DeValue::Datetime(_) => Unexpected::Map,
        };
        let expected = "expected a string, a whole number, true or false";
        Err(self.wrong(format!("invalid type: {unexpected}, {expected}")))
    }

    /// Returns the texts of an array, or the value as the only one.
    pub fn texts(&self) -> failure::Result<Vec<String>> {
        let DeValue::Array(values) = &self.value else { return Ok(vec![self.text()?]) };
        let text = |value: &Spanned<DeValue<'a>>| value.get_ref().as_str().map(str::to_owned);
        let texts: Option<Vec<_>> = values.iter().map(text).collect();
        texts.filter(|texts| !texts.is_empty()).ok_or_else(|| self.wrong("write a text or an array of texts"))
    }

    pub fn boolean(&self) -> failure::Result<bool> {
        self.value.as_bool().ok_or_else(|| self.wrong("write true or false"))
    }

    pub fn table(self) -> failure::Result<Vec<Entry<'a>>> {
        match self.value {
            DeValue::Table(table) => entries(self.file, table),
            _ => Err(self.wrong("write a table")),
        }
    }
}

fn line_number(text: &str, span: &Range<usize>) -> usize {
    let before = text.as_bytes().iter().take(span.start);
    1 + before.filter(|byte| **byte == b'\n').count()
}
