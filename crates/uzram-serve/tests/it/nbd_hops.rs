//! How many functions of this crate and the engine a warm read passes through.

use crate::calls::{functions, is_counted};
use crate::common::{TestServer, cmd};

const READS: u64 = 500;
const MOST_FUNCTIONS: usize = 25;

/// Reads a compressed page that was written before, by a connection with structured replies.
fn read_a_page() {
    let server = TestServer::new("1M");
    let mut client = server.ready(true);
    let page = b"sixteen of text.".repeat(256);
    assert_eq!(client.write(4096, &page).error, 0);
    for _ in 0..READS {
        client.request(0, cmd::READ, 4096, 4096, &[]);
        assert!(client.reply(0).data() == page);
    }
}

#[test]
fn a_read_passes_through_few_functions() {
    if is_counted() {
        return read_a_page();
    }
    let Some(functions) = functions("nbd_hops::a_read_passes_through_few_functions", READS, "") else {
        return;
    };
    let functions: Vec<_> = functions.into_iter().filter(|(_, (file, _))| file.contains("/src/")).collect();
    println!("{} functions: {functions:#?}", functions.len());
    assert!(functions.len() > 10, "valgrind has seen the read");
    assert!(functions.len() <= MOST_FUNCTIONS);
}
