//! Compares seeded operations of one thread, on every CPU it may use, with a naive model.

use super::objects::Objects;
use super::*;
use crate::base::error::ErrorKind;
use crate::base::random::Random;

for_every_policy!(agrees_with_a_naive_model);

const SHAPES: [(usize, usize); 10] =
    [(8, 8), (24, 8), (32, 32), (64, 64), (100, 8), (256, 8), (704, 8), (2048, 8), (4096, 8), (4096, 4096)];

struct Model<P: Policy> {
    objects: Objects<P>,
    random: Random,
    cpus: Vec<CpuSet>,
    /// The approximate target for the number of objects.
    target: usize,
}

fn agrees_with_a_naive_model<P: Policy>() {
    const STEPS: usize = 1000;
    let cpus = allowed_cpus();
    for round in 0..stress_factor() {
        for kind in kinds() {
            for (shape, seed) in SHAPES.into_iter().zip(round * SHAPES.len() as u64..) {
                println!("seed {seed}, {shape:?}, {kind:?}");
                let (objects, random) = (Objects::<P>::new(shape, kind), Random::new(seed));
                let mut model = Model { objects, random, cpus: cpus.clone(), target: 0 };
                (0..STEPS).for_each(|step| model.step(step));
                model.objects.finish();
            }
        }
    }
}

impl<P: Policy> Model<P> {
    fn step(&mut self, step: usize) {
        if step.is_multiple_of(200) {
            // Often few objects, so that slabs run empty.
            let most = ((1 << 18) / self.objects.size).clamp(40, 3000);
            self.target = self.random.below(1 + most) >> self.random.below(8);
        }
        let grow = self.objects.live.len() < self.target;
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
            90..92 => self.objects.check(),
            92..96 => self.objects.check_info(),
            _ => sched_setaffinity(None, &self.cpus[self.random.below(self.cpus.len())]).unwrap(),
        }
    }

    fn alloc(&mut self, gfp: Gfp) {
        if let Err(error) = self.objects.alloc(gfp) {
            assert_eq!((error.kind(), gfp), (ErrorKind::NoMemory, Gfp::NoWait), "{error}");
            self.objects.check_info();
        }
    }

    fn repeat(&mut self, f: impl Fn(&mut Self)) {
        let times = self.random.below(100) >> self.random.below(4);
        (0..times).for_each(|_| f(self));
    }

    fn free(&mut self) {
        let all = self.objects.live.len();
        if all > 0 {
            let any = self.random.below(all);
            self.objects.free(if self.random.below(2) == 0 { all - 1 } else { any });
        }
    }

    fn shrink(&mut self) {
        let Objects { arena, cache, live, .. } = &self.objects;
        let pages = arena.used_pages(Account::Slab);
        let given_back = cache.shrink().unwrap();
        assert_eq!(pages - given_back, arena.used_pages(Account::Slab), "of {pages}");
        self.objects.check_info();
        let slabs = cache.info().num_slabs;
        assert!(slabs <= live.len() as u64, "{slabs} slabs for {} objects", live.len());
    }
}
