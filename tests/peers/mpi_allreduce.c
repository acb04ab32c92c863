// MPI_Allreduce of f32 sums, timed for comparison with Sumac's.
//
//   mpirun -np N mpi_allreduce [--in-place] [--iterations COUNT] SIZE_BYTES...
//   mpirun -np 1 mpi_allreduce --version              print the library's version
//
// Out of place by default, like OSU's and Intel's benchmarks. Prints one JSON object per size:
//
//   {"ranks":4,"size_bytes":8,"iterations":20000,"time_us":3.402,"p99_us":9.117,"cpu_us":3.351}
//
// An iteration is a barrier, then one timed operation; the slowest rank's time counts, and time_us is the median over
// the iterations. First, every rank checks every element of one operation. Their number is COUNT, or, after a warm-up,
// what fits into a budget of time. cpu_us is the CPU time per operation, user
// and system, maximum over ranks; it is measured in a separate pass, since reading that clock is a system call, which
// takes as long as a small operation.

#include <mpi.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PAGE = 4096, MAX_ITERATIONS = 20000, MIN_ITERATIONS = 5, MIN_CPU_ITERATIONS = 3, WARM_UP_OPS = 4 };

static const double WARM_UP_US = 50e3;
static const double BUDGET_US = 200e3;

struct bench {
    int rank;
    int ranks;
    bool in_place;
    // 0: as many as fit into the budget.
    int iterations;
    double *times_us;
    double *slowest_us;
};

struct buffers {
    int count;
    float *input;
    float *output;
};

static double clock_us(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static double now_us(void) { return clock_us(CLOCK_MONOTONIC); }

// The same clock that `sumac perf` reads.
static double cpu_us(void) { return clock_us(CLOCK_PROCESS_CPUTIME_ID); }

static int ascending(const void *left, const void *right) {
    const double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

// Small integers: f32 represents their sums over 64 ranks exactly.
static float value(int rank, size_t index) { return (float)((rank + 1) * (int)((index * 7 + 3) % 1009)); }

static void *allocate(size_t size_bytes) {
    void *memory = aligned_alloc(PAGE, (size_bytes + PAGE - 1) / PAGE * PAGE);
    if (memory == NULL) {
        fprintf(stderr, "mpi_allreduce: out of memory\n");
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    return memory;
}

static void all_reduce(const struct bench *bench, const struct buffers *data) {
    const void *from = bench->in_place ? MPI_IN_PLACE : data->input;
    MPI_Allreduce(from, data->output, data->count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void check(const struct bench *bench, const struct buffers *data) {
    float *filled = bench->in_place ? data->output : data->input;
    for (int i = 0; i < data->count; i++) filled[i] = value(bench->rank, i);
    all_reduce(bench, data);
    for (int i = 0; i < data->count; i++) {
        float expected = 0;
        for (int rank = 0; rank < bench->ranks; rank++) expected += value(rank, i);
        if (data->output[i] != expected) {
            fprintf(stderr, "mpi_allreduce: rank %d: element %d of %d is %g, expected %g\n", bench->rank, i,
                    data->count, data->output[i], expected);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
    }
    // Zeros stay finite over any number of in-place operations.
    if (bench->in_place) memset(filled, 0, sizeof(float) * data->count);
}

// Run for at least WARM_UP_US; return the number of iterations that fit into the budget, as rank 0 estimates it.
static int warm_up(const struct bench *bench, const struct buffers *data) {
    const double start = now_us();
    for (int done = WARM_UP_OPS;; done += WARM_UP_OPS) {
        for (int i = 0; i < WARM_UP_OPS; i++) all_reduce(bench, data);
        const double took = now_us() - start;
        int iterations = 0;
        if (took > WARM_UP_US) {
            const double fit = BUDGET_US * done / took;
            iterations = fit > MAX_ITERATIONS ? MAX_ITERATIONS : fit < MIN_ITERATIONS ? MIN_ITERATIONS : (int)fit;
        }
        MPI_Bcast(&iterations, 1, MPI_INT, 0, MPI_COMM_WORLD);
        if (iterations > 0) return iterations;
    }
}

// CPU time per operation, maximum over ranks.
static double measure_cpu(const struct bench *bench, const struct buffers *data, int timed) {
    const int least = bench->iterations > 0 ? 1 : MIN_CPU_ITERATIONS;
    const int iterations = timed / 4 > least ? timed / 4 : least;
    double used = 0, most = 0;
    for (int i = 0; i < iterations; i++) {
        MPI_Barrier(MPI_COMM_WORLD);
        const double start = cpu_us();
        all_reduce(bench, data);
        used += cpu_us() - start;
    }
    MPI_Reduce(&used, &most, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    return most / iterations;
}

static void measure(const struct bench *bench, size_t size_bytes) {
    const struct buffers data = {
        .count = (int)(size_bytes / sizeof(float)),
        .input = allocate(size_bytes),
        .output = allocate(size_bytes),
    };
    memset(data.output, 0, size_bytes);
    check(bench, &data);
    const int iterations = bench->iterations > 0 ? bench->iterations : warm_up(bench, &data);
    for (int i = 0; i < iterations; i++) {
        MPI_Barrier(MPI_COMM_WORLD);
        const double start = now_us();
        all_reduce(bench, &data);
        bench->times_us[i] = now_us() - start;
    }
    MPI_Reduce(bench->times_us, bench->slowest_us, iterations, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    const double cpu = measure_cpu(bench, &data, iterations);
    if (bench->rank == 0) {
        qsort(bench->slowest_us, iterations, sizeof(double), ascending);
        printf("{\"ranks\":%d,\"size_bytes\":%zu,\"iterations\":%d,\"time_us\":%.3f,\"p99_us\":%.3f,\"cpu_us\":%.3f}\n",
               bench->ranks, size_bytes, iterations, bench->slowest_us[iterations / 2],
               bench->slowest_us[iterations * 99L / 100], cpu);
        fflush(stdout);
    }
    free(data.input);
    free(data.output);
}

static int print_version(int rank) {
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(version, &length);
    if (rank == 0) printf("%s\n", version);
    MPI_Finalize();
    return 0;
}

// Return 0 for an invalid size.
static size_t parse_size(const char *argument) {
    char *end = NULL;
    const unsigned long long size_bytes = strtoull(argument, &end, 10);
    return *end == '\0' && size_bytes % sizeof(float) == 0 && size_bytes <= 1ULL << 32 ? size_bytes : 0;
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    struct bench bench = {0};
    MPI_Comm_rank(MPI_COMM_WORLD, &bench.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &bench.ranks);
    if (argc == 2 && strcmp(argv[1], "--version") == 0) return print_version(bench.rank);
    bench.in_place = argc > 1 && strcmp(argv[1], "--in-place") == 0;
    int first = bench.in_place ? 2 : 1;
    bool valid = true;
    if (first + 1 < argc && strcmp(argv[first], "--iterations") == 0) {
        bench.iterations = atoi(argv[first + 1]);
        valid = bench.iterations > 0 && bench.iterations <= MAX_ITERATIONS;
        first += 2;
    }
    valid = valid && first < argc;
    for (int i = first; i < argc; i++) valid = valid && parse_size(argv[i]) > 0;
    if (!valid) {
        const char *usage = "mpi_allreduce [--in-place] [--iterations COUNT] SIZE_BYTES(multiple of 4)...";
        if (bench.rank == 0) fprintf(stderr, "usage: %s\n", usage);
        MPI_Finalize();
        return 2;
    }
    bench.times_us = allocate(sizeof(double) * MAX_ITERATIONS);
    bench.slowest_us = allocate(sizeof(double) * MAX_ITERATIONS);
    for (int i = first; i < argc; i++) measure(&bench, parse_size(argv[i]));
    free(bench.times_us);
    free(bench.slowest_us);
    MPI_Finalize();
    return 0;
}
