//! Sizes in options and in files, which may depend on the machine: `min(ram / 2, 4G)`.
//!
//! A size is written as for [`uzram::units::parse_size`]; a number without a unit is a factor, and may have a
//! fraction (`ram * 0.75`). The operators are `+ - * /`, parentheses, and `min(…)` and `max(…)`; the
//! variables are those of [`Memory`]. In zram-generator's `zram-size`, which is alike, plain numbers and
//! `ram` are MiB: so a number without a unit where a size is expected, but for 0, is refused.

use std::ops::RangeInclusive;
use std::result;

use uzram::machine_memory::{self, Memory};
use uzram::units::{PAGE_SIZE, parse_size, unit_bytes};
use uzram::{Error, Result};

const MAX_CHARS: usize = 200;
/// The deepest nesting of parentheses accepted.
const MAX_DEPTH: usize = 32;

const OPERAND: &str = "a size, 'ram', 'limit', 'min(', 'max(' or '('";

/// Reads a size of an option or a file, plain or an expression. Fails with `Invalid`: of a plain size the
/// message is that of [`parse_size`], as an attribute would give it; else as [`evaluate`].
pub fn read(text: &str, memory: impl FnOnce() -> Result<Memory>) -> Result<u64> {
    let trimmed = text.trim();
    let is_bare = !trimmed.is_empty() && trimmed.bytes().all(|byte| byte.is_ascii_digit());
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'.';
    let is_plain =
        !trimmed.starts_with(char::is_alphabetic) && trimmed.trim_start_matches('-').bytes().all(is_part);
    match parse_size(text) {
        Ok(bytes) if bytes == 0 || !is_bare => Ok(bytes),
        Err(error) if is_plain && !is_bare => Err(error),
        _ => evaluate(text, &memory()?),
    }
}

/// Reads a size of the command line. Fails as [`read`].
pub fn of_option(text: &str) -> Result<u64> {
    read(text, machine_memory::read)
}

/// Reads a size of the command line that lies in a range, `shown` as in "4K to 16G".
pub fn of_option_within(text: &str, range: RangeInclusive<u64>, shown: &str) -> result::Result<u64, String> {
    let bytes = of_option(text).map_err(|error| error.to_string())?;
    if range.contains(&bytes) { Ok(bytes) } else { Err(format!("write {shown}")) }
}

/// Evaluates an expression to bytes, rounded down to whole pages. Fails with `Invalid` for a syntax error
/// (with its column), or if the result is less than a page or does not fit into 64 bits.
pub fn evaluate(text: &str, memory: &Memory) -> Result<u64> {
    if text.chars().count() > MAX_CHARS {
        return Err(Error::invalid(format!("it has more than {MAX_CHARS} characters")));
    }
    let mut parser = Parser { text, at: 0, depth: 0, memory };
    let value = parser.sum()?;
    match parser.peek() {
        None => {}
        Some(_) => return Err(parser.expected("an operator or the end")),
    }
    if let Some(place) = value.bare {
        return Err(parser.lacks_unit(place));
    }
    let bytes = value.number;
    if bytes < PAGE_SIZE as f64 {
        let what =
            format!("'{text}' comes to {} bytes: less than a page, which is {PAGE_SIZE}", bytes.floor());
        return Err(Error::invalid(what));
    }
    // `u64::MAX as f64` is 2^64; anything below it fits.
    if bytes >= u64::MAX as f64 {
        return Err(Error::invalid(format!("'{text}' comes to more than 64 bits can hold")));
    }
    let bytes = bytes as u64;
    Ok(bytes - bytes % PAGE_SIZE as u64)
}

struct Parser<'a> {
    text: &'a str,
    /// Byte offset of the next character.
    at: usize,
    depth: usize,
    memory: &'a Memory,
}

/// The value of a subexpression.
#[derive(Clone, Copy)]
struct Value {
    number: f64,
    /// `None` for a size; for a factor, the offset of its first number.
    bare: Option<usize>,
}

type Operator = fn(f64, f64) -> f64;

impl<'a> Parser<'a> {
    fn sum(&mut self) -> Result<Value> {
        self.chain(&[('+', |a, b| a + b), ('-', |a, b| a - b)], Self::product)
    }

    fn product(&mut self) -> Result<Value> {
        self.chain(&[('*', |a, b| a * b), ('/', |a, b| a / b)], Self::operand)
    }

    /// Parses operands and operators of one precedence, left-associative.
    fn chain(
        &mut self,
        operators: &[(char, Operator)],
        operand: fn(&mut Self) -> Result<Value>,
    ) -> Result<Value> {
        let mut value = operand(self)?;
        while let Some(sign) = self.peek()
            && let Some((_, operator)) = operators.iter().find(|(other, _)| *other == sign)
        {
            let place = self.at;
            self.at += sign.len_utf8();
            let right = operand(self)?;
            if sign == '/' && right.number == 0.0 {
                return Err(self.wrong(place, "division by 0"));
            }
            let bare = match sign {
                '+' | '-' => self.alike(value, right)?,
                _ => value.bare.filter(|_| right.bare.is_some()),
            };
            value = Value { number: self.finite(operator(value.number, right.number), place)?, bare };
        }
        Ok(value)
    }

    /// Checks that two values to add or compare are both sizes or both factors; returns their `bare`.
    fn alike(&self, left: Value, right: Value) -> Result<Option<usize>> {
        match (left.bare, right.bare) {
            (Some(place), None) | (None, Some(place)) => Err(self.lacks_unit(place)),
            _ => Ok(left.bare),
        }
    }

    fn operand(&mut self) -> Result<Value> {
        match self.peek() {
            Some('(') => self.list(None),
            Some(c) if c.is_ascii_digit() => self.number(),
            Some(c) if is_part_of_name(c) => self.named(),
            _ => Err(self.expected(OPERAND)),
        }
    }

    fn named(&mut self) -> Result<Value> {
        let place = self.at;
        let name = self.take_while(is_part_of_name);
        let size = |bytes: u64| Ok(Value { number: bytes as f64, bare: None });
        let choose = match name {
            "ram" => return size(self.memory.ram_bytes),
            "limit" => return size(self.memory.limit_bytes),
            "min" => f64::min,
            "max" => f64::max,
            _ => {
                self.at = place;
                return Err(self.expected(OPERAND));
            }
        };
        if self.peek() != Some('(') {
            return Err(self.expected("'('"));
        }
        self.list(Some(choose))
    }

    /// Parses a parenthesized expression or, with `choose`, a function's arguments.
    fn list(&mut self, choose: Option<Operator>) -> Result<Value> {
        if self.depth == MAX_DEPTH {
            return Err(self.wrong(self.at, &format!("parentheses more than {MAX_DEPTH} deep")));
        }
        self.depth += 1;
        self.at += 1;
        let mut value = self.sum()?;
        while let Some(choose) = choose
            && self.peek() == Some(',')
        {
            self.at += 1;
            let other = self.sum()?;
            let bare = self.alike(value, other)?;
            value = Value { number: choose(value.number, other.number), bare };
        }
        if self.peek() != Some(')') {
            let wanted = if choose.is_some() { "an operator, ',' or ')'" } else { "an operator or ')'" };
            return Err(self.expected(wanted));
        }
        self.depth -= 1;
        self.at += 1;
        Ok(value)
    }

    /// Parses digits, an optional fraction and an optional unit.
    fn number(&mut self) -> Result<Value> {
        let place = self.at;
        self.take_while(|c| c.is_ascii_digit());
        if self.text[self.at..].starts_with('.') {
            self.at += 1;
            if self.take_while(|c| c.is_ascii_digit()).is_empty() {
                return Err(self.expected("a digit"));
            }
        }
        let digits = &self.text[place..self.at];
        let unit_place = self.at;
        let unit = self.take_while(is_part_of_name);
        let Some(unit_bytes) = unit_bytes(&unit.to_ascii_lowercase()) else {
            self.at = unit_place;
            return Err(self.expected("K, M, G or T, an operator or the end"));
        };
        if !unit.is_empty() && digits.contains('.') {
            let size = &self.text[place..self.at];
            // Its message says what to write instead.
            return Err(parse_size(size).err().unwrap_or_else(|| self.wrong(place, "no fractions")));
        }
        let number: f64 = digits.parse().map_err(|_| self.wrong(place, "not a number"))?;
        let bare = (unit.is_empty() && number != 0.0).then_some(place);
        Ok(Value { number: self.finite(number * unit_bytes as f64, place)?, bare })
    }

    /// Returns the error for a number without a unit where a size is expected.
    fn lacks_unit(&self, place: usize) -> Error {
        let rest = &self.text[place..];
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(rest.len());
        let number = &rest[..end];
        let write = match number.contains('.') {
            true => "write a whole number of K, M, G or T".to_owned(),
            false => format!("write {number}M for MiB, as zram-generator reads it, or {number}B for bytes"),
        };
        self.wrong(place, &format!("{number} has no unit: {write}"))
    }

    /// Skips white space and returns the next character.
    fn peek(&mut self) -> Option<char> {
        self.take_while(char::is_whitespace);
        self.text[self.at..].chars().next()
    }

    fn take_while(&mut self, wanted: impl Fn(char) -> bool) -> &'a str {
        let rest = &self.text[self.at..];
        let (taken, _) = rest.split_at(rest.find(|c| !wanted(c)).unwrap_or(rest.len()));
        self.at += taken.len();
        taken
    }

    /// Refuses infinity and NaN; `min` and `max` would ignore a NaN.
    fn finite(&self, value: f64, place: usize) -> Result<f64> {
        if value.is_finite() { Ok(value) } else { Err(self.wrong(place, "too large")) }
    }

    /// Returns the error for an unexpected token at the current position.
    fn expected(&mut self, wanted: &str) -> Error {
        let found = match self.peek() {
            None => "the end".to_owned(),
            Some(c) if is_part_of_name(c) => {
                let rest = &self.text[self.at..];
                let word: String = rest.chars().take_while(|c| is_part_of_name(*c)).take(20).collect();
                format!("'{word}'")
            }
            Some(c) => format!("'{}'", c.escape_debug()),
        };
        self.wrong(self.at, &format!("expected {wanted}, found {found}"))
    }

    fn wrong(&self, place: usize, why: &str) -> Error {
        let column = 1 + self.text[..place].chars().count();
        Error::invalid(format!("'{}' is not a size: column {column}: {why}", self.text.escape_debug()))
    }
}

fn is_part_of_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use std::iter::repeat_n;

    use uzram::random::Random;

    use super::*;

    const MEMORY: Memory = Memory { ram_bytes: 16 << 30, limit_bytes: 3 << 30 };

    #[test]
    fn sizes_depend_on_the_machine() {
        for (text, bytes) in [
            ("min(ram / 2, 4G)", 4 << 30),
            ("min(ram / 8, 4G)", 2 << 30),
            (" 512M ", 512 << 20),
            ("512mib", 512 << 20),
            ("8192B", 8192),
            ("limit", 3 << 30),
            ("ram", 16 << 30),
            ("ram * 0.25", 4 << 30),
            ("0.5*limit", 3 << 29),
            ("1.5 * 1G", 3 << 29),
            ("ram - limit - 1G", 12 << 30),
            ("ram - (limit - 1G)", 14 << 30),
            ("1G + 2 * 1G", 3 << 30),
            ("(1G + 2G) * 2", 6 << 30),
            ("ram / 4 / 2", 2 << 30),
            ("ram / (4 / 2)", 8 << 30),
            ("8G / 2 * 3", 12 << 30),
            ("max(1G, 2G, 3G - 2G) + min (5G)", 7 << 30),
            ("max(min(ram, limit), 1G)", 3 << 30),
            ("min((ram), ((limit)))", 3 << 30),
            ("ram/3", 5_726_621_696),
            ("4096b", 4096),
            ("8191B", 4096),
            ("10000B / 1", 8192),
            ("ram * (1 + 2 * min(3, 4)) / 7", 16 << 30),
            ("max(0, ram - 32G, 1G) + 0", 1 << 30),
        ] {
            assert_eq!(evaluate(text, &MEMORY), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_wrong_says_where_and_what_was_expected() {
        for (text, why) in [
            ("", "column 1: expected a size, 'ram', 'limit', 'min(', 'max(' or '(', found the end"),
            ("ram /", "column 6: expected a size"),
            ("min(ram, ", "column 10: expected a size"),
            ("min(ram", "column 8: expected an operator, ',' or ')', found the end"),
            ("(ram, 4G)", "column 5: expected an operator or ')', found ','"),
            ("min ram", "column 5: expected '(', found 'ram'"),
            ("min", "column 4: expected '(', found the end"),
            ("min()", "column 5: expected a size"),
            ("1G 2G", "column 4: expected an operator or the end, found '2G'"),
            ("ram)", "column 4: expected an operator or the end, found ')'"),
            ("-1G", "column 1: expected a size"),
            ("1G * -1", "column 6: expected a size"),
            ("swap / 2", "column 1: expected a size, 'ram', 'limit', 'min(', 'max(' or '(', found 'swap'"),
            ("RAM", "found 'RAM'"),
            ("1G + rams", "column 6: expected a size"),
            ("12Q", "column 3: expected K, M, G or T, an operator or the end, found 'Q'"),
            ("4 G", "column 3: expected an operator or the end, found 'G'"),
            ("1.", "column 3: expected a digit, found the end"),
            (".5G", "column 1: expected a size"),
            ("1e9", "column 2: expected K, M, G or T"),
            ("ü/2", "column 1: expected a size, 'ram', 'limit', 'min(', 'max(' or '(', found 'ü'"),
            ("ram\n% 2", "'ram\\n% 2' is not a size: column 5: expected an operator or the end, found '%'"),
            ("ram / 0", "column 5: division by 0"),
            ("min(1G, ram / (limit - limit))", "column 13: division by 0"),
            ("4095B", "'4095B' comes to 4095 bytes: less than a page, which is 4096"),
            ("0", "'0' comes to 0 bytes: less than a page"),
            (
                "64",
                "column 1: 64 has no unit: write 64M for MiB, as zram-generator reads it, or 64B for bytes",
            ),
            ("1.5", "column 1: 1.5 has no unit: write a whole number of K, M, G or T"),
            ("1.5G", "'1.5G' is not a size: no fractions: write 1536M; "),
            ("min(ram, 0.5T)", "'0.5T' is not a size: no fractions: write 512G; "),
            ("2 * 512", "column 1: 2 has no unit"),
            ("min(ram / 2, 4096)", "column 14: 4096 has no unit: write 4096M for MiB"),
            ("(1024) + ram / 4", "column 2: 1024 has no unit"),
            ("ram - 512 * 2", "column 7: 512 has no unit"),
            ("1G - 2G", "'1G - 2G' comes to -1073741824 bytes: less than a page"),
            ("16777216T", "comes to more than 64 bits"),
        ] {
            let error = evaluate(text, &MEMORY).expect_err(text).to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
        // The largest result that fits, and the largest numbers.
        assert_eq!(evaluate("16777216T - 1T", &MEMORY), Ok(16_777_215 << 40));
        let large = format!("{}b", "9".repeat(90));
        let error = evaluate(&format!("{large} / {large}"), &MEMORY).expect_err("1").to_string();
        assert!(error.ends_with("comes to 1 bytes: less than a page, which is 4096"), "{error}");
        let product = ["99999999999T"; 14].join("*");
        let error = evaluate(&format!("min(1G,{product})"), &MEMORY).expect_err("infinite").to_string();
        assert!(error.ends_with(": too large"), "{error}");
    }

    #[test]
    fn plain_sizes_are_those_of_attributes_but_need_a_unit() {
        let read = |text: &str| read(text, || Ok(MEMORY)).map_err(|error| error.to_string());
        for (text, bytes) in [("0", 0), (" 64M ", 64 << 20), ("64b", 64), ("ram/2", 8 << 30), ("0B", 0)] {
            assert_eq!(read(text), Ok(bytes), "{text}");
        }
        for text in ["", "1X", "1.5G", "-1G", "99999999T", "12 G"] {
            let said = read(text).expect_err(text);
            let is_expression = text.contains(' ');
            assert_eq!(
                parse_size(text).map_err(|error| error.to_string()) == Err(said),
                !is_expression,
                "{text}"
            );
        }
        for (text, why) in [
            ("64", "64 has no unit"),
            ("rma/2", "found 'rma'"),
            ("lots", "found 'lots'"),
            ("-1G + ram", "expected a size"),
        ] {
            let said = read(text).expect_err(text);
            assert!(said.contains(why), "{text}: {said}");
        }
    }

    #[test]
    fn length_and_depth_are_bounded() {
        let nested = |depth: usize| format!("{}ram{}", "(".repeat(depth), ")".repeat(depth));
        assert_eq!(evaluate(&nested(MAX_DEPTH), &MEMORY), Ok(16 << 30));
        // Sibling parentheses do not nest.
        assert_eq!(evaluate(&["(ram)"; MAX_DEPTH + 1].join("+"), &MEMORY), Ok(33 << 34));
        let error = evaluate(&nested(MAX_DEPTH + 1), &MEMORY).expect_err("too deep").to_string();
        assert!(error.ends_with("column 33: parentheses more than 32 deep"), "{error}");
        assert!(evaluate(&format!("{:MAX_CHARS$}", "ram"), &MEMORY).is_ok());
        let error = evaluate(&"(".repeat(100_000), &MEMORY).expect_err("too long").to_string();
        assert!(error.len() < 100, "{error}");
    }

    const EXPRESSIONS: [&str; 13] = [
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
    ];
    const CHARS: &str = "0123456789.+-*/(),, ramlitnxkKMGTPBe_\t\u{a0}²é١";

    /// Returns one of [`EXPRESSIONS`], mutated: often invalid, and sometimes too long or too deep.
    fn random_text(random: &mut Random) -> String {
        let other = |random: &mut Random| EXPRESSIONS[random.below(EXPRESSIONS.len())].chars();
        let chars: Vec<char> = CHARS.chars().collect();
        let mut text: Vec<char> = other(random).collect();
        for _ in 0..random.below(6) {
            let at = random.below(text.len() + 1);
            let end = (at + 1 + random.below(16)).min(text.len());
            let any = chars[random.below(chars.len())];
            match random.below(9) {
                0 => drop(text.drain(at..end)),
                1 => drop(text.splice(at..end, [any])),
                2 => text.extend_from_within(at..end),
                3 => {
                    text.truncate(at);
                    text.extend(other(random).skip(end - at));
                }
                4 => {
                    text.push(['+', '-', '*', '/'][random.below(4)]);
                    text.extend(other(random));
                }
                5 => {
                    text.insert(end, ')');
                    text.insert(at, '(');
                }
                6 => {
                    let depth = 1 + random.below(MAX_DEPTH + 2);
                    drop(text.splice(..0, repeat_n('(', depth)));
                    text.extend(repeat_n(')', depth));
                }
                7 => text.extend(repeat_n(' ', MAX_CHARS.saturating_sub(text.len()) + random.below(2))),
                _ => text.insert(at, any),
            }
        }
        text.into_iter().collect()
    }

    /// Also: a rejection has a message, parentheses change nothing, and a plain size is the same as
    /// elsewhere.
    #[test]
    fn values_are_those_of_a_naive_evaluator() {
        let (mut valid, mut too_long, mut too_deep) = (0, 0, 0);
        for seed in 0..50_000 {
            let random = &mut Random::new(seed);
            let memory = match random.below(2) {
                0 => MEMORY,
                _ => Memory { ram_bytes: random.next(), limit_bytes: random.next() >> 32 },
            };
            let text = random_text(random);
            let taken = evaluate(&text, &memory);
            if let Err(error) = &taken {
                assert!(!error.to_string().is_empty(), "seed {seed}: {text:?}");
            }
            let (taken, chars, depth) = (taken.ok(), text.chars().count(), depth(&text));
            if chars > MAX_CHARS {
                assert_eq!(taken, None, "seed {seed}: {text:?}");
                too_long += 1;
                continue;
            }
            // The value is less than 2^64, in whole pages.
            let size = |(bytes, is_size): (f64, bool)| {
                (is_size && (4096.0..2f64.powi(64)).contains(&bytes)).then_some(bytes as u64 & !4095)
            };
            let value = naive(&text, &memory).and_then(size);
            let expected = value.filter(|_| depth <= MAX_DEPTH);
            assert_eq!(taken, expected, "seed {seed}: {text:?}");
            valid += u32::from(taken.is_some());
            too_deep += u32::from(taken != value);
            if chars + 2 <= MAX_CHARS && depth < MAX_DEPTH && is_balanced(&text) {
                let inside = evaluate(&format!("({text})"), &memory).ok();
                assert_eq!(inside, taken, "seed {seed}: {text:?} in parentheses");
            }
            // Larger ones may be rounded.
            let has_unit = text.trim_end().ends_with(char::is_alphabetic);
            if let Some(bytes) = parse_size(&text).ok().filter(|bytes| bytes >> 53 == 0) {
                let wanted = Some(bytes / 4096 * 4096).filter(|bytes| *bytes > 0 && has_unit);
                assert_eq!(taken, wanted, "seed {seed}: {text:?}");
            }
        }
        assert!(valid > 5000 && too_long > 5000 && too_deep > 100, "{valid} {too_long} {too_deep}");
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

    /// Evaluates a text by splitting it at its weakest operator. Returns its value, and whether that is a
    /// size and not a factor; `None` if it is invalid.
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
            // Not `(1)(2)`.
            let inside = inside.strip_suffix(')').filter(|inside| is_balanced(inside))?;
            let choose: fn(f64, f64) -> f64 = match before.trim_end() {
                "" => return naive(inside, memory),
                "min" => f64::min,
                "max" => f64::max,
                _ => return None,
            };
            let mut start = 0;
            let items = outside(inside, &[',']).chain([inside.len()]).map(|end| {
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
        naive_number(text)
    }

    /// Parses digits, maybe a fraction, or a unit, which makes it a size; 0 is a size, too.
    fn naive_number(text: &str) -> Option<(f64, bool)> {
        let digits = text.trim_end_matches(char::is_alphabetic);
        let (whole, fraction) = digits.split_once('.').unwrap_or((digits, "0"));
        let plain = |digits: &str| !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
        let has_unit = digits.len() < text.len();
        if !plain(whole) || !plain(fraction) || has_unit && digits.contains('.') {
            return None;
        }
        // The unit alone is a size, if a one is put before it.
        let unit = parse_size(&format!("1{}", &text[digits.len()..])).ok()?;
        let number = digits.parse::<f64>().ok()?;
        Some((number * unit as f64, has_unit || number == 0.0)).filter(|(value, _)| value.is_finite())
    }
}
