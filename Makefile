# The targets of this repository; `make help` lists them. Needs Rust 1.95, a C compiler, bash and coreutils.

UZRAM = cargo run --quiet --release -p uzram-cli --
LAB = cargo run --quiet --release -p uzram-cli --features designs -- lab
PROGRAMS = nbdcopy fio nbdkit fs_mark mkfs.ext4 mkfs.btrfs mkswap swapon swapoff
# Those whose memory the corpus `processes` is made of.
CORPUS_PROGRAMS = python3 g++ node redis-server java
# Those that are run in less memory, besides.
RUN_PROGRAMS = sqlite3 redis-benchmark redis-cli
# And those whose output is compared.
REAL_PROGRAMS = python3 perl ruby lua5.4 php sqlite3 git g++ gdb fio luajit sbcl erl R octave-cli emacs node java go xz \
	zstd nginx redis-server redis-cli chromium

.DEFAULT_GOAL := help
.PHONY: help run demo dist dist-remote test check lint bench lab fuzz loom asan tsan hog crash full pager run-programs

help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: ## Serve a compressed RAM disk of 1 GiB, in the foreground
	@tools/pager
	@cargo build --release -p uzram-cli
	@$(UZRAM) up --size 1G

demo: ## Copy an image of a real file tree in and out, compare, print ratio and throughput
	@cargo build --release -p uzram-cli
	@tools/demo

dist: ## Build one static program of the product, target/dist/uzram
	@tools/dist

dist-remote: ## Build the same with backings on other machines, linked dynamically, target/dist/uzram-remote
	@tools/dist remote

test: ## Run every test, with a summary
	@tools/test

check: ## Check format, clippy and the unit tests of what was changed, in a minute or two
	@tools/check

lint: ## Check format, clippy, documentation
	@tools/lint

bench: ## Measure every performance target, and codecs on pages of files and of programs (minutes)
	@tools/pager
	@cargo build --release
	@cargo build --release -p uzram-bench
	@tools/install-programs $(PROGRAMS)
	@tools/install-programs $(CORPUS_PROGRAMS) $(RUN_PROGRAMS)
	@tools/bounded 5400 $(UZRAM) bench --targets
	@tools/bounded 1200 $(UZRAM) bench --codecs
	@bench/allocators/run

lab: ## Run every table of the lab in full (minutes)
	@cargo build --release -p uzram-cli -p uzram-lab --features uzram-cli/designs
	@tools/install-programs $(PROGRAMS)
	@tools/bounded 3600 $(LAB) run streams slab-freeze zs-lock zs-free zs-defer lru-batch
	@tools/bounded 3600 $(LAB) run unmap streams-nbd zs-lock-disk --rounds 5
	@tools/bounded 1200 cargo test -p uzram-lab --features lock-stats --test it locks::

fuzz: ## Fuzz all code that parses outside input
	@fuzz/run

asan: ## Test codecs (C included) and slab caches under AddressSanitizer (minutes)
	@tools/bounded 1200 tools/asan

tsan: ## Run multi-threaded tests of slab caches, pools, LRUs and stores under ThreadSanitizer (minutes)
	@tools/bounded 1800 tools/tsan

crash: ## Kill processes 10,000 times, and at every store to memory that outlives them; damage that memory (ninety minutes)
	@UZRAM_CRASH_ROUNDS=50 tools/bounded 10800 cargo test -p uzram --features designs --test it -- --nocapture crash::
	@UZRAM_CRASH_ROUNDS=200 tools/bounded 10800 cargo test -p uzram-cli --test it -- --nocapture survive::a_disk_outlives
	@UZRAM_CRASH_ROUNDS=100 tools/bounded 10800 cargo test -p uzram-cli --test it -- --nocapture survive::a_program_that_swaps

full: ## Overwrite a disk at random for ten minutes whose backing is 97 % live, and check what is written to that
	@UZRAM_CLEAN_LONG=1 tools/bounded 1800 cargo test -p uzram --lib -- --nocapture overwriting_costs
	@UZRAM_CLEAN_SECONDS=600 tools/bounded 1800 \
		cargo test -p uzram-cli --test it -- --nocapture writeback::overwriting_at_random

hog: ## Run a program that swaps in a quarter of the memory it needs, for ten minutes, as root
	@UZRAM_HOG_SECONDS=600 tools/bounded 1200 \
		cargo test -p uzram-cli --test it -- --nocapture swap::a_program_runs

pager: ## Evict, load and check the memory of threads, with every way to trap touches, and of a program, for ten minutes each
	@UZRAM_PAGER_STRESS_SECONDS=100 tools/bounded 1200 cargo test -p uzram-pager --lib -- --nocapture threads_find
	@UZRAM_RUN_STRESS_SECONDS=600 tools/bounded 1200 cargo test -p uzram-cli --test it -- --nocapture run_faults::stress

run-programs: ## Run real programs in all and in half of the memory that they take, and compare (minutes, as root)
	@tools/pager
	@cargo build --release -p uzram-cli
	@tools/install-programs $(REAL_PROGRAMS)
	@tools/bounded 900 tools/run-programs

loom: ## Run the loom models with long bounds (minutes)
	@LOOM_MAX_PREEMPTIONS=3 tools/bounded 1800 \
		tools/loom --release -- --include-ignored
