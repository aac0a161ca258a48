use super::*;
use uzram::codec::Encoder;

fn bytes(corpus: &Corpus) -> Vec<u8> {
    corpus.pages().flatten().copied().collect()
}

#[test]
fn every_kind_gives_the_pages_asked_for() {
    for kind in Kind::ALL {
        for pages in [1, 2, 300] {
            let corpus = build(kind, pages).unwrap();
            assert_eq!(corpus.page_count(), pages, "{kind:?}");
        }
    }
}

#[test]
fn pages_differ_and_compress() {
    for kind in Kind::ALL {
        let corpus = build(kind, 300).unwrap();
        let distinct: std::collections::HashSet<_> = corpus.pages().collect();
        assert!(distinct.len() > 150, "{kind:?}: {} distinct pages of 300", distinct.len());
        let mut encoder = Encoder::new(&uzram::codec::Algorithm::default()).unwrap();
        let mut out = vec![0; 2 * PAGE_SIZE];
        let compressed: usize = corpus.pages().map(|page| encoder.encode(page, &mut out).unwrap()).sum();
        let ratio = (300 * PAGE_SIZE) as f64 / compressed as f64;
        assert!((1.1..20.0).contains(&ratio), "{kind:?}: lz4 ratio {ratio:.2}");
    }
}

#[test]
fn files_come_in_the_same_order_each_time() {
    for kind in [Kind::Text, Kind::Binary] {
        assert!(bytes(&build(kind, 200).unwrap()) == bytes(&build(kind, 200).unwrap()), "{kind:?}");
    }
}

#[test]
fn mixed_takes_the_three_in_turn() {
    let parts = [1, 2, 3].map(|fill| vec![fill; 2 * PAGE_SIZE]);
    let mixed = interleave(&parts, 5);
    let firsts: Vec<_> = mixed.chunks(PAGE_SIZE).map(|page| page[0]).collect();
    assert_eq!(firsts, [1, 2, 3, 1, 2]);
}

#[test]
fn a_corpus_survives_a_file_and_its_last_partial_page_is_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("corpus.bin");
    let corpus = build(Kind::Text, 7).unwrap();
    let mut contents = bytes(&corpus);
    corpus.save(&path).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), contents);
    contents.extend_from_slice(b"tail");
    std::fs::write(&path, &contents).unwrap();
    let loaded = load(&path).unwrap();
    assert_eq!(loaded.page_count(), 7);
    assert_eq!(loaded.page(9), corpus.page(2), "pages count round the corpus");
}

#[test]
fn what_is_no_corpus_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let short = dir.path().join("short.bin");
    std::fs::write(&short, [0; 4095]).unwrap();
    for path in [short.as_path(), dir.path(), Path::new("/nonexistent/corpus.bin")] {
        let error = load(path).err().unwrap().to_string();
        assert!(error.contains(path.to_str().unwrap()), "{error}");
    }
    assert!(build(Kind::Text, 0).is_err());
    assert!(build(Kind::Text, usize::MAX).is_err());
}

#[test]
fn same_filled_pages_are_left_out() {
    let mut contents = vec![0u8; 3 * PAGE_SIZE];
    contents[PAGE_SIZE + 8] = 1;
    contents[2 * PAGE_SIZE..].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8].repeat(PAGE_SIZE / 8));
    let corpus = Corpus::from_bytes(&contents).unwrap();
    let same: Vec<_> = corpus.pages().map(|page| same_word(page).is_some()).collect();
    assert_eq!(same, [true, false, true]);
    assert_eq!(corpus.without_same_filled().unwrap().page_count(), 1);
    assert!(Corpus::from_bytes(&[0; PAGE_SIZE]).unwrap().without_same_filled().is_err());
}

#[test]
fn generated_text_is_seeded() {
    let text = files::generated(3 * PAGE_SIZE);
    assert_eq!((text.len(), &text), (3 * PAGE_SIZE, &files::generated(3 * PAGE_SIZE)));
}
