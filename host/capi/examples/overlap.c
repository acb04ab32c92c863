/* Operations that go on while the program computes: started, tested, waited for in any order, and watched by poll().
 *
 *   cc -std=c11 overlap.c -o overlap $(pkg-config --cflags --libs sumac)
 *   sumac run -n 4 ./overlap
 *   sumac run -n 4 ./overlap --no-thread       without the library's thread: what does not need it
 */
#define _POSIX_C_SOURCE 200809L

#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sumac.h>

enum { COUNT = 100000, BUCKETS = 4, TAG = 7 };

static float gradients[BUCKETS][COUNT];
static uint32_t rank, ranks;

static void check(sumac_status status, const char *what) {
    if (status != SUMAC_OK) {
        fprintf(stderr, "Error: %s: %s: %s\n", what, sumac_status_name(status), sumac_last_error());
        exit(EXIT_FAILURE);
    }
}

static void require(int is_so, const char *what) {
    if (!is_so) {
        fprintf(stderr, "Error: rank %u: %s\n", rank, what);
        exit(EXIT_FAILURE);
    }
}

/* Stands for the backward pass: the gradients of one bucket. */
static void compute(float *values, size_t bucket) {
    for (size_t i = 0; i < COUNT; i++) {
        values[i] = (float)(rank + bucket);
    }
}

static void expect_sum(const float *values, size_t bucket) {
    const float sum = (float)(ranks * (ranks - 1) / 2 + ranks * bucket);
    require(values[0] == sum && values[COUNT - 1] == sum, "a wrong sum");
}

/* Each bucket is reduced while the next one is computed. */
static void train(sumac_comm *comm) {
    sumac_request *requests[BUCKETS];
    for (size_t bucket = 0; bucket < BUCKETS; bucket++) {
        float *values = gradients[bucket];
        compute(values, bucket);
        check(sumac_start_all_reduce(comm, values, values, COUNT, SUMAC_F32, SUMAC_SUM, NULL, &requests[bucket]), "start");
    }
    for (size_t left = BUCKETS; left > 0; left--) {
        size_t bucket = BUCKETS;
        sumac_outcome *outcome = NULL;
        check(sumac_wait_any(requests, BUCKETS, -1, &bucket, &outcome), "wait_any");
        require(bucket < BUCKETS && requests[bucket] == NULL, "a request that was waited for is NULL");
        require(sumac_outcome_path(outcome) != SUMAC_PATH_NONE, "an outcome");
        sumac_outcome_free(outcome);
        expect_sum(gradients[bucket], bucket);
    }
    size_t none = 0;
    require(sumac_wait_any(requests, BUCKETS, -1, &none, NULL) == SUMAC_ERROR_ARGUMENT, "nothing is left");
}

/* An event loop watches a file descriptor. */
static void event_loop(sumac_comm *comm) {
    sumac_request *request;
    compute(gradients[0], 0);
    check(sumac_start_all_reduce(comm, gradients[0], gradients[1], COUNT, SUMAC_F32, SUMAC_SUM, NULL, &request), "start");
    struct pollfd watched = {.events = POLLIN};
    check(sumac_request_fd(request, &watched.fd), "fd");
    require(poll(&watched, 1, 60000) == 1 && (watched.revents & POLLIN) != 0, "the descriptor becomes readable");
    bool is_complete = false;
    check(sumac_test(request, &is_complete), "test");
    require(is_complete, "what is readable is complete");
    check(sumac_wait(&request, NULL), "wait");
    expect_sum(gradients[1], 0);
}

/* The others enter a barrier only after rank 0 has seen that it is not complete. */
static void wait_with_a_limit(sumac_comm *comm, int has_thread) {
    sumac_request *request = NULL;
    sumac_options *options = NULL;
    size_t index;
    char token = 1;
    if (!has_thread) {
        /* A test would run a host collective to its end. What is in the tree goes on by itself. */
        check(sumac_options_new(&options), "options");
        check(sumac_options_set_algo(options, "tree"), "algo");
    }
    if (rank == 0) {
        bool is_complete = true;
        check(sumac_start_barrier(comm, options, &request), "start a barrier");
        check(sumac_test(request, &is_complete), "test");
        require(!is_complete, "the others are not there");
        require(sumac_wait_any(&request, 1, 0.01, &index, NULL) == SUMAC_ERROR_TIMEOUT, "nor after a while");
        for (uint32_t to = 1; to < ranks; to++) {
            check(sumac_send(comm, &token, sizeof token, to, TAG), "send beside a barrier");
        }
    } else {
        check(sumac_receive(comm, &token, sizeof token, 0, TAG), "receive");
        check(sumac_start_barrier(comm, options, &request), "start a barrier");
    }
    sumac_options_free(options);
    check(sumac_wait_any(&request, 1, 60, &index, NULL), "wait for a barrier");
}

static void messages(sumac_comm *comm) {
    const uint32_t next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
    sumac_request *requests[2];
    uint32_t received = ranks;
    check(sumac_start_receive(comm, &received, sizeof received, previous, TAG, &requests[0]), "start_receive");
    check(sumac_start_send(comm, &rank, sizeof rank, next, TAG, &requests[1]), "start_send");
    sumac_outcome *outcome = NULL;
    check(sumac_wait(&requests[0], &outcome), "wait");
    check(sumac_wait(&requests[1], &outcome), "wait");
    require(outcome == NULL && received == previous, "a message");
}

static atomic_int calls;

static void count(void *context) {
    atomic_fetch_add((atomic_int *)context, 1);
}

/* The memory of a request that is given up belongs to the library until it calls back. */
static void give_up(sumac_comm *comm) {
    sumac_request *requests[2];
    float *values = malloc(COUNT * sizeof *values);
    require(values != NULL, "memory");
    compute(values, 0);
    check(sumac_start_all_reduce(comm, values, values, COUNT, SUMAC_F32, SUMAC_SUM, NULL, &requests[0]), "start");
    check(sumac_request_on_completion(requests[0], count, &calls), "on_completion");
    check(sumac_request_detach(&requests[0], free, values), "detach");
    require(requests[0] == NULL, "a request that was given up is NULL");
    check(sumac_start_barrier(comm, NULL, &requests[1]), "start");
    check(sumac_wait(&requests[1], NULL), "wait");
    require(atomic_load(&calls) == 1, "the callback was called once");
}

int main(int argc, char **argv) {
    const int has_thread = argc < 2 || strcmp(argv[1], "--no-thread") != 0;
    sumac_config *config;
    sumac_comm *comm;
    check(sumac_config_from_env(&config), "environment");
    check(sumac_config_set_progress_thread(config, has_thread), "progress");
    check(sumac_join(config, &comm), "join");
    sumac_config_free(config);
    rank = sumac_comm_rank(comm);
    ranks = sumac_comm_size(comm);
    train(comm);
    wait_with_a_limit(comm, has_thread);
    messages(comm);
    if (has_thread) {
        event_loop(comm);
        give_up(comm);
    }
    check(sumac_comm_leave(&comm, -1), "leave");
    if (rank == 0) {
        printf("all operations overlap\n");
    }
    return EXIT_SUCCESS;
}
