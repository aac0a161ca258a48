//! Fuzzes sizes that depend on the machine with any text. The first bytes of the input describe the machine.
//!
//! Promises: the value of a text is that of a naive evaluator, which splits it at its weakest operator; a
//! rejection has a message; parentheses around the whole text change nothing; a plain size with a unit is the
//! same as elsewhere.

use uzram::machine_memory::Memory;
use uzram::units::parse_size;
use uzram_cli::size_expr::{MAX_CHARS, MAX_DEPTH, evaluate};

use crate::input::{Input, on_a_machine};

pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let memory = input.machine();
    let text = String::from_utf8_lossy(input.rest());
    let taken = evaluate(&text, &memory);
    if let Err(error) = &taken {
        assert!(!error.to_string().is_empty());
    }
    let (taken, chars) = (taken.ok(), text.chars().count());
    if chars > MAX_CHARS {
        assert_eq!(taken, None);
        return;
    }
    // The value is less than 2^64, in whole pages.
    let size = |(bytes, is_size): (f64, bool)| {
        (is_size && (4096.0..2f64.powi(64)).contains(&bytes)).then_some(bytes as u64 & !4095)
    };
    let expected = if depth(&text) <= MAX_DEPTH { naive(&text, &memory).and_then(size) } else { None };
    assert_eq!(taken, expected, "{text:?}");
    if chars + 2 <= MAX_CHARS && depth(&text) < MAX_DEPTH && is_balanced(&text) {
        assert_eq!(evaluate(&format!("({text})"), &memory).ok(), taken, "{text:?} in parentheses");
    }
    // Larger ones may be rounded.
    let has_unit = text.trim_end().ends_with(char::is_alphabetic);
    if let Some(bytes) = parse_size(&text).ok().filter(|bytes| bytes >> 53 == 0) {
        let wanted = Some(bytes / 4096 * 4096).filter(|bytes| *bytes > 0 && has_unit);
        assert_eq!(taken, wanted, "{text:?}");
    }
}

fn depth(text: &str) -> usize {
    let (mut depth, mut deepest) = (0usize, 0);
    for c in text.chars() {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    deepest
}

fn is_balanced(text: &str) -> bool {
    let open = text.chars().try_fold(0usize, |depth, c| match c {
        '(' => Some(depth + 1),
        ')' => depth.checked_sub(1),
        _ => Some(depth),
    });
    open == Some(0)
}

fn outside<'a>(text: &'a str, wanted: &'a [char]) -> impl Iterator<Item = usize> + 'a {
    let mut depth = 0;
    text.char_indices().filter_map(move |(at, c)| {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        (depth == 0 && wanted.contains(&c)).then_some(at)
    })
}

/// Evaluates a text by splitting it; returns its value, and whether that is a size and not a factor; `None`
/// if it is invalid, a part of it is not a number, or sizes and factors are added or compared.
fn naive(text: &str, memory: &Memory) -> Option<(f64, bool)> {
    let text = text.trim();
    for signs in [&['+', '-'], &['*', '/']] {
        if let Some(at) = outside(text, signs).last() {
            let ((left, of_left), (right, of_right)) =
                (naive(&text[..at], memory)?, naive(&text[at + 1..], memory)?);
            let value = match &text[at..=at] {
                "+" | "-" if of_left != of_right => return None,
                "+" => left + right,
                "-" => left - right,
                "*" => left * right,
                _ => left / right,
            };
            return Some((value, of_left || of_right)).filter(|(value, _)| value.is_finite());
        }
    }
    match text {
        "ram" => return Some((memory.ram_bytes as f64, true)),
        "limit" => return Some((memory.limit_bytes as f64, true)),
        _ => {}
    }
    if let Some((before, inside)) = text.split_once('(') {
        let inside = inside.strip_suffix(')')?;
        // Not `(1)(2)`.
        if !is_balanced(inside) {
            return None;
        }
        let choose: fn(f64, f64) -> f64 = match before.trim_end() {
            "" => return naive(inside, memory),
            "min" => f64::min,
            "max" => f64::max,
            _ => return None,
        };
        let ends: Vec<usize> = outside(inside, &[',']).chain([inside.len()]).collect();
        let mut start = 0;
        let items = ends.into_iter().map(|end| {
            let item = naive(&inside[start..end], memory);
            start = end + 1;
            item
        });
        let items = items.collect::<Option<Vec<_>>>()?;
        let is_size = items.iter().any(|(_, is_size)| *is_size);
        let all_alike = items.iter().all(|item| item.1 == is_size);
        let chosen = items.into_iter().map(|(value, _)| value).reduce(choose);
        return chosen.filter(|_| all_alike).map(|value| (value, is_size));
    }
    number(text)
}

/// Parses digits, maybe a fraction, or a unit, which makes it a size; 0 is a size, too.
fn number(text: &str) -> Option<(f64, bool)> {
    let digits = text.trim_end_matches(char::is_alphabetic);
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, "0"));
    let plain = |digits: &str| !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
    if !plain(whole) || !plain(fraction) {
        return None;
    }
    // The unit alone is a size, if a one is put before it.
    let unit = parse_size(&format!("1{}", &text[digits.len()..])).ok()?;
    let number = digits.parse::<f64>().ok()?;
    let has_unit = digits.len() < text.len();
    if has_unit && digits.contains('.') {
        return None;
    }
    Some((number * unit as f64, has_unit || number == 0.0)).filter(|(value, _)| value.is_finite())
}

pub(crate) fn seeds() -> Vec<Vec<u8>> {
    [
        "min(ram / 2, 4G)",
        "ram * 0.75 - (limit + 512MiB) / 3",
        "max(min(limit, 8192k), 1536m, 4096B)",
        "1.5g",
        "((ram-limit))/4/2*1T",
        "16777215T + 1T - 4096b",
        "8191",
        "min(ram / 2, 4096)",
        "max(0, ram - 2G) + ram * (1 - 0.5)",
        "ram / (limit - limit)",
        "min(1,2,3,4,5,6,7,8,9)*max(1G)",
        " 512M ",
        "(((((((((((((((((((((((((((((((ram)))))))))))))))))))))))))))))))",
    ]
    .map(on_a_machine)
    .into()
}
