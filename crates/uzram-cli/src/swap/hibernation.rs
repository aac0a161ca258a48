//! Whether the machine could hibernate to a swap area of ours; `docs/swap.md` says why it must not.

use std::fs;
use std::path::Path;

/// What the kernel can do when it hibernates; `[disabled]` if it does not.
const MODES: &str = "sys/power/disk";

/// Where systemd-sleep.conf(5) finds the file of `dist/systemd/sleep.conf.d`, which forbids it.
const FORBIDDEN_BY: [&str; 3] = [
    "etc/systemd/sleep.conf.d/uzram.conf",
    "run/systemd/sleep.conf.d/uzram.conf",
    "usr/lib/systemd/sleep.conf.d/uzram.conf",
];

/// Returns a warning to show when swap goes on, if the machine below `root` may hibernate.
pub fn warning(root: &Path) -> Option<String> {
    let modes = fs::read_to_string(root.join(MODES)).ok()?;
    let is_forbidden = FORBIDDEN_BY.iter().any(|file| root.join(file).exists());
    (modes.trim() != "[disabled]" && !is_forbidden).then(|| {
        format!(
            "this machine can hibernate, which would write its memory to this swap area, which is memory: forbid it with \
             AllowHibernation=no in /{}, or boot with `nohibernate`",
            FORBIDDEN_BY[0]
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_may_hibernate_is_warned_of() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(warning(root.path()), None, "a kernel without hibernation");
        let modes = root.path().join(MODES);
        fs::create_dir_all(modes.parent().unwrap()).unwrap();
        for (text, is_possible) in [("[disabled]\n", false), ("[platform] shutdown reboot suspend\n", true)] {
            fs::write(&modes, text).unwrap();
            let warning = warning(root.path());
            assert_eq!(warning.is_some(), is_possible, "{text}");
            assert!(warning.is_none_or(|line| line.contains("AllowHibernation=no")));
        }
        for file in FORBIDDEN_BY {
            let file = root.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(&file, "").unwrap();
            assert_eq!(warning(root.path()), None);
            fs::remove_file(&file).unwrap();
        }
    }
}
