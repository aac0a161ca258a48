/*
 * SECONDS SEED [still]: eight threads touch, map, unmap, discard and remap memory of their own, and touch and discard what all share; they
 * fork, up to four deep, execute, vfork and start daemons, unless `still`. Contents are checked everywhere. SIGTERM: it ends regularly.
 */
#define _GNU_SOURCE
#include "check.h"
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { RW = PROT_READ | PROT_WRITE, ANONYMOUS = MAP_PRIVATE | MAP_ANONYMOUS, THREADS = 8, BLOCKS = 5, MOST = 384, SHARED = 2048, DEPTH = 4 };

struct block {
    char *at;
    size_t pages;
    uint64_t versions[2 * MOST]; /* 0: empty. */
};

struct thread {
    uint64_t random, version;
    struct block blocks[BLOCKS];
};

static struct thread threads[THREADS];
static char *shared, *self;
static int is_still;
static atomic_int stops, asked, forks;

static uint64_t draw(struct thread *my, uint64_t below) {
    my->random ^= my->random << 13;
    my->random ^= my->random >> 7;
    my->random ^= my->random << 17;
    return (my->random >> 11) % below;
}

static void check_page(const char *page, uint64_t version) {
    if (version ? is_filled(page, PAGE, version) : is_zero(page, PAGE))
        return;
    fprintf(stderr, "stress.c: %p has not version %lu, but %s\n", page, version, is_zero(page, PAGE) ? "is empty" : "others");
    exit(1);
}

static void check_block(struct block *block) {
    for (size_t page = 0; page < block->pages; page++)
        check_page(block->at + page * PAGE, block->versions[page]);
}

static void check_all(struct thread *my) {
    for (int i = 0; i < BLOCKS; i++)
        check_block(&my->blocks[i]);
}

static void fill_part(struct thread *my, struct block *block, size_t from, size_t to) {
    for (; from < to; from++)
        fill(block->at + from * PAGE, PAGE, block->versions[from] = ++my->version);
}

static void map(struct thread *my, struct block *block) {
    block->pages = 1 + draw(my, MOST);
    block->at = mmap(NULL, block->pages * PAGE, RW, ANONYMOUS, -1, 0);
    check(block->at != MAP_FAILED);
    memset(block->versions, 0, sizeof block->versions);
    fill_part(my, block, draw(my, block->pages), block->pages);
}

/* To another size, and perhaps another place. */
static void remap(struct thread *my, struct block *block) {
    size_t pages = 1 + draw(my, MOST);
    char *to = NULL;
    if (draw(my, 2))
        to = mmap(NULL, pages * PAGE, RW, ANONYMOUS, -1, 0);
    block->at = mremap(block->at, block->pages * PAGE, pages * PAGE, MREMAP_MAYMOVE | (to ? MREMAP_FIXED : 0), to);
    check(block->at != MAP_FAILED);
    for (; block->pages < pages; block->pages++)
        block->versions[block->pages] = 0;
    block->pages = pages;
}

/* Of what all share, each word is empty or belongs to its place, whoever empties it meanwhile. */
static void share(struct thread *my) {
    size_t page = draw(my, SHARED - 64), pages = 1 + draw(my, 64);
    char *at = shared + page * PAGE;
    switch (draw(my, 8)) {
    case 0:
        check(madvise(at, pages * PAGE, MADV_DONTNEED) == 0);
        break;
    case 1:
        check(mmap(at, pages * PAGE, RW, ANONYMOUS | MAP_FIXED, -1, 0) == at);
        break;
    case 2: case 3: case 4:
        for (size_t i = 0; i < pages; i++)
            fill(at + i * PAGE, PAGE, page + i + 1);
        break;
    default:
        for (size_t i = 0; i < pages * PAGE / 8; i++) {
            uint64_t word = ((volatile uint64_t *)at)[i];
            check(word == 0 || word == word_of(i % (PAGE / 8), page + i / (PAGE / 8) + 1));
        }
    }
}

static void step(struct thread *my) {
    struct block *block = &my->blocks[draw(my, BLOCKS)];
    size_t from = draw(my, block->pages), to = from + 1 + draw(my, block->pages - from);
    switch (draw(my, 8)) {
    case 0:
        check_block(block);
        check(munmap(block->at, block->pages * PAGE) == 0);
        map(my, block);
        break;
    case 1:
        check(madvise(block->at + from * PAGE, (to - from) * PAGE, MADV_DONTNEED) == 0);
        memset(block->versions + from, 0, (to - from) * sizeof *block->versions);
        break;
    case 2:
        remap(my, block);
        break;
    case 3: case 4:
        fill_part(my, block, from, to);
        break;
    case 5:
        check_block(block);
        break;
    default:
        share(my);
    }
}

static void expect(pid_t pid, int wanted) {
    int status = status_of(pid);
    if (status != wanted) {
        fprintf(stderr, "a child ended with %d, not %d\n", status, wanted);
        exit(1);
    }
}

static void run_child(struct thread *my, int depth);

static void start_children(struct thread *my, int depth) {
    forks++;
    uint64_t how = draw(my, 6);
    int ends[2];
    check(pipe2(ends, O_CLOEXEC) == 0);
    pid_t pid = how == 0 ? vfork() : fork();
    if (pid == 0 && how < 2) {
        execl(self, "stress", "executed", NULL);
        _exit(1);
    }
    if (pid == 0 && how == 2) { /* A daemon: its parent ends first. */
        setsid();
        if (fork())
            _exit(3);
        check_all(my);
        _exit(write(ends[1], "r", 1) == 1 ? 0 : 1);
    }
    if (pid == 0) {
        run_child(my, depth + 1);
        _exit(3);
    }
    if (how == 2) {
        char byte = 0;
        close(ends[1]);
        ends[1] = -1;
        check(read(ends[0], &byte, 1) == 1 && byte == 'r');
    }
    check_block(&my->blocks[draw(my, BLOCKS)]);
    expect(pid, 3);
    close(ends[0]);
    if (ends[1] >= 0)
        close(ends[1]);
}

static void run_child(struct thread *my, int depth) {
    check_all(my);
    for (int i = 0; i < 100; i++)
        step(my);
    if (depth < DEPTH && draw(my, 2))
        start_children(my, depth);
    check_all(my);
}

static void *run(void *argument) {
    struct thread *my = argument;
    while (!stops) {
        step(my);
        if (!is_still && draw(my, 200) == 0)
            start_children(my, 0);
    }
    check_all(my);
    return NULL;
}

static void on_term(int signal) {
    (void)signal;
    asked = 1;
}

int main(int argc, char **argv) {
    if (argc == 2)
        return 3;
    check(argc > 2);
    char path[4096] = {0};
    check(readlink("/proc/self/exe", path, sizeof path - 1) > 0);
    self = path;
    is_still = argc > 3;
    uint64_t seed = strtoull(argv[2], NULL, 0);
    setvbuf(stdout, NULL, _IONBF, 0);
    signal(SIGTERM, on_term);
    shared = mmap(NULL, SHARED * PAGE, RW, ANONYMOUS, -1, 0);
    for (uint64_t i = 0; i < THREADS; i++) {
        threads[i].random = (seed + 1) * 0x9e3779b97f4a7c15 + i * 0xbf58476d1ce4e5b9;
        for (int j = 0; j < BLOCKS; j++)
            map(&threads[i], &threads[i].blocks[j]);
    }
    printf("seed %lu\n", (unsigned long)seed);
    pthread_t ids[THREADS];
    for (int i = 0; i < THREADS; i++)
        check(pthread_create(&ids[i], NULL, run, &threads[i]) == 0);
    time_t end = time(NULL) + atoi(argv[1]);
    while (time(NULL) < end && !asked)
        usleep(20000);
    stops = 1;
    for (int i = 0; i < THREADS; i++)
        pthread_join(ids[i], NULL);
    if (!is_still)
        fprintf(stderr, "%d forks\n", forks);
    puts(asked ? "stress is right, and was asked to end" : "stress is right");
    return 0;
}
