/* A library that `allocates` loads: it allocates, frees, and touches the program's memory while it is loaded. */
#include "check.h"

extern char *shared;
extern size_t shared_bytes;
char *given;

__attribute__((constructor)) static void start(void) {
    for (uint64_t i = 0; i < 40; i++) {
        given = malloc(MIB);
        fill(given, MIB, i);
        check(is_filled(given, MIB, i));
        if (i < 39)
            free(given);
    }
    check(is_filled(shared, shared_bytes, 1));
}

void take(char *memory) {
    check(is_filled(memory, MIB, 5));
    free(memory);
}
