//! Heap pages: the memory of a program's live objects, as the allocator laid it out.
//!
//! The objects are built from a seed; then every page that has a part of one is read through
//! `/proc/self/mem`, with the allocator's headers, the holes left by freed objects and all else on it.
//! Reading through the file instead of through pointers keeps this safe: the kernel copies, and an unmapped
//! address is an error.
//!
//! Only pages near the objects are taken, and of the mappings in `/proc/self/maps` only private writable ones
//! without a file. This excludes stacks, other threads' buffers, the rest of the process, and a corpus built
//! before.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use serde_json::{Value, json};
use uzram::units::{PAGE_SHIFT, PAGE_SIZE};

use super::files::{generated, words};

/// Gaps of up to this many pages between pages that hold objects are taken too: they are the
/// free parts of tables and the holes of freed objects.
const MAX_GAP_PAGES: usize = 16;
/// About how many bytes of live objects to build for a page of the corpus. Measured: these cover 1.1 pages
/// for each page asked for.
const OBJECT_BYTES_A_PAGE: usize = 4400;

/// Returns `page_count` pages of the live heap, shuffled; repeats them if the objects cover fewer pages, and
/// generates text if the process cannot read its own memory.
pub(super) fn live_pages(page_count: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(7);
    let objects = Objects::build(&mut rng, page_count * OBJECT_BYTES_A_PAGE);
    let mut pages: Vec<usize> = with_gaps(&objects.pages());
    rng.shuffle(&mut pages);
    let mut out = read(&pages, page_count);
    drop(objects);
    if out.is_empty() {
        return generated(page_count * PAGE_SIZE);
    }
    while out.len() < page_count * PAGE_SIZE {
        out.extend_from_within(..out.len().min(page_count * PAGE_SIZE - out.len()));
    }
    out
}

/// The objects that the process holds while its memory is read.
struct Objects {
    records: Vec<Value>,
    document: String,
    by_name: BTreeMap<String, u64>,
    sessions: HashMap<u64, [u64; 4]>,
    floats: Vec<f64>,
    table: Vec<Row>,
}

/// A row of the sorted table, as a database or a data frame would keep it: key, name, score, count.
type Row = (u64, String, f64, u32);

impl Objects {
    /// Builds about `len_bytes` of objects: a third of it parsed JSON and its text, a third the table and the
    /// map by name, the rest hashed sessions and floats.
    fn build(rng: &mut fastrand::Rng, len_bytes: usize) -> Objects {
        let words = words(rng, 5000);
        // The divisors are the bytes that one item takes, allocator overhead included, times its share.
        let mut records: Vec<Value> =
            (0..len_bytes / 4200 + 4).map(|i| record(rng, &words, i as u64)).collect();
        let document = serde_json::to_string(&records[..records.len() / 2]).unwrap_or_default();
        // Programs that have run for a while have freed some of their objects.
        records.retain(|_| rng.u8(..10) != 0);
        let mut table: Vec<Row> = (0..len_bytes / 480 + 4)
            .map(|i| {
                let name = format!("{} {}", pick(rng, &words), pick(rng, &words));
                (i as u64, name, rng.f64(), rng.u32(..1000))
            })
            .collect();
        table.sort_by(|a, b| a.1.cmp(&b.1));
        Objects {
            records,
            document,
            by_name: table.iter().step_by(2).map(|row| (row.1.clone(), row.0)).collect(),
            sessions: (0..len_bytes / 320).map(|_| (rng.u64(..), session(rng))).collect(),
            // The sum of six uniform numbers is nearly normal.
            floats: (0..len_bytes / 48).map(|_| (0..6).map(|_| rng.f64()).sum::<f64>() - 3.0).collect(),
            table,
        }
    }

    fn pages(&self) -> BTreeSet<usize> {
        let mut pages = Pages(BTreeSet::new());
        pages.slice(&self.records);
        self.records.iter().for_each(|value| pages.value(value));
        pages.slice(self.document.as_bytes());
        for (name, key) in &self.by_name {
            pages.slice(std::slice::from_ref(key));
            pages.slice(std::slice::from_ref(name));
            pages.slice(name.as_bytes());
        }
        self.sessions.values().for_each(|session| pages.slice(session));
        pages.slice(&self.floats);
        pages.slice(&self.table);
        self.table.iter().for_each(|row| pages.slice(row.1.as_bytes()));
        pages.0
    }
}

/// A parsed object of the kind that services exchange.
fn record(rng: &mut fastrand::Rng, words: &[String], id: u64) -> Value {
    let name: Vec<_> = (0..4).map(|_| pick(rng, words)).collect();
    let tags: Vec<_> = (0..5).map(|_| pick(rng, words)).collect();
    json!({
        "id": id,
        "key": format!("{:032x}", rng.u128(..)),
        "name": name.join(" "),
        "score": rng.f64(),
        "active": rng.bool(),
        "tags": tags,
        "position": {"x": rng.f64() * 1000.0, "y": rng.f64() * 1000.0},
    })
}

/// A token, its start and last use (ns), and its use count.
fn session(rng: &mut fastrand::Rng) -> [u64; 4] {
    let began_ns = 1_700_000_000_000_000_000 + rng.u64(..86_400_000_000_000);
    [rng.u64(..), began_ns, began_ns + rng.u64(..3_600_000_000_000), rng.u64(..50)]
}

fn pick<'a>(rng: &mut fastrand::Rng, words: &'a [String]) -> &'a str {
    &words[rng.usize(..words.len())]
}

/// Page numbers collected from the addresses of objects.
struct Pages(BTreeSet<usize>);

impl Pages {
    fn slice<T>(&mut self, items: &[T]) {
        let start = items.as_ptr().addr();
        let len_bytes = std::mem::size_of_val(items);
        if len_bytes > 0 {
            self.0.extend(start >> PAGE_SHIFT..=(start + len_bytes - 1) >> PAGE_SHIFT);
        }
    }

    fn value(&mut self, value: &Value) {
        match value {
            Value::String(text) => self.slice(text.as_bytes()),
            Value::Array(items) => {
                self.slice(items);
                items.iter().for_each(|item| self.value(item));
            }
            Value::Object(fields) => {
                for (name, item) in fields {
                    self.slice(name.as_bytes());
                    self.slice(std::slice::from_ref(item));
                    self.value(item);
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
}

/// Returns the pages and the short gaps between them, ascending.
fn with_gaps(pages: &BTreeSet<usize>) -> Vec<usize> {
    let mut out: Vec<usize> = Vec::with_capacity(pages.len() * 5 / 4);
    for &page in pages {
        match out.last() {
            Some(&last) if page - last <= MAX_GAP_PAGES + 1 => out.extend(last + 1..=page),
            _ => out.push(page),
        }
    }
    out
}

/// Returns the contents of the first `page_count` of `pages` that are in the allocator's mappings.
fn read(pages: &[usize], page_count: usize) -> Vec<u8> {
    let Ok(mem) = File::open("/proc/self/mem") else { return Vec::new() };
    let ranges = allocator_ranges(&fs::read_to_string("/proc/self/maps").unwrap_or_default());
    let mut out = Vec::with_capacity(page_count * PAGE_SIZE);
    let mut page = [0; PAGE_SIZE];
    for &number in pages {
        if out.len() == page_count * PAGE_SIZE {
            break;
        }
        let address = (number << PAGE_SHIFT) as u64;
        let ours = ranges.iter().any(|range| range.start <= address && address < range.end);
        if ours && mem.read_exact_at(&mut page, address).is_ok() {
            out.extend_from_slice(&page);
        }
    }
    out
}

/// Returns the private writable mappings of a `/proc/self/maps` text that belong to no file and no stack.
fn allocator_ranges(maps: &str) -> Vec<std::ops::Range<u64>> {
    maps.lines()
        .filter_map(|line| {
            let mut fields = line.split_ascii_whitespace();
            let (range, mode) = (fields.next()?, fields.next()?);
            let name = fields.nth(3);
            let (low, high) = range.split_once('-')?;
            let range = u64::from_str_radix(low, 16).ok()?..u64::from_str_radix(high, 16).ok()?;
            (mode == "rw-p" && name.is_none_or(|name| name == "[heap]")).then_some(range)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_private_writable_memory_without_a_file_is_the_allocators() {
        let maps = "1000-3000 rw-p 00000000 00:00 0 [heap]\n\
                    4000-5000 rw-p 00000000 00:00 0 \n\
                    6000-7000 rw-p 00000000 00:00 0 [stack]\n\
                    8000-9000 rw-p 00000000 fe:00 12 /usr/lib/libc.so\n\
                    a000-b000 ---p 00000000 00:00 0\n";
        assert_eq!(allocator_ranges(maps), [0x1000..0x3000, 0x4000..0x5000]);
    }

    #[test]
    fn short_gaps_are_taken_and_long_ones_are_not() {
        let far = 8 + MAX_GAP_PAGES + 2;
        assert_eq!(with_gaps(&BTreeSet::from([5, 8, far])), [5, 6, 7, 8, far]);
    }

    #[test]
    fn the_objects_cover_the_pages_asked_for() {
        let mut rng = fastrand::Rng::with_seed(7);
        let objects = Objects::build(&mut rng, 512 * OBJECT_BYTES_A_PAGE);
        let pages = with_gaps(&objects.pages());
        assert!(pages.len() >= 512, "512 pages asked for, {} covered", pages.len());
        let row = &objects.table[0];
        let first = (&raw const *row).addr() >> PAGE_SHIFT;
        let page = read(&[first], 1);
        assert_eq!(page.len(), PAGE_SIZE);
    }
}
