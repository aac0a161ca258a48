/* Memory in huge pages, which the program asks for: it leaves and comes back as other memory does. */
#define _GNU_SOURCE
#include "check.h"
#include <sys/mman.h>

int main(void) {
    const size_t huge = 2 * MIB, bytes = 96 * MIB;
    char *room = mmap(NULL, bytes + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(room != MAP_FAILED);
    char *memory = (char *)(((uintptr_t)room + huge - 1) & ~(huge - 1));
    /* A mapping of its own begins with one. A kernel without them refuses it. */
    madvise(memory, bytes, MADV_HUGEPAGE);
    fill(memory, bytes, 1);
    usleep(300000);
    check(is_filled(memory, bytes, 1));
    fill(memory, 8 * MIB, 2);
    check(munmap(memory + bytes - huge, huge) == 0);
    char *moved = mremap(memory, bytes - huge, bytes, MREMAP_MAYMOVE);
    check(moved != MAP_FAILED && is_filled(moved, 8 * MIB, 2) && is_zero(moved + bytes - huge, huge));
    for (size_t at = 8 * MIB / 8; at < (bytes - huge) / 8; at += 111)
        check(((uint64_t *)moved)[at] == word_of(at, 1));
    puts("huge pages are right");
    return 0;
}
