//! The tree of files: a directory for each device, with the file `disk` and one for each attribute in it.
//!
//! An inode number consists of the device's number and the file's place in the device's directory. A device
//! gets its number on the first lookup, and numbers are never reused, so that files of a removed device stay
//! stale even if a new device has its name. The ledger keeps the numbers for the process's next life.
//!
//! Lock: `Tree::numbers`, then the exports' list.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::sync::{Arc, Weak};

use uzram::device::{Attribute, Device};
use uzram::sync::Mutex;

use super::ledger::Ledger;
use crate::Exports;

/// The name of the disk's file in its device's directory.
pub const DISK: &str = "disk";
/// Name prefix of the files for warming up threads; a number follows. Directory listings omit them. There
/// are several, as kernels before 6.2 serialize writes to one file.
const WARM_UP: &str = ".warm-up-";

pub(super) const ROOT: u64 = 1;
/// The inode number of the first file for warming up threads; the others follow.
const FIRST_WARM_UP: u64 = 2;
const FIRST_DEVICE: u64 = 1 << PLACE_BITS;

/// The low bits of an inode number, which are the file's place.
const PLACE_BITS: u32 = 16;
const NUMBERS_END: u64 = 1 << (u64::BITS - PLACE_BITS);
const DIRECTORY: u64 = 0;
const DISK_PLACE: u64 = 1;
const FIRST_ATTRIBUTE: u64 = 2;

#[derive(Clone)]
pub(super) enum Node {
    Root,
    Directory,
    Disk(Arc<Device>),
    Attribute(Arc<Device>, &'static Attribute),
    WarmUp,
}

pub(super) struct Entry {
    pub ino: u64,
    pub name: String,
    pub is_directory: bool,
}

pub(super) struct Tree {
    exports: Exports,
    numbers: Mutex<Numbers>,
}

struct Numbers {
    devices: BTreeMap<u64, Weak<Device>>,
    last: u64,
    ledger: Arc<Ledger>,
}

impl Numbers {
    /// Gives the devices of `exports` the numbers that they have in the ledger.
    fn restore(exports: &Exports, ledger: Arc<Ledger>) -> Self {
        let device = |(number, name): (u64, Vec<u8>)| {
            let device = exports.named(str::from_utf8(&name).ok()?).ok()?;
            (1..NUMBERS_END).contains(&number).then(|| (number, Arc::downgrade(&device)))
        };
        let devices: BTreeMap<_, _> = ledger.device_numbers().into_iter().filter_map(device).collect();
        ledger.retain_devices(|number| devices.contains_key(&number));
        let highest = devices.last_key_value().map_or(0, |(number, _)| *number);
        let last = Some(ledger.last_number()).filter(|last| *last < NUMBERS_END).unwrap_or(0).max(highest);
        Numbers { devices, last, ledger }
    }

    /// Returns the number of a device; assigns one if it has none.
    fn of(&mut self, device: &Arc<Device>) -> u64 {
        let is_it = |other: &Weak<Device>| std::ptr::eq(other.as_ptr(), Arc::as_ptr(device));
        if let Some((number, _)) = self.devices.iter().find(|(_, other)| is_it(other)) {
            return *number;
        }
        // Another device of that name was removed, even if something still holds it.
        let is_kept =
            |other: &Weak<Device>| other.upgrade().is_some_and(|other| other.name() != device.name());
        self.ledger.retain_devices(|number| self.devices.get(&number).is_some_and(is_kept));
        self.devices.retain(|_, device| device.strong_count() > 0);
        self.last += 1;
        if !self.ledger.enter_device(self.last, device.name()) {
            tracing::warn!(
                device = device.name(),
                "too many devices: its open files would not survive this process"
            );
        }
        self.devices.insert(self.last, Arc::downgrade(device));
        self.last
    }
}

fn ino(number: u64, place: u64) -> u64 {
    number << PLACE_BITS | place
}

impl Tree {
    /// Names the files of `exports`, with the numbers that they have in the ledger.
    pub fn new(exports: Exports, ledger: Arc<Ledger>) -> Self {
        let numbers = Mutex::unordered(Numbers::restore(&exports, ledger));
        Tree { exports, numbers }
    }

    /// Returns the node of an inode number, unless its device was removed.
    pub fn node(&self, ino: u64) -> Option<Node> {
        match ino {
            ROOT => return Some(Node::Root),
            FIRST_WARM_UP..FIRST_DEVICE => return Some(Node::WarmUp),
            _ => {}
        }
        let (number, place) = (ino >> PLACE_BITS, ino & ((1 << PLACE_BITS) - 1));
        let device = self.numbers.lock().devices.get(&number)?.upgrade()?;
        match place {
            DIRECTORY => Some(Node::Directory),
            DISK_PLACE => Some(Node::Disk(device)),
            _ => {
                let attribute = Device::attributes().get(usize::try_from(place - FIRST_ATTRIBUTE).ok()?)?;
                Some(Node::Attribute(device, attribute))
            }
        }
    }

    pub fn lookup(&self, parent: u64, name: &OsStr) -> Option<(u64, Node)> {
        let name = name.to_str()?;
        let ino = match self.node(parent)? {
            Node::Root if name.starts_with(WARM_UP) => {
                let number = name[WARM_UP.len()..].parse::<u16>().ok()?;
                Some(FIRST_WARM_UP + u64::from(number)).filter(|ino| *ino < FIRST_DEVICE)?
            }
            Node::Root => {
                let device = self.exports.named(name).ok()?;
                ino(self.numbers.lock().of(&device), DIRECTORY)
            }
            Node::Directory if name == DISK => parent + DISK_PLACE,
            Node::Directory => {
                let at = Device::attributes().iter().position(|attribute| attribute.name == name)?;
                parent + FIRST_ATTRIBUTE + at as u64
            }
            Node::Disk(_) | Node::Attribute(..) | Node::WarmUp => return None,
        };
        Some((ino, self.node(ino)?))
    }

    /// Returns the entries of a directory; none for other files.
    pub fn entries(&self, directory: u64) -> Vec<Entry> {
        let file =
            |at: u64, name: &str| Entry { ino: directory + at, name: name.into(), is_directory: false };
        let entries = match self.node(directory) {
            Some(Node::Root) => self.exports.devices().iter().map(|device| self.directory(device)).collect(),
            Some(Node::Directory) => {
                let attributes = Device::attributes().iter().zip(FIRST_ATTRIBUTE..);
                let attributes = attributes.map(|(attribute, at)| file(at, attribute.name));
                [file(DISK_PLACE, DISK)].into_iter().chain(attributes).collect()
            }
            _ => return Vec::new(),
        };
        let dot = |name: &str, ino| Entry { ino, name: name.into(), is_directory: true };
        let mut all = vec![dot(".", directory), dot("..", ROOT)];
        all.extend::<Vec<Entry>>(entries);
        all
    }

    pub fn exports(&self) -> &Exports {
        &self.exports
    }

    fn directory(&self, device: &Arc<Device>) -> Entry {
        let ino = ino(self.numbers.lock().of(device), DIRECTORY);
        Entry { ino, name: device.name().to_owned(), is_directory: true }
    }
}

/// Returns the name of the file in a mount's root for warming up thread `number`. Write to the files of all
/// threads at the same time, each write as long as the file.
pub fn warm_up_file(number: usize) -> String {
    format!("{WARM_UP}{number}")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn new_tree(exports: Exports) -> Tree {
        Tree::new(exports, Arc::new(Ledger::new().unwrap()))
    }

    #[test]
    fn every_entry_is_found_by_its_name() {
        let exports = Exports::new(["a", "b"].map(|name| Device::new(name).unwrap()));
        let tree = new_tree(exports);
        let names = |ino: u64| -> Vec<String> {
            tree.entries(ino).into_iter().skip(2).map(|entry| entry.name).collect()
        };
        assert_eq!(names(ROOT), ["a", "b"]);
        for device in tree.entries(ROOT).into_iter().skip(2) {
            assert_eq!(tree.lookup(ROOT, OsStr::new(&device.name)).unwrap().0, device.ino);
            let files = tree.entries(device.ino);
            assert_eq!(files.len(), 3 + Device::attributes().len());
            for file in files.iter().skip(2) {
                let (ino, node) = tree.lookup(device.ino, OsStr::new(&file.name)).unwrap();
                assert_eq!(ino, file.ino);
                match node {
                    Node::Disk(of) => assert_eq!((file.name.as_str(), of.name()), (DISK, &*device.name)),
                    Node::Attribute(of, attribute) => {
                        assert_eq!((attribute.name, of.name()), (&*file.name, &*device.name));
                    }
                    _ => panic!("{} is a directory", file.name),
                }
                assert!(tree.lookup(ino, OsStr::new("x")).is_none() && tree.entries(ino).is_empty());
            }
        }
        assert!(tree.lookup(ROOT, OsStr::new("c")).is_none());
    }

    #[test]
    fn a_device_that_comes_again_is_another() {
        let exports = Exports::new([Device::new("a").unwrap()]);
        let tree = new_tree(exports.clone());
        let look = || tree.lookup(ROOT, OsStr::new("a")).unwrap().0;
        let first = look();
        assert_eq!(look(), first);
        exports.remove("a").unwrap();
        assert!(tree.node(first).is_none() && tree.lookup(ROOT, OsStr::new("a")).is_none());
        exports.add(Device::new("a").unwrap(), crate::ExportPolicy::default()).unwrap();
        assert_ne!(look(), first);
        assert!(tree.node(first).is_none());
    }

    #[test]
    fn numbers_stay_in_the_next_life() {
        let devices = |names: &[&str]| Exports::new(names.iter().map(|name| Device::new(name).unwrap()));
        let ledger = Arc::new(Ledger::new().unwrap());
        let (exports, look) =
            (devices(&["a", "b", "c"]), |tree: &Tree, name| Some(tree.lookup(ROOT, OsStr::new(name))?.0));
        let tree = Tree::new(exports.clone(), Arc::clone(&ledger));
        let numbers = ["b", "c", "a"].map(|name| look(&tree, name));
        // A removed device, and a new one of its name that was looked up.
        exports.remove("b").unwrap();
        exports.add(Device::new("b").unwrap(), crate::ExportPolicy::default()).unwrap();
        let new = look(&tree, "b");
        assert_ne!(new, numbers[0]);
        drop(tree);
        let tree = Tree::new(devices(&["d", "a", "b"]), Arc::clone(&ledger));
        assert_eq!([look(&tree, "b"), look(&tree, "a"), look(&tree, "c")], [new, numbers[2], None]);
        assert!(tree.node(numbers[0].unwrap()).is_none() && tree.node(numbers[1].unwrap()).is_none());
        assert_eq!(look(&tree, "d"), Some(ino(5, DIRECTORY)));
        // The last one's number is not given again.
        let tree = Tree::new(devices(&["e"]), Arc::clone(&ledger));
        assert_eq!(look(&tree, "e"), Some(ino(6, DIRECTORY)));
        assert_eq!(ledger.device_numbers(), [(6, b"e".to_vec())]);
    }

    #[test]
    fn there_are_files_for_many_threads() {
        let tree = new_tree(Exports::new([Device::new("a").unwrap()]));
        let look = |name: &str| {
            tree.lookup(ROOT, OsStr::new(name)).map(|(ino, node)| (ino, matches!(node, Node::WarmUp)))
        };
        assert_eq!(look(&warm_up_file(0)), Some((2, true)));
        assert_eq!(look(&warm_up_file(65533)), Some((65535, true)));
        for wrong in [".warm-up-", ".warm-up-x", ".warm-up-65534", ".warm-up-99999999999"] {
            assert_eq!(look(wrong), None, "{wrong}");
        }
    }
}
