/* Has memory, and a child with as much, until standard input ends; with an argument, a child of vfork(2). */
#define _GNU_SOURCE
#include "check.h"
#include <unistd.h>

static void wait_for_end(void) {
    char byte;
    check(write(1, "ready\n", 6) == 6);
    while (read(0, &byte, 1) > 0) {
    }
}

int main(int argc, char **argv) {
    char *memory = malloc(64 * MIB);
    fill(memory, 64 * MIB, 1);
    /* A busy machine lets the pager wait for so long. */
    usleep(300000);
    check(is_filled(memory, 64 * MIB, 1));
    (void)argv;
    pid_t pid = argc > 1 ? vfork() : fork();
    check(pid >= 0);
    if (pid == 0) {
        if (argc == 1)
            fill(memory, 64 * MIB, 2);
        usleep(300000);
        wait_for_end();
        _exit(0);
    }
    wait_for_end();
    check(waitpid(pid, NULL, 0) == pid);
    check(is_filled(memory, 64 * MIB, 1));
    return 0;
}
