//! Attributes as files (`uzram up --mount`), under the tools that are used on those of sysfs.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt};

use crate::common::Daemon;
use crate::common::block::BlockPlace;
use crate::common::clients::{arg, complain, succeed};

fn up(place: &BlockPlace) -> Daemon {
    place.up(&["--mount", arg(&place.dir().join("mnt"))])
}

#[test]
fn tools_copy_attributes_and_set_them() {
    let Some(place) =
        BlockPlace::needing(&["cp", "install", "dd", "tee", "sed", "mv", "ln", "touch", "truncate", "tail"])
    else {
        return;
    };
    let _daemon = up(&place);
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
    ] {
        let complaint = refused(what);
        assert!(complaint.contains(said), "{what}: {complaint}");
    }
    assert_eq!(shell("cat $1/mem_limit"), before);
}

#[test]
fn an_open_attribute_is_read_and_set_again_and_again() {
    let Some(place) = BlockPlace::if_able() else { return };
    let _daemon = up(&place);
    let mut file = OpenOptions::new().read(true).write(true).open(place.files().join("mem_limit")).unwrap();
    let (mut text, mut other) = (String::new(), File::open(place.files().join("mem_limit")).unwrap());
    file.read_to_string(&mut text).unwrap();
    assert_eq!(text, "0\n");
    for mib in [1u64, 20, 300] {
        // Where the last operation ended, as in sysfs.
        file.write_all(format!("{mib}M").as_bytes()).unwrap();
        for reader in [&mut file, &mut other] {
            let mut text = String::new();
            reader.seek(SeekFrom::Start(0)).unwrap();
            reader.read_to_string(&mut text).unwrap();
            assert_eq!(text, format!("{}\n", mib << 20));
        }
        assert_eq!(place.number("mem_limit"), mib << 20);
    }
    assert_eq!(file.write_at(b"much", 99).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    assert_eq!(file.metadata().map(|found| (found.len(), found.blocks())).unwrap(), (4096, 0));
    assert_eq!(file.seek(SeekFrom::End(0)).unwrap(), 4096);
    file.write_all(b"7M").unwrap();
    assert_eq!(place.number("mem_limit"), 7 << 20);
    // Programs read a file that shows no size to its end.
    assert_eq!(fs::metadata(place.files().join("block_state")).unwrap().len(), 0);
}
