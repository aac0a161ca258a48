//! Who may open a device, by policy and by its current users.
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
    // A caller that found it before its removal can neither open it nor bring it back.
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
    // A client that connected while it was attached stays a reader.
    let (exports, device) = with_policy(Export::Always, false);
    let file = exports.open_file(&device, true).unwrap();
    let client = connect(&exports).unwrap();
    drop(file);
    assert_eq!((client.access, connect(&exports).unwrap().access), (Access::Read, Access::Write));
    assert!(exports.open_file(&device, true).is_ok());
}

/// Checks the documented rules while clients and files open and close at random.
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
    // The default export is the first that can be opened.
    let file = exports.open_file(&exports.named("a").unwrap(), true).unwrap();
    assert_eq!(exports.find(b"").unwrap().device().name(), "b");
    assert!(exports.find(b"a").unwrap().connect().is_err());
    drop(file);
    assert_eq!(exports.find(b"").unwrap().device().name(), "a");
}
