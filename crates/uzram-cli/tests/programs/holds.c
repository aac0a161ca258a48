/*
 * Has memory, and a child with as much, until standard input ends. `vfork`: a child of vfork(2). `looks`:
 * both look at their memory now and then.
 */
#define _GNU_SOURCE
#include "check.h"
#include <poll.h>
#include <unistd.h>

static int looks;

/* Some of what it looks at is away, once the pager has had a CPU. */
static void wait_for_end(const char *memory, uint64_t version) {
    struct pollfd input = {0, POLLIN, 0};
    char byte;
    check(write(1, "ready\n", 6) == 6);
    do
        while (poll(&input, 1, looks ? 500 : -1) == 0)
            check(is_filled(memory, 64 * MIB, version));
    while (read(0, &byte, 1) > 0);
}

int main(int argc, char **argv) {
    int shares = argc > 1 && strcmp(argv[1], "vfork") == 0;
    looks = argc > 1 && !shares;
    char *memory = malloc(64 * MIB);
    fill(memory, 64 * MIB, 1);
    /* Most often the pager has had one by then. */
    usleep(300000);
    check(is_filled(memory, 64 * MIB, 1));
    pid_t pid = shares ? vfork() : fork();
    check(pid >= 0);
    if (pid == 0) {
        if (!shares)
            fill(memory, 64 * MIB, 2);
        usleep(300000);
        wait_for_end(memory, shares ? 1 : 2);
        _exit(0);
    }
    wait_for_end(memory, 1);
    check(waitpid(pid, NULL, 0) == pid);
    check(is_filled(memory, 64 * MIB, 1));
    return 0;
}
