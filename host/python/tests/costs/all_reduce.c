/* Times all-reduces through the C interface: as a rank, print the median of a call and the processor time per call, in
 * seconds.
 *
 *   all_reduce COUNT CALLS
 */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <stdlib.h>
#include <sumac.h>
#include <time.h>

static void check(sumac_status status) {
    if (status != SUMAC_OK) {
        fprintf(stderr, "Error: %s\n", sumac_last_error());
        exit(EXIT_FAILURE);
    }
}

static double now(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static int compare(const void *one, const void *other) {
    double difference = *(const double *)one - *(const double *)other;
    return (difference > 0) - (difference < 0);
}

int main(int argc, char **argv) {
    sumac_comm *comm;
    if (argc != 3) {
        fprintf(stderr, "usage: all_reduce COUNT CALLS\n");
        return 2;
    }
    size_t count = strtoul(argv[1], NULL, 10), calls = strtoul(argv[2], NULL, 10), warmup = calls / 10 + 1;
    float *values = calloc(count, sizeof *values);
    double *seconds = calloc(calls, sizeof *seconds);
    if (values == NULL || seconds == NULL) {
        return EXIT_FAILURE;
    }
    check(sumac_join(NULL, &comm));
    for (size_t call = 0; call < warmup; call++) {
        check(sumac_all_reduce(comm, values, values, count, SUMAC_F32, SUMAC_SUM, NULL, NULL));
    }
    double used = now(CLOCK_PROCESS_CPUTIME_ID);
    for (size_t call = 0; call < calls; call++) {
        double begin = now(CLOCK_MONOTONIC);
        check(sumac_all_reduce(comm, values, values, count, SUMAC_F32, SUMAC_SUM, NULL, NULL));
        seconds[call] = now(CLOCK_MONOTONIC) - begin;
    }
    used = (now(CLOCK_PROCESS_CPUTIME_ID) - used) / (double)calls;
    qsort(seconds, calls, sizeof *seconds, compare);
    printf("%.9f %.9f\n", seconds[calls / 2], used);
    check(sumac_comm_leave(&comm, -1));
    free(values);
    free(seconds);
    return EXIT_SUCCESS;
}
