/* A program that gives up its rights: its memory goes on, and that of its children, which have none from the start. */
#define _GNU_SOURCE
#include "check.h"
#include <sys/mman.h>
#include <unistd.h>

static char *memory, *read_only;

static void check_all(void) {
    check(is_filled(memory, 48 * MIB, 1));
    check(is_filled(read_only, 8 * MIB, 2));
}

int main(void) {
    setvbuf(stdout, NULL, _IONBF, 0);
    read_only = mmap(NULL, 8 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    fill(read_only, 8 * MIB, 2);
    memory = malloc(48 * MIB);
    fill(memory, 48 * MIB, 1);
    check(mprotect(read_only, 8 * MIB, PROT_READ) == 0);
    fill(memory, 48 * MIB, 1);
    press();
    check(setresgid(65534, 65534, 65534) == 0 && setresuid(65534, 65534, 65534) == 0);
    check_all();
    pid_t pid = fork();
    if (pid == 0) {
        check_all();
        fill(memory, 48 * MIB, 3);
        check(is_filled(memory, 48 * MIB, 3));
        char *more = malloc(16 * MIB);
        fill(more, 16 * MIB, 4);
        check(is_filled(more, 16 * MIB, 4));
        pid_t grandchild = fork();
        if (grandchild == 0)
            _exit(is_filled(memory, 48 * MIB, 3) ? 8 : 1);
        check(status_of(grandchild) == 8);
        exit(7);
    }
    check(status_of(pid) == 7);
    check_all();
    puts("rights are given up");
    return 0;
}
