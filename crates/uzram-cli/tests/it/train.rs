//! `uzram train`: its dictionary, its output, and what it refuses.

use crate::common::*;

const PAGE_BYTES: usize = 4096;

/// Returns different pages that share records of a hundred bytes, which are themselves incompressible.
fn corpus(pages: usize) -> Vec<u8> {
    let mut random = Random::new(1);
    let records = random.bytes(6400);
    let mut bytes = Vec::new();
    while bytes.len() < pages * PAGE_BYTES {
        let at = random.below(records.len() - 100);
        bytes.extend_from_slice(&records[at..at + 100]);
    }
    bytes.truncate(pages * PAGE_BYTES);
    bytes
}

fn train(args: &str) -> Ended {
    finish(bare_command(&format!("train {args}")))
}

#[test]
fn a_trained_dictionary_is_measured_and_serves_a_device() {
    let place = Place::new();
    // Zeros and repetitions are left out, and so is the half page at the end.
    let pages = corpus(150);
    let contents = [&pages[..], &[0; 3 * PAGE_BYTES], &pages[..5 * PAGE_BYTES], &[1; 100]].concat();
    let first = place.write("first", contents);
    let second = place.write("second", &corpus(190)[150 * PAGE_BYTES..]);
    let dict = place.path("pages.dict");

    let said = train(&format!("{first} {second} -o {dict} --size 16K --level 3")).shows(&[
        "pages       198 of 198; left out: 3 same-filled, 5 repeated\n",
        "trained on  167 pages\n",
        "held out    23 pages, with zstd:3\n",
        &format!(" bytes, {dict}\n"),
    ]);
    let numbers = |start: &str| -> Vec<f64> {
        let line = said.lines().find(|line| line.trim_start().starts_with(start)).unwrap();
        line.words().iter().filter_map(|word| word.parse().ok()).collect()
    };
    let ratios = numbers("ratio");
    assert!(ratios[0] < 1.5 && ratios[1] > 2.0, "{said}");
    let len_bytes = fs::metadata(&dict).unwrap().len();
    assert!(len_bytes <= 16 << 10 && numbers("dictionary") == [len_bytes as f64], "{said}");

    // A device accepts it for each algorithm with dictionaries, and shows its cost.
    let algorithm = format!("zstd:3,dict={dict}");
    let daemon = place.up(&format!("--algorithm {algorithm}"));
    assert!(daemon.facts.contains(&algorithm), "{}", daemon.facts);
    let fixed_bytes = |algorithm: &str| {
        place.run(&format!("add more --size 16M --algorithm {algorithm}")).ok();
        place.run("stat more comp_algorithm").shows(&[format!("[{algorithm}]")]);
        let bytes: u64 = place.run("stat more mem_fixed").ok().trim().parse().unwrap();
        place.run("remove more").ok();
        bytes
    };
    for kind in ["lz4", "lz4hc:4", "zstd:3"] {
        let with = fixed_bytes(&format!("{kind},dict={dict}"));
        assert!(with > fixed_bytes(kind) + len_bytes, "{kind}: the dictionary is counted");
    }
    train(&format!("{first} -o {dict}")).says(1, "pages.dict exists: remove it");
    assert_eq!(fs::metadata(&dict).unwrap().len(), len_bytes, "left alone");
}

#[test]
fn what_cannot_be_trained_is_one_line() {
    let place = Place::new();
    place.write("few", corpus(20));
    place.write("zeros", vec![0; 100 * PAGE_BYTES]);
    place.write("many", corpus(60));
    place.refuses(&[
        ("train DIR/few -o DIR/out", 1, &["18 pages to train on are too few"]),
        ("train DIR/zeros -o DIR/out", 1, &["0 different pages are too few"]),
        ("train DIR/missing -o DIR/out", 1, &["missing: No such file"]),
        ("train DIR -o DIR/out", 1, &["not a regular file"]),
        ("train /dev/zero -o DIR/out", 1, &["/dev/zero: not a regular file"]),
        ("train DIR/many -o DIR/no/dir --size 8K", 1, &["cannot write"]),
        (
            "train DIR/many -o DIR/out --size 512B",
            2,
            &["invalid value '512B' for '--size <SIZE>': write 1K to 1M"],
        ),
        ("train DIR/many -o DIR/out --size 2M", 2, &["write 1K to 1M"]),
        ("train DIR/many -o DIR/out --size big", 2, &["--size"]),
        ("train DIR/many -o DIR/out --size 8K --level 0", 2, &["--level: '0' is no level"]),
        ("train DIR/many -o DIR/out --size 8K --level 23", 2, &["--level: '23' is no level"]),
        ("train DIR/many", 2, &["--output"]),
        ("train -o DIR/out", 2, &["<CORPUS>"]),
    ]);
    assert!(!Path::new(&place.path("out")).exists());
    train(&format!("{0}/many -o {0}/out --size 8K --level -5", place.root().display())).ok();
}
