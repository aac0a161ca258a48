//! Parsing and printing of algorithms, and reading of their dictionary files.

use super::*;

#[test]
fn algorithms_read_as_they_print() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&file, trained()).unwrap();
    let path = file.path().display();
    let lines =
        ["memory", "lz4", "lz4:2", "lz4:65537", "lz4hc", "lz4hc:2", "zstd", "zstd:3", "zstd:-5", "zstd:22"];
    let with_dictionary = lines.map(|text| format!("{text},dict={path}"));
    let without = [&lines[..], &["deflate", "deflate:1", "deflate:12"]].concat();
    for text in without.into_iter().map(str::to_owned).chain(with_dictionary) {
        let read = algorithm(&text);
        assert_eq!((read.to_string(), format!("{read:?}")), (text.clone(), format!("Algorithm({text})")));
        assert!(read == algorithm(&text) && read == read.clone());
        assert!(text.starts_with(read.kind().name()));
        assert_eq!(read.dictionary().map(Dictionary::bytes), text.contains("dict").then(trained));
    }
    for (text, shown) in [
        ("lz4:1", "lz4"),
        ("lz4hc:9", "lz4hc"),
        (" zstd:1\n", "zstd"),
        ("deflate:+6", "deflate"),
        ("memory:1", "memory"),
        ("w64+lz4", "memory"),
    ] {
        assert_eq!(algorithm(text).to_string(), shown);
    }
    assert_eq!((algorithm("zstd:-7").level(), algorithm("deflate").level()), (-7, 6));
    assert!(Algorithm::default() == algorithm("lz4") && Algorithm::default() != algorithm("lz4:2"));
    assert!(algorithm("lz4") != algorithm(&format!("lz4,dict={path}")));
    assert!(with("lz4", raw()) != with("lz4", trained()));
    assert_eq!(Kind::ALL.map(Kind::name), ["lz4", "lz4hc", "zstd", "deflate", "memory"]);
}

#[test]
fn a_bad_algorithm_says_what_to_write() {
    for (text, hint) in [
        ("", "there are: lz4, lz4hc, zstd, deflate, memory"),
        ("LZ4", "there are: lz4, lz4hc, zstd, deflate, memory"),
        ("lzo:3", "no compression algorithm 'lzo'"),
        ("lz4:0", "1 to 65537"),
        ("lz4:65538", "the higher the faster"),
        ("lz4hc:1", "2 to 9"),
        ("lz4hc:10", "2 to 9"),
        ("zstd:", "1 to 22"),
        ("zstd:fast", "1 to 22"),
        ("zstd:23", "1 to 22"),
        ("zstd:-131073", "-131072 to -1"),
        ("zstd:99999999999", "1 to 22"),
        ("zstd:0", "'0' is no level"),
        ("deflate:0", "1 to 12"),
        ("deflate:13", "1 to 12"),
        ("memory:0", "no levels but 1"),
        ("memory:2", "no levels but 1"),
        ("w64", "no compression algorithm 'w64'"),
        ("zstd,", "dict=PATH"),
        ("zstd,level=3", "dict=PATH"),
        ("zstd,dict=", "beginning with '/'"),
        ("zstd,dict=pages.dict", "beginning with '/'"),
        ("zstd,dict=/a b", "no spaces"),
        ("zstd,dict=/a[1]", "no brackets"),
    ] {
        let error = text.parse::<Algorithm>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert!(error.to_string().contains(hint), "{text}: {error}");
    }
    // A level given in code is checked, too.
    for (kind, level) in [(Kind::Lz4, 0), (Kind::Lz4hc, 10), (Kind::Zstd, 23), (Kind::Deflate, -1)] {
        assert!(Algorithm::new(kind, Some(level), None).is_err());
    }
}

#[test]
fn a_bad_dictionary_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let write = |name: &str, bytes: &[u8]| std::fs::write(path(name), bytes).unwrap();
    write("empty", &[]);
    write("short", &[1; 7]);
    write("long", &vec![1; MAX_DICTIONARY_BYTES + 1]);
    write("text", b"root:x:0:0:root:/root:/bin/sh");
    write("longest", &[&trained()[..4], &vec![1; MAX_DICTIONARY_BYTES - 4]].concat());
    let mut damaged = trained().to_vec();
    damaged[8..200].fill(0xff);
    write("damaged", &damaged);
    write("cut", &trained()[..100]);
    let fifo = std::ffi::CString::new(path("fifo")).unwrap();
    // SAFETY: a path in the test's own directory, terminated by a zero.
    assert_eq!(unsafe { libc::mkfifo(fifo.as_ptr(), 0o600) }, 0);
    for (name, kinds, hint) in [
        ("missing", &["lz4", "lz4hc", "zstd"][..], "No such file"),
        ("empty", &["lz4", "lz4hc", "zstd"], "is empty"),
        ("short", &["lz4", "zstd"], "8 bytes at least"),
        ("long", &["lz4", "zstd"], "1024 KiB at most"),
        ("text", &["lz4", "lz4hc", "zstd", "memory"], "it is not a dictionary: `uzram train`"),
        ("fifo", &["zstd"], "regular file"),
        (".", &["zstd"], "regular file"),
        ("damaged", &["zstd", "zstd:19"], "damaged zstd dictionary"),
        ("cut", &["zstd", "zstd:-3"], "damaged zstd dictionary"),
        ("longest", &["deflate"], "takes no dictionary"),
    ] {
        for kind in kinds {
            let error = format!("{kind},dict={}", path(name)).parse::<Algorithm>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
            assert!(error.to_string().contains(hint), "{kind} {name}: {error}");
        }
    }
    // A damaged zstd dictionary is raw contents for lz4.
    for text in ["lz4,dict=damaged", "lz4hc,dict=cut", "lz4,dict=longest", "lz4hc:2,dict=longest"] {
        let (kind, name) = text.split_once(",dict=").unwrap();
        Coder::new(&algorithm(&format!("{kind},dict={}", path(name))))
            .assert_round_trip(text, &[3; PAGE_SIZE]);
    }
}
