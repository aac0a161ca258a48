//! The systemd units in `dist/systemd`, as systemd itself reads them.

use crate::common::*;

const SERVICE: &str = include_str!("../../../../dist/systemd/uzram.service");
const SLEEP: &str = include_str!("../../../../dist/systemd/sleep.conf.d/uzram.conf");
const CONFIG: &str = include_str!("../../../../dist/uzram.toml");
/// A unit of every system with /tmp in memory, which is ordered after swap.
const TMP_MOUNT: &str = "[Unit]
DefaultDependencies=no
Before=local-fs.target
After=swap.target
[Mount]
What=tmpfs
Where=/tmp
Type=tmpfs
";

/// Returns the command `systemd-analyze args`; `None`, after it has said so, if there is none.
fn analyze(args: &str) -> Option<Command> {
    if missing("systemd-analyze") {
        return None;
    }
    let mut command = Command::new("systemd-analyze");
    command.args(args.words()).env("PATH", program_path());
    Some(command)
}

/// Returns what systemd says of the service as one of the units of the system.
fn verify(service: &str) -> Option<String> {
    let place = Place::new();
    for (name, text, target) in
        [("uzram.service", service, "swap.target"), ("tmp.mount", TMP_MOUNT, "local-fs.target")]
    {
        place.write(name, text);
        let wants = place.root().join(format!("{target}.wants"));
        fs::create_dir(&wants).unwrap();
        symlink(format!("../{name}"), wants.join(name)).unwrap();
    }
    let mut command = analyze("verify --man=no sysinit.target")?;
    command.env("SYSTEMD_LOG_TARGET", "console");
    // A trailing colon appends the system's own units.
    let ended = finish(command.env("SYSTEMD_UNIT_PATH", format!("{}:", place.root().display())));
    // Ignore messages about other units.
    Some(ended.stderr.lines().filter(|line| line.contains("uzram")).collect::<Vec<_>>().join("\n"))
}

#[test]
fn systemd_starts_the_service_before_swap_target_and_has_nothing_to_say_of_it() {
    let installed = "ExecStart=/usr/bin/uzram up --config /etc/uzram.toml\n";
    assert!(SERVICE.contains(installed));
    let service = SERVICE.replace("/usr/bin/uzram", UZRAM);
    let Some(said) = verify(&service) else { return };
    assert_eq!(said, "");
    // An error would be reported.
    let said = verify(&service.replace("[Install]", "Tpyo=1\n[Install]")).unwrap();
    assert!(said.contains("Tpyo"), "{said}");
    let cycle = service.replace("Before=swap.target", "Before=swap.target\nAfter=local-fs.target");
    let said = verify(&cycle).unwrap();
    // The line about the cycle names this unit or another one of the cycle.
    assert!(said.contains("ordering cycle") || said.contains("Found dependency on uzram.service"), "{said}");
}

/// systemd would hibernate to its swap area.
#[test]
fn with_the_service_comes_what_forbids_hibernation() {
    assert!(SERVICE.contains("sleep.conf.d/uzram.conf"));
    let settings: Vec<_> = SLEEP.lines().filter(|line| !line.starts_with('#') && !line.is_empty()).collect();
    let modes = ["AllowHibernation=no", "AllowHybridSleep=no", "AllowSuspendThenHibernate=no"];
    assert_eq!(settings, [&["[Sleep]"][..], &modes].concat());
    // It is read where the documentation has it put, after the main file, which says nothing or its opposite.
    let place = Place::new();
    let root = place.root().display();
    let Some(mut command) = analyze(&format!("--root={root} cat-config --no-pager systemd/sleep.conf"))
    else {
        return;
    };
    fs::create_dir_all(place.path("etc/systemd/sleep.conf.d")).unwrap();
    place.write("etc/systemd/sleep.conf.d/uzram.conf", SLEEP);
    place.write("etc/systemd/sleep.conf", "[Sleep]\nAllowHibernation=yes\n");
    let read = finish(&mut command).ok();
    let last = |name: &str| read.lines().rev().find(|line| line.starts_with(name)).map(str::to_owned);
    for mode in modes {
        assert_eq!(last(mode.split_once('=').unwrap().0).as_deref(), Some(mode), "{read}");
    }
}

/// Its own mount namespace would hide its mounts from all other processes.
#[test]
fn nothing_gives_the_service_a_mount_namespace() {
    const THEIRS: &str = "Private Protect ReadOnly ReadWrite Inaccessible ExecPaths NoExecPaths Bind \
                          TemporaryFileSystem Root Dynamic";
    let settings = SERVICE.lines().filter(|line| !line.starts_with('#'));
    let hiding = settings.filter(|line| THEIRS.words().iter().any(|begin| line.starts_with(begin)));
    assert_eq!(hiding.collect::<Vec<_>>(), Vec::<&str>::new());
}

#[test]
fn the_service_has_the_capabilities_that_starting_takes() {
    let line = SERVICE.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet=")).unwrap();
    let has: Vec<&str> = line.split(' ').collect();
    for needed in ["CAP_SYS_ADMIN", "CAP_SYS_RESOURCE", "CAP_DAC_READ_SEARCH"] {
        assert!(has.contains(&needed), "{needed} is not in {line}");
    }
    // Both files say what socket-owner needs.
    let drop_in = "CapabilityBoundingSet=CAP_CHOWN CAP_FOWNER";
    assert!(SERVICE.contains(drop_in) && CONFIG.contains(drop_in));
}

/// The value is ten times the exposure of `systemd-analyze security`, which goes from 0 to 10.
#[test]
fn the_service_has_little_that_it_does_not_need() {
    let place = Place::new();
    let unit = place.write("uzram.service", SERVICE);
    let security = |threshold: &str| {
        analyze(&format!("security --offline=true --no-pager --threshold {threshold} {unit}")).map(finish)
    };
    let Some(ended) = security("45") else { return };
    if ended.stderr.contains("unrecognized option") {
        return println!("skipped: this systemd-analyze reads no files");
    }
    ended.ok();
    assert!(!security("10").unwrap().status.success(), "it says so of all");
}
