//! The disk with its usual clients: libnbd's tools, qemu's and fio on a device of the real program; also
//! while pages are compressed again, and where clients and daemons end in the middle of an operation.

use std::process::ExitStatus;

use crate::common::*;

#[test]
fn a_file_system_comes_back_whole() {
    let Some(place) = Place::needing("mkfs.ext4 e2fsck nbdcopy nbdinfo") else { return };
    let _daemon = place.up_sized("64M", "");
    // The sources of all crates: a real tree.
    let tree = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    succeed(&place, "mkfs.ext4", &["-q", "-d", arg(tree), "image", "64M"]);
    assert_eq!(succeed(&place, "nbdinfo", &["--size", &place.uri()]).trim(), "67108864");

    succeed(&place, "nbdcopy", &["--flush", "image", &place.uri()]);
    place.assert_holds(&place.root().join("image"));
    succeed(&place, "e2fsck", "-f -n copy");
    succeed(&place, "nbdcopy", &["--synchronous", "--connections=1", &place.uri(), "image-again"]);
    let [image, again] = ["image", "image-again"].map(|name| fs::read(place.path(name)).unwrap());
    assert!(image == again, "the contents changed");
    let (stored, charged) = (place.statistic("orig_data_bytes"), place.statistic("mem_charged_bytes"));
    assert!(stored > 0 && charged < stored, "{charged} bytes for {stored}");
}

#[test]
fn devices_are_added_used_and_removed() {
    let Some(place) = Place::needing("nbdcopy nbdinfo qemu-io") else { return };
    let _daemon = place.up("");
    let added = place.run("add logs --size 8M --algorithm zstd:3 --mem-limit 4M").ok();
    let uri = added.trim();
    assert!(uri.starts_with("nbd+unix:///logs?socket="), "{added}");
    assert_eq!(succeed(&place, "nbdinfo", &["--size", uri]).trim(), "8388608");
    assert_eq!(place.run("stat logs mem_limit").ok(), "4194304\n");
    place.run("stat logs comp_algorithm").shows(&["[zstd:3]"]);
    assert!(succeed(&place, "nbdinfo", &["--list", &place.uri()]).contains("\"logs\""));

    // Each device has its own contents for every client.
    let (first, second) = (random_file(&place, "first", 2 << 20), random_file(&place, "second", 3 << 20));
    place.copy_in(&first);
    succeed(&place, "nbdcopy", &[arg(&second), uri]);
    place.assert_holds(&first);
    assert!(fs::read(place.copy_out(uri, "logs")).unwrap().starts_with(&fs::read(&second).unwrap()));

    place.run("add logs").says(1, "there is a device 'logs' already");
    let user = Connected::new(&place, uri);
    place.run("remove logs").says(1, "in use (users: 1)");
    drop(user);
    wait_until("it can be removed", || place.run("remove logs").status.success());
    assert!(!place.run("list").ok().contains("logs"));
    complain(&place, "nbdinfo", &[uri]);
    assert_eq!(succeed(&place, "nbdinfo", &["--size", &place.uri()]).trim(), "16777216");
}

#[test]
fn qemu_reads_its_patterns_at_odd_offsets() {
    let Some(place) = Place::needing("qemu-io") else { return };
    let _daemon = place.up_sized("64M", "--algorithm zstd");
    qemu_io(
        &place,
        &[
            "write -P 0xa1 0 1M",
            "write -P 0xb2 4095 2",
            "write -P 0xc3 12345 67890",
            "read -P 0xa1 0 4095",
            "read -P 0xb2 4095 2",
            "read -P 0xa1 4097 8248",
            "read -P 0xc3 12345 67890",
            "read -P 0xa1 80235 1",
            "write -z 5000 5001",
            "read -P 0 5000 5001",
            "read -P 0xa1 4097 903",
            "discard 16k 16k",
            "read -P 0xc3 12345 4039",
            "write -f -P 0xd4 67108863 1",
            "read -P 0xd4 67108863 1",
            "read -P 0 2M 60M",
            "flush",
        ],
    );
}

#[test]
fn qemu_converts_and_compares() {
    let Some(place) = Place::needing("qemu-img") else { return };
    let _daemon = place.up_sized("24M", "");
    let (uri, source) = (place.uri(), random_file(&place, "source", 24 << 20));
    for args in [
        format!("convert -n -f raw -O raw {} {uri}", source.display()),
        format!("compare -f raw -F raw {} {uri}", source.display()),
        format!("convert -f raw -O qcow2 {uri} copy.qcow2"),
        format!("compare -f raw -F qcow2 {uri} copy.qcow2"),
    ] {
        succeed(&place, "qemu-img", &args);
    }
}

#[test]
fn fio_verifies_what_it_wrote() {
    if missing("fio") {
        return;
    }
    for algorithm in ["lz4", "zstd"] {
        let place = Place::new();
        let _daemon = place.up_sized("64M", &format!("--algorithm {algorithm}"));
        let verify = "--verify=crc32c --do_verify=1 --iodepth=16 --buffer_compress_percentage=60";
        for sizes in ["--bs=4k", "--bsrange=512-64k"] {
            place.fio(&format!("--rw=randwrite --size=48M {sizes} {verify}"));
        }
        place.assert_zero("failed_reads failed_writes");
    }
}

#[test]
fn clients_of_one_export_do_not_disturb_each_other() {
    let Some(place) = Place::needing("fio nbdcopy") else { return };
    let _daemon = place.up_sized("64M", "");
    thread::scope(|scope| {
        for offset in ["0", "32M"] {
            let place = &place;
            scope.spawn(move || {
                let verify = "--verify=crc32c --do_verify=1 --iodepth=8";
                place.fio(&format!("--rw=randwrite --bsrange=512-16k --size=32M --offset={offset} {verify}"));
            });
        }
        // Meanwhile, another client reads the whole disk.
        place.copy_out(&place.uri(), "copy");
    });
}

/// A client that writes forever, in long requests, with several of them in flight.
struct Writer(Killed);

impl Writer {
    fn start(place: &Place) -> Writer {
        let job = place.job(
            "--rw=randwrite --bs=256k --iodepth=8 --offset=32M --size=32M --time_based --runtime=300 \
             --buffer_compress_percentage=50",
        );
        let written = place.statistic("pages_written");
        let mut fio = Command::new("fio");
        fio.args(job.words()).current_dir(place.root()).stdin(Stdio::null());
        let writer = Writer(Killed(fio.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()));
        wait_until("it writes", || place.statistic("pages_written") > written + 1000);
        writer
    }

    fn ended(mut self) -> ExitStatus {
        wait(&mut self.0, PATIENCE)
    }
}

#[test]
fn a_client_killed_while_it_writes_costs_nobody_else_anything() {
    let Some(place) = Place::needing("fio qemu-io") else { return };
    let daemon = place.up_sized("64M", "");
    thread::scope(|scope| {
        let verifier = scope.spawn(|| {
            place.fio(
                "--rw=randwrite --bsrange=512-16k --size=32M --loops=2 --verify=crc32c --do_verify=1 --iodepth=8",
            );
        });
        for _ in 0..5 {
            let writer = Writer::start(&place);
            kill(Pid::from_child(&writer.0));
            assert!(!writer.ended().success());
        }
        verifier.join().unwrap();
    });
    // Pages that killed clients were writing are whole, old or new, and their connections are gone.
    qemu_io(&place, &["read 32M 32M", "write -P 0x42 32M 32M", "read -P 0x42 32M 32M"]);
    place.assert_zero("failed_reads failed_writes");
    wait_until("nobody is connected", || place.run("reset zram0").status.success());
    place.run("down").ok();
    let said = daemon.succeeds();
    assert!(!said.contains("panicked"), "{said}");
}

#[test]
fn a_daemon_told_to_end_under_load_leaves_nothing_behind() {
    if missing("fio") {
        return;
    }
    for signal in [Signal::TERM, Signal::INT] {
        let place = Place::new();
        let daemon = place.up_sized("64M", "");
        let process = daemon.process();
        let writers = [(); 2].map(|()| Writer::start(&place));
        let _idle = connect(&place.socket("nbd.sock"));

        daemon.signal(signal);
        let said = daemon.succeeds();
        assert!(!said.contains("panicked"), "{signal:?} {said}");
        // Clients get an error: they neither hang nor succeed.
        assert!(writers.into_iter().all(|writer| !writer.ended().success()));
        assert_eq!(of_process(process, "stat"), "");
        let left = fs::read_dir(place.dir()).unwrap().map(|entry| entry.unwrap().file_name());
        let sockets: Vec<_> = left.filter(|name| name.to_string_lossy().ends_with(".sock")).collect();
        assert!(sockets.is_empty(), "{sockets:?}");
        if has_program("nbdinfo") {
            complain(&place, "nbdinfo", &[place.uri()]);
        }
        // The next daemon starts at once.
        let next = place.up("");
        place.end(next);
    }
}

#[test]
fn a_disk_takes_less_memory_after_it() {
    let Some(place) = Place::needing("nbdcopy") else { return };
    let _daemon = place.up_sized("4M", "--recompress zstd:3");
    assert_eq!(place.get("recomp_algorithm"), "#1: lz4 lz4hc [zstd:3] deflate memory");
    let text = PathBuf::from(place.write("text", decimals(4 << 20)));
    place.copy_in(&text);
    let taken = || ["compr_data_bytes", "mem_used_bytes"].map(|name| place.statistic(name));
    let before = taken();
    // Nothing is idle yet.
    place.set("idle=3600 recompress=type=idle");
    assert_eq!(place.statistic("pages_recompressed"), 0);
    place.set("idle=all recompress=type=idle");
    assert_eq!(place.statistic("pages_recompressed"), 1024);
    for (after, before) in taken().into_iter().zip(before) {
        assert!(after * 100 < before * 90, "{after} of {before}");
    }
    let states = place.run("stat zram0 block_state").ok();
    assert!(states.lines().count() == 1024 && states.lines().all(|line| line.ends_with("....r.")));
    place.assert_holds(&text);
    place.run("set zram0 recompress=type=warm").says(1, "write idle, huge or huge_idle");
}

#[test]
fn fio_verifies_meanwhile() {
    let Some(place) = Place::needing("fio") else { return };
    let _daemon = place.up_sized("32M", "--log warn --recompress deflate:1");
    thread::scope(|scope| {
        let verified = scope.spawn(|| {
            place.fio(
                "--rw=randwrite --bsrange=512-16k --size=24M --iodepth=8 --verify=crc32c --do_verify=1 --loops=2 \
                 --buffer_compress_percentage=40",
            );
        });
        wait_until("verified", || {
            place.set("recompress=");
            verified.is_finished()
        });
        verified.join().unwrap();
    });
    assert!(place.statistic("pages_recompressed") > 100);
    place.assert_zero("failed_reads failed_writes corrupted_objects");
}
