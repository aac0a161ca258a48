//! What a command prints: text, or with `--json` one JSON document. Both come from one value.

use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;

use crate::failure::{Context, Result, print};

/// Whether this process prints JSON. Set before anything is printed; processes that it forks have the same.
static JSON: AtomicBool = AtomicBool::new(false);

pub fn set_json(is_json: bool) {
    JSON.store(is_json, Ordering::Relaxed);
}

pub fn is_json() -> bool {
    JSON.load(Ordering::Relaxed)
}

/// Prints a command's result: as JSON, or as the text that `text` returns.
pub fn report<T: Serialize>(value: &T, text: impl FnOnce(&T) -> String) -> Result<()> {
    print(&rendered(value, text)?)
}

pub fn rendered<T: Serialize>(value: &T, text: impl FnOnce(&T) -> String) -> Result<String> {
    if !is_json() {
        return Ok(text(value));
    }
    let json = serde_json::to_string_pretty(value).context(|| "cannot write JSON")?;
    Ok(json + "\n")
}
