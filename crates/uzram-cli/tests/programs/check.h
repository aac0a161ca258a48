/* What the test programs share: contents that are known by their place, and a check that ends the program. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096ul
#define MIB (1ul << 20)
#define check(what) ((what) ? (void)0 : (fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what), exit(1)))

static inline uint64_t word_of(uint64_t place, uint64_t version) {
    uint64_t x = (place << 20 | version) * 0x9e3779b97f4a7c15ull;
    return place % 4 ? place << 16 | version : x ^ x >> 29;
}

/* Fills memory with what belongs to its place. */
static inline void fill(void *memory, size_t bytes, uint64_t version) {
    uint64_t *words = memory;
    for (size_t i = 0; i < bytes / 8; i++)
        words[i] = word_of(i, version);
}

static inline int is_filled(const void *memory, size_t bytes, uint64_t version) {
    const uint64_t *words = memory;
    for (size_t i = 0; i < bytes / 8; i++)
        if (words[i] != word_of(i, version))
            return 0;
    return 1;
}

static inline int is_zero(const void *memory, size_t bytes) {
    const uint64_t *words = memory;
    for (size_t i = 0; i < bytes / 8; i++)
        if (words[i])
            return 0;
    return 1;
}

/* Has other memory go out of memory, where there is a limit: the pager may wait for a busy CPU. */
static inline void press(void) {
    char *memory = malloc(48 * MIB);
    fill(memory, 48 * MIB, 99);
    usleep(100000);
    check(is_filled(memory, 48 * MIB, 99));
    free(memory);
}

/* Waits for a child; returns its status as a shell does. */
static inline int status_of(pid_t pid) {
    int status;
    check(pid > 0 && waitpid(pid, &status, 0) == pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
