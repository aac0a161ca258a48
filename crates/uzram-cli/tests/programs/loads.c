/* dlopen(3) of libraries with much memory in use, by several threads. */
#define _GNU_SOURCE
#include "check.h"
#include <dlfcn.h>
#include <pthread.h>

static void *work(void *argument) {
    (void)argument;
    for (int i = 0; i < 30; i++) {
        char *memory = malloc(4 * MIB);
        fill(memory, 4 * MIB, (uint64_t)i);
        void *library = dlopen("libm.so.6", RTLD_NOW | RTLD_LOCAL);
        check(library);
        double (*cosine)(double) = (double (*)(double))dlsym(library, "cos");
        check(cosine && cosine(0) == 1);
        check(dlsym(library, "no_such_function") == NULL && dlerror());
        check(dlopen("libno-such.so", RTLD_NOW) == NULL && dlerror());
        check(is_filled(memory, 4 * MIB, (uint64_t)i));
        dlclose(library);
        free(memory);
    }
    return NULL;
}

int main(void) {
    char *memory = malloc(48 * MIB);
    fill(memory, 48 * MIB, 77);
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        check(pthread_create(&threads[i], NULL, work, NULL) == 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    check(is_filled(memory, 48 * MIB, 77));
    puts("libraries are right");
    return 0;
}
