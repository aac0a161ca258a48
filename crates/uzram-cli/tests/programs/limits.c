/* Limits of the process: setrlimit(2) of address space, data and descriptors; and /proc/self/maps. */
#define _GNU_SOURCE
#include "check.h"
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>

#define GIB (1024 * MIB)

static struct rlimit get(int resource) {
    struct rlimit limit, same;
    check(getrlimit(resource, &limit) == 0);
    check(prlimit(getpid(), resource, NULL, &same) == 0);
    check(limit.rlim_cur == same.rlim_cur && limit.rlim_max == same.rlim_max);
    return limit;
}

static void set(int resource, rlim_t soft, rlim_t hard) {
    struct rlimit limit = {soft, hard};
    check(setrlimit(resource, &limit) == 0);
    limit = get(resource);
    check(limit.rlim_cur == soft && limit.rlim_max == hard);
}

/* Allocates, maps and grows in small steps and in large ones, until it is refused; says how much there was, about. */
static void exhaust(const char *what) {
    char *large = mmap(NULL, 4 * GIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(large == MAP_FAILED && errno == ENOMEM);
    check(!malloc(4 * GIB) && errno == ENOMEM && !calloc(4, GIB) && !aligned_alloc(MIB, 4 * GIB));
    char *block = malloc(100 * MIB);
    check(block);
    fill(block, MIB, 1);
    check(!realloc(block, 4 * GIB) && errno == ENOMEM && is_filled(block, MIB, 1));
    free(block);
    char *mapped = mmap(NULL, 256 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(mapped != MAP_FAILED);
    check(mremap(mapped, 256 * MIB, 4 * GIB, MREMAP_MAYMOVE) == MAP_FAILED && errno == ENOMEM);
    fill(mapped, MIB, 2);
    /* In place of what is there, nothing more is used. */
    check(mmap(mapped, 256 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == mapped);
    check(mapped[0] == 0 && munmap(mapped, 256 * MIB) == 0);
    static void *blocks[1 << 16];
    for (size_t size = 100000; size <= 64 * MIB; size *= 25) {
        size_t count = 0;
        errno = 0;
        while (count < sizeof blocks / sizeof *blocks && (blocks[count] = malloc(size)))
            memset(blocks[count++], 1, 4096);
        check(errno == ENOMEM && !blocks[count]);
        size_t mib = count * size / MIB;
        printf("%s: blocks of %zu: %s\n", what, size, mib > 350 && mib <= 1024 ? "as many as fit" : "wrong");
        if (mib <= 350 || mib > 1024)
            printf("%zu MiB\n", mib);
        while (count--)
            free(blocks[count]);
    }
    fflush(stdout);
    pid_t child = fork();
    check(child >= 0);
    if (!child) {
        check(mmap(NULL, 4 * GIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == MAP_FAILED);
        block = malloc(100 * MIB);
        check(block);
        fill(block, 32 * MIB, 3);
        check(is_filled(block, 32 * MIB, 3));
        _exit(0);
    }
    int status;
    check(waitpid(child, &status, 0) == child && status == 0);
}

int main(int argc, char **argv) {
    (void)argv;
    struct rlimit limit;
    if (argc > 1) {
        limit = get(RLIMIT_AS);
        printf("executed with %lu of %lu, %lu\n", (unsigned long)limit.rlim_cur, (unsigned long)limit.rlim_max,
               (unsigned long)get(RLIMIT_DATA).rlim_cur);
        char *memory = malloc(64 * MIB);
        check(memory);
        fill(memory, 64 * MIB, 1);
        check(is_filled(memory, 64 * MIB, 1));
        return 0;
    }
    check(get(RLIMIT_AS).rlim_cur == RLIM_INFINITY && get(RLIMIT_DATA).rlim_cur == RLIM_INFINITY);
    char *memory = malloc(256 * MIB);
    check(memory);
    fill(memory, 64 * MIB, 1);
    int resources[] = {RLIMIT_AS, RLIMIT_DATA};
    for (int nth = 0; nth < 2; nth++) {
        set(resources[nth], GIB, RLIM_INFINITY);
        /* In a child: what the C library's own allocator has freed may stay in use. */
        fflush(stdout);
        pid_t child = fork();
        check(child >= 0);
        if (!child) {
            exhaust(nth ? "data" : "address space");
            fflush(stdout);
            _exit(0);
        }
        int status;
        check(waitpid(child, &status, 0) == child && status == 0);
        set(resources[nth], RLIM_INFINITY, RLIM_INFINITY);
        void *large = malloc(2 * GIB);
        check(large);
        free(large);
    }
    set(RLIMIT_DATA, 2 * GIB, 3 * GIB);
    set(RLIMIT_AS, GIB, 2 * GIB);
    limit = (struct rlimit){3 * GIB, 2 * GIB};
    check(setrlimit(RLIMIT_AS, &limit) == -1 && errno == EINVAL);
    set(RLIMIT_AS, 2 * GIB, 2 * GIB);
    check(is_filled(memory, 64 * MIB, 1));
    fflush(stdout);
    pid_t child = fork();
    check(child >= 0);
    if (!child) {
        execl("/proc/self/exe", "limits", "x", NULL);
        _exit(1);
    }
    int status;
    check(waitpid(child, &status, 0) == child && status == 0);
    limit.rlim_cur = 20;
    limit.rlim_max = 1024;
    check(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    check(is_filled(memory, 64 * MIB, 1));
    int opened[30], count = 0;
    while (count < 30 && (opened[count] = open("/dev/null", O_RDONLY)) >= 0)
        count++;
    printf("%d descriptors\n", count);
    while (count--)
        check(close(opened[count]) == 0);
    check(is_filled(memory, 64 * MIB, 1));
    FILE *maps = fopen("/proc/self/maps", "r");
    check(maps);
    char line[512];
    int found = 0;
    while (fgets(line, sizeof line, maps)) {
        unsigned long start, end;
        char access[5];
        check(sscanf(line, "%lx-%lx %4s", &start, &end, access) == 3);
        found |= start <= (uintptr_t)memory && (uintptr_t)memory < end && access[0] == 'r' && access[1] == 'w';
    }
    fclose(maps);
    check(found);
    puts("limits are right");
    return 0;
}
