//! `uzram run` before it becomes the program: where it lays out its library and the pager, and what it says
//! if it cannot.

use crate::common::*;

/// What the shell in the program says: where the image is, and that it can be read.
const PROGRAM: &str =
    "test -x $UZRAM_RUN_IMAGE && cat $LD_PRELOAD $UZRAM_RUN_IMAGE >/dev/null && echo $UZRAM_RUN_IMAGE";

/// Runs a script that prepares places, in mounts of its own; then `uzram run` as this user, with this
/// environment. `$dir` is a folder of that user.
fn prepared(script: &str, user: &str, environment: &str) -> Ended {
    let dir = tempfile::tempdir().unwrap();
    let script = format!(
        "dir=$1; set -e; mount -t tmpfs -o mode=1777 tmpfs /var/tmp; mount -t tmpfs tmpfs /var/lib
         mount -t tmpfs tmpfs $dir; mkdir $dir/home; chown 65534 $dir/home
         chmod 755 $dir
         {script}
         exec {user} env -u HOME -u XDG_CACHE_HOME {environment} $0 run --limit 64M --no-spill -- /bin/sh -c '{PROGRAM}'"
    );
    let mut command = isolated(&script);
    command.arg(UZRAM).arg(dir.path());
    finish(command)
}

#[test]
fn files_are_in_the_first_folder_that_will_do() {
    if Run::if_root().is_none() {
        return;
    }
    let (of_root, of_nobody) = ("/var/lib/uzram-run", "/var/tmp/uzram-65534");
    for (script, user, environment, place) in [
        ("true", "", "", of_root),
        // Root's own folder is readable for programs that give up root, whatever the umask.
        ("umask 077", "", "", of_root),
        ("mkdir -m 777 /var/lib/uzram-run", "", "", "/var/tmp/uzram-0"),
        ("mount -o remount,noexec /var/lib", "", "", "/var/tmp/uzram-0"),
        ("mount -o remount,ro /var/lib", "", "HOME=$dir/home", "/var/tmp/uzram-0"),
        ("true", AS_NOBODY, "", of_nobody),
        ("true", AS_NOBODY, "HOME=relative", of_nobody),
        ("chmod 777 $dir", AS_NOBODY, "HOME=$dir/home", of_nobody),
        ("true", AS_NOBODY, "HOME=$dir/home", "/home/.cache/uzram"),
        ("true", AS_NOBODY, "HOME=$dir/home XDG_CACHE_HOME=relative", "/home/.cache/uzram"),
        ("true", AS_NOBODY, "HOME=$dir/home XDG_CACHE_HOME=$dir/home/c", "/home/c/uzram"),
    ] {
        let ended = prepared(script, user, environment);
        let is_there = ended.stdout.contains(&format!("{place}/uzram-pager-"));
        assert!(ended.status.success() && is_there, "{script}, {environment}: {ended}");
    }
}

#[test]
fn without_any_folder_it_says_what_to_do() {
    if Run::if_root().is_none() {
        return;
    }
    let noexec = "/var/tmp/uzram-65534: its file system allows no execution (noexec)";
    for (script, said) in [
        ("mount -o remount,noexec /var/tmp", noexec),
        ("mount -o remount,ro /var/tmp", "cannot make /var/tmp/uzram-65534: Read-only file system"),
        ("mount -t tmpfs -o size=8k,mode=1777 tmpfs /var/tmp", "/var/tmp/uzram-65534: no room for "),
        ("ulimit -f 1", "RLIMIT_FSIZE"),
    ] {
        prepared(script, AS_NOBODY, "").says(125, said).says(125, "set XDG_CACHE_HOME");
    }
}

#[test]
fn a_read_only_folder_for_spill_files_is_refused() {
    if Run::if_root().is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = arg(dir.path());
    let run = |dir: &str, options: &str| {
        let script = "mount -t tmpfs -o ro tmpfs $1 && exec $0 run --limit 64M $2 -- /bin/true";
        finish(isolated(script).args([UZRAM, dir, options]))
    };
    for (dir, options) in [(dir, &*format!("--spill={dir}")), ("/var/tmp", "--hard")] {
        let said = format!("no spill file can be in {dir}: Read-only file system");
        run(dir, options).says(125, &said).says(125, "--spill DIR, or --no-spill");
    }
    assert!(run("/var/tmp", "--no-spill").status.success());
}
