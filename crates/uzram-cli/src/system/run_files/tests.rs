use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::process::{Child, Command};

use super::*;

const ONE: Build = Build { id: "1111", library_bytes: 3000, image_bytes: 70_000 };
const OTHER: Build = Build { id: "2222", ..ONE };
const BOTH: [&str; 2] = ["libuzram-run-1111.so", "uzram-pager-1111"];

fn contents(build: Build) -> Vec<u8> {
    let len = build.library_bytes + build.image_bytes;
    (0..len).map(|at| (at * 7 % 251) as u8 ^ build.id.as_bytes()[0]).collect()
}

fn lay_out_of(dir: &Path, build: Build) -> std::result::Result<RunFiles, String> {
    lay_out_in(dir, build, &|| Ok(contents(build))).map_err(|why| why.to_string())
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A folder below one that only this user may write to.
fn folder() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    // Root's programs have to get through.
    set_mode(dir.path(), 0o755);
    let path = dir.path().join("uzram");
    (dir, path)
}

fn check_whole(files: &RunFiles, build: Build) {
    let paths = [&files.library, &files.image];
    assert_eq!(paths.map(|path| fs::read(path).unwrap()).concat(), contents(build));
    assert_eq!(paths.map(|path| fs::symlink_metadata(path).unwrap().mode() & 0o7777), [0o755; 2]);
}

fn names(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

#[test]
fn files_are_made_once_and_replaced_if_they_are_not_ours_or_not_whole() {
    let (root, dir) = folder();
    let files = lay_out_of(&dir, ONE).unwrap();
    check_whole(&files, ONE);
    assert_eq!(fs::metadata(&dir).unwrap().mode() & 0o7777, 0o755);
    let again = lay_out_in(&dir, ONE, &|| panic!("they are there")).unwrap();
    assert!(again.image.is_absolute() && again.image == files.image);
    let elsewhere = root.path().join("elsewhere");
    fs::write(&elsewhere, contents(ONE)).unwrap();
    let spoils: [&dyn Fn(); 7] = [
        &|| fs::OpenOptions::new().write(true).open(&files.library).unwrap().set_len(2999).unwrap(),
        &|| fs::write(&files.image, b"").unwrap(),
        &|| fs::remove_file(&files.image).unwrap(),
        &|| {
            fs::remove_file(&files.library).unwrap();
            symlink(&elsewhere, &files.library).unwrap();
        },
        &|| set_mode(&files.image, 0o777),
        &|| set_mode(&files.image, 0o700),
        &|| chown(&files.image, is_root().then_some(65534), None).unwrap(),
    ];
    for spoil in spoils {
        spoil();
        check_whole(&lay_out_of(&dir, ONE).unwrap(), ONE);
        assert_eq!(names(&dir), BOTH);
    }
    assert_eq!(fs::read(elsewhere).unwrap(), contents(ONE));
    // What cannot be replaced is named.
    fs::remove_file(&files.image).unwrap();
    fs::create_dir(&files.image).unwrap();
    let why = lay_out_of(&dir, ONE).err().unwrap();
    assert!(why.starts_with(&format!("cannot write {}: ", files.image.display())), "{why}");
    assert_eq!(names(&dir), BOTH);
}

#[test]
fn a_folder_that_others_can_change_is_not_used() {
    let (root, dir) = folder();
    let root = root.path();
    let refused = |dir: &Path, said: &str| {
        let why = lay_out_of(dir, ONE).err().unwrap();
        assert!(why.contains(said), "{why}");
    };
    set_mode(root, 0o777);
    refused(&dir, "other users can change ");
    set_mode(root, 0o1777);
    lay_out_of(&dir, ONE).unwrap();
    set_mode(root, 0o755);
    for mode in [0o777, 0o1777, 0o775] {
        set_mode(&dir, mode);
        refused(&dir, &format!("mode {mode:04o}: other users can change it"));
    }
    let [real, link, file] = ["real", "link", "file"].map(|name| root.join(name));
    fs::create_dir(&real).unwrap();
    symlink(&real, &link).unwrap();
    fs::write(&file, b"").unwrap();
    refused(&link, "it is no folder");
    refused(&file, "it is no folder");
    // Above it a link is followed; then its path has none.
    let files = lay_out_of(&link.join("uzram"), ONE).unwrap();
    assert_eq!(files.image.parent(), Some(&*fs::canonicalize(&real).unwrap().join("uzram")));
    for name in ["a b", "a:b"] {
        refused(&root.join(name), "a colon or a space");
        assert!(!root.join(name).exists());
    }
    if is_root() {
        let foreign = root.join("foreign");
        fs::create_dir(&foreign).unwrap();
        chown(&foreign, Some(65534), None).unwrap();
        refused(&foreign, "it is user 65534's");
        refused(&foreign.join("uzram"), "other users can change ");
        set_mode(root, 0o700);
        refused(&root.join("new"), "programs that give up root cannot enter ");
    }
}

/// A process whose environment names an image, until this is dropped.
struct User(Child);

impl User {
    fn start(image: &Path, script: &str) -> User {
        let mut shell = Command::new("/bin/sh");
        User(shell.args(["-c", script, script]).env("UZRAM_RUN_IMAGE", image).spawn().unwrap())
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn files_of_other_builds_stay_while_they_are_used() {
    let (_root, dir) = folder();
    // A build that no other test has, one of another process included: who uses its files is looked for.
    let build = Build { id: format!("used-{}", std::process::id()).leak(), ..OTHER };
    let old = lay_out_of(&dir, build).unwrap();
    let [library, image] = [&old.library, &old.image].map(PathBuf::clone);
    fs::write(dir.join(".new-77"), b"half").unwrap();
    fs::write(dir.join("other"), b"not of uzram run").unwrap();
    let stays = || {
        drop(lay_out_of(&dir, ONE).unwrap());
        library.exists() && image.exists()
    };
    // While another one has not become its program yet nothing is removed; then what is in use is not.
    assert!(stays());
    drop(old);
    let pager = File::open(&image).unwrap();
    flock(&pager, FlockOperation::LockShared).unwrap();
    assert!(stays());
    drop(pager);
    // A program that executes itself again and again has no pager's lock meanwhile.
    for script in ["exec sleep 600", "exec /bin/sh -c \"$0\" \"$0\""] {
        let _user = User::start(&image, script);
        assert!((0..40).all(|_| stays()));
    }
    // Not at once: a process that another test starts has the lock until it is executed.
    assert!((0..200).any(|_| !stays()));
    // Nor is there what was not written to its end.
    assert_eq!(names(&dir), [BOTH[0], "other", BOTH[1]]);
}

/// Runs of two builds at once: each has its files until it has become its program.
#[test]
fn runs_at_once_have_their_files() {
    let (_root, dir) = folder();
    thread::scope(|scope| {
        for build in [ONE, OTHER, ONE, OTHER] {
            let dir = &dir;
            scope.spawn(move || {
                for _ in 0..60 {
                    check_whole(&lay_out_of(dir, build).unwrap(), build);
                }
            });
        }
    });
    let left = names(&dir);
    assert!(left.iter().all(|name| !name.starts_with(NEW)), "{left:?}");
}

#[test]
fn a_user_has_a_number_outside_of_its_namespace() {
    for (map, uid, outside) in [
        ("         0          0 4294967295\n", 1000, 1000),
        ("0 100000 65536", 5, 100_005),
        ("0 1000 1\n1 200000 10\n", 10, 200_009),
        ("0 1000 1\n1 200000 10\n", 11, 11),
        ("", 7, 7),
    ] {
        assert_eq!(uid_outside(map, uid), outside, "{map}");
    }
}
