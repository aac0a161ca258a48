//! The pager's image: a static program that a library starts in another program's address space
//! ([`uzram_pager::process`]).

mod own;

fn main() {
    // SAFETY: the library has made the page, and this process for it.
    unsafe { uzram_pager::process::run(own::control(), own::lazy::begin) }
}
