//! `uzram train`: its dictionary, its output, and what it refuses.

use crate::common::{Place, bare_command, finish};

const PAGE_BYTES: usize = 4096;

/// Returns `pages` different pages that share records of a hundred bytes, which are themselves
/// incompressible.
fn corpus(pages: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize
    };
    let records: Vec<u8> = (0..6400).map(|_| next() as u8).collect();
    let mut bytes = Vec::new();
    while bytes.len() < pages * PAGE_BYTES {
        let at = next() % (records.len() - 100);
        bytes.extend_from_slice(&records[at..at + 100]);
    }
    bytes.truncate(pages * PAGE_BYTES);
    bytes
}

fn train(args: &[&str]) -> crate::common::Ended {
    finish(bare_command(&[&["train"], args].concat()))
}

#[test]
fn a_trained_dictionary_is_measured_and_serves_a_device() {
    let place = Place::new();
    let path = |name: &str| place.root().join(name).display().to_string();
    let (first, second, dict) = (path("first"), path("second"), path("pages.dict"));
    // Zeros and repetitions are left out, and so is the half page at the end.
    let pages = corpus(150);
    std::fs::write(&first, [&pages[..], &[0; 3 * PAGE_BYTES], &pages[..5 * PAGE_BYTES], &[1; 100]].concat())
        .unwrap();
    std::fs::write(&second, &corpus(190)[150 * PAGE_BYTES..]).unwrap();

    let said = train(&[&first, &second, "-o", &dict, "--size", "16K", "--level", "3"]).ok();
    for line in [
        "pages       198 of 198; left out: 3 same-filled, 5 repeated\n",
        "trained on  167 pages\n",
        "held out    23 pages, with zstd:3\n",
        &format!(" bytes, {dict}\n"),
    ] {
        assert!(said.contains(line), "{said}");
    }
    let numbers = |start: &str| -> Vec<f64> {
        let line = said.lines().find(|line| line.trim_start().starts_with(start)).unwrap();
        line.split_whitespace().filter_map(|word| word.parse().ok()).collect()
    };
    let ratios = numbers("ratio");
    assert!(ratios[0] < 1.5 && ratios[1] > 2.0, "{said}");
    let len_bytes = std::fs::metadata(&dict).unwrap().len();
    assert!(len_bytes <= 16 << 10 && numbers("dictionary") == [len_bytes as f64], "{said}");

    // A device accepts it for each algorithm with dictionaries, and shows its cost.
    for kind in ["lz4", "lz4hc:4", "zstd:3"] {
        let fixed_bytes = |algorithm: &str| {
            let daemon = place.up(&["--algorithm", algorithm]);
            let shown = place.run(&["stat", "zram0", "comp_algorithm"]).ok();
            assert!(shown.contains(&format!("[{algorithm}]")) && daemon.facts.contains(algorithm), "{shown}");
            place.number("mem_fixed")
        };
        let with = fixed_bytes(&format!("{kind},dict={dict}"));
        assert!(with > fixed_bytes(kind) + len_bytes, "{kind}: the dictionary is counted");
    }
    let refused = train(&[&first, "-o", &dict]);
    assert!(refused.complaint(1).contains("pages.dict exists: remove it"));
    assert_eq!(std::fs::metadata(&dict).unwrap().len(), len_bytes, "left alone");
}

#[test]
fn what_cannot_be_trained_is_one_line() {
    let place = Place::new();
    let path = |name: &str| place.root().join(name).display().to_string();
    let (few, zeros, many, out) = (path("few"), path("zeros"), path("many"), path("out"));
    std::fs::write(&few, corpus(20)).unwrap();
    std::fs::write(&zeros, vec![0; 100 * PAGE_BYTES]).unwrap();
    std::fs::write(&many, corpus(60)).unwrap();
    for (args, status, mentions) in [
        (&[few.as_str(), "-o", &out][..], 1, "18 pages to train on are too few"),
        (&[&zeros, "-o", &out], 1, "0 different pages are too few"),
        (&[&path("missing"), "-o", &out], 1, "missing: No such file"),
        (&[&place.root().display().to_string(), "-o", &out], 1, "not a regular file"),
        (&["/dev/zero", "-o", &out], 1, "/dev/zero: not a regular file"),
        (&[&many, "-o", &path("no/dir"), "--size", "8K"], 1, "cannot write"),
        (
            &[&many, "-o", &out, "--size", "512B"],
            2,
            "invalid value '512B' for '--size <SIZE>': write 1K to 1M",
        ),
        (&[&many, "-o", &out, "--size", "2M"], 2, "write 1K to 1M"),
        (&[&many, "-o", &out, "--size", "big"], 2, "--size"),
        (&[&many, "-o", &out, "--size", "8K", "--level", "0"], 2, "--level: '0' is no level"),
        (&[&many, "-o", &out, "--size", "8K", "--level", "23"], 2, "--level: '23' is no level"),
        (&[&many], 2, "--output"),
        (&["-o", &out], 2, "<CORPUS>"),
    ] {
        let ended = train(args);
        let line = ended.complaint(status);
        assert!(line.contains(mentions), "{args:?}: {line}");
        assert!(!std::path::Path::new(&out).exists(), "{args:?}");
    }
    train(&[&many, "-o", &out, "--size", "8K", "--level", "-5"]).ok();
}
