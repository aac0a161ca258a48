//! Attributes as files (`uzram up --mount`), under the tools that are used on those of sysfs, and
//! `block_state` of a large disk: a text that grows with it, but that the daemon never holds as a whole.

use crate::common::*;

#[test]
fn tools_copy_attributes_and_set_them() {
    let tools = "cp install dd tee sed mv ln touch truncate tail";
    let Some(place) = BlockPlace::needing(tools) else { return };
    let _daemon = place.up_mounted("16M", "");
    let (files, root) = (place.files(), place.root());
    let shell = |script: &str| {
        succeed(&place, "sh", &["-ec", script, "sh", arg(&files), arg(root)]).trim().to_owned()
    };
    let refused = |script: &str| complain(&place, "sh", &["-ec", script, "sh", arg(&files), arg(root)]);
    let stat = fs::read_to_string(files.join("mm_stat")).unwrap();
    for copy in [
        "cp $1/mm_stat $2/to",
        "cp -a $1/mm_stat $2/to",
        "cp --sparse=always $1/mm_stat $2/to",
        "cp --sparse=never $1/mm_stat $2/to",
        "install -m 600 $1/mm_stat $2/to",
        "dd if=$1/mm_stat of=$2/to status=none",
        "dd if=$1/mm_stat of=$2/to status=none bs=7",
        "cat $1/mm_stat > $2/to",
        "tail -n 1 $1/mm_stat > $2/to",
    ] {
        shell(&format!("rm -f $2/to; {copy}"));
        assert_eq!(fs::read_to_string(root.join("to")).unwrap(), stat, "{copy}");
    }
    // All of a long one, too, which is written as it is read.
    fs::write(place.disk(), (0..512 << 10).map(|at: u32| (at >> 3) as u8).collect::<Vec<u8>>()).unwrap();
    for copy in
        ["cp $1/block_state $2/to", "cp --sparse=always $1/block_state $2/to", "install $1/block_state $2/to"]
    {
        shell(&format!("rm -f $2/to; {copy}"));
        assert_eq!(fs::read_to_string(root.join("to")).unwrap().lines().count(), 128, "{copy}");
    }

    for (mib, set) in (1..).zip([
        "echo NM > $1/mem_limit",
        "printf NM >> $1/mem_limit",
        "echo NM | tee $1/mem_limit",
        "echo NM | tee -a $1/mem_limit",
        "echo NM | dd of=$1/mem_limit status=none",
        "echo NM | dd of=$1/mem_limit status=none conv=notrunc oflag=append",
        "echo NM | dd of=$1/mem_limit status=none conv=notrunc bs=4096 seek=3",
        "echo NM > $2/value; cp $2/value $1/mem_limit",
        "echo NM > $2/value; cp --sparse=always $2/value $1/mem_limit",
        "echo NM > $2/value; cat $2/value 1<> $1/mem_limit",
        "exec 3<> $1/mem_limit; read old <&3; echo NM >&3",
        "exec 3> $1/mem_limit; echo 77M >&3; echo NM >&3",
        "exec 3>> $1/mem_limit; echo 77M >&3; echo NM >&3",
    ]) {
        shell(&set.replace('N', &mib.to_string()));
        assert_eq!(shell("cat $1/mem_limit"), (mib << 20).to_string(), "{set}");
    }
    // Nothing is written; nothing changes.
    let before = shell("cat $1/mem_limit");
    shell(
        ": > $1/mem_limit; touch $1/mem_limit; truncate -s 0 $1/mem_limit; cp $1/mem_limit $1/mem_limit || true",
    );
    for (what, said) in [
        ("sed -i s/1/2/ $1/mem_limit", "Permission denied"),
        ("echo 1M > $1/other", "Permission denied"),
        ("mkfifo $1/other", "Permission denied"),
        ("rm -f $1/mem_limit", "Operation not permitted"),
        ("mv $1/mem_limit $1/other", "Operation not permitted"),
        ("mv $1/mem_limit $1/mm_stat", "Operation not permitted"),
        ("ln $1/mem_limit $1/other", "Operation not permitted"),
        ("ln -s x $1/other", "Operation not permitted"),
        ("mkdir $1/other", "Operation not permitted"),
        ("rmdir $1", "Operation not permitted"),
        ("install $2/value $1/mem_limit", "Operation not permitted"),
        ("echo 1M >> $1/mm_stat", "Permission denied"),
        ("cat $1/reset", "Permission denied"),
        ("dd if=/dev/zero of=$1/mem_limit bs=70000 count=1", "Argument list too long"),
        ("echo much | dd of=$1/mem_limit status=none", "Invalid argument"),
        ("echo zstd | dd of=$1/comp_algorithm status=none", "Device or resource busy"),
    ] {
        let complaint = refused(what);
        assert!(complaint.contains(said), "{what}: {complaint}");
    }
    assert_eq!(shell("cat $1/mem_limit"), before);
    let shown = fs::metadata(files.join("mem_limit")).unwrap();
    assert_eq!((shown.len(), shown.blocks()), (4096, 0));
    // Programs read a file that shows no size to its end.
    assert_eq!(fs::metadata(files.join("block_state")).unwrap().len(), 0);
}

/// Readers that stop in the middle; a whole text for each would take 20 MB.
const READERS: usize = 8;
const SIZE: &str = "2G";
const LINES: usize = 2 << 18;
/// The most memory for all of them together.
const MOST_BYTES: u64 = 16 << 20;
const GET: &[u8] = b"GET /v1/devices/zram0/attributes/block_state HTTP/1.1\r\n\r\n";

fn assert_little_more(daemon: &Daemon, before: u64) {
    let more = daemon.anonymous_bytes().saturating_sub(before);
    assert!(more < MOST_BYTES, "{more} bytes more");
}

#[test]
fn readers_that_stop_hold_neither_memory_nor_the_device() {
    if missing("qemu-io") {
        return;
    }
    let (place, has_files) = (BlockPlace::new(false), !unable());
    let daemon = if has_files { place.up_mounted(SIZE, "") } else { place.up_sized(SIZE, "") };
    // So that each page has a slot.
    qemu_io(&place, &["write -z 0 1G", "write -z 1G 1G"]);
    let before = daemon.anonymous_bytes();
    let readers = (0..READERS).map(|_| {
        let mut reader = connect(&place.socket("control.sock"));
        reader.write_all(GET).unwrap();
        reader.read_exact(&mut [0; 1000]).unwrap();
        reader
    });
    let readers: Vec<_> = readers.collect();
    assert_little_more(&daemon, before);
    let text = place.run("stat zram0 block_state").ok();
    assert_eq!(text.lines().count(), LINES);
    for (page, line) in text.lines().enumerate() {
        assert!(line.len() == 39 && line[..12].trim() == page.to_string(), "{page}: {line}");
        assert!(line.ends_with(".000000 s....."), "{line}");
    }
    if has_files {
        let (before, path) = (daemon.anonymous_bytes(), place.files().join("block_state"));
        let files: Vec<_> = (0..READERS).map(|_| File::open(&path).unwrap()).collect();
        files.iter().for_each(|file| file.read_exact_at(&mut [0; 1000], 0).unwrap());
        assert_little_more(&daemon, before);
        assert!(fs::read_to_string(&path).unwrap() == text);
        // At any offset, back and forth.
        let mut random = Random::new(1);
        for _ in 0..20 {
            let offset = random.below(text.len());
            let len = random.below(10_000).min(text.len() - offset);
            let mut part = vec![0; len];
            files[0].read_exact_at(&mut part, offset as u64).unwrap();
            assert!(part == text.as_bytes()[offset..][..len], "{offset} {len}");
        }
    }
    assert_eq!(place.run("reset zram0").ok(), "");
    // They are disconnected, and their responses are incomplete.
    for mut reader in readers {
        let mut rest = String::new();
        let _ = reader.read_to_string(&mut rest);
        assert!(rest.len() < LINES * 40, "{}", rest.len());
    }
    let empty = ask(&place.socket("control.sock"), GET);
    assert!(empty.ends_with("\r\n\r\n{\"name\":\"block_state\",\"text\":\"\"}\n"), "{empty}");
}
