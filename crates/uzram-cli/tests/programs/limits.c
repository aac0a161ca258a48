/* Limits of the process: setrlimit(2) of address space, data and descriptors; and /proc/self/maps. */
#define _GNU_SOURCE
#include "check.h"
#include <errno.h>
#include <sys/mman.h>
#include <sys/resource.h>

int main(void) {
    struct rlimit limit, seen;
    check(getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur == RLIM_INFINITY);
    limit.rlim_cur = 1024 * MIB;
    check(setrlimit(RLIMIT_AS, &limit) == 0);
    check(getrlimit(RLIMIT_AS, &seen) == 0 && seen.rlim_cur == 1024 * MIB);
    char *memory = malloc(256 * MIB);
    check(memory);
    fill(memory, 64 * MIB, 1);
    char *large = mmap(NULL, 4096 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    printf("4 GiB of address space: %s\n", large == MAP_FAILED ? "refused" : "given");
    check(is_filled(memory, 64 * MIB, 1));
    limit.rlim_cur = 20;
    limit.rlim_max = 1024;
    check(setrlimit(RLIMIT_NOFILE, &limit) == 0);
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
