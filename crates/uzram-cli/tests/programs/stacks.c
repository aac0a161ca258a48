/* Stacks in memory of the program: of threads (pthread_attr_setstack) and of coroutines (swapcontext). A fork on one of them. */
#define _GNU_SOURCE
#include "check.h"
#include <pthread.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

enum { STACK = 8 << 20 };
static ucontext_t home, away;
static int reached;

static int deep(int depth) {
    volatile char frame[3000];
    memset((char *)frame, depth, sizeof frame);
    int sum = depth ? deep(depth - 1) : 0;
    return sum + frame[17];
}

static void *on_stack(void *argument) {
    int first = deep(1500);
    press();
    check(deep(1500) == first);
    return argument;
}

static void coroutine(void) {
    int first = deep(1500);
    swapcontext(&away, &home);
    check(deep(1500) == first);
    pid_t pid = fork();
    if (pid == 0)
        _exit(deep(1200) == deep(1200) ? 9 : 1);
    check(status_of(pid) == 9);
    reached = 1;
}

int main(void) {
    char *stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(stack != MAP_FAILED);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    check(pthread_attr_setstack(&attributes, stack, STACK) == 0);
    pthread_t thread;
    check(pthread_create(&thread, &attributes, on_stack, NULL) == 0);
    pthread_join(thread, NULL);
    getcontext(&away);
    away.uc_stack.ss_sp = malloc(STACK);
    away.uc_stack.ss_size = STACK;
    away.uc_link = &home;
    makecontext(&away, coroutine, 0);
    swapcontext(&home, &away);
    press();
    swapcontext(&home, &away);
    check(reached);
    puts("stacks are right");
    return 0;
}
