// The least that a large all-reduce costs on this machine: two threads, each pinned to a core, go over the buffers of
// all ranks once and leave the sum in every one of them. No message, no protocol, nobody to wait for but each other.
//
//   bare_loop RANKS SIZE_BYTES...        f32 sum, in place
//
// For each size one JSON object is printed:
//
//   {"ranks":4,"size_bytes":67108864,"iterations":24,"time_us":7214.500}
//
// The buffers are cut into segments that stay in a core's cache while they are reduced: the first rank's is copied,
// the others' are added, the sum is stored to all. Plain stores: the lines have just been read, so going past the
// cache gains nothing. One operation is checked, every element in every buffer; then the median of many is taken.
//
// The threads meet by spinning, since a wake-up by the kernel takes longer than reducing 64 KiB. Up to some KiB the
// time is that of their meeting, which depends on who comes last; a bound it is only from there on.

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { THREADS = 2, MAX_RANKS = 64, MAX_ITERATIONS = 20000, MIN_ITERATIONS = 9, WARM_UP_OPS = 4 };

#define SEGMENT_BYTES ((size_t)128 << 10)
#define SEGMENT_BYTES_MIN ((size_t)4 << 10)
#define LINE_BYTES 64

static const double BUDGET_US = 200e3;

struct job {
    int ranks;
    size_t count;
    // Elements of one segment; thread t takes the segments t, t + THREADS and so on.
    size_t segment;
    float *buffers[MAX_RANKS];
};

struct meeting {
    _Alignas(256) atomic_int arrived;
    _Alignas(256) atomic_uint generation;
};

// What the helping thread is told; written before a meeting, read after it.
static struct job job;
static bool over;
static struct meeting before, after;

static double now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec * 1e-3;
}

static int ascending(const void *left, const void *right) {
    const double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

// Small integers, whose sums over MAX_RANKS ranks f32 holds exactly.
static float value(int rank, size_t index) { return (float)((rank + 1) * (int)((index * 7 + 3) % 1009)); }

static bool pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    return pthread_setaffinity_np(pthread_self(), sizeof set, &set) == 0;
}

static void meet(struct meeting *meeting) {
    const unsigned generation = atomic_load_explicit(&meeting->generation, memory_order_acquire);
    if (atomic_fetch_add_explicit(&meeting->arrived, 1, memory_order_acq_rel) == THREADS - 1) {
        atomic_store_explicit(&meeting->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&meeting->generation, generation + 1, memory_order_release);
        return;
    }
    while (atomic_load_explicit(&meeting->generation, memory_order_acquire) == generation) {
    }
}

static void add(float *restrict sum, const float *restrict from, size_t count) {
    for (size_t i = 0; i < count; i++) sum[i] += from[i];
}

static void reduce_share(int thread) {
    _Alignas(LINE_BYTES) static _Thread_local float sum[SEGMENT_BYTES / sizeof(float)];
    for (size_t at = thread * job.segment; at < job.count; at += THREADS * job.segment) {
        const size_t count = job.count - at < job.segment ? job.count - at : job.segment;
        memcpy(sum, job.buffers[0] + at, count * sizeof(float));
        for (int rank = 1; rank < job.ranks; rank++) add(sum, job.buffers[rank] + at, count);
        for (int rank = 0; rank < job.ranks; rank++) memcpy(job.buffers[rank] + at, sum, count * sizeof(float));
    }
}

static void *help(void *unused) {
    (void)unused;
    pin(1);
    for (;;) {
        meet(&before);
        if (over) return NULL;
        reduce_share(1);
        meet(&after);
    }
}

static double time_one(void) {
    meet(&before);
    const double start = now_us();
    reduce_share(0);
    meet(&after);
    return now_us() - start;
}

static bool prepare(size_t size_bytes) {
    const size_t share = (size_bytes / THREADS + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
    size_t segment_bytes = share < SEGMENT_BYTES_MIN ? SEGMENT_BYTES_MIN : share;
    if (segment_bytes > SEGMENT_BYTES) segment_bytes = SEGMENT_BYTES;
    job.count = size_bytes / sizeof(float);
    job.segment = segment_bytes / sizeof(float);
    for (int rank = 0; rank < job.ranks; rank++) {
        // Shared between processes, as the ranks' memory would have to be.
        void *memory = mmap(NULL, size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) {
            perror("bare_loop: mmap");
            return false;
        }
        job.buffers[rank] = memory;
        for (size_t i = 0; i < job.count; i++) job.buffers[rank][i] = value(rank, i);
    }
    return true;
}

static bool check(void) {
    time_one();
    for (size_t i = 0; i < job.count; i++) {
        float expected = 0;
        for (int rank = 0; rank < job.ranks; rank++) expected += value(rank, i);
        for (int rank = 0; rank < job.ranks; rank++) {
            if (job.buffers[rank][i] != expected) {
                fprintf(stderr, "bare_loop: rank %d: element %zu is %g, expected %g\n", rank, i, job.buffers[rank][i],
                        expected);
                return false;
            }
            // Sums of zeros stay finite, however many are timed.
            job.buffers[rank][i] = 0;
        }
    }
    return true;
}

static bool measure(size_t size_bytes) {
    static double times_us[MAX_ITERATIONS];
    if (!prepare(size_bytes) || !check()) return false;
    double mean_us = 0;
    for (int i = 0; i < WARM_UP_OPS; i++) mean_us += time_one() / WARM_UP_OPS;
    const double fit = BUDGET_US / (mean_us > 0.01 ? mean_us : 0.01);
    const int iterations = fit > MAX_ITERATIONS ? MAX_ITERATIONS : fit < MIN_ITERATIONS ? MIN_ITERATIONS : (int)fit;
    for (int i = 0; i < iterations; i++) times_us[i] = time_one();
    qsort(times_us, iterations, sizeof(double), ascending);
    printf("{\"ranks\":%d,\"size_bytes\":%zu,\"iterations\":%d,\"time_us\":%.3f}\n", job.ranks, size_bytes, iterations,
           times_us[iterations / 2]);
    fflush(stdout);
    for (int rank = 0; rank < job.ranks; rank++) munmap(job.buffers[rank], size_bytes);
    return true;
}

int main(int argc, char **argv) {
    job.ranks = argc > 2 ? atoi(argv[1]) : 0;
    bool valid = job.ranks >= 2 && job.ranks <= MAX_RANKS;
    for (int i = 2; i < argc; i++) {
        const size_t size_bytes = strtoull(argv[i], NULL, 10);
        valid = valid && size_bytes > 0 && size_bytes % sizeof(float) == 0;
    }
    if (!valid) {
        fprintf(stderr, "usage: bare_loop RANKS(2..%d) SIZE_BYTES(multiple of 4)...\n", MAX_RANKS);
        return 2;
    }
    // Two threads that spin on one core would measure the scheduler.
    pthread_t helper;
    if (!pin(1) || !pin(0) || pthread_create(&helper, NULL, help, NULL) != 0) {
        fprintf(stderr, "bare_loop: CPUs 0 and 1 can't both be used\n");
        return 1;
    }
    bool right = true;
    for (int i = 2; i < argc && right; i++) right = measure(strtoull(argv[i], NULL, 10));
    over = true;
    meet(&before);
    pthread_join(helper, NULL);
    return right ? 0 : 1;
}
