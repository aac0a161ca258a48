/* fork(2), clone(2), vfork(2), posix_spawn(3) and exec(3), of a program with threads and much memory. */
#define _GNU_SOURCE
#include "check.h"
#include <pthread.h>
#include <spawn.h>
#include <stdatomic.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

extern char **environ;
enum { BLOCKS = 24 };
static char *blocks[BLOCKS];
static atomic_int ends;

static void *touch(void *argument) {
    size_t nth = (size_t)argument;
    for (unsigned version = 1; !ends; version++) {
        fill(blocks[nth], 2 * MIB, version);
        check(is_filled(blocks[nth], 2 * MIB, version));
        usleep(5000);
    }
    return NULL;
}

/* Has memory come back all the time. */
static void *look(void *argument) {
    for (unsigned i = (unsigned)(size_t)argument; !ends; i++) {
        (void)*(volatile char *)(blocks[4 + i * 7 % (BLOCKS - 4)] + i * 13 % 512 * PAGE);
        if (i % 4096 == 0)
            usleep(100);
    }
    return NULL;
}

/* Whether the kernel tells the pager of children that the C library does not know. */
static int may_trace(void) {
    FILE *file = fopen("/proc/self/status", "r");
    unsigned long long caps = 0;
    char line[256];
    while (file && fgets(line, sizeof line, file))
        sscanf(line, "CapEff: %llx", &caps);
    fclose(file);
    return caps >> 19 & 1;
}

/* Memory that may be read only, and some behind a small range without access, once they have left memory. */
static char *kept;

static int all_filled(uint64_t version) {
    if (!is_filled(kept, 2 * MIB, 7) || !is_filled(kept + 2 * MIB + 16 * PAGE, MIB, 8))
        return 0;
    for (size_t i = 4; i < BLOCKS; i++)
        if (!is_filled(blocks[i], 2 * MIB, version + i))
            return 0;
    return 1;
}

int main(int argc, char **argv) {
    if (argc > 1) {
        printf("executed: %s\n", argv[1]);
        return 7;
    }
    setvbuf(stdout, NULL, _IONBF, 0);
    kept = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    fill(kept, 2 * MIB, 7);
    fill(kept + 2 * MIB + 16 * PAGE, MIB, 8);
    for (size_t i = 0; i < BLOCKS; i++) {
        blocks[i] = i % 2 ? malloc(2 * MIB) : mmap(NULL, 2 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        fill(blocks[i], 2 * MIB, 100 + i);
    }
    usleep(300000);
    check(mprotect(kept, 2 * MIB, PROT_READ) == 0 && mprotect(kept + 2 * MIB, 16 * PAGE, PROT_NONE) == 0);
    /* Streams that were not used for long, and are written to in children. */
    FILE *files[200];
    for (int i = 0; i < 200; i++)
        check((files[i] = tmpfile()));
    pthread_t threads[4];
    for (size_t i = 0; i < 4; i++)
        check(pthread_create(&threads[i], NULL, touch, (void *)i) == 0);
    for (int round = 0; round < 6; round++) {
        pid_t pid = fork();
        check(pid >= 0);
        if (pid == 0) {
            check(all_filled(100));
            for (size_t i = 4; i < BLOCKS; i++)
                fill(blocks[i], 2 * MIB, 500 + i);
            check(all_filled(500));
            fprintf(files[round], "child %d", round);
            if (round % 3 == 0) {
                pid_t grandchild = fork();
                if (grandchild == 0)
                    exit(all_filled(500) ? 3 : 1);
                check(status_of(grandchild) == 3);
            }
            exit(5);
        }
        if (round % 4 == 1)
            check(all_filled(100));
        check(status_of(pid) == 5);
        check(all_filled(100));
    }
    pthread_t lookers[2];
    for (size_t i = 0; i < 2; i++)
        check(pthread_create(&lookers[i], NULL, look, (void *)i) == 0);
    for (int round = 0; may_trace() && round < 100; round++) {
        pid_t pid = (pid_t)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
        if (pid == 0)
            _exit(all_filled(100) ? 6 : 1);
        check(status_of(pid) == 6);
    }
    pid_t pid = vfork();
    if (pid == 0) {
        execl("/proc/self/exe", argv[0], "vfork", NULL);
        _exit(1);
    }
    check(status_of(pid) == 7);
    char *arguments[] = {argv[0], "spawn", NULL};
    check(posix_spawn(&pid, "/proc/self/exe", NULL, NULL, arguments, environ) == 0);
    check(status_of(pid) == 7);
    check(system("exit 4") >> 8 == 4);
    FILE *pipe = popen("echo from a pipe", "r");
    char line[64];
    check(fgets(line, sizeof line, pipe) && strcmp(line, "from a pipe\n") == 0);
    check(pclose(pipe) == 0);
    /* A child that closes all descriptors, as daemons do. */
    pid = fork();
    if (pid == 0) {
        for (int fd = 3; fd < 1024; fd++)
            close(fd);
        _exit(all_filled(100) ? 6 : 1);
    }
    check(status_of(pid) == 6);
    ends = 1;
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < 2; i++)
        pthread_join(lookers[i], NULL);
    check(all_filled(100));
    puts("children are right");
    return 0;
}
