/*
 * A program with an allocator and a locale of its own, whose memory is first used inside dlopen(3), of a plugin with names of its own
 * (RTLD_DEEPBIND; none with an allocator of its own); forks beside dlopen(3), and from inside its allocator's lock: atfork handlers order both.
 */
#define _GNU_SOURCE
#include "check.h"
#include <ctype.h>
#include <dlfcn.h>
#include <locale.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

char *shared;
size_t shared_bytes;
static const char *plugin;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_int stops;

static void acquire(void) { pthread_mutex_lock(&lock); }
static void release(void) { pthread_mutex_unlock(&lock); }
__attribute__((constructor)) static void prepare(void) { pthread_atfork(acquire, release, release); }

#ifdef OWN
enum { HOW = RTLD_NOW };
static char *at, *end;

/* By the C library's own names, too. Its lock is held while it maps, and touches, memory. */
void *malloc(size_t bytes) {
    bytes = ((bytes + 15) & ~15ul) + 16;
    acquire();
    if ((size_t)(end - at) < bytes) {
        size_t more = bytes > MIB ? bytes : MIB;
        at = mmap(NULL, more, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        end = at + more;
    }
    size_t *memory = (size_t *)at;
    at += bytes;
    memory[0] = bytes - 16;
    release();
    return memory + 2;
}
void free(void *memory) { (void)memory; }
void *calloc(size_t count, size_t bytes) { return malloc(count * bytes); }
void *realloc(void *memory, size_t bytes) {
    char *new = malloc(bytes);
    size_t old = memory ? ((size_t *)memory)[-2] : 0;
    return memcpy(new, memory ? memory : new, old < bytes ? old : bytes);
}
void *__libc_malloc(size_t bytes) { return malloc(bytes); }
void __libc_free(void *memory) { free(memory); }
void *__libc_calloc(size_t count, size_t bytes) { return malloc(count * bytes); }
void *__libc_realloc(void *memory, size_t bytes) { return realloc(memory, bytes); }
#else
enum { HOW = RTLD_NOW | RTLD_DEEPBIND };
#endif

static void *loads(void *argument) {
    while (!stops) {
        void *library = dlopen(plugin, HOW);
        check(library && dlclose(library) == 0);
#ifdef OWN
        usleep(300000); /* Nothing is ever freed. */
#endif
    }
    return argument;
}

static void *touches(void *argument) {
    for (unsigned x = 1; !stops; x = x * 1103515245 + 12345) {
        acquire();
        for (size_t i = 0; i < 50; i++) {
            size_t word = ((size_t)x * 64 + i * 4096) % (shared_bytes / 8);
            check(((volatile uint64_t *)shared)[word] == word_of(word, 1));
        }
        release();
    }
    return argument;
}

int main(int argc, char **argv) {
    check(argc > 1 && setlocale(LC_ALL, "C.UTF-8"));
    plugin = argv[1];
    void *library = dlopen(plugin, HOW);
    check(library);
    free(*(char **)dlsym(library, "given"));
    char *mine = malloc(MIB);
    fill(mine, MIB, 5);
    ((void (*)(char *))dlsym(library, "take"))(mine);
    check(dlclose(library) == 0);
    char *memory = malloc(64 * MIB);
    fill(memory, 64 * MIB, 1);
    shared_bytes = 48 * MIB;
    shared = memory;
    pthread_t threads[2];
    check(pthread_create(&threads[0], NULL, loads, NULL) == 0 && pthread_create(&threads[1], NULL, touches, NULL) == 0);
    for (int i = 0; i < 30; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            char *more = malloc(MIB / 4);
            fill(more, MIB / 4, 3);
            check(i % 20 || is_filled(shared, shared_bytes, 1));
            check(is_filled(more, MIB / 4, 3) && toupper(120) == 88);
            _exit(6);
        }
        check(status_of(pid) == 6);
    }
    stops = 1;
    pthread_join(threads[0], NULL);
    pthread_join(threads[1], NULL);
    check(is_filled(shared, shared_bytes, 1));
    puts("allocations are right");
    return 0;
}
