//! Compares the walk with the kernel's, and tests what it does not follow.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;
use crate::base::random::Random;

fn resolved(path: &Path) -> Result<(u64, u64), Refused> {
    let stat = Place::resolve(path)?.status()?;
    assert_ne!(FileType::from_raw_mode(stat.st_mode), FileType::Symlink, "{}", path.display());
    Ok((stat.st_dev, stat.st_ino))
}

fn by_kernel(path: &Path) -> Result<(u64, u64), Refused> {
    let stat = rustix::fs::stat(path)?;
    Ok((stat.st_dev, stat.st_ino))
}

fn agree(path: &Path) {
    assert_eq!(resolved(path), by_kernel(path), "{}", path.display());
    let Ok(canonical) = path.canonicalize() else { return };
    assert_eq!(resolved(path), resolved(&canonical), "{}", path.display());
}

/// Returns a path of a few names, some not UTF-8, with random dots and slashes.
fn random_path(random: &mut Random) -> OsString {
    let mut path = Vec::new();
    for _ in 0..1 + random.below(4) {
        let names: [&[u8]; 9] = [b"a", b"b", b"c", b"d", b"\xff\xfe", b"..", b"..", b".", b""];
        path.extend_from_slice(names[random.below(names.len())]);
        path.push(b'/');
    }
    if random.below(4) > 0 {
        path.pop();
    }
    OsString::from_vec(if path.is_empty() { b".".to_vec() } else { path })
}

#[test]
fn a_tree_of_our_own_is_walked_as_the_kernel_walks_it() {
    for seed in 1..=30 {
        let mut random = Random::new(seed);
        let root = tempfile::tempdir().expect("a directory");
        let root = root.path().canonicalize().expect("it is there");
        let within = |random: &mut Random| root.join("x/y").join(random_path(random));
        fs::create_dir_all(root.join("x/y")).expect("a directory");
        for _ in 0..40 {
            let place = within(&mut random);
            // Each call fails if the name exists already, or its directory does not.
            match random.below(4) {
                0 => drop(fs::create_dir(&place)),
                1 => drop(fs::OpenOptions::new().create_new(true).write(true).open(&place)),
                2 => drop(symlink(random_path(&mut random), &place)),
                _ => drop(symlink(within(&mut random), &place)),
            }
        }
        for _ in 0..300 {
            let path = within(&mut random);
            println!("seed {seed}");
            agree(&path);
        }
        for path in ["/", "/..", "/../..", ".", "..", "../..", "/proc/self/exe", "/dev/stdin/x", ""] {
            agree(Path::new(path));
        }
    }
}

#[test]
fn as_many_links_are_followed_as_the_kernel_follows() {
    let root = tempfile::tempdir().expect("a directory");
    fs::write(root.path().join("0"), "").expect("a file");
    for number in 1..=MAX_LINKS + 1 {
        symlink((number - 1).to_string(), root.path().join(number.to_string())).expect("a link");
    }
    symlink("loop", root.path().join("loop")).expect("a link");
    let at = |name: &str| root.path().join(name);
    assert!(resolved(&at("40")).is_ok());
    assert_eq!(resolved(&at("41")), Err(Refused::System(Errno::LOOP)));
    assert_eq!(resolved(&at("loop")), Err(Refused::System(Errno::LOOP)));
    ["40", "41", "loop", "1/", "loop/x"].iter().for_each(|name| agree(&at(name)));
}

#[test]
fn a_link_where_others_may_write_is_not_followed() {
    let root = tempfile::tempdir().expect("a directory");
    let (dir, target) = (root.path().join("shared"), root.path().join("target"));
    fs::create_dir(&dir).expect("a directory");
    fs::create_dir(&target).expect("a directory");
    fs::write(target.join("file"), "").expect("a file");
    symlink(&target, dir.join("link")).expect("a link");
    symlink(target.join("file"), dir.join("last")).expect("a link");
    fs::write(dir.join("file"), "").expect("a file");
    symlink("shared/link", root.path().join("trusted")).expect("a link");
    let paths =
        ["shared/link", "shared/link/file", "shared/last", "trusted/file", "target/../shared/link/none"];
    for (mode, is_followed) in [(0o755, true), (0o775, false), (0o1777, false), (0o757, false)] {
        fs::set_permissions(&dir, Permissions::from_mode(mode)).expect("ours");
        for path in paths {
            let answer = Place::resolve(&root.path().join(path)).map(|_| ());
            let link = dir.join(if path.ends_with("last") { "last" } else { "link" });
            let refused = Refused::Link { link, dir: dir.clone() };
            let wanted = if is_followed { Ok(()) } else { Err(refused) };
            assert_eq!(answer, wanted, "{mode:o} {path}");
        }
        // Names that are no links are resolved in any directory.
        assert!(resolved(&dir.join("file")).is_ok());
        assert!(
            Place::resolve(&dir.join("none")).is_ok_and(|place| place.status().err() == Some(Errno::NOENT))
        );
    }
    fs::set_permissions(&dir, Permissions::from_mode(0o755)).expect("ours");
    match std::os::unix::fs::chown(&dir, Some(65534), None) {
        Ok(()) => {
            let Err(Refused::Link { link, dir: named }) = resolved(&dir.join("last")) else {
                panic!("the link of another user was followed");
            };
            assert_eq!((link, named), (dir.join("last"), dir));
        }
        Err(error) => println!("skipped: giving a directory away: {error}"),
    }
}

#[test]
fn a_link_that_comes_later_is_not_opened() {
    let root = tempfile::tempdir().expect("a directory");
    let (path, target) = (root.path().join("file"), root.path().join("target"));
    fs::write(&target, "kept").expect("a file");
    let place = Place::resolve(&path).expect("a place");
    symlink(&target, &path).expect("a link");
    let mode = Mode::RUSR | Mode::WUSR;
    assert_eq!(place.open(OFlags::RDWR | OFlags::TRUNC, mode).map(|_| ()), Err(Errno::LOOP));
    let make = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
    assert_eq!(place.open(make, mode).map(|_| ()), Err(Errno::EXIST));
    assert_eq!(fs::read(&target).expect("a file"), b"kept");
    place.remove_file().expect("the link");
    assert!(target.exists() && place.open(make, mode).is_ok());
}
