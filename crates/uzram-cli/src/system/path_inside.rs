//! Whether a path leads into a directory, by whatever names, and even if parts of both do not exist yet.

use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

/// Returns whether `path` is `dir` or lies in it; both are absolute. A directory that is visible in several
/// places is one: what is mounted on it in one of them is there in the others, too, if they share mounts.
pub fn is_inside(path: &Path, dir: &Path) -> bool {
    let ((path, path_rest), (dir, dir_rest)) = (split_existing(path), split_existing(dir));
    let dir = file_number(&dir);
    let is_dir = |other: &Path| dir.is_some() && file_number(other) == dir;
    if dir_rest.as_os_str().is_empty() {
        path.ancestors().any(is_dir)
    } else {
        is_dir(&path) && path_rest.starts_with(&dir_rest)
    }
}

/// Splits an absolute path into the part that exists, without symbolic links, and the rest.
fn split_existing(path: &Path) -> (PathBuf, PathBuf) {
    let (mut existing, mut rest) = (PathBuf::new(), PathBuf::new());
    for part in path.components() {
        match existing.join(part).canonicalize() {
            _ if part == Component::ParentDir => _ = rest.pop() || existing.pop(),
            Ok(found) if rest.as_os_str().is_empty() => existing = found,
            _ => rest.push(part),
        }
    }
    (existing, rest)
}

/// Returns the numbers that identify a file. Sends no request to a file system that another process serves.
fn file_number(path: &Path) -> Option<(u32, u32, u64)> {
    let found = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::INO).ok()?;
    Some((found.stx_dev_major, found.stx_dev_minor, found.stx_ino))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_followed_to_where_it_leads() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("a/b")).unwrap();
        std::os::unix::fs::symlink(root.path().join("a"), root.path().join("link")).unwrap();
        for (path, dir, inside) in [
            ("a/b/f", "a", true),
            ("a", "a", true),
            ("a/b", "link", true),
            ("link/b/new", "a/b", true),
            ("a/b/../f", "a/b", false),
            ("a/new/../b/f", "a/b", true),
            ("a/bb", "a/b", false),
            ("a", "a/b", false),
            ("a/new/f", "link/new", true),
            ("a/new/sub/f", "a/b/../new", true),
            ("a/new2/f", "a/new", false),
            ("a/f", "a/new", false),
            ("a/b/f", "/", true),
        ] {
            let found = is_inside(&root.path().join(path), &root.path().join(dir));
            assert_eq!(found, inside, "{path} in {dir}");
        }
    }
}
