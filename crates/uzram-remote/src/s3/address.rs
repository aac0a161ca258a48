//! Texts that name a place in a store: `s3://BUCKET[/PREFIX][:SIZE]`; and the login, with the store's URL.

use serde::{Deserialize, Serialize};
use uzram::units::parse_size;
use uzram::{ErrorKind, Result};

use crate::error;

pub(crate) const SCHEME: &str = "s3://";
/// Bytes of a bucket's name, as S3 has them.
const BUCKET_BYTES: std::ops::RangeInclusive<usize> = 3..=63;
const MAX_PREFIX_BYTES: usize = 512;
/// The most bytes of a region and of a URL, and of a key and a token.
const MAX_NAME_BYTES: usize = 2048;
const MAX_SECRET_BYTES: usize = 8192;

/// A bucket, and what the names of objects in it begin with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct S3Address {
    /// The bucket's name.
    pub bucket: String,
    /// Names in it begin with this and a `/`; with `uzram/` if it is empty.
    pub prefix: String,
    /// How many bytes to use there; `None` for as many as the device has.
    pub size_bytes: Option<u64>,
}

impl S3Address {
    /// Parses a text. Errors: `Invalid`, also for a text with a login, which other users of the machine could
    /// read.
    pub fn parse(text: &str) -> Result<S3Address> {
        let refused = |why: &str| Err(error(ErrorKind::Invalid, format!("no place in S3: {why}")));
        let Some(rest) = text.strip_prefix(SCHEME) else { return refused("it does not begin with s3://") };
        if rest.contains('@') {
            return refused(
                "it contains '@'. Give the login in a file or in the environment, where other users do not see it",
            );
        }
        let (rest, size_bytes) = match rest.split_once(':').map(|(rest, size)| (rest, parse_size(size))) {
            None => (rest, None),
            Some((rest, Ok(size_bytes))) if size_bytes > 0 => (rest, Some(size_bytes)),
            Some(_) => return refused("what follows the ':' is not a size"),
        };
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
        let is_bucket = BUCKET_BYTES.contains(&bucket.len())
            && bucket.chars().all(|c| is_plain(c) || ".-".contains(c))
            && bucket.starts_with(is_plain)
            && bucket.ends_with(is_plain)
            && !bucket.contains("..");
        if !is_bucket {
            return refused("a bucket has 3 to 63 lower-case letters, digits, '.' and '-'");
        }
        let prefix = prefix.strip_suffix('/').filter(|prefix| !prefix.is_empty()).unwrap_or(prefix);
        if prefix.len() > MAX_PREFIX_BYTES {
            return refused("its prefix is too long");
        }
        if prefix.chars().any(|c| !c.is_ascii_alphanumeric() && !"/-_.=+~!".contains(c)) {
            return refused("a prefix has letters, digits and any of /-_.=+~!");
        }
        if !prefix.is_empty() && prefix.split('/').any(|part| ["", ".", ".."].contains(&part)) {
            return refused("a part of its prefix is empty, '.' or '..'");
        }
        Ok(S3Address { bucket: bucket.to_owned(), prefix: prefix.to_owned(), size_bytes })
    }
}

impl std::fmt::Display for S3Address {
    /// Shows the text that parses as this address, without the size.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let slash = if self.prefix.is_empty() { "" } else { "/" };
        write!(f, "{SCHEME}{}{slash}{}", self.bucket, self.prefix)
    }
}

/// A login, and which store it is for. Without `Debug`, so that it is shown nowhere.
#[derive(Clone, Serialize, Deserialize)]
pub struct S3Login {
    /// The access key's id.
    pub access_key_id: String,
    /// The secret key.
    pub secret_access_key: String,
    /// The session's token, of a login that ends.
    pub session_token: Option<String>,
    /// The region.
    pub region: String,
    /// The store's URL; Amazon's without one.
    pub endpoint: Option<String>,
}

impl S3Login {
    /// Checks that it can be sent. Errors: `Invalid` if something is too long, or contains what cannot be
    /// there.
    pub fn checked(self) -> Result<S3Login> {
        let refused = |why: &str| Err(error(ErrorKind::Invalid, why.to_owned()));
        let is_secret =
            |text: &str| text.len() <= MAX_SECRET_BYTES && text.chars().all(|c| c.is_ascii_graphic());
        let secrets = [&self.access_key_id, &self.secret_access_key].into_iter().chain(&self.session_token);
        if !secrets.into_iter().all(|text| is_secret(text)) {
            return refused("the login to S3 is too long, or contains a space or a special character");
        }
        let is_region = |text: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c));
        if self.region.len() > MAX_NAME_BYTES || !is_region(&self.region) {
            return refused("AWS_REGION is not the name of a region");
        }
        let is_url = |text: &str| {
            let rest = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
            let is_good = |rest: &str| {
                rest.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '[')
                    && rest.chars().all(|c| c.is_ascii_alphanumeric() || "-._:/[]".contains(c))
            };
            text.len() <= MAX_NAME_BYTES && rest.is_some_and(is_good)
        };
        match &self.endpoint {
            Some(endpoint) if !is_url(endpoint) => {
                refused("AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL is not http[s]://HOST[:PORT][/PATH]")
            }
            _ => Ok(self),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn shown(text: &str) -> Option<(String, Option<u64>)> {
        let address = S3Address::parse(text).ok()?;
        // What is shown parses as the same.
        let again = S3Address::parse(&address.to_string()).unwrap();
        assert_eq!(again, S3Address { size_bytes: None, ..address.clone() });
        Some((address.to_string(), address.size_bytes))
    }

    #[test]
    fn an_address_has_a_bucket_and_perhaps_a_prefix_and_a_size() {
        for (text, address, size_bytes) in [
            ("s3://cold", "s3://cold", None),
            ("s3://cold/", "s3://cold", None),
            ("s3://cold:2G", "s3://cold", Some(2 << 30)),
            ("s3://a.b-c/d/e_f/:64M", "s3://a.b-c/d/e_f", Some(64 << 20)),
            ("s3://cold/a=b/v1.2", "s3://cold/a=b/v1.2", None),
            ("s3://", "", None),
            ("s3:///prefix", "", None),
            ("s3://ab", "", None),
            ("s3://Cold", "", None),
            ("s3://-cold", "", None),
            ("s3://cold.", "", None),
            ("s3://co..ld", "", None),
            ("s3://cold/a//b", "", None),
            ("s3://cold//", "", None),
            ("s3://cold/../b", "", None),
            ("s3://cold/a/.", "", None),
            ("s3://cold/a b", "", None),
            ("s3://cold/a\n", "", None),
            ("s3://cold/ä", "", None),
            ("s3://cold/%2e", "", None),
            ("s3://cold/a?b", "", None),
            ("s3://cold/a#b", "", None),
            ("s3://cold:0", "", None),
            ("s3://cold:x", "", None),
            ("s3://cold/a:1:2G", "", None),
            ("s3://cold:9000/a", "", None),
            ("s3://id:secret@cold/a", "", None),
            ("redis://cold", "", None),
        ] {
            let expected = (!address.is_empty()).then(|| (address.to_owned(), size_bytes));
            assert_eq!(shown(text), expected, "{text}");
        }
        assert!(S3Address::parse(&format!("s3://{}", "a".repeat(64))).is_err());
        assert!(S3Address::parse(&format!("s3://cold/{}", "a".repeat(513))).is_err());
        let secret = S3Address::parse("s3://id:secret@cold").unwrap_err().to_string();
        assert!(!secret.contains("secret") && secret.contains("in a file"), "{secret}");
    }

    #[test]
    fn logins_that_cannot_be_sent_are_refused() {
        let login = |secret: &str, region: &str, endpoint: &str| {
            let login = S3Login {
                access_key_id: "ID".to_owned(),
                secret_access_key: secret.to_owned(),
                session_token: None,
                region: region.to_owned(),
                endpoint: Some(endpoint.to_owned()),
            };
            login.checked().is_ok()
        };
        assert!(login("key/+=", "eu-west-1", "https://[::1]:9000/minio"));
        for (secret, region, endpoint) in [
            ("a b", "r", "http://a"),
            ("a\nb", "r", "http://a"),
            (&"a".repeat(9000), "r", "http://a"),
            ("a", "r/../x", "http://a"),
            ("a", "r", "a:9000"),
            ("a", "r", "http://"),
            ("a", "r", "http://user:password@a"),
            ("a", "r", "http://a?b"),
        ] {
            assert!(!login(secret, region, endpoint), "{secret} {region} {endpoint}");
        }
    }
}
