//! `uzram run` and the kinds of programs: each as the command, and as a child of a shell that is managed.

use tempfile::TempDir;

use crate::common::*;

/// Kinds of programs: the name; a script that makes `program` in the current folder by `$CC`, or with
/// `$ORDINARY`, which is one; and in how many processes memory is managed, or why it is refused. Of `env -i`
/// nobody learns: nothing of `uzram run` is left in its environment.
const KINDS: &[(&str, &str, Result<usize, &str>)] = &[
    ("dynamic", "$CC", Ok(1)),
    ("not position-independent", "$CC -no-pie", Ok(1)),
    ("shebang", "printf '#! /bin/sh -e\n%s\n' $ORDINARY >program", Ok(1)),
    ("shell script", "echo $ORDINARY >program", Ok(1)),
    (
        "script of a script",
        "printf '#!/bin/sh\nexec sh \"$@\"\n' >script; chmod a+x script
         printf '#!%s -e\n%s\n' $PWD/script $ORDINARY >program",
        Ok(1),
    ),
    ("env -i", "printf '#!/bin/sh\nexec env -i %s\n' $ORDINARY >program", Ok(0)),
    (
        "strace",
        "command -v strace; printf '#!/bin/sh\nexec strace -o/dev/null %s\n' $ORDINARY >program",
        Ok(1),
    ),
    ("static", "$CC -static", Err("is linked statically")),
    ("static-pie", "$CC -static-pie", Err("is linked statically")),
    ("i386", "$CC -m32", Err("is for another kind of machine")),
    ("address-sanitized", "$CC -fsanitize=address", Err("address sanitizer")),
    (
        "another C library",
        "ln -s /lib64/ld-linux-x86-64.so.2 ld-musl.so.1; $CC -Wl,--dynamic-linker=$PWD/ld-musl.so.1",
        Err("is not for glibc"),
    ),
    (
        "Go",
        "$CC; echo go >go; objcopy --add-section .go.buildinfo=go program",
        Err("is a Go program, which makes its system calls itself"),
    ),
    ("set-uid", SET_UID, Err("has other rights than its user")),
];
const SET_UID: &str = "$CC; chmod 4755 program";

/// Makes a program of a kind; `None` if it cannot be made here.
fn made(script: &str, ordinary: &Path) -> Option<(TempDir, PathBuf)> {
    let dir = tempfile::tempdir().unwrap();
    set_mode(dir.path(), 0o755);
    let cc = format!("cc -O1 -o program {}/tests/programs/kinds.c", env!("CARGO_MANIFEST_DIR"));
    let mut sh = Command::new("sh");
    sh.args(["-ec", &format!("{script}; chmod a+x program")]).current_dir(dir.path());
    let is_made = finish(sh.env("CC", cc).env("ORDINARY", ordinary)).status.success();
    let path = dir.path().join("program");
    is_made.then_some((dir, path))
}

/// Returns in how many processes memory was managed, by their figures: `--stats=json`.
fn managed(ended: &Ended) -> usize {
    let lines = ended.stderr.lines().filter(|line| !line.starts_with("uzram: strace runs until"));
    let figures = lines.map(|line| serde_json::from_str(line).unwrap());
    figures.filter(|one: &Value| one["used_max_bytes"].as_u64().unwrap() > 16 << 20).count()
}

#[test]
fn every_kind_of_program_is_managed_or_said_not_to_be() {
    let Some(run) = Run::if_able() else { return };
    let ordinary = Program::compiled("kinds", "");
    for (name, script, memory) in KINDS {
        let Some((_dir, path)) = made(script, &ordinary.path) else {
            println!("skipped: no program of the kind {name} can be made here");
            continue;
        };
        println!("{name}");
        let path = arg(&path);
        let plain = finish(Command::new("sh").args(["-c", "exec \"$0\"", path]));
        assert!(plain.status.code() == Some(3) && plain.stdout.starts_with("right, "), "{plain}");
        let run = |options: &str, command: &[&str]| {
            run.run(&[&["--limit", "24M", options, "--"], command].concat())
        };
        let is_plain = |ended: &Ended| (ended.status, &ended.stdout) == (plain.status, &plain.stdout);
        let ended = run("--stats=json", &[path]);
        assert!(is_plain(&ended), "{name}: {ended}");
        assert_eq!(ended.stderr.contains("uzram: strace runs until"), *name == "strace", "{ended}");
        match memory {
            Ok(count) => assert_eq!(managed(&ended), *count, "{name}: {ended}"),
            Err(why) => {
                let begin = format!("uzram: {path} ");
                let is_said = ended.stderr.starts_with(&begin) && ended.stderr.contains(why);
                assert!(
                    is_said && ended.stderr.ends_with(": its memory is not managed\n"),
                    "{name}: {ended}"
                );
                assert_eq!(ended.stderr.lines().count(), 1, "{name}: {ended}");
                run("--hard", &[path]).says(125, why).says(125, "and --hard was given");
            }
        }
        // As a child by exec, behind a shell that goes on and one that does not. What has the address
        // sanitizer ends itself under any library that is loaded first.
        for shell in ["\"$0\"; exit $?", "exec \"$0\""] {
            let ended = run("--stats=json", &["/bin/sh", "-c", shell, path]);
            if *name == "address-sanitized" {
                assert!(!ended.status.success() && ended.stderr.contains("ASan"), "{shell}: {ended}");
                continue;
            }
            assert!(is_plain(&ended), "{name}, {shell}: {ended}");
            if let Ok(count) = memory {
                assert_eq!(managed(&ended), *count, "{name}, {shell}: {ended}");
            }
        }
    }
}

/// A program with the rights of another user, started by one without any.
#[test]
fn a_set_uid_program_of_another_user_is_left_alone() {
    if Run::if_root().is_none() {
        return;
    }
    let (dir, path) = made(SET_UID, Path::new("")).unwrap();
    let cache = dir.path().join("cache");
    fs::create_dir(&cache).unwrap();
    chown(&cache, Some(NOBODY), Some(NOBODY)).unwrap();
    let path = arg(&path);
    let run = |command: &[&str]| {
        let mut run = Command::new("env");
        run.arg(format!("XDG_CACHE_HOME={}", cache.display())).args(AS_NOBODY.words());
        finish(run.arg(UZRAM).args("run --limit 24M --".words()).args(command))
    };
    for command in [&[path][..], &["/bin/sh", "-c", "exec \"$0\"", path]] {
        let ended = run(command);
        assert_eq!((ended.status.code(), &*ended.stdout), (Some(3), "right, as 65534 and 0\n"), "{ended}");
    }
    assert!(run(&[path]).stderr.contains("has other rights than its user"));
}

/// The user's libraries are loaded first; one of an outer `uzram run` is not.
#[test]
fn our_library_is_the_last_one() {
    if Run::if_able().is_none() {
        return;
    }
    for (own, kept) in [
        ("", ""),
        ("libm.so.6", "libm.so.6:"),
        ("/a/b.so c.so:d.so", "/a/b.so:c.so:d.so:"),
        ("a.so:/old/libuzram-run-99.so", "a.so:"),
    ] {
        let mut command = bare_command("run --limit 64M -- /bin/sh -c");
        let said = finish(command.arg("echo $LD_PRELOAD").env("LD_PRELOAD", own)).ok();
        let ours = said.strip_prefix(kept).unwrap_or_else(|| panic!("{own}: {said}"));
        let is_one = ours.starts_with('/') && !ours.contains([':', ' ']);
        assert!(is_one && ours.contains("/libuzram-run-"), "{own}: {said}");
    }
}
