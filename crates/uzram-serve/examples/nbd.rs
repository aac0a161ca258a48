//! Serves one device over NBD until standard input ends.
//!
//! `cargo run --release --example nbd -- /tmp/zram0.sock 1G`, and then, in another terminal,
//! `nbdinfo 'nbd+unix:///zram0?socket=/tmp/zram0.sock'`.

use std::io::Read;

use uzram::device::Device;
use uzram_serve::Exports;
use uzram_serve::nbd::{Server, ServerConfig};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(socket), Some(size)) = (arguments.next(), arguments.next()) else {
        return Err("two arguments are needed: the socket's path and the device's size".into());
    };
    let device = Device::new("zram0")?;
    device.set("disksize", &size)?;
    let _server = Server::bind(ServerConfig::new(socket), Exports::new([device]))?.spawn()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
