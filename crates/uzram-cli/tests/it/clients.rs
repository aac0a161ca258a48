//! The disk with its usual clients: libnbd's tools, qemu's and fio on a device of the real program; also
//! where a daemon ends in the middle of an operation.

use crate::common::*;
use crate::nbd::request_bytes;

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
    let mut user = Client::connect(&place.socket("nbd.sock"));
    user.enter_export(b"logs");
    place.run("remove logs").says(1, "in use (users: 1)");
    drop(user);
    wait_until("it can be removed", || place.run("remove logs").status.success());
    assert!(!place.run("list").ok().contains("logs"));
    complain(&place, "nbdinfo", &[uri]);
    assert_eq!(succeed(&place, "nbdinfo", &["--size", &place.uri()]).trim(), "16777216");
}

/// Two clients of one export write and verify, while another one reads the whole disk.
#[test]
fn fio_verifies_what_it_wrote_whoever_is_there_besides() {
    for algorithm in ["lz4", "zstd"] {
        let Some(place) = Place::needing("fio nbdcopy") else { return };
        let _daemon = place.up_sized("64M", &format!("--algorithm {algorithm}"));
        thread::scope(|scope| {
            for (offset, sizes) in [("0", "--bs=4k"), ("32M", "--bsrange=512-64k")] {
                let (place, verify) = (&place, "--verify=crc32c --do_verify=1 --iodepth=16");
                let options = format!(
                    "--rw=randwrite {sizes} --size=24M --offset={offset} {verify} \
                     --buffer_compress_percentage=60"
                );
                scope.spawn(move || place.fio(&options));
            }
            place.copy_out(&place.uri(), "copy");
        });
        place.assert_zero("failed_reads failed_writes");
    }
}

#[test]
fn a_daemon_told_to_end_under_load_leaves_nothing_behind() {
    let Some(place) = Place::needing("nbdinfo") else { return };
    let daemon = place.up("");
    let process = daemon.process();
    let header = request_bytes(0, cmd::WRITE, 1, 1 << 20, 256 << 10);
    let request = [header, Random::new(1).bytes(256 << 10)].concat();
    let writers = [(); 2].map(|()| {
        let (mut stream, request) = (place.nbd().stream, request.clone());
        thread::spawn(move || {
            while stream.write_all(&request).and_then(|()| stream.read_exact(&mut [0; 16])).is_ok() {}
        })
    });
    let _idle = connect(&place.socket("nbd.sock"));
    wait_until("they write", || place.statistic("pages_written") > 1000);

    let said = daemon.terminate();
    assert!(!said.contains("panicked"), "{said}");
    // Clients get an error, and do not hang.
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    assert_eq!(of_process(process, "stat"), "");
    let left = fs::read_dir(place.dir()).unwrap().map(|entry| entry.unwrap().file_name());
    let sockets: Vec<_> = left.filter(|name| name.to_string_lossy().ends_with(".sock")).collect();
    assert!(sockets.is_empty(), "{sockets:?}");
    complain(&place, "nbdinfo", &[place.uri()]);
    // The next daemon starts at once.
    let next = place.up("");
    place.end(next);
}
