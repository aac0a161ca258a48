/* mmap(2) and its relatives, on whole mappings and parts of them. */
#define _GNU_SOURCE
#include "check.h"
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

static sigjmp_buf back;

static void caught(int signal) {
    (void)signal;
    siglongjmp(back, 1);
}

/* Returns whether a write to, or a read of, memory is refused. */
static int is_refused(volatile char *at, int writes) {
    if (sigsetjmp(back, 1))
        return 1;
    if (writes)
        *at = 1;
    else
        (void)*at;
    return 0;
}

static char *map(size_t bytes, int protection) {
    char *memory = mmap(NULL, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(memory != MAP_FAILED);
    return memory;
}

int main(void) {
    int rw = PROT_READ | PROT_WRITE;
    struct sigaction action = {.sa_handler = caught};
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);

    /* munmap of a part. */
    char *memory = map(16 * MIB, rw);
    check(is_zero(memory, 16 * MIB));
    fill(memory, 16 * MIB, 1);
    press();
    check(munmap(memory + 4 * MIB, 2 * MIB) == 0);
    check(is_refused(memory + 5 * MIB, 0) && is_refused(memory + 4 * MIB, 1));
    check(is_filled(memory, 4 * MIB, 1));
    check(munmap(memory + 4 * MIB, 2 * MIB) == 0);

    /* MAP_FIXED over a part, anonymous and a file. */
    char *over = mmap(memory + 8 * MIB, MIB, rw, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    check(over == memory + 8 * MIB && is_zero(over, MIB));
    fill(over, MIB, 2);
    FILE *file = tmpfile();
    check(ftruncate(fileno(file), MIB) == 0 && pwrite(fileno(file), "file", 4, 0) == 4);
    char *of_file = mmap(memory + 10 * MIB, MIB, rw, MAP_SHARED | MAP_FIXED, fileno(file), 0);
    check(of_file == memory + 10 * MIB && memcmp(of_file, "file", 4) == 0);
    of_file[4] = '!';
    char text[5];
    check(pread(fileno(file), text, 5, 0) == 5 && memcmp(text, "file!", 5) == 0);
    press();
    check(is_filled(over, MIB, 2) && memcmp(of_file, "file!", 5) == 0);
    check(munmap(memory, 16 * MIB) == 0);
    check(is_refused(memory, 0) && is_refused(over, 0) && is_refused(of_file, 0));

    /* mprotect of parts. */
    memory = map(16 * MIB, rw);
    fill(memory, 16 * MIB, 3);
    check(mprotect(memory + 2 * MIB, 4 * MIB, PROT_READ) == 0);
    check(mprotect(memory + 8 * MIB, MIB, PROT_NONE) == 0);
    press();
    check(is_filled(memory, 8 * MIB, 3));
    check(is_refused(memory + 3 * MIB, 1) && !is_refused(memory + 3 * MIB, 0));
    check(is_refused(memory + 8 * MIB, 0));
    check(mprotect(memory, 16 * MIB, rw) == 0);
    press();
    check(is_filled(memory, 16 * MIB, 3));
    fill(memory, 16 * MIB, 4);
    press();
    check(is_filled(memory, 16 * MIB, 4));

    /* madvise of parts. */
    check(madvise(memory + 2 * MIB, 4 * MIB, MADV_DONTNEED) == 0);
    check(is_zero(memory + 2 * MIB, 4 * MIB));
    check(is_filled(memory, 2 * MIB, 4));
    check(madvise(memory, MIB, MADV_WILLNEED) == 0 && madvise(memory, MIB, MADV_SEQUENTIAL) == 0);
    check(madvise(memory, MIB, MADV_NORMAL) == 0);
    check(madvise(memory + 1, MIB, MADV_DONTNEED) == -1 && errno == EINVAL);
    check(madvise(memory, MIB, 12345) == -1 && errno == EINVAL);
    fill(memory, 16 * MIB, 5);
    check(madvise(memory, 16 * MIB, MADV_FREE) == 0);
    fill(memory, 16 * MIB, 6);
    press();
    check(is_filled(memory, 16 * MIB, 6));

    /* mremap: smaller, larger, elsewhere. */
    check(mremap(memory, 16 * MIB, 8 * MIB, 0) == memory);
    check(is_refused(memory + 9 * MIB, 0) && is_filled(memory, 8 * MIB, 6));
    char *larger = mremap(memory, 8 * MIB, 24 * MIB, MREMAP_MAYMOVE);
    check(larger != MAP_FAILED && is_filled(larger, 8 * MIB, 6) && is_zero(larger + 8 * MIB, 16 * MIB));
    char *target = map(4 * MIB, rw);
    fill(target, 4 * MIB, 7);
    press();
    char *moved = mremap(larger, 4 * MIB, 4 * MIB, MREMAP_MAYMOVE | MREMAP_FIXED, target);
    check(moved == target && is_filled(moved, 4 * MIB, 6));
    check(is_refused(larger, 0) && !is_refused(larger + 4 * MIB, 0));
    errno = 0;
    check(mremap(target + 1, 4 * MIB, 8 * MIB, MREMAP_MAYMOVE) == MAP_FAILED && errno == EINVAL);

    /* Of what is found while a part may not be written, all is one mapping later, which mremap takes. */
    memory = map(16 * MIB, rw);
    memory[0] = 1;
    check(mprotect(memory + 2 * MIB, 4 * MIB, PROT_READ) == 0);
    fill(memory + 6 * MIB, 10 * MIB, 8);
    press();
    check(mprotect(memory, 16 * MIB, rw) == 0);
    memory = mremap(memory, 16 * MIB, 24 * MIB, MREMAP_MAYMOVE);
    check(memory != MAP_FAILED && memory[0] == 1 && is_zero(memory + MIB, 5 * MIB));
    check(is_filled(memory + 6 * MIB, 10 * MIB, 8) && is_zero(memory + 16 * MIB, 8 * MIB));

    /* Reserved first, used later, as allocators do. */
    char *reserved = map(1024 * MIB, PROT_NONE);
    check(is_refused(reserved, 0));
    check(mprotect(reserved + 512 * MIB, 8 * MIB, rw) == 0);
    fill(reserved + 512 * MIB, 8 * MIB, 8);
    press();
    check(is_filled(reserved + 512 * MIB, 8 * MIB, 8));
    check(mmap(reserved + 512 * MIB, 8 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
          reserved + 512 * MIB);
    check(is_refused(reserved + 512 * MIB, 0));
    check(mprotect(reserved + 512 * MIB, 8 * MIB, rw) == 0 && is_zero(reserved + 512 * MIB, 8 * MIB));
    check(munmap(reserved, 1024 * MIB) == 0);

    check(munmap((void *)1, MIB) == -1 && errno == EINVAL);
    check(mmap(NULL, 0, rw, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED && errno == EINVAL);

    /* System calls read and write memory that is not there. */
    char *buffer = map(32 * MIB, rw);
    fill(buffer, 32 * MIB, 9);
    press();
    FILE *copy = tmpfile();
    for (size_t at = 0; at < 32 * MIB; at += MIB)
        check(write(fileno(copy), buffer + at, MIB) == (ssize_t)MIB);
    check(madvise(buffer, 32 * MIB, MADV_DONTNEED) == 0);
    for (size_t at = 0; at < 32 * MIB; at += MIB)
        check(pread(fileno(copy), buffer + at, MIB, (off_t)at) == (ssize_t)MIB);
    check(is_filled(buffer, 32 * MIB, 9));
    puts("mappings are right");
    return 0;
}
