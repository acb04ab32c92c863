/* Times all-reduces through the C interface: as a rank, print the median of a call in seconds.
 *
 *   all_reduce COUNT CALLS
 */
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

static double now(void) {
    struct timespec time;
    timespec_get(&time, TIME_UTC);
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
    for (size_t call = 0; call < calls + warmup; call++) {
        double begin = now();
        check(sumac_all_reduce(comm, values, values, count, SUMAC_F32, SUMAC_SUM, NULL, NULL));
        if (call >= warmup) {
            seconds[call - warmup] = now() - begin;
        }
    }
    qsort(seconds, calls, sizeof *seconds, compare);
    printf("%.9f\n", seconds[calls / 2]);
    check(sumac_comm_leave(&comm, -1));
    free(values);
    free(seconds);
    return EXIT_SUCCESS;
}
