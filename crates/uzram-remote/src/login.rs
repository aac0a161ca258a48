//! Logins, which come from the environment, or from files that no other user can read: docs/remote.md lists
//! them.

use std::ffi::OsString;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;

use uzram::{ErrorKind, Result};

use crate::redis::Credentials;
use crate::{S3Login, error};

/// The most bytes of a user's name, and of a password.
const MAX_LOGIN_BYTES: usize = 4096;
const MAX_FILE_BYTES: u64 = 16 << 10;

/// Returns the login to Redis. Errors: `Invalid` if it is too long, or a user has no password; `NotFound`,
/// `Permission` or `Io` if its file cannot be used.
pub(crate) fn redis() -> Result<Credentials> {
    let password = match variable("UZRAM_REDIS_PASSWORD_FILE")? {
        Some(path) => Some(first_line(&read_private(&path)?)),
        None => variable("UZRAM_REDIS_PASSWORD")?,
    };
    checked(Credentials { user: variable("UZRAM_REDIS_USER")?, password })
}

fn checked(login: Credentials) -> Result<Credentials> {
    if login.user.is_some() && login.password.as_ref().is_none_or(String::is_empty) {
        let what = "UZRAM_REDIS_USER is set, but neither UZRAM_REDIS_PASSWORD_FILE nor UZRAM_REDIS_PASSWORD has a password";
        return Err(error(ErrorKind::Invalid, what));
    }
    let is_long = |text: &Option<String>| text.as_ref().is_some_and(|text| text.len() > MAX_LOGIN_BYTES);
    match is_long(&login.user) || is_long(&login.password) {
        true => Err(error(ErrorKind::Invalid, "the user's name or the password is too long")),
        false => Ok(login),
    }
}

/// Returns the login to S3, and where it is. Errors: `Permission` if there is none; `Invalid` if it cannot be
/// one; as [`redis`] for its file.
pub(crate) fn s3() -> Result<S3Login> {
    let keys = match variable("UZRAM_S3_CREDENTIALS_FILE")? {
        Some(path) => {
            let what = "it has neither an access key's id and a secret key in two lines, nor \
                        aws_access_key_id = … and aws_secret_access_key = …";
            let keys = parse_keys(&read_private(&path)?);
            Some(keys.ok_or_else(|| error(ErrorKind::Invalid, format!("{path}: {what}")))?)
        }
        None => {
            let token = variable("AWS_SESSION_TOKEN")?;
            let pair = variable("AWS_ACCESS_KEY_ID")?.zip(variable("AWS_SECRET_ACCESS_KEY")?);
            pair.map(|(id, secret)| (id, secret, token))
        }
    };
    let Some((access_key_id, secret_access_key, session_token)) = keys else {
        let what = "no login to S3: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or UZRAM_S3_CREDENTIALS_FILE. Nothing \
                    else is searched";
        return Err(error(ErrorKind::Permission, what));
    };
    S3Login {
        access_key_id,
        secret_access_key,
        session_token,
        region: variable("AWS_REGION")?.unwrap_or_else(|| "us-east-1".to_owned()),
        endpoint: match variable("AWS_ENDPOINT_URL_S3")? {
            Some(url) => Some(url),
            None => variable("AWS_ENDPOINT_URL")?,
        },
    }
    .checked()
}

/// Returns a variable of the environment, unless it is empty. Errors: `Invalid` if it is not UTF-8.
fn variable(name: &str) -> Result<Option<String>> {
    value_of(name, std::env::var_os(name))
}

fn value_of(name: &str, value: Option<OsString>) -> Result<Option<String>> {
    match value.map(OsString::into_string) {
        Some(Err(_)) => Err(error(ErrorKind::Invalid, format!("{name} is not UTF-8"))),
        Some(Ok(value)) => Ok(Some(value).filter(|value| !value.is_empty())),
        None => Ok(None),
    }
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}

/// Parses what a file has: two lines, or the keys of an AWS file, of whose sections the first one counts.
/// Returns an access key's id, its secret key and a session's token.
fn parse_keys(text: &str) -> Option<(String, String, Option<String>)> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with(['#', ';']));
    let lines: Vec<_> = lines.collect();
    let is_section = |line: &str| line.starts_with('[');
    let of_section = &lines[usize::from(lines.first().is_some_and(|line| is_section(line)))..];
    let value = |name: &str| {
        let lines = of_section.iter().take_while(|line| !is_section(line));
        let mut pairs = lines.filter_map(|line| line.split_once('='));
        pairs.find_map(|(key, value)| (key.trim() == name).then(|| value.trim().to_owned()))
    };
    if let Some((id, secret)) = value("aws_access_key_id").zip(value("aws_secret_access_key")) {
        return Some((id, secret, value("aws_session_token")));
    }
    match lines[..] {
        // A secret key may end with '='.
        [id, secret] if !id.contains(['=', '[']) && !secret.contains(' ') => {
            Some((id.to_owned(), secret.to_owned(), None))
        }
        _ => None,
    }
}

/// Reads a file that only this user and root may read.
fn read_private(path: &str) -> Result<String> {
    let refused = |kind, why: &str| Err(error(kind, format!("{path}: {why}")));
    let opened = File::open(path).and_then(|file| Ok((file.metadata()?, file)));
    let (metadata, file) = match opened {
        Ok(opened) => opened,
        Err(error) => return refused(ErrorKind::NotFound, &format!("the password cannot be read: {error}")),
    };
    let own = rustix::process::geteuid().as_raw();
    if metadata.mode() & 0o077 != 0 || ![0, own].contains(&metadata.uid()) {
        return refused(ErrorKind::Permission, "other users may read or change the password: chmod 600 it");
    }
    let mut text = String::new();
    match file.take(MAX_FILE_BYTES).read_to_string(&mut text) {
        Ok(_) => Ok(text),
        Err(error) => refused(ErrorKind::Io, &format!("the password cannot be read: {error}")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::os::unix::ffi::OsStringExt;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_user_without_a_password_is_refused() {
        let is_refused = |user: Option<&str>, password: Option<&str>| {
            let login = Credentials { user: user.map(str::to_owned), password: password.map(str::to_owned) };
            let refused = checked(login).err();
            assert!(refused.iter().all(|error| {
                error.kind() == ErrorKind::Invalid && error.to_string().contains("UZRAM_REDIS_PASSWORD")
            }));
            refused.is_some()
        };
        assert!(is_refused(Some("user"), None) && is_refused(Some("user"), Some("")));
        assert!(!is_refused(Some("user"), Some("secret")) && !is_refused(None, Some("secret")));
        assert!(!is_refused(None, None));
    }

    #[test]
    fn a_variable_that_is_not_utf_8_is_refused() {
        let value =
            |bytes: Option<&[u8]>| value_of("NAME", bytes.map(|bytes| OsString::from_vec(bytes.to_vec())));
        assert_eq!((value(None), value(Some(b""))), (Ok(None), Ok(None)));
        assert_eq!(value(Some(b"a")), Ok(Some("a".to_owned())));
        let refused = value(Some(b"a\xff")).unwrap_err();
        assert!(refused.kind() == ErrorKind::Invalid && refused.to_string().contains("NAME"), "{refused}");
    }

    #[test]
    fn a_password_that_others_can_read_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("password");
        std::fs::write(&path, "secret\n").unwrap();
        let read = |mode| {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let text = read_private(path.to_str().unwrap());
            text.map(|text| first_line(&text)).map_err(|error| error.kind())
        };
        assert_eq!(read(0o600), Ok("secret".to_owned()));
        assert_eq!(read(0o400), Ok("secret".to_owned()));
        for mode in [0o644, 0o660, 0o604, 0o620] {
            assert_eq!(read(mode), Err(ErrorKind::Permission), "{mode:o}");
        }
        assert_eq!(read_private("/nowhere").map_err(|error| error.kind()), Err(ErrorKind::NotFound));
    }

    #[test]
    fn a_file_has_keys_in_two_lines_or_by_name() {
        let keys = |token: Option<&str>| Some(("ID".to_owned(), "a/b=".to_owned(), token.map(str::to_owned)));
        for (text, expected) in [
            ("ID\na/b=\n", keys(None)),
            ("\n# mine\nID\r\n  a/b=  \n\n", keys(None)),
            ("aws_access_key_id=ID\naws_secret_access_key=a/b=\n", keys(None)),
            (
                "[default]\naws_access_key_id = ID\naws_secret_access_key = a/b=\naws_session_token = t\n[x]\nregion = y\n",
                keys(Some("t")),
            ),
            ("[a]\naws_access_key_id = ID\n[b]\naws_secret_access_key = a/b=\n", None),
            ("[a]\nregion = x\n", None),
            ("ID\n", None),
            ("ID\nsecret\nmore\n", None),
            ("", None),
        ] {
            assert_eq!(parse_keys(text), expected, "{text}");
        }
    }
}
