/* A thread that gives memory back, and gets a CPU only now and then: whatever is taken away while its call has
   begun and not emptied the memory yet, the memory reads as zeros when it returns. */
#define _GNU_SOURCE
#include "check.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>

#define BLOCK (MIB / 4)
#define ROUNDS 20

static int ask[2], answer[2];
static char *block;
static cpu_set_t one;
static atomic_int begins, is_done;

static void *be_busy(void *unused) {
    (void)unused;
    check(sched_setaffinity(0, sizeof one, &one) == 0);
    while (!atomic_load(&is_done))
        ;
    return NULL;
}

/* Uses more memory than the limit. */
static void *press_on(void *unused) {
    (void)unused;
    char *memory = malloc(8 * MIB);
    for (uint64_t version = 1; !atomic_load(&is_done); version++) {
        fill(memory, 8 * MIB, version);
        check(is_filled(memory, 8 * MIB, version));
    }
    return NULL;
}

static void *discard(void *unused) {
    (void)unused;
    struct sched_param param = {0};
    check(sched_setaffinity(0, sizeof one, &one) == 0 && sched_setscheduler(0, SCHED_IDLE, &param) == 0);
    for (char c; read(ask[0], &c, 1) == 1 && c;) {
        atomic_store(&begins, 1);
        check(madvise(block, BLOCK, MADV_DONTNEED) == 0);
        check(write(answer[1], &c, 1) == 1);
    }
    return NULL;
}

int main(void) {
    check(pipe(ask) == 0 && pipe(answer) == 0);
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    block = mmap(NULL, BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(block != MAP_FAILED);
    pthread_t others[3], idle;
    for (int i = 0; i < 3; i++)
        check(pthread_create(&others[i], NULL, i ? be_busy : press_on, NULL) == 0);
    check(pthread_create(&idle, NULL, discard, NULL) == 0);
    for (int round = 1; round <= ROUNDS; round++) {
        fill(block, BLOCK, round);
        char c = 1;
        atomic_store(&begins, 0);
        check(write(ask[1], &c, 1) == 1);
        /* It stays in memory until it is given back. */
        while (!atomic_load(&begins))
            for (size_t at = 0; at < BLOCK; at += PAGE)
                (void)((volatile char *)block)[at];
        check(read(answer[0], &c, 1) == 1);
        check(is_zero(block, BLOCK));
    }
    atomic_store(&is_done, 1);
    for (int i = 0; i < 3; i++)
        check(pthread_join(others[i], NULL) == 0);
    char c = 0;
    check(write(ask[1], &c, 1) == 1 && pthread_join(idle, NULL) == 0);
    puts("what was given back is zeros");
    return 0;
}
