//! The library that `uzram run` loads into a program (`LD_PRELOAD`, ld.so(8)). It takes the place of the C
//! library's functions for memory, so that what the program gets is memory of a pager,
//! [`uzram_pager::Memory`].
//!
//! | module | what it does |
//! |---|---|
//! | `inside` | says which threads, and which parts of them, are the library's own |
//! | `own` | the library's own memory: the C library's allocator, which the program does not use any more |
//! | `settings` | what `uzram run` has asked for, in the environment |
//! | `real` | the functions whose place this library takes |
//! | `heap` | malloc(3) and its relatives: mimalloc in the managed memory |
//! | `maps` | mmap(2) and its relatives |
//! | `descriptors` | close(2) and its relatives, which spare the library's own descriptors |
//! | `streams` | what the C library touches in a child before anything else |
//! | `figures` | the figures that `uzram list` shows |
//! | `process` | start, fork(2), threads, and the line at the end |
//!
//! # Rules
//!
//! - **A thread that serves a fault must not wait for the program.** It touches no managed memory, and takes
//!   no lock that a thread of the program may hold while that touches some: none of mimalloc's, and of the C
//!   library's only those of its allocator, which protect the library's own memory alone.
//! - **What the library allocates is its own**: in Rust by the global allocator, in C by the linker
//!   (`build.rs`), and in the C library by the mark of `inside`.
//! - Nothing in here calls a function by its C name: the linker would take it for one of the library's own.
//! - Functions of the C library that call each other do so directly: `malloc` alone is looked up. So are
//!   calls from a program that is linked statically, or makes system calls itself: these the library does not
//!   see.

mod descriptors;
mod figures;
mod heap;
mod inside;
mod maps;
mod own;
mod process;
mod real;
mod settings;
mod state;
mod streams;
