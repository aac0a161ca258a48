//! Eight threads pass objects to each other, under disturbances.
//!
//! [`Stress`] selects the disturbances. At the end a thread that allocated nothing frees everything, and no
//! object may be left. A seed repeats what each thread does, not how the threads interleave.

use super::objects::{Claims, Live};
use super::*;
use crate::base::error::ErrorKind;
use crate::base::random::Random;
use crate::base::sync::{AtomicU64, Mutex, Ordering, classes};
use rustix::thread::{Pid, gettid};
use std::sync::atomic::AtomicBool;
use std::thread::{Scope, ScopedJoinHandle};
use std::time::Duration;

for_every_policy!(threads_that_pass_objects_lose_none, slabs_are_taken_away_under_fast_paths);

const THREADS: usize = 8;
/// Sizes and alignments of the caches that share an arena, all used by every thread.
const SHAPES: [(usize, usize); 4] = [(8, 8), (64, 64), (704, 8), (4096, 8)];
/// Steps of each of the eight threads, its successors included.
const STEPS: usize = 1500;
/// The most objects in a mailbox; a sender frees further ones itself.
const MAX_WAITING: usize = 200;

#[derive(Clone, Copy, Debug, Default)]
struct Stress {
    /// One in this many calls of the arena fails; 0: none.
    faults_one_in: usize,
    /// The arena's limit; 0: none.
    limit_pages: u64,
    /// Whether one more thread shrinks the caches all the time, and checks them.
    shrinking: bool,
    /// Whether one more thread binds the others to random CPUs, wherever they are in the code.
    moving: bool,
    /// The number of threads that run one after the other in place of each of the eight.
    lives: usize,
}

impl Stress {
    fn may_refuse(self) -> bool {
        self.faults_one_in > 0 || self.limit_pages > 0
    }
}

fn threads_that_pass_objects_lose_none<P: Policy>() {
    let none = Stress::default();
    let all = Stress { faults_one_in: 20, limit_pages: 300, shrinking: true, moving: true, lives: 4 };
    for stress in [
        none,
        Stress { faults_one_in: 3, ..none },
        Stress { limit_pages: 150, ..none },
        Stress { shrinking: true, ..none },
        Stress { lives: 20, ..none },
        Stress { moving: true, ..none },
        all,
    ] {
        let kinds = kinds();
        for (seed, kind) in (0..kinds.len() as u64 * stress_factor()).zip(kinds.into_iter().cycle()) {
            println!("seed {seed}, {kind:?}, {stress:?}");
            Shared::<P>::new(stress, kind, seed).run();
        }
    }
}

/// Threads use only fast paths while slabs run empty and are discarded again and again.
fn slabs_are_taken_away_under_fast_paths<P: Policy>() {
    let steps = 10_000 * stress_factor();
    for kind in kinds() {
        println!("{kind:?}");
        let arena = arena();
        let cache = cache_of::<P>(&arena, (64, 8), kind);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (cache, done) = (&cache, &done);
            let worker = move || {
                for stamp in 0..steps {
                    let live = Live::new(cache, 64, cache.alloc(Gfp::MayWait).unwrap(), stamp);
                    live.check(cache, 64);
                    cache.free(live.object).unwrap();
                }
            };
            let workers: Vec<_> = (0..3).map(|_| scope.spawn(worker)).collect();
            let shrinking = scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    cache.shrink().unwrap();
                }
            });
            let results: Vec<_> = workers.into_iter().map(ScopedJoinHandle::join).collect();
            done.store(true, Ordering::Relaxed);
            results.into_iter().chain([shrinking.join()]).for_each(|result| result.unwrap());
        });
        check_all_is_back(&arena, vec![cache]);
    }
}

type Parcel = (usize, Live);

struct Shared<P: Policy> {
    stress: Stress,
    seed: u64,
    arena: Arc<Arena>,
    caches: Vec<Cache<P>>,
    claims: Claims,
    /// The objects passed to each thread and not freed yet.
    mailboxes: Vec<Mutex<Vec<Parcel>>>,
    stamp: AtomicU64,
    refused: AtomicU64,
    moved: AtomicU64,
    cpus: Vec<CpuSet>,
    /// Threads that run and may be moved.
    running: Mutex<Vec<Pid>>,
    done: AtomicBool,
}

impl<P: Policy> Shared<P> {
    fn new(stress: Stress, kind: bool, seed: u64) -> Self {
        let arena = arena();
        arena.set_run_cache_batch_pages(32).unwrap();
        Shared {
            stress,
            seed,
            caches: SHAPES.iter().map(|shape| cache_of(&arena, *shape, kind)).collect(),
            claims: Claims::new(&arena),
            arena,
            mailboxes: (0..THREADS).map(|_| Mutex::new(&classes::DEVICE, Vec::new())).collect(),
            stamp: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            moved: AtomicU64::new(0),
            cpus: allowed_cpus(),
            running: Mutex::new(&classes::DEVICE, Vec::new()),
            done: AtomicBool::new(false),
        }
    }

    fn run(self) {
        self.arena.inject_faults(self.seed, self.stress.faults_one_in);
        self.arena.set_limit_pages(self.stress.limit_pages);
        std::thread::scope(|scope| {
            let mut disturbing = Vec::new();
            if self.stress.shrinking {
                disturbing.push(scope.spawn(|| self.shrink_until_done()));
            }
            if self.stress.moving {
                disturbing.push(scope.spawn(|| self.move_until_done()));
            }
            let workers: Vec<_> = (0..THREADS).map(|number| self.spawn_lives(scope, number)).collect();
            let results: Vec<_> = workers.into_iter().map(ScopedJoinHandle::join).collect();
            self.done.store(true, Ordering::Relaxed);
            let disturbed = disturbing.into_iter().map(ScopedJoinHandle::join);
            if let Some(panic) = results.into_iter().chain(disturbed).find_map(Result::err) {
                std::panic::resume_unwind(panic);
            }
        });
        self.finish();
    }

    fn spawn_lives<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        number: usize,
    ) -> ScopedJoinHandle<'scope, ()> {
        scope.spawn(move || {
            let lives = self.stress.lives.max(1);
            for life in 0..lives {
                let worker = Worker::new(self, number, life);
                let handle = scope.spawn(move || worker.run(STEPS / lives));
                handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            }
        })
    }

    fn shrink_until_done(&self) {
        while !self.done.load(Ordering::Relaxed) {
            for cache in &self.caches {
                cache.shrink().unwrap();
                let info = cache.info();
                assert_eq!(info.num_objs % u64::from(info.objperslab), 0, "{info:?}");
            }
            std::thread::yield_now();
        }
    }

    fn move_until_done(&self) {
        let mut random = Random::new(self.seed);
        while !self.done.load(Ordering::Relaxed) {
            {
                // No thread ends under the lock, so that its id cannot be reused.
                let running = self.running.lock();
                if let Some(at) = running.len().checked_sub(1) {
                    let (thread, cpu) = (random.below(at + 1), random.below(self.cpus.len()));
                    sched_setaffinity(Some(running[thread]), &self.cpus[cpu]).unwrap();
                    self.moved.fetch_add(1, Ordering::Relaxed);
                }
            }
            std::thread::sleep(Duration::from_micros(20));
        }
    }

    fn free(&self, (cache, live): Parcel) {
        let (size, cache) = (SHAPES[cache].0, &self.caches[cache]);
        live.check(cache, size);
        self.claims.give_back(cache.address(live.object), size);
        cache.free(live.object).unwrap();
    }

    fn finish(self) {
        for mailbox in &self.mailboxes {
            let parcels = std::mem::take(&mut *mailbox.lock());
            parcels.into_iter().for_each(|parcel| self.free(parcel));
        }
        let refused = self.refused.into_inner();
        assert_eq!(refused > 0, self.stress.may_refuse(), "{refused} allocations were refused");
        if self.stress.moving && self.cpus.len() > 1 {
            assert!(self.moved.into_inner() > 0, "no thread was moved");
        }
        self.arena.inject_faults(0, 0);
        self.arena.set_limit_pages(0);
        self.arena.set_run_cache_batch_pages(0).unwrap();
        let charged = self.caches.iter().map(Cache::info);
        let charged: u64 = charged.map(|info| info.num_slabs * u64::from(info.pagesperslab)).sum();
        assert_eq!(self.arena.used_pages(Account::Slab), charged);
        check_all_is_back(&self.arena, self.caches);
    }
}

struct Worker<'a, P: Policy> {
    shared: &'a Shared<P>,
    number: usize,
    random: Random,
    /// The objects that it owns, by cache.
    own: [Vec<Live>; SHAPES.len()],
}

impl<'a, P: Policy> Worker<'a, P> {
    fn new(shared: &'a Shared<P>, number: usize, life: usize) -> Self {
        let random = Random::new(shared.seed << 32 | (life * THREADS + number) as u64);
        Worker { shared, number, random, own: Default::default() }
    }

    fn run(mut self, steps: usize) {
        let me = Running::new(self.shared);
        for _ in 0..steps {
            let cache = self.random.below(SHAPES.len());
            match self.random.below(16) {
                0..6 => self.alloc(cache),
                6..10 => self.free_one(cache),
                10 => (0..self.random.below(40)).for_each(|_| self.alloc(cache)),
                11 => (0..self.random.below(40)).for_each(|_| self.free_one(cache)),
                12 | 13 => self.hand_over(cache),
                14 => self.free_what_came(),
                _ if self.random.below(8) > 0 => {}
                _ if self.shared.stress.moving => {
                    let cpus = &self.shared.cpus;
                    sched_setaffinity(None, &cpus[self.random.below(cpus.len())]).unwrap();
                }
                _ => std::thread::yield_now(),
            }
        }
        // The remaining objects outlive the thread.
        let mut mailbox = self.shared.mailboxes[self.number].lock();
        for (cache, own) in self.own.into_iter().enumerate() {
            mailbox.extend(own.into_iter().map(|live| (cache, live)));
        }
        drop(mailbox);
        drop(me);
    }

    fn has_room(&self, cache: usize) -> bool {
        self.own[cache].len() < ((128 << 10) / SHAPES[cache].0).clamp(8, 300)
    }

    fn alloc(&mut self, cache: usize) {
        if !self.has_room(cache) {
            return self.free_one(cache);
        }
        let gfp = if self.random.below(8) == 0 { Gfp::NoWait } else { Gfp::MayWait };
        match self.shared.caches[cache].alloc(gfp) {
            Ok(object) => {
                let (of, (size, align)) = (&self.shared.caches[cache], SHAPES[cache]);
                self.shared.claims.take(of.address(object), size, align);
                let stamp = self.shared.stamp.fetch_add(1, Ordering::Relaxed);
                self.own[cache].push(Live::new(of, size, object, stamp));
            }
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::NoMemory | ErrorKind::NoSpace), "{error}");
                assert!(gfp == Gfp::NoWait || self.shared.stress.may_refuse(), "{error}");
                self.shared.refused.fetch_add(self.shared.stress.may_refuse().into(), Ordering::Relaxed);
            }
        }
    }

    fn take(&mut self, cache: usize) -> Option<Live> {
        let own = &mut self.own[cache];
        let (newest, any) = (own.len().checked_sub(1)?, self.random.below(own.len()));
        Some(own.swap_remove(if self.random.below(2) == 0 { newest } else { any }))
    }

    fn free_one(&mut self, cache: usize) {
        if let Some(live) = self.take(cache) {
            self.shared.free((cache, live));
        }
    }

    fn hand_over(&mut self, cache: usize) {
        let to = self.random.below(THREADS);
        let parcels: Vec<Parcel> =
            (0..self.random.below(20)).map_while(|_| self.take(cache)).map(|live| (cache, live)).collect();
        let mut mailbox = self.shared.mailboxes[to].lock();
        if mailbox.len() < MAX_WAITING {
            mailbox.extend(parcels);
        } else {
            drop(mailbox);
            parcels.into_iter().for_each(|parcel| self.shared.free(parcel));
        }
    }

    fn free_what_came(&self) {
        let parcels = std::mem::take(&mut *self.shared.mailboxes[self.number].lock());
        parcels.into_iter().for_each(|parcel| self.shared.free(parcel));
    }
}

/// Registers this thread as one that may be moved, until it is dropped.
struct Running<'a>(&'a Mutex<Vec<Pid>>);

impl<'a> Running<'a> {
    fn new<P: Policy>(shared: &'a Shared<P>) -> Self {
        shared.running.lock().push(gettid());
        Running(&shared.running)
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.lock().retain(|thread| *thread != gettid());
    }
}
