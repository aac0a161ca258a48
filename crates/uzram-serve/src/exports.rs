//! The devices of a daemon, and who may reach which.
//!
//! A device is reached in two ways: over NBD, by whomever a listener lets in, and through its file, by root's programs
//! and by the kernel, whose loop device makes it a disk for file systems and swap. Nobody may read or change beneath
//! the kernel what the kernel believes to be its own. So, for each device:
//!
//! - While its file is open for writing (it is *attached*, say), it is not exported. With [`Export::Always`] it is, for
//!   reading only.
//! - Its file is not opened for writing while an NBD client may write, nor, without [`Export::Always`], while one is
//!   connected.
//! - A client that was let in for reading stays a reader, whatever happens later.
//!
//! A listener may name the devices that it serves ([`Exports::only`]).
//!
//! Locks: the list's, then an entry's `Users`, leaves but for a device's own: held while names are compared and users
//! counted, never while a device is made, opened, emptied or used.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread;
use std::time::{Duration, Instant};

use uzram::device::{Device, OpenDevice};
use uzram::named::hint;
use uzram::{Error, ErrorKind, Result};

/// When NBD clients may reach a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Export {
    /// While its file is not open for writing.
    #[default]
    WhileFree,
    /// At any time; for reading only while its file is open for writing.
    Always,
    /// Never.
    Never,
}

impl From<Option<bool>> for Export {
    /// As users say it: `export = true`, `export = false`, or nothing.
    fn from(export: Option<bool>) -> Self {
        match export {
            None => Export::WhileFree,
            Some(true) => Export::Always,
            Some(false) => Export::Never,
        }
    }
}

/// How a device is exported.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportPolicy {
    /// When.
    pub export: Export,
    /// Only for reading.
    pub read_only: bool,
}

/// What an NBD client may do with a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Read it.
    Read,
    /// Read and change it.
    Write,
}

/// How many use a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Users {
    /// NBD clients that may only read.
    pub readers: usize,
    /// NBD clients that may write.
    pub writers: usize,
    /// Open files of it that may only read.
    pub reading_files: usize,
    /// Open files of it that may write: a loop device has one.
    pub writing_files: usize,
}

impl Users {
    fn of(&mut self, role: Role) -> &mut usize {
        match role {
            Role::Reader => &mut self.readers,
            Role::Writer => &mut self.writers,
            Role::ReadingFile => &mut self.reading_files,
            Role::WritingFile => &mut self.writing_files,
        }
    }

    /// NBD clients.
    pub fn clients(&self) -> usize {
        self.readers + self.writers
    }

    /// Open files.
    pub fn files(&self) -> usize {
        self.reading_files + self.writing_files
    }
}

/// One device.
struct Entry {
    device: Arc<Device>,
    policy: ExportPolicy,
    users: Mutex<Users>,
}

impl Entry {
    /// Nothing panics while it is held, so a poisoned lock is as good as any.
    fn users(&self) -> MutexGuard<'_, Users> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a client that comes now may do; `None` if it may not come.
    fn access(&self, users: &Users) -> Option<Access> {
        match self.policy.export {
            Export::Never => None,
            Export::WhileFree if users.writing_files > 0 => None,
            Export::Always if users.writing_files > 0 => Some(Access::Read),
            _ if self.policy.read_only => Some(Access::Read),
            _ => Some(Access::Write),
        }
    }

    /// Why its file cannot be opened for writing now, if so.
    fn writing_obstacle(&self, users: &Users) -> Option<&'static str> {
        match self.policy.export {
            _ if users.writers > 0 => Some("NBD clients may write to it"),
            Export::WhileFree if users.readers > 0 => Some("NBD clients have it open"),
            _ => None,
        }
    }
}

/// A list of devices, shared by all who hold a clone of it. Each has its own name; the first that is exported is also
/// the default export, which NBD clients ask for with the empty name.
#[derive(Clone, Default)]
pub struct Exports {
    devices: Arc<RwLock<Vec<Arc<Entry>>>>,
    /// The names that NBD clients see; `None` for all.
    only: Option<Arc<[String]>>,
}

impl Exports {
    /// Offers `devices`, in this order, each with the default policy; their names differ.
    pub fn new(devices: impl IntoIterator<Item = Arc<Device>>) -> Self {
        Exports::with_policies(devices.into_iter().map(|device| (device, ExportPolicy::default())))
    }

    /// Offers devices, in this order, each with a policy; their names differ.
    pub fn with_policies(devices: impl IntoIterator<Item = (Arc<Device>, ExportPolicy)>) -> Self {
        let entry = |(device, policy)| Arc::new(Entry { device, policy, users: Mutex::default() });
        Exports { devices: Arc::new(RwLock::new(devices.into_iter().map(entry).collect())), only: None }
    }

    /// The same list, of which NBD clients see these names alone, whether there are such devices yet or not.
    pub fn only(&self, names: Arc<[String]>) -> Self {
        Exports { devices: Arc::clone(&self.devices), only: Some(names) }
    }

    /// Offers one more, as the last.
    ///
    /// # Errors
    /// `Busy` when one of that name is offered.
    pub fn add(&self, device: Arc<Device>, policy: ExportPolicy) -> Result<()> {
        let mut devices = self.write();
        if devices.iter().any(|other| other.device.name() == device.name()) {
            return Err(Error::new(
                ErrorKind::Busy,
                format!("there is a device '{}' already", device.name()),
            ));
        }
        devices.push(Arc::new(Entry { device, policy, users: Mutex::default() }));
        Ok(())
    }

    /// Frees a device and no longer offers it.
    ///
    /// # Errors
    /// `NotFound` when none of that name is offered; `Busy` while it is in use.
    pub fn remove(&self, name: &str) -> Result<()> {
        let device = self.named(name)?;
        // From here on nobody can open it.
        device.remove()?;
        self.write().retain(|other| !Arc::ptr_eq(&other.device, &device));
        Ok(())
    }

    /// The export that an NBD client means by `name`; names compare as bytes. It may be one that the client may not use
    /// now, which connecting says, unless its policy is to hide it for good.
    pub fn find(&self, name: &[u8]) -> Option<Found> {
        let devices = self.read();
        let mut shown = devices.iter().filter(|entry| self.shows(entry));
        let entry = if name.is_empty() {
            shown.find(|entry| entry.access(&entry.users()).is_some())
        } else {
            shown.find(|entry| entry.device.name().as_bytes() == name)
        };
        entry.map(|entry| Found { entry: Arc::clone(entry) })
    }

    /// The names of all that NBD clients may use now, in order.
    pub fn exported(&self) -> Vec<String> {
        let devices = self.read();
        let shown = devices.iter().filter(|entry| self.shows(entry));
        let usable = shown.filter(|entry| entry.access(&entry.users()).is_some());
        usable.map(|entry| entry.device.name().to_owned()).collect()
    }

    /// Whether NBD clients may ever use a device.
    fn shows(&self, entry: &Entry) -> bool {
        let name = entry.device.name();
        entry.policy.export != Export::Never
            && self.only.as_ref().is_none_or(|only| only.iter().any(|shown| shown == name))
    }

    /// Opens a device's file, for writing or not.
    ///
    /// # Errors
    /// `Busy` when an NBD client forbids it, or the device is uninitialised; `NotFound` when it is not offered any more.
    pub fn open_file(&self, device: &Arc<Device>, writes: bool) -> Result<OpenFile> {
        let found = self.read().iter().find(|entry| Arc::ptr_eq(&entry.device, device)).cloned();
        let entry = found
            .ok_or_else(|| Error::new(ErrorKind::NotFound, format!("'{}' was removed", device.name())))?;
        let mut users = entry.users();
        if let Some(why) = entry.writing_obstacle(&users).filter(|_| writes) {
            let what = format!("'{}' cannot be opened for writing: {why}", device.name());
            return Err(Error::new(ErrorKind::Busy, what));
        }
        let role = if writes { Role::WritingFile } else { Role::ReadingFile };
        *users.of(role) += 1;
        drop(users);
        let entered = Entered { entry, role };
        Ok(OpenFile { device: Arc::new(device.open()?), _entered: Arc::new(entered) })
    }

    /// How many files of a device are open beside `own` ones, as soon as there are none, or after `patience`: what was
    /// just detached closes its file a moment later.
    pub fn other_files(&self, name: &str, own: usize, patience: Duration) -> usize {
        let deadline = Instant::now() + patience;
        loop {
            match self.users(name).files().saturating_sub(own) {
                0 => return 0,
                others if Instant::now() >= deadline => return others,
                _ => thread::sleep(Duration::from_millis(2)),
            }
        }
    }

    /// How many use a device; nobody, if it is not offered.
    pub fn users(&self, name: &str) -> Users {
        let devices = self.read();
        devices
            .iter()
            .find(|entry| entry.device.name() == name)
            .map(|entry| *entry.users())
            .unwrap_or_default()
    }

    /// The device of a name.
    ///
    /// # Errors
    /// `NotFound`, with the names there are.
    pub fn named(&self, name: &str) -> Result<Arc<Device>> {
        let devices = self.read();
        let found = devices.iter().find(|entry| entry.device.name() == name);
        found.map(|entry| Arc::clone(&entry.device)).ok_or_else(|| {
            let names: Vec<&str> = devices.iter().map(|entry| entry.device.name()).collect();
            let known = if names.is_empty() { "this daemon has none".to_owned() } else { hint(name, &names) };
            Error::new(ErrorKind::NotFound, format!("no device '{name}'; {known}"))
        })
    }

    /// All of them, in order, as of now, exported or not.
    pub fn devices(&self) -> Vec<Arc<Device>> {
        self.read().iter().map(|entry| Arc::clone(&entry.device)).collect()
    }

    /// A panic cannot leave the list half changed, so a poisoned lock is as good as any.
    fn read(&self) -> RwLockReadGuard<'_, Vec<Arc<Entry>>> {
        self.devices.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Vec<Arc<Entry>>> {
        self.devices.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a user is.
#[derive(Clone, Copy)]
enum Role {
    Reader,
    Writer,
    ReadingFile,
    WritingFile,
}

/// One of a device's users, until it is dropped.
struct Entered {
    entry: Arc<Entry>,
    role: Role,
}

impl Drop for Entered {
    fn drop(&mut self) {
        *self.entry.users().of(self.role) -= 1;
    }
}

/// An export that an NBD client has named.
pub struct Found {
    entry: Arc<Entry>,
}

impl Found {
    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.entry.device
    }

    /// Lets a client in.
    ///
    /// # Errors
    /// `Permission` when the device is not exported now; `Busy` when it is uninitialised.
    pub fn connect(self) -> Result<ExportedDevice> {
        let Found { entry } = self;
        let mut users = entry.users();
        let Some(access) = entry.access(&users) else {
            let what = format!(
                "'{}' is attached or open for writing on its machine, and not exported meanwhile (export = true exports \
                 it for reading)",
                entry.device.name()
            );
            return Err(Error::new(ErrorKind::Permission, what).with_setting("export"));
        };
        let role = match access {
            Access::Read => Role::Reader,
            Access::Write => Role::Writer,
        };
        *users.of(role) += 1;
        drop(users);
        let entered = Entered { entry: Arc::clone(&entry), role };
        Ok(ExportedDevice { device: entry.device.open()?, access, entered })
    }
}

/// A device that an NBD client uses.
pub struct ExportedDevice {
    /// Its contents.
    pub device: OpenDevice,
    /// What the client may do.
    pub access: Access,
    entered: Entered,
}

impl ExportedDevice {
    /// The open device, and what counts its user until it is dropped: after all that use the device.
    pub fn into_parts(self) -> (OpenDevice, ClientUse) {
        (self.device, ClientUse { _entered: self.entered })
    }
}

/// Counts a client among a device's users, until it is dropped.
pub struct ClientUse {
    _entered: Entered,
}

/// A device's file that is open. All clones of it are one user.
#[derive(Clone)]
pub struct OpenFile {
    /// Its contents.
    pub device: Arc<OpenDevice>,
    _entered: Arc<Entered>,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use uzram::random::Random;

    fn device(name: &str) -> Arc<Device> {
        let device = Device::new(name).unwrap();
        device.set("disksize", "64K").unwrap();
        device
    }

    fn names(exports: &Exports) -> Vec<String> {
        exports.devices().iter().map(|device| device.name().to_owned()).collect()
    }

    fn with_policy(export: Export, read_only: bool) -> (Exports, Arc<Device>) {
        let device = device("a");
        let policy = ExportPolicy { export, read_only };
        (Exports::with_policies([(Arc::clone(&device), policy)]), device)
    }

    fn connect(exports: &Exports) -> Option<ExportedDevice> {
        exports.find(b"a")?.connect().ok()
    }

    #[test]
    fn devices_come_and_go_by_name() {
        let exports = Exports::new([device("a")]);
        let default = ExportPolicy::default();
        exports.add(device("b"), default).unwrap();
        assert_eq!(exports.add(device("b"), default).unwrap_err().kind(), ErrorKind::Busy);
        assert_eq!(names(&exports), ["a", "b"]);
        assert_eq!(exports.find(b"").unwrap().device().name(), "a");
        exports.remove("a").unwrap();
        assert_eq!(exports.find(b"").unwrap().device().name(), "b");
        assert_eq!(exports.remove("a").unwrap_err().kind(), ErrorKind::NotFound);
        exports.remove("b").unwrap();
        assert!(exports.find(b"").is_none() && exports.named("b").is_err());
    }

    #[test]
    fn a_device_in_use_stays() {
        let exports = Exports::new([device("a")]);
        let open = connect(&exports).unwrap();
        assert_eq!(exports.remove("a").unwrap_err().kind(), ErrorKind::Busy);
        open.device.write(0, &[7; 4096]).unwrap();
        drop(open);
        let found_before = exports.find(b"a").unwrap();
        let device = Arc::clone(found_before.device());
        exports.remove("a").unwrap();
        // Who found it before it went can neither open it nor bring it back.
        assert!(found_before.connect().is_err() && exports.open_file(&device, false).is_err());
        device.set("reset", "1").unwrap();
        assert_eq!(device.set("disksize", "64K").unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn who_may_come_depends_on_who_is_there() {
        for (export, attached) in
            [(Export::WhileFree, None), (Export::Always, Some(Access::Read)), (Export::Never, None)]
        {
            for read_only in [false, true] {
                let (exports, device) = with_policy(export, read_only);
                let free = connect(&exports).map(|client| client.access);
                let expected = if read_only { Access::Read } else { Access::Write };
                assert_eq!(free, Some(expected).filter(|_| export != Export::Never));
                let file = exports.open_file(&device, true).unwrap();
                assert_eq!(connect(&exports).map(|client| client.access), attached, "{export:?} {read_only}");
                assert_eq!(exports.exported().len(), usize::from(attached.is_some()));
                drop(file);
                assert_eq!(connect(&exports).map(|client| client.access), free);
                assert_eq!(exports.users("a"), Users::default());
            }
        }
    }

    #[test]
    fn a_file_is_not_opened_for_writing_beneath_clients() {
        for (export, read_only, admitted) in [
            (Export::WhileFree, false, false),
            (Export::WhileFree, true, false),
            (Export::Always, false, false),
            (Export::Always, true, true),
        ] {
            let (exports, device) = with_policy(export, read_only);
            let client = connect(&exports).unwrap();
            assert!(exports.open_file(&device, false).is_ok());
            let file = exports.open_file(&device, true);
            assert_eq!(file.is_ok(), admitted, "{export:?} {read_only}");
            assert_eq!(exports.users("a").clients(), 1);
            assert_eq!(exports.users("a").files(), usize::from(admitted));
            drop(client);
            assert!(exports.open_file(&device, true).is_ok());
        }
        // A reader who came while it was attached stays a reader.
        let (exports, device) = with_policy(Export::Always, false);
        let file = exports.open_file(&device, true).unwrap();
        let client = connect(&exports).unwrap();
        drop(file);
        assert_eq!((client.access, connect(&exports).unwrap().access), (Access::Read, Access::Write));
        assert!(exports.open_file(&device, true).is_ok());
    }

    /// Clients and files that come and go at random, against the rules as written down.
    #[test]
    fn nobody_reads_or_writes_beneath_the_kernel() {
        let mut random = Random::new(1);
        for export in [Export::WhileFree, Export::Always] {
            let (exports, device) = with_policy(export, false);
            let (mut clients, mut files) = (Vec::new(), Vec::new());
            for _ in 0..5_000 {
                match random.below(4) {
                    0 => clients.extend(connect(&exports)),
                    1 => files.extend(exports.open_file(&device, true).ok()),
                    2 if !clients.is_empty() => drop(clients.swap_remove(random.below(clients.len()))),
                    3 if !files.is_empty() => drop(files.swap_remove(random.below(files.len()))),
                    _ => {}
                }
                let writers = clients.iter().filter(|client| client.access == Access::Write).count();
                assert!(files.is_empty() || writers == 0);
                assert!(files.is_empty() || export == Export::Always || clients.is_empty());
                assert_eq!(exports.users("a").clients(), clients.len());
                assert_eq!(exports.users("a").writing_files, files.len());
            }
        }
    }

    #[test]
    fn a_listener_shows_what_it_names() {
        let exports = Exports::new([device("a"), device("b")]);
        let only_b = exports.only(["b".to_owned(), "c".to_owned()].into());
        assert_eq!(only_b.exported(), ["b"]);
        assert_eq!(only_b.find(b"").unwrap().device().name(), "b");
        assert!(only_b.find(b"a").is_none());
        exports.add(device("c"), ExportPolicy::default()).unwrap();
        assert_eq!(only_b.exported(), ["b", "c"]);
        assert_eq!(exports.exported(), ["a", "b", "c"]);
        // A default export is one that can be used.
        let file = exports.open_file(&exports.named("a").unwrap(), true).unwrap();
        assert_eq!(exports.find(b"").unwrap().device().name(), "b");
        assert!(exports.find(b"a").unwrap().connect().is_err());
        drop(file);
        assert_eq!(exports.find(b"").unwrap().device().name(), "a");
    }
}
