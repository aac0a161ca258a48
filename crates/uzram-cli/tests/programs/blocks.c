/* malloc(3) and its relatives: sizes, alignments, threads that free each other's blocks; contents stay. */
#include "check.h"
#include <errno.h>
#include <malloc.h>
#include <pthread.h>

enum { SLOTS = 20000 };
static unsigned char *slots[SLOTS];
static size_t sizes[SLOTS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static unsigned next(unsigned *seed) {
    *seed = *seed * 1664525 + 1013904223;
    return *seed >> 8;
}

static size_t size_of(unsigned *seed) {
    unsigned kind = next(seed) % 100;
    if (kind < 80)
        return next(seed) % 2000 + 1;
    if (kind < 98)
        return next(seed) % 50000 + 1;
    return next(seed) % 500000 + 1;
}

static void *work(void *argument) {
    unsigned seed = (unsigned)(uintptr_t)argument;
    for (int i = 0; i < 60000; i++) {
        size_t size = size_of(&seed);
        unsigned char *block;
        switch (next(&seed) % 4) {
        case 0:
            block = calloc(1, size);
            check(block[0] == 0 && block[size - 1] == 0 && block[size / 2] == 0);
            break;
        case 1: {
            void *out;
            size_t align = 16ul << next(&seed) % 9;
            check(posix_memalign(&out, align, size) == 0 && (uintptr_t)out % align == 0);
            block = out;
            break;
        }
        default:
            block = malloc(size);
        }
        check(block && malloc_usable_size(block) >= size);
        memset(block, (int)(size % 251), size);
        unsigned slot = next(&seed) % SLOTS;
        pthread_mutex_lock(&lock);
        unsigned char *old = slots[slot];
        size_t old_size = sizes[slot];
        slots[slot] = block;
        sizes[slot] = size;
        pthread_mutex_unlock(&lock);
        if (!old)
            continue;
        for (size_t at = 0; at < old_size; at += 97)
            check(old[at] == old_size % 251);
        if (next(&seed) % 4 == 0) {
            size_t new_size = size_of(&seed);
            old = realloc(old, new_size);
            for (size_t at = 0; at < (new_size < old_size ? new_size : old_size); at += 97)
                check(old[at] == old_size % 251);
        }
        free(old);
    }
    return NULL;
}

int main(void) {
    pthread_t threads[4];
    for (uintptr_t i = 0; i < 4; i++)
        check(pthread_create(&threads[i], NULL, work, (void *)(i + 1)) == 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    /* Alignments beyond what allocators like. */
    for (size_t align = 64; align <= 4 * MIB; align *= 2) {
        void *block = NULL;
        check(posix_memalign(&block, align, 3 * PAGE + 1) == 0 && (uintptr_t)block % align == 0);
        memset(block, 7, 3 * PAGE + 1);
        block = realloc(block, 5 * PAGE);
        check(((char *)block)[3 * PAGE] == 7);
        free(block);
    }
    void *out;
    check(posix_memalign(&out, 3, 8) == EINVAL);
    errno = 0;
    volatile size_t many = SIZE_MAX / 2;
    check(reallocarray(NULL, many, 4) == NULL && errno == ENOMEM);
    char *line = strdup("a line");
    check(strcmp(line, "a line") == 0);
    free(line);
    free(NULL);
    puts("blocks are right");
    return 0;
}
