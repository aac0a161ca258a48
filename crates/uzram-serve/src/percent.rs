//! Percent-encoding (RFC 3986), for names in paths and socket paths in URIs.

/// Encodes all but unreserved characters and `/`.
///
/// ```
/// assert_eq!(uzram_serve::percent::encode(b"/run/my zram"), "/run/my%20zram");
/// ```
pub fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for &byte in bytes {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            text.push(char::from(byte));
        } else {
            text.push_str(&format!("%{byte:02X}"));
        }
    }
    text
}

/// Encodes one segment of a path: like [`encode`], and also `/`.
pub fn encode_segment(segment: &str) -> String {
    encode(segment.as_bytes()).replace('/', "%2F")
}

/// Decodes `text`; `None` for a malformed escape, or if the result is not UTF-8.
pub fn decode(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let high = char::from(rest.next()?).to_digit(16)?;
        let low = char::from(rest.next()?).to_digit(16)?;
        bytes.push((high * 16 + low) as u8);
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_is_encoded_decodes_to_itself() {
        for text in ["zram0", "a b/c", "100%", "ü?&=#", ""] {
            assert_eq!(decode(&encode(text.as_bytes())).unwrap(), text);
            let segment = encode_segment(text);
            assert!(!segment.contains('/'), "{segment}");
            assert_eq!(decode(&segment).unwrap(), text);
        }
    }

    #[test]
    fn broken_escapes_are_refused() {
        for text in ["%", "%4", "%zz", "%+1", "%ff"] {
            assert_eq!(decode(text), None, "{text}");
        }
    }
}
