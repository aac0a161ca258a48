/* Signals that arrive while memory comes and goes, on a stack of their own that is not in memory either; threads that come and go. */
#define _GNU_SOURCE
#include "check.h"
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/time.h>
#include <unistd.h>

static char *shared;
static atomic_long handled;

static void handle(int signal) {
    (void)signal;
    size_t at = (size_t)(handled * 37 % 8192) * PAGE;
    check(((volatile uint64_t *)(shared + at))[0] == word_of(at / 8, 1));
    handled++;
}

static void *work(void *argument) {
    stack_t stack = {.ss_sp = malloc(64 << 10), .ss_size = 64 << 10};
    check(sigaltstack(&stack, NULL) == 0);
    size_t bytes = 6 * MIB;
    char *own = malloc(bytes);
    for (int version = 0; version < 3; version++) {
        fill(own, bytes, (uintptr_t)argument + (size_t)version);
        check(is_filled(own, bytes, (uintptr_t)argument + (size_t)version));
    }
    free(own);
    stack_t none = {.ss_flags = SS_DISABLE};
    sigaltstack(&none, NULL);
    free(stack.ss_sp);
    return NULL;
}

int main(void) {
    shared = malloc(32 * MIB);
    fill(shared, 32 * MIB, 1);
    struct sigaction action = {.sa_handler = handle, .sa_flags = SA_ONSTACK | SA_RESTART};
    sigaction(SIGALRM, &action, NULL);
    struct itimerval timer = {{0, 2000}, {0, 2000}};
    setitimer(ITIMER_REAL, &timer, NULL);
    for (uintptr_t round = 0; round < 12; round++) {
        pthread_t threads[3];
        for (uintptr_t i = 0; i < 3; i++)
            check(pthread_create(&threads[i], NULL, work, (void *)(10 * round + i)) == 0);
        for (int i = 0; i < 3; i++)
            pthread_join(threads[i], NULL);
    }
    struct itimerval off = {0};
    setitimer(ITIMER_REAL, &off, NULL);
    check(is_filled(shared, 32 * MIB, 1));
    check(handled > 10);
    puts("signals are right");
    return 0;
}
