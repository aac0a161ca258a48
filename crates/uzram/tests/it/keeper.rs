//! A device whose process is killed: another process, which kept the descriptors, attaches it again.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::sync::{Arc, Mutex};

use crate::alone::only;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use uzram::device::{Device, HowToOpen, Keeper, KeptPart, NamedBacking};
use uzram::random::Random;
use uzram::units::PAGE_SIZE;
use uzram::{Error, ErrorKind, Result};

const PAGES: u64 = 600;
/// Has the program be the child; the number of its socket follows.
const SOCKET: &str = "UZRAM_KEEPER_SOCKET";
const TEST: &str = "keeper::a_killed_process_leaves_a_device_with_its_attributes_and_contents";

/// Statistics, which start anew or depend on it.
const STATISTICS: [&str; 11] = [
    "backing",
    "bd_stat",
    "classes",
    "io_stat",
    "lru",
    "mem_charged",
    "mem_chunks",
    "mem_fixed",
    "mem_used_max",
    "mm_stat",
    "policy",
];

fn contents(page: u64) -> [u8; PAGE_SIZE] {
    let mut contents = [page as u8; PAGE_SIZE];
    let noise = page as usize % 4 * 1300;
    Random::new(page).fill(&mut contents[..noise]);
    contents
}

fn text(page: u64) -> [u8; PAGE_SIZE] {
    let mut random = Random::new(page);
    let mut lines =
        (0..).flat_map(|line| format!("line {line} of text, {}\n", random.below(1000)).into_bytes());
    std::array::from_fn(|_| lines.next().unwrap())
}

/// The child's keeper: sends all of it to the parent, which has the other end of the socket.
struct Sender(UnixStream);

impl Keeper for Sender {
    fn keep(&self, device: &str, memory: BorrowedFd<'_>, backing: Option<&NamedBacking>) -> Result<()> {
        let backing = backing.unwrap();
        let text = format!("{device} {} {}\n", backing.name(), backing.len_bytes());
        let fds = [memory, backing.parts().unwrap()[0].descriptor];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(&self.0, &[IoSlice::new(text.as_bytes())], &mut control, SendFlags::empty())
            .map_err(|error| Error::new(ErrorKind::Io, error.to_string()))?;
        Ok(())
    }

    fn give_up(&self, _: &str) {
        panic!("the child resets nothing");
    }
}

/// The parent's keeper.
#[derive(Default)]
struct Notes(Mutex<Vec<String>>);

impl Keeper for Notes {
    fn keep(&self, device: &str, _: BorrowedFd<'_>, _: Option<&NamedBacking>) -> Result<()> {
        self.0.lock().unwrap().push(format!("keep {device}"));
        Ok(())
    }

    fn give_up(&self, device: &str) {
        self.0.lock().unwrap().push(format!("give up {device}"));
    }
}

/// Receives what [`Sender`] sends: its words and the descriptors.
fn receive(socket: &UnixStream) -> (Vec<String>, Vec<OwnedFd>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let (mut control, mut text) = (RecvAncillaryBuffer::new(&mut space), [0; 4096]);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(socket, &mut [IoSliceMut::new(&mut text)], &mut control, flags).unwrap();
    let fds = control.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => fds.collect(),
        _ => Vec::new(),
    });
    let words = std::str::from_utf8(&text[..got.bytes]).unwrap().split_whitespace().map(str::to_owned);
    (words.collect(), fds.collect())
}

fn attributes(device: &Device) -> BTreeMap<&'static str, String> {
    let rows = Device::attributes().iter().filter(|row| !STATISTICS.contains(&row.name));
    rows.filter_map(|row| Some((row.name, device.get(row.name).ok()?))).collect()
}

/// The child: a device with attributes and contents of all kinds. Prints the attributes, and waits.
fn wait_to_be_killed(socket: OwnedFd, directory: &str) {
    let device = Device::new("zram0").unwrap();
    device.set_keeper(Arc::new(Sender(socket.into()))).unwrap();
    let dictionary = format!("{directory}/dictionary");
    let samples: Vec<_> = (0..64).map(text).collect();
    std::fs::write(&dictionary, uzram::codec::train(&samples, 4096).unwrap()).unwrap();
    #[cfg(feature = "designs")]
    for (name, value) in [
        ("writeback_layout", "blocks"),
        ("compressed_writeback", "0"),
        ("chain_size", "8"),
        ("pool_design", "class-indexed"),
        ("lru_design", "single-lock"),
        ("streams", "2"),
        ("lru_pagevec", "3"),
        ("run_cache_batch", "16"),
    ] {
        device.set(name, value).expect(name);
    }
    for (name, value) in [
        ("comp_algorithm", format!("zstd:2,dict={dictionary}").as_str()),
        ("recomp_algorithm", "algo=deflate:7 priority=1"),
        ("recomp_algorithm", "algo=zstd priority=3"),
        ("backing_dev", &format!("{directory}/backing:8M")),
        ("writeback_limit", "5000"),
        ("writeback_limit_enable", "1"),
        ("writeback_batch_size", "9"),
        ("mem_limit", "64M"),
        ("reserve", "4M"),
        ("checksum", "1"),
        ("reclaim", "zspages"),
        ("policy_high", "70"),
        ("policy_low", "60"),
        ("writeback_budget", "64M/day"),
        ("disksize", &(PAGES * PAGE_SIZE as u64).to_string()),
        // At any time.
        ("mem_limit", "80M"),
        ("writeback_batch_size", "7"),
        ("policy_low", "50"),
        ("recompress_after", "9h"),
        ("writeback_after", "8h"),
        ("compact_threshold", "33"),
        ("compact_rate", "9M"),
    ] {
        device.set(name, value).expect(name);
    }
    let disk = device.open().unwrap();
    for page in 0..PAGES {
        let offset = page * PAGE_SIZE as u64;
        // The reserve is filled in the background.
        while disk.write(offset, &contents(page)).is_err() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
    device.set("recompress", "priority=1 max_pages=50").unwrap();
    device.set("idle", "all").unwrap();
    device.set("writeback", "page_indexes=100-199").unwrap();
    // Pages of one repeated byte stay.
    let left: u64 = device.get("writeback_limit").unwrap().parse().unwrap();
    assert!((4925..5000).contains(&left), "{left}");
    device.set("writeback_limit_enable", "0").unwrap();
    device.set("writeback_limit_enable", "1").unwrap();
    let shown = attributes(&device);
    shown.iter().for_each(|(name, value)| println!("attribute {name}={value:?}"));
    println!("ready");
    loop {
        std::thread::park();
    }
}

#[test]
fn a_killed_process_leaves_a_device_with_its_attributes_and_contents() {
    if let Ok(number) = std::env::var(SOCKET) {
        let (number, directory) = number.split_once(':').unwrap();
        // SAFETY: the descriptor was made for this process, and nothing else here has it.
        let socket = unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(number.parse().unwrap()) };
        wait_to_be_killed(socket, directory);
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    // Unlike `try_clone`, dup(2) makes a descriptor that stays open on exec.
    let inherited = rustix::io::dup(&theirs).unwrap();
    let mut child = only(TEST)
        .env(SOCKET, format!("{}:{path}", inherited.as_raw_fd()))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    drop((theirs, inherited));
    let out = BufReader::new(child.stdout.take().unwrap());
    let lines = out.lines().map(Result::unwrap).take_while(|line| line != "ready");
    let had: BTreeMap<_, _> = lines
        .filter_map(|line| {
            // The test's name may come before, without a line's end.
            let (name, value) = line.split_once("attribute ")?.1.split_once('=')?;
            Some((name.to_owned(), value.to_owned()))
        })
        .collect();
    child.kill().unwrap();
    child.wait().unwrap();
    let (words, fds) = receive(&ours);
    assert_eq!(ours.try_clone().unwrap().read(&mut [0]).unwrap(), 0, "nothing else was sent");
    let [name, backing_name, backing_bytes] = &words[..] else { panic!("{words:?}") };
    let [memory, backing] = <[OwnedFd; 2]>::try_from(fds).unwrap();
    let others = backing.try_clone().unwrap();
    let part = KeptPart {
        name: backing_name.clone(),
        len_bytes: backing_bytes.parse().unwrap(),
        descriptor: backing,
    };
    let backing = NamedBacking::from_parts([part]).unwrap();
    let keeper = Arc::new(Notes::default());
    // SAFETY: the process that had the memory was waited for.
    let attached =
        unsafe { Device::attach(name, memory, Some(backing), Arc::<Notes>::clone(&keeper), |_| ()) };
    let (device, attached) = attached.unwrap();
    assert_eq!((attached.pages, attached.pages_lost), (PAGES, 0));
    let has: BTreeMap<_, _> = attributes(&device)
        .into_iter()
        .map(|(name, value)| (name.to_owned(), format!("{value:?}")))
        .collect();
    assert!(has.len() > 25, "{has:?}");
    for (name, value) in &has {
        assert_eq!(had.get(name), Some(value), "{name}");
    }
    assert_eq!(had.len(), has.len());
    let disk = device.open().unwrap();
    for page in 0..PAGES {
        let mut read = [0; PAGE_SIZE];
        disk.read(page * PAGE_SIZE as u64, &mut read).unwrap();
        assert!(read == contents(page), "page {page}");
    }
    drop(disk);
    // The device goes on as any other.
    device.set("writeback", "page_indexes=200-249").unwrap();
    assert_eq!(device.get("writeback_limit").as_deref(), Ok("4888"));
    let path = format!("{path}/backing");
    let refused = NamedBacking::open(&path, HowToOpen::default()).map(drop).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Busy);
    device.set("reset", "1").unwrap();
    assert_eq!(*keeper.0.lock().unwrap(), ["give up zram0"]);
    assert!(others.as_fd().as_raw_fd() >= 0, "somebody still has the descriptor");
    device.set("backing_dev", &path).unwrap();
    device.set("disksize", "1M").unwrap();
    device.remove().unwrap();
    assert_eq!(*keeper.0.lock().unwrap(), ["give up zram0", "keep zram0", "give up zram0"]);
}
