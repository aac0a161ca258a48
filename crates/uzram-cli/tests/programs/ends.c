/* A process that ends while its threads touch memory: by exit(3), _exit(2), abort(3) or a signal, as the argument says. */
#define _GNU_SOURCE
#include "check.h"
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

static void *touch(void *argument) {
    char *memory = argument;
    for (uint64_t version = 0;; version++)
        fill(memory, 24 * MIB, version);
    return NULL;
}

int main(int argc, char **argv) {
    check(argc == 2);
    pthread_t thread;
    for (int i = 0; i < 3; i++)
        check(pthread_create(&thread, NULL, touch, malloc(24 * MIB)) == 0);
    usleep(300000);
    puts("about to end");
    fflush(stdout);
    switch (argv[1][0]) {
    case 'e': exit(11);
    case '_': _exit(12);
    case 'a': abort();
    case 'k': raise(SIGTERM);
    }
    return 13;
}
