#![allow(clippy::unwrap_used)]

use std::collections::HashSet;

use super::*;
use crate::harness::corpus::{Kind, build};
use crate::harness::stats::median;
use crate::harness::to_json;

/// Returns whether a test cannot run here, and prints why.
fn skipped() -> bool {
    missing_program().inspect(|name| println!("skipped: the program {name} is missing")).is_some()
}

#[test]
fn fio_writes_pages_of_the_corpus() {
    if skipped() {
        return;
    }
    let corpus = build(Kind::Mixed, 512).unwrap();
    let size_bytes = pages_to_bytes(512);
    let server = Server::nbdkit("malloc", size_bytes, None).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("disk.bin");
    let known: HashSet<_> = corpus.pages().collect();
    // On a busy machine fio may write little in its time, and then gets more tries.
    let counts = (3..8).map(|seed| {
        let duration = Duration::from_millis(1500) * (1 << (seed - 3));
        let fio = Fio { rw: "randwrite", jobs: 2, duration, seed };
        assert!(fio.run(server.uri(), &corpus).unwrap() > 0.0);
        run_to_end(Command::new("nbdcopy").arg(server.uri()).arg(&copy), Duration::from_secs(60)).unwrap();
        let disk = corpus::load(&copy).unwrap();
        disk.pages().filter(|page| known.contains(page)).collect::<HashSet<_>>().len()
    });
    // 512 draws of 512 find 63 %; some pages are torn, or of fio's first noise.
    let enough = counts.inspect(|count| println!("{count} distinct pages")).find(|count| *count > 100);
    assert!(enough.is_some(), "pages of the corpus on the disk");
}

#[test]
fn two_servers_are_compared() {
    if skipped() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("corpus.bin");
    build(Kind::Text, 64).unwrap().save(&path).unwrap();
    // nbdkit stands in for uzram, with the command line and the socket of its server.
    let program = dir.path().join("server");
    let script = "#!/bin/sh\nexec nbdkit -f --unix \"$3/nbd.sock\" memory \"$7\"\n";
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let options = NbdOptions {
        program,
        corpus: path,
        jobs: vec![1],
        duration: Duration::from_millis(100),
        repeat: 1,
        stop: Arc::default(),
    };
    let report = run(&options).unwrap();
    assert_eq!(report.rows.len(), COMPARISONS.len());
    for row in &report.rows {
        assert!(
            row.ratio > 0.0 && row.ratio == median(&[row.uzram_mb_per_s / row.nbdkit_mb_per_s]),
            "{row:?}"
        );
    }
    assert!(report.to_string().contains("randwrite"));
    assert!(to_json(&report).contains("\"nbdkit_mb_per_s\""));
    let stopped = NbdOptions { stop: Arc::new(AtomicBool::new(true)), ..options.clone() };
    assert_eq!(run(&stopped).err().unwrap().to_string(), "interrupted");
    assert!(run(&NbdOptions { repeat: 0, ..options }).is_err());
}
