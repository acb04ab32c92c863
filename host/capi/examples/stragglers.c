/* A rank that is late: with SUMAC_STRAGGLER_DEADLINE the operation fails on all ranks and names the late one, with
 * SUMAC_STRAGGLER_PARTIAL it completes without it. Both need a tree.
 *
 *   cc -std=c11 stragglers.c -o stragglers $(pkg-config --cflags --libs sumac)
 *   sumac run -n 4 ./stragglers
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sumac.h>

enum { COUNT = 1000, RANKS_MAX = 64, TAG = 3 };

/* Longer than the others need to enter an operation on a busy machine. */
static const double LIMIT_S = 2;

static float values[COUNT];
static uint32_t rank, ranks, late;

static void check(sumac_status status, const char *what) {
    if (status != SUMAC_OK) {
        fprintf(stderr, "Error: rank %u: %s: %s: %s\n", rank, what, sumac_status_name(status), sumac_last_error());
        exit(EXIT_FAILURE);
    }
}

static void require(int is_so, const char *what) {
    if (!is_so) {
        fprintf(stderr, "Error: rank %u: %s; the last error: %s\n", rank, what, sumac_last_error());
        exit(EXIT_FAILURE);
    }
}

/* Sum 1 of each rank on a communicator of its own. The late rank enters when all others have a result or an error. */
static sumac_status sum_with_a_late_rank(sumac_comm *comm, sumac_comm *group, int32_t policy, sumac_outcome **outcome) {
    sumac_options *options;
    char token = 1;
    check(sumac_options_new(&options), "options");
    check(sumac_options_set_algo(options, "tree"), "algo");
    check(sumac_options_set_straggler(options, policy, LIMIT_S), "straggler");
    for (size_t i = 0; i < COUNT; i++) {
        values[i] = 1;
    }
    for (uint32_t other = 0; rank == late && other < late; other++) {
        check(sumac_receive(comm, &token, sizeof token, other, TAG), "receive");
    }
    sumac_status status = sumac_all_reduce(group, values, values, COUNT, SUMAC_F32, SUMAC_SUM, options, outcome);
    if (rank != late) {
        check(sumac_send(comm, &token, sizeof token, late, TAG), "send");
    }
    sumac_options_free(options);
    return status;
}

static void fail_on_all_ranks(sumac_comm *comm) {
    sumac_comm *group;
    sumac_outcome *outcome;
    uint32_t named[RANKS_MAX];
    check(sumac_comm_split(comm, 0, 0, &group), "split");
    sumac_status status = sum_with_a_late_rank(comm, group, SUMAC_STRAGGLER_DEADLINE, &outcome);
    require(status == SUMAC_ERROR_STRAGGLERS && outcome == NULL, "all ranks get the same error");
    require(sumac_last_error_status() == SUMAC_ERROR_STRAGGLERS, "the code of the last error");
    require(sumac_last_error_ranks(NULL, 0) == 1, "one rank is named");
    require(sumac_last_error_ranks(named, RANKS_MAX) == 1 && named[0] == late, "the late rank is named");
    require(strstr(sumac_last_error(), "straggler limit") != NULL, "the text names the limit");
    /* It stays known on the communicator, which has ended. */
    require(sumac_barrier(group, NULL, NULL) == SUMAC_ERROR_ENDED, "the communicator has ended");
    require(sumac_last_error_cause() == SUMAC_ERROR_STRAGGLERS, "and the reason is known");
    require(sumac_last_error_ranks(named, RANKS_MAX) == 1 && named[0] == late, "with its data");
    /* Whoever frees a communicator early is lost to the others. */
    check(sumac_barrier(comm, NULL, NULL), "barrier");
    sumac_comm_free(group);
}

static void go_on_without_it(sumac_comm *comm) {
    sumac_comm *group;
    sumac_outcome *outcome;
    uint32_t missing[RANKS_MAX];
    check(sumac_comm_split(comm, 0, 0, &group), "split");
    sumac_status status = sum_with_a_late_rank(comm, group, SUMAC_STRAGGLER_PARTIAL, &outcome);
    if (rank == late) {
        require(status == SUMAC_ERROR_EXCLUDED && outcome == NULL, "the late rank is excluded");
        require(sumac_last_error_ranks(NULL, 0) == 0, "no other rank is named");
    } else {
        check(status, "all_reduce");
        require(sumac_outcome_missing(outcome, missing, RANKS_MAX) == 1 && missing[0] == late, "one rank is missing");
        require(values[0] == (float)late && values[COUNT - 1] == (float)late, "a sum of the others");
        sumac_outcome_free(outcome);
    }
    check(sumac_barrier(comm, NULL, NULL), "barrier");
    sumac_comm_free(group);
}

int main(void) {
    sumac_comm *comm;
    check(sumac_join(NULL, &comm), "join");
    rank = sumac_comm_rank(comm);
    ranks = sumac_comm_size(comm);
    late = ranks - 1;
    require(ranks >= 2, "at least 2 ranks");
    fail_on_all_ranks(comm);
    go_on_without_it(comm);
    check(sumac_comm_leave(&comm, -1), "leave");
    if (rank == 0) {
        printf("late ranks are known\n");
    }
    return EXIT_SUCCESS;
}
