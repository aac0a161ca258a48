/* A small program with one thread, whose child starts threads that use streams, as a daemon does; and grows large. */
#define _GNU_SOURCE
#include "check.h"
#include <errno.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

static void *work(void *argument) {
    FILE *file = tmpfile();
    check(file && fputs("text", file) >= 0 && fflush(NULL) == 0 && fclose(file) == 0);
    return argument;
}

int main(void) {
    pid_t pid = fork();
    if (pid == 0) {
        pthread_t thread;
        for (int i = 0; i < 4; i++) {
            check(pthread_create(&thread, NULL, work, NULL) == 0);
            pthread_join(thread, NULL);
        }
        char *memory = malloc(40 * MIB);
        fill(memory, 40 * MIB, 1);
        /* A busy machine lets the pager wait for so long. */
        usleep(300000);
        check(is_filled(memory, 40 * MIB, 1));
        exit(4);
    }
    check(status_of(pid) == 4);
    /* Arguments that make no sense cost nothing. */
    char *memory = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    fill(memory, 4 * MIB, 2);
    check(mremap(memory, 4 * MIB, SIZE_MAX, MREMAP_MAYMOVE) == MAP_FAILED);
    check(munmap(memory, SIZE_MAX / 2 & ~(PAGE - 1)) == -1 && errno == EINVAL);
    check(mmap(memory, MIB, PROT_READ, MAP_SHARED | MAP_FIXED, 12345, 0) == MAP_FAILED && errno == EBADF);
    check(mmap(memory + 1, MIB, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED);
    check(mremap(memory, 2 * MIB, 2 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, memory + MIB) == MAP_FAILED);
    check(is_filled(memory, 4 * MIB, 2));
    if (mlockall(MCL_CURRENT) == 0)
        munlockall();
    else
        check(errno == ENOMEM || errno == EPERM);
    char *large = malloc(3ul << 30);
    check(large);
    for (size_t at = 0; at < 3ul << 30; at += 64 * MIB)
        large[at] = (char)(at >> 26);
    for (size_t at = 0; at < 3ul << 30; at += 64 * MIB)
        check(large[at] == (char)(at >> 26));
    free(large);
    puts("small things are right");
    return 0;
}
