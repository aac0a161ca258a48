/* More memory than its limit; then it says which user it runs as. What kind of program it is decides how it is compiled. */
#define _GNU_SOURCE
#include "check.h"
#include <unistd.h>

int main(void) {
    char *memory = malloc(40 * MIB);
    check(memory);
    for (uint64_t version = 0; version < 3; version++) {
        fill(memory, 40 * MIB, version);
        /* A busy machine lets the pager wait for so long. */
        usleep(100000);
        check(is_filled(memory, 40 * MIB, version));
    }
    free(memory);
    printf("right, as %u and %u\n", (unsigned)getuid(), (unsigned)geteuid());
    return 3;
}
