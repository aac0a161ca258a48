//! Once made, encoders and decoders take no memory: neither Rust's nor, inside zstd, C's.
//!
//! This program's own `malloc` counts and hands on to glibc's. Rust's allocator and the C libraries
//! linked in here both end in it.

#![cfg(all(target_os = "linux", target_env = "gnu"))]
#![allow(clippy::unwrap_used)]

use std::cell::Cell;
use std::ffi::c_void;

use uzram::base::units::{PAGE_SIZE, Page};
use uzram::codec::{Algorithm, Decoder, Encoder};

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

fn count() {
    ALLOCATIONS.with(|allocations| allocations.set(allocations.get() + 1));
}

fn allocations() -> u64 {
    ALLOCATIONS.with(Cell::get)
}

unsafe extern "C" {
    fn __libc_malloc(bytes: usize) -> *mut c_void;
    fn __libc_calloc(count: usize, bytes: usize) -> *mut c_void;
    fn __libc_realloc(old: *mut c_void, bytes: usize) -> *mut c_void;
}

// SAFETY: the C library's malloc with the same contract; every caller gets it from there.
#[unsafe(no_mangle)]
unsafe extern "C" fn malloc(bytes: usize) -> *mut c_void {
    count();
    // SAFETY: handed on as it came.
    unsafe { __libc_malloc(bytes) }
}

// SAFETY: as for malloc.
#[unsafe(no_mangle)]
unsafe extern "C" fn calloc(members: usize, bytes: usize) -> *mut c_void {
    count();
    // SAFETY: handed on as it came.
    unsafe { __libc_calloc(members, bytes) }
}

// SAFETY: as for malloc.
#[unsafe(no_mangle)]
unsafe extern "C" fn realloc(old: *mut c_void, bytes: usize) -> *mut c_void {
    count();
    // SAFETY: handed on as it came.
    unsafe { __libc_realloc(old, bytes) }
}

/// Page `number`: the higher the number in its hundred, the less it compresses.
fn fill(page: &mut Page, number: u64) {
    let mut state = number + 1;
    let random_bytes = (number % 100) as usize * PAGE_SIZE / 100;
    for (i, byte) in page.iter_mut().enumerate() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *byte = if i < random_bytes { (state >> 56) as u8 } else { (i / 16) as u8 };
    }
}

#[test]
fn coding_pages_allocates_nothing() {
    let text = std::hint::black_box(String::from("seen by the counter"));
    assert!(allocations() > 0, "{text}: Rust's allocations are not counted");
    let algorithms = [Algorithm::Lz4, Algorithm::Zstd { level: 1 }, Algorithm::Zstd { level: 3 }];
    for algorithm in algorithms {
        let before = allocations();
        let mut encoder = Encoder::new(&algorithm).unwrap();
        let mut decoder = Decoder::new(&algorithm).unwrap();
        assert!(allocations() > before, "{algorithm}: the allocations of C code are not counted");

        let (mut page, mut out, mut decoded) = ([0; PAGE_SIZE], [0; PAGE_SIZE], [0; PAGE_SIZE]);
        let mut did_not_fit = 0;
        let before = allocations();
        for number in 0..10_000 {
            fill(&mut page, number);
            match encoder.encode(&page, &mut out) {
                Some(len_bytes) => {
                    decoder.decode(&out[..len_bytes], &mut decoded).unwrap();
                    assert!(decoded == page);
                    // Failing is free as well.
                    assert!(decoder.decode(&out[..len_bytes / 2], &mut decoded).is_err());
                }
                None => did_not_fit += 1,
            }
            if number % 10 == 0 {
                assert!(encoder.encode(&page, &mut out[..8]).is_none());
            }
        }
        let after = allocations();
        assert_eq!(after, before, "{algorithm}: {} allocations", after - before);
        assert!(did_not_fit < 1_000, "{algorithm}: {did_not_fit} pages did not fit");
    }
}
