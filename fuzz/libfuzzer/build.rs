//! Compiles `c_coverage.c`, which handles the coverage calls of the C libraries.

fn main() {
    println!("cargo:rerun-if-changed=c_coverage.c");
    cc::Build::new().file("c_coverage.c").cargo_metadata(false).compile("c_coverage");
    let out = std::env::var("OUT_DIR").expect("cargo sets OUT_DIR");
    println!("cargo:rustc-link-search=native={out}");
    // The whole archive: the libraries that call it come later in the linker's list.
    println!("cargo:rustc-link-lib=static:+whole-archive=c_coverage");
    println!("cargo:rustc-link-arg-bins=-Wl,--wrap=__sanitizer_cov_trace_pc");
}
