//! Compares seeded operations of one thread, on every CPU it may use, with a naive model.

use super::objects::Live;
use super::*;
use crate::base::error::ErrorKind;
use crate::base::random::Random;
use std::collections::BTreeMap;

for_every_policy!(agrees_with_a_naive_model);

/// Sizes with alignments.
const SHAPES: [(usize, usize); 10] =
    [(8, 8), (24, 8), (32, 32), (64, 64), (100, 8), (256, 8), (704, 8), (2048, 8), (4096, 8), (4096, 4096)];

struct Model<P: Policy> {
    arena: Arc<Arena>,
    cache: Cache<P>,
    size: usize,
    align: usize,
    random: Random,
    cpus: Vec<CpuSet>,
    live: Vec<Live>,
    /// The end of the object that starts at an address.
    ends: BTreeMap<usize, usize>,
    stamp: u64,
    /// The approximate target for the number of objects.
    target: usize,
}

fn agrees_with_a_naive_model<P: Policy>() {
    const STEPS: usize = 1000;
    let cpus = allowed_cpus();
    for round in 0..stress_factor() {
        for kind in kinds() {
            for (shape, seed) in SHAPES.into_iter().zip(round * SHAPES.len() as u64..) {
                let _context = Context(format!("seed {seed}, {shape:?}, {kind:?}"));
                let mut model = Model::<P>::new(shape, kind, seed, &cpus);
                (0..STEPS).for_each(|step| model.step(step));
                model.finish();
            }
        }
    }
}

impl<P: Policy> Model<P> {
    fn new(shape: (usize, usize), kind: bool, seed: u64, cpus: &[CpuSet]) -> Self {
        let arena = arena();
        let cache = cache_of(&arena, shape, kind);
        Model {
            cache,
            arena,
            size: shape.0,
            align: shape.1,
            random: Random::new(seed),
            cpus: cpus.to_vec(),
            live: Vec::new(),
            ends: BTreeMap::new(),
            stamp: 0,
            target: 0,
        }
    }

    fn step(&mut self, step: usize) {
        if step.is_multiple_of(200) {
            // Often few objects, so that slabs run empty.
            let most = ((1 << 18) / self.size).clamp(40, 3000);
            self.target = self.random.below(1 + most) >> self.random.below(8);
        }
        let grow = self.live.len() < self.target;
        match self.random.below(100) {
            0..50 if grow => self.alloc(Gfp::MayWait),
            0..50 => self.free(),
            50..60 => self.alloc(if grow { Gfp::MayWait } else { Gfp::NoWait }),
            60..70 => self.free(),
            70..82 if grow => self.repeat(|model| model.alloc(Gfp::MayWait)),
            70..82 => self.repeat(Self::free),
            82..85 => self.repeat(|model| model.alloc(Gfp::MayWait)),
            85..88 => self.repeat(Self::free),
            88..90 => self.shrink(),
            90..92 => self.live.iter().for_each(|live| live.check(&self.cache, self.size)),
            92..96 => check_info(&self.arena, &self.cache, self.live.len()),
            _ => sched_setaffinity(None, &self.cpus[self.random.below(self.cpus.len())]).unwrap(),
        }
    }

    fn alloc(&mut self, gfp: Gfp) {
        match self.cache.alloc(gfp) {
            Ok(object) => self.handed_out(object),
            Err(error) => {
                assert_eq!((error.kind(), gfp), (ErrorKind::NoMemory, Gfp::NoWait), "{error}");
                check_info(&self.arena, &self.cache, self.live.len());
            }
        }
    }

    fn repeat(&mut self, f: impl Fn(&mut Self)) {
        let times = self.random.below(100) >> self.random.below(4);
        (0..times).for_each(|_| f(self));
    }

    fn free(&mut self) {
        if let Some(object) = self.take_back() {
            self.cache.free(object).unwrap();
        }
    }

    fn shrink(&mut self) {
        let pages = self.arena.used_pages(Account::Slab);
        let given_back = self.cache.shrink().unwrap();
        assert_eq!(pages - given_back, self.arena.used_pages(Account::Slab), "of {pages}");
        check_info(&self.arena, &self.cache, self.live.len());
        let slabs = self.cache.info().num_slabs;
        assert!(slabs <= self.live.len() as u64, "{slabs} slabs for {} objects", self.live.len());
    }

    /// Checks that a new object overlaps no other, and fills it.
    fn handed_out(&mut self, object: u32) {
        let start = self.cache.address(object).addr();
        let (base, end) = (self.arena.address(0).addr(), start + self.size);
        assert_eq!(start % self.align, 0, "object {object:#x} at {start:#x}");
        assert!(base <= start && end <= base + ARENA_BYTES as usize, "object {object:#x} at {start:#x}");
        let before = self.ends.range(..end).next_back();
        assert!(
            before.is_none_or(|(_, before_end)| *before_end <= start),
            "object {object:#x} at {start:#x}..{end:#x} overlaps that at {before:x?}"
        );
        self.ends.insert(start, end);
        self.stamp += 1;
        self.live.push(Live::new(&self.cache, self.size, object, self.stamp));
    }

    /// Returns an object to free, after checking that it has not changed or moved.
    fn take_back(&mut self) -> Option<u32> {
        let (newest, any) = (self.live.len().checked_sub(1)?, self.random.below(self.live.len()));
        let live = self.live.swap_remove(if self.random.below(2) == 0 { newest } else { any });
        live.check(&self.cache, self.size);
        assert!(self.ends.remove(&self.cache.address(live.object).addr()).is_some(), "{live:?} has moved");
        Some(live.object)
    }

    fn finish(mut self) {
        while !self.live.is_empty() {
            self.free();
        }
        check_info(&self.arena, &self.cache, 0);
        check_all_is_back(&self.arena, vec![self.cache]);
    }
}
