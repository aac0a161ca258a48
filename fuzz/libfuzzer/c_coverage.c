/* Coverage of the C libraries (liblz4, libzstd).
 *
 * Any C compiler can call __sanitizer_cov_trace_pc at each edge, which libFuzzer no longer supports; it
 * needs counters. This file counts the calls: a counter for each call site, in the section where
 * libFuzzer looks for the user's own counters. Two sites that share a counter only cost some coverage.
 * The linker redirects the calls here (--wrap, see build.rs). */

#include <stdint.h>

#define COUNTERS_LOG2 15

/* Must not be instrumented, or it would call itself. */
#ifdef __clang__
#define UNINSTRUMENTED __attribute__((no_sanitize("coverage", "address")))
#else
#define UNINSTRUMENTED __attribute__((no_sanitize_coverage, no_sanitize("address")))
#endif

__attribute__((section("__libfuzzer_extra_counters"))) static uint8_t counters[1 << COUNTERS_LOG2];

UNINSTRUMENTED void __wrap___sanitizer_cov_trace_pc(void)
{
    /* Counted from a place in the program, so that the system's choice of addresses does not matter. */
    uint32_t place = (uint32_t)((uintptr_t)__builtin_return_address(0) - (uintptr_t)counters);
    uint8_t *counter = &counters[place * 2654435769u >> (32 - COUNTERS_LOG2)];
    *counter += *counter != UINT8_MAX;
}

/* gcc also reports comparisons of floating-point numbers, which libFuzzer has no use for. */
void __sanitizer_cov_trace_cmpf(float a, float b)
{
    (void)a;
    (void)b;
}

void __sanitizer_cov_trace_cmpd(double a, double b)
{
    (void)a;
    (void)b;
}
