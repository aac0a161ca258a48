/* Pages of which half is random, changed three times. */
#include "check.h"

#define PAGES (48 * MIB / PAGE)

static inline uint64_t next(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    return *state ^= *state << 17;
}

int main(void) {
    uint64_t *memory = calloc(48, MIB);
    for (uint64_t round = 1; round <= 3; round++) {
        /* A busy machine lets the pager wait for so long, once there is memory for it. */
        if (round == 2)
            usleep(300000);
        for (uint64_t page = 0; page < PAGES; page++) {
            uint64_t state = (page << 8) + round;
            for (size_t i = 0; i < PAGE / 16; i++)
                memory[page * PAGE / 8 + i] = next(&state);
        }
    }
    for (uint64_t page = 0; page < PAGES; page++) {
        uint64_t state = (page << 8) + 3;
        for (size_t i = 0; i < PAGE / 16; i++)
            check(memory[page * PAGE / 8 + i] == next(&state));
    }
    puts("halves are right");
    return 0;
}
