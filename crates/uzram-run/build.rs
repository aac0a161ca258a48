//! Has C code inside the library (mimalloc, codecs) call the library's own functions for memory, which never
//! manage it.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    for name in ["mmap", "munmap", "malloc", "calloc", "realloc", "free", "posix_memalign", "aligned_alloc"] {
        println!("cargo::rustc-cdylib-link-arg=-Wl,--wrap={name}");
    }
}
