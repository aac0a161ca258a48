/* More memory than its limit; then it says which user it runs as. What kind of program it is decides how it is compiled. */
#define _GNU_SOURCE
#include "check.h"
#include <unistd.h>

/* Returns whether `uzram run` has given this program a pager. */
static int has_pager(void) {
    static char maps[1 << 16];
    FILE *file = fopen("/proc/self/maps", "r");
    maps[fread(maps, 1, sizeof maps - 1, file)] = 0;
    fclose(file);
    return strstr(maps, "libuzram-run") != NULL;
}

static unsigned long resident_pages(void) {
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    check(fscanf(file, "%*d %lu", &pages) == 1);
    fclose(file);
    return pages;
}

int main(void) {
    char *memory = malloc(40 * MIB);
    check(memory);
    for (uint64_t version = 0; version < 3; version++) {
        fill(memory, 40 * MIB, version);
        /* A busy machine lets the pager wait for so long, and for longer until it takes the first pages. */
        usleep(100000);
        for (int i = 0; i < 500 && version == 0 && has_pager() && resident_pages() > 40 * MIB / PAGE; i++)
            usleep(20000);
        check(is_filled(memory, 40 * MIB, version));
    }
    free(memory);
    printf("right, as %u and %u\n", (unsigned)getuid(), (unsigned)geteuid());
    return 3;
}
