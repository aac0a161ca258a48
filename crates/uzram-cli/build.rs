//! Puts the files of `uzram run` where `system/run_files.rs` includes them: the library that is loaded into
//! programs, and the image of the pager's process. `tools/pager` builds both, before; without them the
//! program is built nonetheless, and its `run` says what is missing.

use std::error::Error;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use std::{env, fs};

const FILES: [&str; 2] = ["libuzram-run.so", "uzram-pager"];

fn main() -> Result<(), Box<dyn Error>> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("no OUT_DIR")?);
    let target = env::var_os("CARGO_TARGET_DIR").unwrap_or("target".into());
    let folder = Path::new("../..").join(target).join("run");
    let paths = FILES.map(|name| folder.join(name));
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=CARGO_TARGET_DIR");
    // What is built outside the repository takes no files that somebody has put beside it.
    let read = |path: &PathBuf| fs::metadata("../../tools/pager").and_then(|_| fs::read(path));
    if let [Ok(library), Ok(image)] = paths.each_ref().map(read) {
        let mut hasher = DefaultHasher::new();
        (&library, &image).hash(&mut hasher);
        let lens = format!("library_bytes: {}, image_bytes: {}", library.len(), image.len());
        let built = format!("Some(Build {{ id: \"{:016x}\", {lens} }})", hasher.finish());
        fs::write(out.join("built.rs"), built)?;
        // Copied, so that they stay as they are while this is built.
        fs::write(out.join(FILES[0]), library)?;
        fs::write(out.join(FILES[1]), image)?;
        paths.iter().for_each(|path| println!("cargo::rerun-if-changed={}", path.display()));
    } else {
        FILES.iter().try_for_each(|name| fs::write(out.join(name), ""))?;
        fs::write(out.join("built.rs"), "None")?;
        // Cargo takes what does not exist, or is newer than this run, for changed, each time.
        if !folder.exists() && fs::create_dir_all(&folder).is_ok() {
            fs::File::open(&folder)?.set_modified(SystemTime::UNIX_EPOCH)?;
        }
        println!("cargo::rerun-if-changed={}", folder.display());
    }
    Ok(())
}
