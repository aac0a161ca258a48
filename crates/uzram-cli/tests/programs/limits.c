/* Limits of the process: those it was started with, and setrlimit(2) of descriptors; and /proc/self/maps. */
#define _GNU_SOURCE
#include "check.h"
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

static struct rlimit get(int resource) {
    struct rlimit limit, same;
    check(getrlimit(resource, &limit) == 0);
    check(prlimit(getpid(), resource, NULL, &same) == 0);
    check(limit.rlim_cur == same.rlim_cur && limit.rlim_max == same.rlim_max);
    return limit;
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
