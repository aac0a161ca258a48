//! A device's backing device: [`Tiers`] with names and descriptions for users.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::OnceLock;

use crate::backing::{Backing, Blocks, Engine, FileBacking, FileOptions, Objects, Seal, Tiers};
use crate::base::error::{Error, ErrorKind, Result};
use crate::base::sync::Arc;
use crate::base::units::{format_size, parse_size};

/// Backings with names and descriptions.
#[derive(Clone)]
pub struct NamedBacking {
    name: String,
    backing: Arc<Tiers>,
    /// The tiers, and after them a key, if there is one.
    parts: Vec<Part>,
}

/// A file, a block device, or a store on other machines.
#[derive(Clone, Default)]
struct Part {
    name: String,
    how: String,
    /// `None` for a key, which holds nothing.
    backing: Option<Backing>,
    file: Option<Arc<FileBacking>>,
    /// With which another process can go on, if it is elsewhere.
    kept: Option<Arc<OwnedFd>>,
    copies: u8,
    seal: Option<Arc<dyn Seal>>,
}

/// How to open a backing device.
#[derive(Clone, Copy, Debug)]
pub struct HowToOpen {
    /// Whether a file or device that holds other data is overwritten.
    pub force: bool,
    /// How many copies of each object a store on other machines keeps, 1 or 2.
    pub copies: u8,
    /// Whether files and block devices are encrypted, too; stores on other machines always are.
    pub encrypted: bool,
    /// Whether the device outlives the process: no transfer goes on once the process has ended and was waited
    /// for.
    pub keeps: bool,
}

impl Default for HowToOpen {
    fn default() -> Self {
        HowToOpen { force: false, copies: 1, encrypted: false, keeps: false }
    }
}

/// A part of a backing device, with which another process can go on ([`NamedBacking::from_parts`]).
#[derive(Clone, Debug)]
pub struct KeptPart<D> {
    /// Its name, which is not looked up.
    pub name: String,
    /// Its length.
    pub len_bytes: u64,
    /// Its descriptor, or a duplicate.
    pub descriptor: D,
}

const KEY: &str = "key";

/// Opens backing devices that are no files: in stores on other machines. What names one begins with
/// `SCHEME://`.
pub trait Opener: Send + Sync {
    /// Checks that a text can name a store, without connecting.
    fn check(&self, text: &str) -> Result<()>;

    /// Opens a store that keeps so many copies of each object, 1 or 2.
    fn open(&self, text: &str, copies: u8) -> Result<Elsewhere>;

    /// Goes on where another process was, by a duplicate of [`Elsewhere::kept`]. Does not wait for the store,
    /// which may be away.
    fn resume(&self, kept: OwnedFd, len_bytes: u64) -> Result<Elsewhere>;

    /// Draws a key to seal what is in files, or takes the one that another process kept. Returns with what
    /// another process gets it; `None` if the system refused that.
    fn seal(&self, kept: Option<OwnedFd>) -> Result<(Arc<dyn Seal>, Option<OwnedFd>)>;
}

/// A backing in a store on other machines.
pub struct Elsewhere {
    /// The name, without passwords.
    pub name: String,
    /// How it is accessed.
    pub how: String,
    /// The backing, and what its objects are sealed with.
    pub backing: Arc<dyn Objects>,
    /// See `backing`.
    pub seal: Arc<dyn Seal>,
    /// How many copies it keeps of each object.
    pub copies: u8,
    /// What another process needs to go on ([`Opener::resume`]); `None` if the system refused it.
    pub kept: Option<OwnedFd>,
}

static OPENER: OnceLock<Box<dyn Opener>> = OnceLock::new();

/// Has backing devices elsewhere opened by `opener`, in the whole process. Only the first one counts.
pub fn set_opener(opener: Box<dyn Opener>) {
    let _ = OPENER.set(opener);
}

fn opener() -> Result<&'static dyn Opener> {
    OPENER.get().map(AsRef::as_ref).ok_or_else(|| {
        let what = "this program was built without stores on other machines (the feature 'remote')";
        Error::new(ErrorKind::Unsupported, what).with_setting("backing_dev")
    })
}

pub(super) fn check_encrypts() -> Result<()> {
    opener().map(drop).map_err(|error| {
        let what = "this program was built without encryption (the feature 'remote')";
        Error::new(error.kind(), what).with_setting("backing_encrypted")
    })
}

impl NamedBacking {
    /// Names any blocks. The attribute `backing_dev` shows `name`; messages also show `how` they are
    /// accessed.
    pub fn new(name: impl Into<String>, how: impl Into<String>, blocks: Arc<dyn Blocks>) -> Self {
        let (name, how, blocks) = (name.into(), how.into(), Backing::Blocks(blocks));
        let part = Part { name: name.clone(), how, backing: Some(blocks.clone()), ..Part::default() };
        NamedBacking { name, backing: blocks.into(), parts: std::iter::once(part).collect() }
    }

    /// Opens a backing device given as `PATH`, `PATH:SIZE` or the address of a store on other machines, or
    /// several with spaces in between, which are used in this order: `/var/lib/uzram/cold.img:2G
    /// redis://cache:6379`. The text after the last colon of a path is a size if it parses as one, else part
    /// of the path. With a size, a missing file is created.
    ///
    /// # Errors
    /// `Invalid` unless a path is absolute; as [`FileBacking::open`], [`Opener::open`] and [`Tiers::new`];
    /// `Unsupported` for a store, or encryption, if the program has no opener. Files that it created are
    /// removed.
    pub fn open(text: &str, how: HowToOpen) -> Result<Self> {
        Self::check(text)?;
        let names: Vec<_> = Self::split_parts(text).collect();
        if how.copies > 1 && !names.iter().any(|name| is_address(name)) {
            let what = "a file or block device keeps one copy: two are for a cluster of servers";
            return Err(Error::invalid(what).with_setting("backing_copies"));
        }
        if how.encrypted {
            check_encrypts()?;
        }
        let mut parts = Vec::new();
        let mut open = || {
            names.iter().try_for_each(|name| Part::open(name, how).map(|part| parts.push(part)))?;
            if how.encrypted && !parts.iter().any(|part| part.seal.is_some()) {
                parts.push(Part::key(None)?);
            }
            Self::of(parts.clone())
        };
        let opened = open();
        if opened.is_err() {
            parts.iter().filter_map(|part| part.file.as_ref()).for_each(|file| file.undo());
        }
        opened
    }

    /// Goes on with the backing device of another, in this process or one that has ended, by duplicates of
    /// the descriptors of its [`parts`](NamedBacking::parts). They have their locks already.
    /// Fails as [`FileBacking::from_descriptor`], [`Opener::resume`] and [`Opener::seal`].
    pub fn from_parts(parts: impl IntoIterator<Item = KeptPart<OwnedFd>>) -> Result<Self> {
        let resume = |KeptPart { name, len_bytes, descriptor }: KeptPart<OwnedFd>| {
            Ok(match &*name {
                KEY => Part::key(Some(descriptor))?,
                _ if is_address(&name) => Part::from(opener()?.resume(descriptor, len_bytes)?),
                _ => Part::of_file(&name, FileBacking::from_descriptor(&name, descriptor, len_bytes)?),
            })
        };
        Self::of(parts.into_iter().map(resume).collect::<Result<_>>()?)
    }

    fn of(parts: Vec<Part>) -> Result<Self> {
        let seal = parts.iter().find_map(|part| part.seal.clone());
        let backings = parts.iter().filter_map(|part| part.backing.clone());
        let backing = Arc::new(Tiers::new(backings.collect(), seal)?);
        let places = parts.iter().filter(|part| part.backing.is_some());
        Ok(NamedBacking {
            name: places.map(|part| &*part.name).collect::<Vec<_>>().join(" "),
            backing,
            parts,
        })
    }

    /// Returns whether a text names a store on other machines, perhaps among others.
    pub fn is_elsewhere(text: &str) -> bool {
        Self::split_parts(text).any(is_address)
    }

    /// Splits a text into its parts: another one begins where a space precedes a whole path or an address.
    pub fn split_parts(text: &str) -> impl Iterator<Item = &str> {
        let begins = |rest: &str| rest.starts_with('/') || rest.split(' ').next().is_some_and(is_address);
        let mut rest = Some(text.trim());
        std::iter::from_fn(move || {
            let all = rest?;
            let next = all.match_indices(' ').map(|(at, _)| at).find(|at| begins(&all[at + 1..]));
            rest = next.map(|at| &all[at + 1..]);
            Some(next.map_or(all, |at| all[..at].trim_end()))
        })
    }

    /// Returns the paths of the files and block devices that a text names.
    pub fn paths(text: &str) -> impl Iterator<Item = &Path> {
        Self::split_parts(text).filter(|name| name.starts_with('/')).map(|name| Path::new(split(name).0))
    }

    /// Returns the open files and block devices, with their paths.
    pub fn files(&self) -> impl Iterator<Item = (&str, BorrowedFd<'_>)> {
        self.parts.iter().filter_map(|part| Some((&*part.name, part.file.as_ref()?.descriptor())))
    }

    /// Returns the parts, with which another process can go on; `None` if it cannot.
    pub fn parts(&self) -> Option<Vec<KeptPart<BorrowedFd<'_>>>> {
        let kept = |(tier, part)| {
            let Part { name, file, kept, .. }: &Part = part;
            let kept = kept.as_ref().map(|kept| kept.as_fd());
            let descriptor = file.as_ref().map(|file| file.descriptor()).or(kept)?;
            Some(KeptPart { name: name.clone(), len_bytes: self.backing.tier_bytes(tier), descriptor })
        };
        self.parts.iter().enumerate().map(kept).collect()
    }

    pub(super) fn is_encrypted(&self) -> bool {
        self.backing.seal().is_some()
    }

    pub(super) fn copies(&self) -> u8 {
        self.parts.iter().map(|part| part.copies).fold(1, u8::max)
    }

    /// Returns the length of the backing.
    pub fn len_bytes(&self) -> u64 {
        self.backing.len_bytes()
    }

    /// Has the lock of a file given up when it is closed, whoever else has its descriptor.
    pub fn unlock_when_dropped(&self) {
        let files = self.parts.iter().filter_map(|part| part.file.as_ref());
        files.for_each(|file| file.unlock_when_dropped(true));
    }

    /// Checks that a text can name files, block devices or stores.
    pub(super) fn check(text: &str) -> Result<()> {
        let refused = |what: String| Err(Error::invalid(what).with_setting("backing_dev"));
        Tiers::check_number(Self::split_parts(text).count())?;
        Self::split_parts(text).try_for_each(|name| {
            if is_address(name) {
                return opener()?.check(name);
            }
            let (path, _) = split(name);
            // The process that opens it may have another working directory than the user who wrote it.
            match path.starts_with('/') && !path.contains(char::is_control) {
                true => Ok(()),
                false => refused(format!(
                    "'{path}' cannot be a backing device: write the whole path, beginning with '/', or none"
                )),
            }
        })
    }

    /// Returns whether [`NamedBacking::open`] would open one of the same files, perhaps with another size.
    pub(super) fn is_at(&self, text: &str) -> bool {
        Self::split_parts(text).any(|name| self.parts.iter().any(|part| part.name == split(name).0))
    }

    /// Returns the name: a file's path, or an address; of all parts, with spaces in between.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the tiers.
    pub fn backing(&self) -> &Arc<Tiers> {
        &self.backing
    }
}

impl Part {
    fn open(name: &str, how: HowToOpen) -> Result<Part> {
        if is_address(name) {
            return Ok(Part::from(opener()?.open(name, how.copies)?));
        }
        let (path, size_bytes) = split(name);
        let engine = if how.keeps { Engine::Threads } else { Engine::Auto };
        let options = FileOptions { size_bytes, force: how.force, engine, ..FileOptions::new(path) };
        let file = FileBacking::open(&options).map_err(|error| match not_a_size(name) {
            Some(why) if error.kind() == ErrorKind::NotFound => {
                let what = format!("the backing device '{name}' does not exist; {why}");
                Error::new(error.kind(), what).with_setting("backing_dev")
            }
            _ => error,
        })?;
        file.unlock_when_dropped(!how.keeps);
        Ok(Part::of_file(path, file))
    }

    fn of_file(path: &str, file: FileBacking) -> Part {
        let (how, file) = (how(&file), Arc::new(file));
        let backing = Some(Backing::Blocks(Arc::<FileBacking>::clone(&file) as Arc<dyn Blocks>));
        Part { name: path.to_owned(), how, backing, file: Some(file), ..Part::default() }
    }

    fn key(kept: Option<OwnedFd>) -> Result<Part> {
        let (seal, kept) = opener()?.seal(kept)?;
        let (name, how, kept) = (KEY.to_owned(), "encrypted".to_owned(), kept.map(Arc::new));
        Ok(Part { name, how, kept, seal: Some(seal), ..Part::default() })
    }
}

impl From<Elsewhere> for Part {
    fn from(Elsewhere { name, how, backing, seal, copies, kept }: Elsewhere) -> Self {
        let (backing, seal) = (Some(Backing::Objects(backing)), Some(seal));
        Part { name, how, backing, file: None, kept: kept.map(Arc::new), copies, seal }
    }
}

impl fmt::Display for NamedBacking {
    /// Shows the name, the size, and how it is accessed, of each part.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, Part { name, how, backing, .. }) in self.parts.iter().enumerate() {
            f.write_str(if at > 0 { "; " } else { "" })?;
            match backing {
                None => f.write_str(how)?,
                Some(_) => write!(f, "{name}, {}, {how}", format_size(self.backing.tier_bytes(at)))?,
            }
        }
        Ok(())
    }
}

fn is_address(text: &str) -> bool {
    text.contains("://") && !text.starts_with('/')
}

fn split(text: &str) -> (&str, Option<u64>) {
    let sized = text.rsplit_once(':').and_then(|(path, size)| Some((path, parse_size(size).ok()?)));
    sized.map_or((text, None), |(path, size_bytes)| (path, Some(size_bytes)))
}

/// Returns why what follows a path's last colon is not a size, if it looks like one.
fn not_a_size(name: &str) -> Option<String> {
    let (_, size) = name.rsplit_once(':')?;
    let looks_like_one = size.trim_start_matches('-').starts_with(|c: char| c.is_ascii_digit());
    looks_like_one.then(|| parse_size(size).err().map(|error| error.to_string())).flatten()
}

fn how(file: &FileBacking) -> String {
    let engine = match (file.engine(), file.fallback()) {
        (Engine::Uring, _) => "io_uring".to_owned(),
        (_, Some(refusal)) => format!("threads ({refusal})"),
        (_, None) => "threads".to_owned(),
    };
    let direct = if file.is_direct() { "direct" } else { "through the page cache" };
    let space = if file.is_reserved() { "" } else { ", space not reserved" };
    format!("{engine}, {direct}{space}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_has_parts() {
        for (text, parts) in [
            ("/b", &["/b"][..]),
            ("/b:2G redis://a:1,b:2", &["/b:2G", "redis://a:1,b:2"]),
            ("/a file with spaces:2G  /b", &["/a file with spaces:2G", "/b"]),
            ("s3://a/b:2G /b redis://c", &["s3://a/b:2G", "/b", "redis://c"]),
            (" /b and redis ", &["/b and redis"]),
            ("b", &["b"]),
            ("", &[""]),
        ] {
            assert_eq!(NamedBacking::split_parts(text).collect::<Vec<_>>(), parts, "{text}");
        }
        assert!(NamedBacking::is_elsewhere("/b redis://c") && !NamedBacking::is_elsewhere("/b://c"));
    }

    #[test]
    fn what_follows_the_last_colon_may_be_a_size() {
        for (text, path, size_bytes) in [
            ("/b.img", "/b.img", None),
            ("/b.img:2G", "/b.img", Some(2 << 30)),
            ("/b.img:0", "/b.img", Some(0)),
            ("/dev/disk/by-path/pci-0000:00:1f.2", "/dev/disk/by-path/pci-0000:00:1f.2", None),
            ("/dev/disk/by-path/pci-0000:00:4096", "/dev/disk/by-path/pci-0000:00", Some(4096)),
            ("/b.img:", "/b.img:", None),
            ("/b.img:-1", "/b.img:-1", None),
            ("/b:1G:1M", "/b:1G", Some(1 << 20)),
            ("", "", None),
        ] {
            assert_eq!(split(text), (path, size_bytes), "{text}");
        }
    }
}
