//! Words that other programs have for commands, options and keys of files, and what they are here. They come
//! before the most similar word, which is often another thing.

/// Words of other programs, and the end of a sentence that says what they are here.
type Row = (&'static [&'static str], &'static str);

const COMMANDS: &[Row] = &[
    (&["stop", "kill", "end", "quit", "exit", "shutdown", "halt"], "`uzram down` ends the daemon"),
    (&["start", "serve", "server", "daemon", "init"], "`uzram up` starts a daemon"),
    (&["create", "new"], "`uzram up` starts a daemon with a device, `uzram add` adds one to it"),
    (&["restart"], "`uzram down` and `uzram up` do, and lose the contents; `uzram upgrade` keeps them"),
    (&["ls", "ps", "devices"], "`uzram list` lists the devices"),
    (&["rm", "delete", "del", "destroy"], "`uzram remove` removes a device"),
    (&["show", "get", "info", "stats"], "`uzram stat` shows a device, `uzram status` the daemon"),
    (
        &["resize", "grow"],
        "a disk keeps its size until `uzram reset`; `uzram set NAME disksize=SIZE` sets another",
    ),
    (&["mount"], "`uzram up --mount DIR` shows devices as files, `uzram attach` makes one a block device"),
    (&["umount", "unmount", "eject"], "`uzram detach` frees a block device, and with --force also unmounts"),
    (&["swapon", "mkswap"], "`uzram swap on` swaps to compressed memory"),
    (&["swapoff"], "`uzram swap off` ends swapping"),
    (&["disconnect"], "`uzram kick` disconnects NBD clients"),
    (&["version"], "`uzram --version` prints it"),
];

const OPTIONS: &[Row] = &[
    (
        &["--daemon", "--daemonize", "--background", "--detach", "--fork", "-d", "-b"],
        "`uzram swap on` starts a daemon in the background, `uzram up` serves in the foreground: run it as a service (the \
         unit is dist/systemd/uzram.service)",
    ),
    (
        &["--foreground", "-f"],
        "`uzram up` always serves in the foreground, `uzram swap on` with --foreground",
    ),
    (&["--swap"], "`uzram swap on` swaps to compressed memory"),
    (&["--block", "--loop", "--blockdev", "--device"], "--attach makes a block device"),
    (
        &["--limit", "--memory", "--memory-limit", "--max-memory", "-m"],
        "--mem-limit bounds the memory of a device, --limit that of a program (`uzram run`)",
    ),
    (
        &["--algo", "--comp", "--compression", "--compressor", "--compress", "-a"],
        "--algorithm is the compression algorithm",
    ),
    (&["--writeback", "--writeback-device", "--file"], "--backing PATH:SIZE is where cold pages go"),
    (
        &["--port", "--bind", "--address", "--socket", "-p"],
        "--listen has the places to serve NBD at, as in tcp:127.0.0.1:10809",
    ),
    (&["--verbose", "--debug", "--quiet", "-v", "-q"], "--log sets how much is logged, as in --log debug"),
    (&["-s"], "--size is the size of the disk"),
    (&["-n"], "--name is the name of the device"),
];

/// The keys of zram-generator.conf(5) that have another name here, or none; also its obsolete ones.
const KEYS: &[Row] = &[
    (&["zram-size"], "`size`"),
    (&["zram-fraction"], "part of `size`, as in size = \"ram * 0.5\""),
    (&["max-zram-size"], "part of `size`, as in size = \"min(ram / 2, 4G)\""),
    (&["zram-resident-limit"], "`mem-limit`"),
    (&["compression-algorithm"], "`algorithm`, and a second algorithm is `recompress`"),
    (&["writeback-device"], "`backing`"),
    (&["memory-limit"], "`host-memory-limit`; what bounds a device's memory is `mem-limit`"),
    (
        &["mount-point", "fs-type"],
        "not there: write attach = true, then make a file system on the block device and mount it",
    ),
    (&["options"], "not there: swap space has `swap-discard`, mount options are for mount(8)"),
];

fn find(rows: &[Row], word: &str) -> Option<&'static str> {
    rows.iter().find(|(words, _)| words.contains(&word)).map(|(_, answer)| *answer)
}

pub fn of_command(word: &str) -> Option<&'static str> {
    find(COMMANDS, word)
}

pub fn of_option(word: &str) -> Option<&'static str> {
    let is_number = word.strip_prefix('-').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    if is_number { Some("a number cannot be negative") } else { find(OPTIONS, word) }
}

/// Returns what a key of zram-generator's files is in those of `--config`.
pub fn of_key(key: &str) -> Option<String> {
    let dashed = key.replace('_', "-");
    let here = match find(KEYS, &dashed) {
        Some(here) => here,
        None if dashed.starts_with("set!") => "not there: the variables of a size are `ram` and `limit`",
        None => return None,
    };
    Some(format!("zram-generator's `{key}` is {here}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_word_has_one_answer() {
        for rows in [COMMANDS, OPTIONS, KEYS] {
            let mut words: Vec<_> = rows.iter().flat_map(|(words, _)| *words).collect();
            let all = words.len();
            words.sort_unstable();
            words.dedup();
            assert_eq!(words.len(), all);
        }
    }
}
