//! The list of all tables.

use uzram::{Error, Result};

use crate::experiment::Series;
use crate::{lru_batch, slab_freeze, streams, unmap, zs_defer, zs_free, zs_lock};

/// Every table, in the order they are listed.
pub static TABLES: [&Series; 9] = [
    &streams::SERIES,
    &streams::nbd::SERIES,
    &slab_freeze::SERIES,
    &zs_lock::SERIES,
    &zs_lock::disk::SERIES,
    &zs_free::SERIES,
    &zs_defer::SERIES,
    &lru_batch::SERIES,
    &unmap::SERIES,
];

/// Returns the table with that name.
pub fn table(name: &str) -> Result<&'static Series> {
    TABLES.into_iter().find(|table| table.name == name).ok_or_else(|| {
        let names: Vec<_> = TABLES.iter().map(|table| table.name).collect();
        Error::invalid(format!("there is no table '{name}', only: {}", names.join(", ")))
    })
}
