//! Text for machines that have no files: seeded sentences of words with a natural skew.

/// Returns `len_bytes` of generated text, always the same.
pub(super) fn text(len_bytes: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(3);
    let words = words(&mut rng, 5000);
    let mut out = Vec::with_capacity(len_bytes + 64);
    while out.len() < len_bytes {
        // The product of two uniform numbers favours the first words, as languages do.
        let pick = (rng.f64() * rng.f64() * words.len() as f64) as usize;
        out.extend_from_slice(words[pick].as_bytes());
        out.extend_from_slice(if rng.u8(..12) == 0 { b".\n" } else { b" " });
    }
    out.truncate(len_bytes);
    out
}

/// Makes up `count` words of 2 to 9 of English's commonest letters.
pub(super) fn words(rng: &mut fastrand::Rng, count: usize) -> Vec<String> {
    const LETTERS: &[u8; 12] = b"etaoinshrdlu";
    (0..count)
        .map(|_| (0..rng.usize(2..10)).map(|_| char::from(LETTERS[rng.usize(..12)])).collect())
        .collect()
}
