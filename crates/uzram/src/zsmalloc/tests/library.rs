//! The pool as others use it.

use super::Arc;
use crate::base::error::ErrorKind;
use crate::base::mem::Arena;
use crate::zsmalloc::{Design, Options, Pool};

for_every_design!(handles_are_of_one_pool_and_free_their_bytes);

fn new<D: Design>() -> Pool<D> {
    let arena = Arc::new(Arena::new(64 << 20).expect("address space"));
    Pool::new(arena, &Options { count_locks: true, ..Options::new("library", 10_000) }).expect("pool")
}

fn handles_are_of_one_pool_and_free_their_bytes<D: Design>() {
    let (pool, other) = (new::<D>(), new::<D>());
    let handles: Vec<_> =
        (1..=4096u32).map(|len| pool.store(&vec![len as u8; len as usize], len).unwrap()).collect();
    for handle in &handles {
        assert_eq!(handle.len(), handle.owner() as usize);
        assert_eq!(*pool.read(handle).unwrap(), vec![handle.owner() as u8; handle.len()]);
    }
    assert_eq!(other.read(&handles[0]).err().map(|error| error.kind()), Some(ErrorKind::Invalid));
    let (mut kept, mut freed) = (Vec::new(), Vec::new());
    handles
        .into_iter()
        .for_each(|handle| if handle.len() % 5 == 0 { &mut kept } else { &mut freed }.push(handle));
    assert_eq!(other.free(freed.pop().unwrap()).unwrap_err().kind(), ErrorKind::Invalid);
    freed.into_iter().for_each(|handle| pool.free(handle).unwrap());
    let before = pool.pages_used();
    let gained = pool.compact();
    assert!(gained > before / 2 && pool.pages_used() == before - gained, "{gained} of {before}");
    for handle in &kept {
        assert_eq!(*pool.read(handle).unwrap(), vec![handle.owner() as u8; handle.len()]);
    }
    let counts = pool.lock_counts();
    assert_eq!((counts.allocs, counts.frees), (4096, 4096 - 4096 / 5 - 1));
    assert_eq!(D::FREES_PAGES_LOCKED, counts.runs_freed_locked > 0);
}
