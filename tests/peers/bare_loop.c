// A lower bound for a large all-reduce on this machine: two threads, each pinned to a core, pass over the buffers of
// all ranks once and store the sum in each of them. No messages, no protocol, no synchronisation but between the two.
//
//   bare_loop RANKS SIZE_BYTES...        f32 sum, in place
//
// Prints one JSON object per size:
//
//   {"ranks":4,"size_bytes":67108864,"iterations":24,"time_us":7214.500}
//
// The buffers are split into segments that stay in a core's cache while they are reduced: the first rank's segment is
// copied, the others' are added, the sum is stored to all. Plain stores: the lines have just been read, so non-temporal
// stores gain nothing. One operation is checked, every element of every buffer; the result is the median of many.
//
// The threads synchronise by spinning, since a wake-up by the kernel takes longer than reducing 64 KiB. Up to some KiB
// the barrier dominates the time; it is a bound only above that.

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

struct barrier {
    _Alignas(256) atomic_int arrived;
    _Alignas(256) atomic_uint generation;
};

// Shared with the helper thread; written before a barrier, read after it.
static struct job job;
static bool stop;
static struct barrier before, after;

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

static void barrier_wait(struct barrier *barrier) {
    const unsigned generation = atomic_load_explicit(&barrier->generation, memory_order_acquire);
    if (atomic_fetch_add_explicit(&barrier->arrived, 1, memory_order_acq_rel) == THREADS - 1) {
        atomic_store_explicit(&barrier->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&barrier->generation, generation + 1, memory_order_release);
        return;
    }
    while (atomic_load_explicit(&barrier->generation, memory_order_acquire) == generation) {
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
        barrier_wait(&before);
        if (stop) return NULL;
        reduce_share(1);
        barrier_wait(&after);
    }
}

static double time_one(void) {
    barrier_wait(&before);
    const double start = now_us();
    reduce_share(0);
    barrier_wait(&after);
    return now_us() - start;
}

static bool prepare(size_t size_bytes) {
    const size_t share = (size_bytes / THREADS + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
    size_t segment_bytes = share < SEGMENT_BYTES_MIN ? SEGMENT_BYTES_MIN : share;
    if (segment_bytes > SEGMENT_BYTES) segment_bytes = SEGMENT_BYTES;
    job.count = size_bytes / sizeof(float);
    job.segment = segment_bytes / sizeof(float);
    for (int rank = 0; rank < job.ranks; rank++) {
        // Shared mappings, as ranks in separate processes would need.
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
            // Zeros stay finite over any number of in-place operations.
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
    // On one core, two spinning threads would measure the scheduler.
    pthread_t helper;
    if (!pin(1) || !pin(0) || pthread_create(&helper, NULL, help, NULL) != 0) {
        fprintf(stderr, "bare_loop: cannot pin threads to CPUs 0 and 1\n");
        return 1;
    }
    bool right = true;
    for (int i = 2; i < argc && right; i++) right = measure(strtoull(argv[i], NULL, 10));
    stop = true;
    barrier_wait(&before);
    pthread_join(helper, NULL);
    return right ? 0 : 1;
}
