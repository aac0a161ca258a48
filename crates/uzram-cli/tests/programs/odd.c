/*
 * What few programs do: address hints, small and coroutine stacks, threads on stacks in the heap, cancellation in a fault, locked
 * memory, a userfaultfd of their own, O_DIRECT, no descriptor at all, and a strict seccomp list to end with.
 */
#define _GNU_SOURCE
#include "check.h"
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { RW = PROT_READ | PROT_WRITE, ANONYMOUS = MAP_PRIVATE | MAP_ANONYMOUS, SMALL = 16 << 10 };
static ucontext_t home, away;
static char *cold;

static void hints(void) {
    char *wanted[] = {(char *)0x40000000000, (char *)0x80000000, (char *)0x200000000000};
    for (uint64_t i = 0; i < 3; i++) {
        check(mmap(wanted[i], 16 * MIB, RW, ANONYMOUS | MAP_NORESERVE, -1, 0) == wanted[i]);
        fill(wanted[i], 16 * MIB, i);
        check(mmap(wanted[i] + 20 * MIB, MIB, RW, ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == wanted[i] + 20 * MIB);
    }
    check(mmap(wanted[1], MIB, RW, ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == MAP_FAILED && errno == EEXIST);
    press();
    for (uint64_t i = 0; i < 3; i++) {
        check(is_filled(wanted[i], 16 * MIB, i));
        check(mmap(wanted[i], MIB, RW, ANONYMOUS | MAP_FIXED, -1, 0) == wanted[i] && is_zero(wanted[i], MIB));
        check(munmap(wanted[i], 24 * MIB) == 0);
    }
}

static void coroutine(void) {
    press();
    swapcontext(&away, &home);
    pid_t pid = fork();
    if (pid == 0)
        _exit(is_filled(cold, 8 * MIB, 1) ? 9 : 1);
    check(status_of(pid) == 9);
    press();
}

static void *sleeps(void *argument) {
    volatile char frame[4096];
    memset((char *)frame, 7, sizeof frame);
    check(read(*(int *)argument, (char *)frame, 1) == 1 && frame[0] == 'x' && frame[4095] == 7);
    return NULL;
}

/* Stacks lie between memory that is watched. */
static void stacks(void) {
    char *block = malloc(4 * MIB);
    char *below = block, *above = block + 2 * MIB;
    fill(below, 2 * MIB - 128 * 1024, 1);
    fill(above, 2 * MIB, 2);
    getcontext(&away);
    away.uc_stack.ss_sp = above - SMALL;
    away.uc_stack.ss_size = SMALL;
    away.uc_link = &home;
    makecontext(&away, coroutine, 0);
    swapcontext(&home, &away);
    press();
    swapcontext(&home, &away);
    int ends[2];
    check(pipe(ends) == 0);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    check(pthread_attr_setstack(&attributes, above - 96 * 1024 + 3504, 64 * 1024) == 0);
    pthread_t thread;
    check(pthread_create(&thread, &attributes, sleeps, &ends[0]) == 0);
    press();
    pid_t pid = fork();
    if (pid == 0) {
        volatile char *stack = above - 96 * 1024;
        int sum = 0;
        for (int i = 0; i < 96 * 1024; i++)
            sum += stack[i] == 7;
        check(sum >= 4096);
        _exit(is_filled(below, 2 * MIB - 128 * 1024, 1) && is_filled(above, 2 * MIB, 2) ? 8 : 1);
    }
    check(status_of(pid) == 8);
    check(write(ends[1], "x", 1) == 1 && pthread_join(thread, NULL) == 0);
    check(is_filled(below, 2 * MIB - 128 * 1024, 1) && is_filled(above, 2 * MIB, 2));
    free(block);
}

static void *cancelled(void *argument) {
    if (argument)
        pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, NULL);
    else
        pthread_cancel(pthread_self());
    do
        check(is_filled(cold, 32 * MIB, 1));
    while (argument);
    pid_t pid = fork();
    if (pid == 0)
        _exit(4);
    while (waitpid(pid, NULL, WNOHANG) == 0)
        sched_yield();
    pthread_testcancel();
    return NULL;
}

static void cancels(void) {
    for (uintptr_t i = 0; i < 4; i++) {
        pthread_t thread;
        check(pthread_create(&thread, NULL, cancelled, (void *)i) == 0);
        usleep((useconds_t)(10000 * i));
        void *result;
        if (i)
            pthread_cancel(thread);
        check(pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
    }
}

/* How much of it is in memory and locked, mlock(2): from /proc/self/smaps. */
static long locked_kib(void) {
    FILE *maps = fopen("/proc/self/smaps", "r");
    char line[512];
    long all = 0, kib;
    while (fgets(line, sizeof line, maps))
        all += sscanf(line, "Locked: %ld", &kib) == 1 ? kib : 0;
    fclose(maps);
    return all;
}

static void locks(void) {
    char *part = cold + 4 * MIB;
    if (mlock(part, 2 * MIB) == 0) {
        press();
        check(locked_kib() >= 2048 && is_filled(part - 4 * MIB, 8 * MIB, 1));
        unsigned char there[512];
        check(mincore(part, 2 * MIB, there) == 0);
        for (int i = 0; i < 512; i++)
            check(there[i] & 1);
        check(madvise(part, MIB, MADV_DONTNEED) == -1 && errno == EINVAL && is_filled(cold, 8 * MIB, 1));
        check(munlock(part, 2 * MIB) == 0);
    }
    if (mlockall(MCL_CURRENT) == 0) {
        check(is_filled(cold, 32 * MIB, 1));
        munlockall();
    }
    press();
    check(is_filled(cold, 32 * MIB, 1));
}

static void *serves(void *argument) {
    int own = *(int *)argument;
    struct uffd_msg message;
    check(read(own, &message, sizeof message) == sizeof message && message.event == UFFD_EVENT_PAGEFAULT);
    char *page = aligned_alloc(PAGE, PAGE);
    memset(page, 'o', PAGE);
    struct uffdio_copy copy = {.dst = message.arg.pagefault.address & ~(PAGE - 1), .src = (uintptr_t)page, .len = PAGE};
    check(ioctl(own, UFFDIO_COPY, &copy) == 0);
    return NULL;
}

static void userfaultfd(void) {
    int own = (int)syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
    struct uffdio_api api = {.api = UFFD_API};
    check(own >= 0 && ioctl(own, UFFDIO_API, &api) == 0);
    char *memory = mmap(NULL, 4 * MIB, RW, ANONYMOUS, -1, 0);
    struct uffdio_register range = {.range = {(uintptr_t)memory, 4 * MIB}, .mode = UFFDIO_REGISTER_MODE_MISSING};
    check(ioctl(own, UFFDIO_REGISTER, &range) == 0);
    press();
    pthread_t thread;
    check(pthread_create(&thread, NULL, serves, &own) == 0);
    check(((volatile char *)memory)[17] == 'o' && pthread_join(thread, NULL) == 0);
    check(ioctl(own, UFFDIO_UNREGISTER, &range.range) == 0 && close(own) == 0 && is_zero(memory + PAGE, 4 * MIB - PAGE));
    munmap(memory, 4 * MIB);
}

/* Reads and writes by the device itself, of buffers that are not in memory. */
static void direct(void) {
    int file = open("/var/tmp", O_TMPFILE | O_RDWR | O_DIRECT, 0600);
    if (file < 0)
        return;
    char *other = mmap(NULL, 8 * MIB, RW, ANONYMOUS, -1, 0);
    fill(other, 8 * MIB, 3);
    press();
    check(pwrite(file, cold, 8 * MIB, 0) == (ssize_t)(8 * MIB));
    check(pread(file, other, 8 * MIB, 0) == (ssize_t)(8 * MIB) && is_filled(other, 8 * MIB, 1));
    munmap(other, 8 * MIB);
    close(file);
}

static void no_descriptors(char *self) {
    check(close_range(3, ~0u, 0) == 0);
    press();
    check(is_filled(cold, 32 * MIB, 1));
    for (int i = 0; i < 2; i++) {
        pid_t pid = fork();
        if (pid == 0 && i)
            execl(self, self, "executed", NULL);
        else if (pid == 0) {
            close_range(0, ~0u, 0);
            fill(cold, 16 * MIB, 2);
            _exit(is_filled(cold, 16 * MIB, 2) && is_filled(cold + 24 * MIB, 0, 1) ? 5 : 1);
        }
        check(status_of(pid) == 5);
    }
}

/* Nothing is allowed but what is needed to touch, write and end. */
static void strict(void) {
#define ALLOW(name) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##name, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)
    struct sock_filter list[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        ALLOW(write), ALLOW(exit_group), ALLOW(brk), ALLOW(mmap), ALLOW(munmap), ALLOW(rt_sigreturn), ALLOW(fstat),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
    };
    struct sock_fprog program = {sizeof list / sizeof *list, list};
    check(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
    press();
    check(is_filled(cold, 32 * MIB, 1));
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IONBF, 0);
    cold = mmap(NULL, 32 * MIB, RW, ANONYMOUS, -1, 0);
    fill(cold, 32 * MIB, 1);
    press();
    (void)argv;
    if (argc > 1)
        return is_filled(cold, 32 * MIB, 1) ? 5 : 1;
    char self[4096] = {0};
    check(readlink("/proc/self/exe", self, sizeof self - 1) > 0);
    hints();
    puts("hints");
    stacks();
    puts("stacks");
    cancels();
    puts("cancellation");
    locks();
    puts("locks");
    userfaultfd();
    puts("userfaultfd");
    direct();
    puts("direct");
    no_descriptors(self);
    puts("no descriptors");
    strict();
    puts("odd things are right");
    return 0;
}
