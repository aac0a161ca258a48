//! The settings of a run, from the environment.

use crate::control::PREFIX;
use crate::predecessor;
use core::ffi::{CStr, c_char};

/// What the library itself needs of the environment.
pub struct Settings<'a> {
    /// The path of the image.
    pub image: Option<&'a CStr>,
    /// The program must not run without a limit.
    pub is_hard: bool,
    /// Where the ids of the pager and the keeper of the program that executed this one are: 0 for none.
    pub processes: Option<&'a CStr>,
    environment: *const *const c_char,
}

impl Settings<'_> {
    /// Reads the settings; `None` if there is no limit.
    ///
    /// # Safety
    /// The list ends with null, as `environ`; it and its strings are valid, and do not change.
    pub unsafe fn read(environment: *const *const c_char) -> Option<Self> {
        let mut settings = Self { image: None, is_hard: false, processes: None, environment };
        let mut has_limit = false;
        for variable in settings.variables() {
            let setting = &variable.to_bytes_with_nul()[PREFIX.len()..];
            has_limit |= setting.starts_with(b"LIMIT=");
            settings.is_hard |= setting.starts_with(b"HARD=");
            if let Some(path) = setting.strip_prefix(b"IMAGE=") {
                settings.image = CStr::from_bytes_with_nul(path).ok();
            }
            if setting.starts_with(predecessor::NAME) && setting.len() == predecessor::SETTING_BYTES {
                settings.processes = Some(variable);
            }
        }
        has_limit.then_some(settings)
    }

    /// What is passed on to the image: each variable that begins with the prefix.
    pub fn variables<'b>(&self) -> impl Iterator<Item = &'b CStr> + use<'b> {
        let mut at = self.environment;
        let strings = core::iter::from_fn(move || {
            // SAFETY: as `read` says: null, or not behind the list's end.
            let string = *unsafe { at.as_ref() }?;
            // SAFETY: the list goes on if this is not its end, and then the string is valid.
            (!string.is_null()).then(|| unsafe {
                at = at.add(1);
                CStr::from_ptr(string)
            })
        });
        strings.filter(|variable| variable.to_bytes().starts_with(PREFIX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(list: &[&'static CStr], then: impl FnOnce(Option<Settings<'_>>)) {
        let list: Vec<_> = list.iter().map(|string| string.as_ptr()).chain([core::ptr::null()]).collect();
        // SAFETY: the list ends with null, and lives.
        then(unsafe { Settings::read(list.as_ptr()) });
    }

    #[test]
    fn what_begins_with_the_prefix_counts_if_there_is_a_limit() {
        read(&[c"UZRAM_RUN_IMAGE=/x", c"LIMIT=1", c"UZRAM_RUN_LIMITS=1"], |none| assert!(none.is_none()));
        // SAFETY: null is an empty list.
        assert!(unsafe { Settings::read(core::ptr::null()) }.is_none());
        let list = [c"PATH=/bin", c"UZRAM_RUN_IMAGE=/a b", c"UZRAM_RUN_LIMIT=5", c"XUZRAM_RUN_HARD=1"];
        read(&list, |settings| {
            let settings = settings.unwrap();
            assert_eq!((settings.image, settings.is_hard), (Some(c"/a b"), false));
            assert!(settings.variables().eq([list[1], list[2]]));
        });
        read(&[c"UZRAM_RUN_HARD=", c"UZRAM_RUN_LIMIT="], |settings| assert!(settings.unwrap().is_hard));
    }
}
