/* Every collective once, in place and apart, with its result checked: what each of them expects and returns.
 *
 *   cc -std=c11 collectives.c -o collectives $(pkg-config --cflags --libs sumac)
 *   sumac run -n 4 ./collectives
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sumac.h>

enum { BLOCK = 1000, RANKS_MAX = 64 };

static int32_t wide[RANKS_MAX * BLOCK], more[RANKS_MAX * BLOCK], own[BLOCK];
static uint32_t rank, ranks;

static void check(sumac_status status, const char *what) {
    if (status != SUMAC_OK) {
        fprintf(stderr, "Error: %s: %s: %s\n", what, sumac_status_name(status), sumac_last_error());
        exit(EXIT_FAILURE);
    }
}

/* Check that `count` elements from `values` are `first`, `first` + `step`, ... */
static void expect(const char *what, const int32_t *values, size_t count, int32_t first, int32_t step) {
    for (size_t i = 0; i < count; i++) {
        if (values[i] != first + (int32_t)i * step) {
            fprintf(stderr, "Error: %s: rank %u: element %zu is %d\n", what, rank, i, values[i]);
            exit(EXIT_FAILURE);
        }
    }
}

/* Element i of rank r is r * 1000 + i. */
static void fill(int32_t *values, size_t count) {
    for (size_t i = 0; i < count; i++) {
        values[i] = (int32_t)rank * BLOCK + (int32_t)i;
    }
}

static void reductions(sumac_comm *comm) {
    const int32_t n = (int32_t)ranks, sum = n * (n - 1) / 2 * BLOCK;
    fill(wide, BLOCK);
    check(sumac_all_reduce(comm, wide, more, BLOCK, SUMAC_I32, SUMAC_SUM, NULL, NULL), "all_reduce");
    expect("all_reduce", more, BLOCK, sum, n);
    check(sumac_all_reduce(comm, wide, wide, BLOCK, SUMAC_I32, SUMAC_MAX, NULL, NULL), "all_reduce in place");
    expect("all_reduce in place", wide, BLOCK, (n - 1) * BLOCK, 1);

    fill(wide, BLOCK);
    check(sumac_reduce(comm, wide, rank == 1 ? more : NULL, BLOCK, SUMAC_I32, SUMAC_MIN, 1, NULL, NULL), "reduce");
    if (rank == 1) {
        expect("reduce", more, BLOCK, 0, 1);
    }
    check(sumac_reduce(comm, wide, wide, BLOCK, SUMAC_I32, SUMAC_SUM, 0, NULL, NULL), "reduce in place");
    expect("reduce in place", wide, BLOCK, rank == 0 ? sum : (int32_t)rank * BLOCK, rank == 0 ? n : 1);

    fill(wide, ranks * BLOCK);
    check(sumac_reduce_scatter(comm, wide, own, BLOCK, SUMAC_I32, SUMAC_SUM, NULL, NULL), "reduce_scatter");
    expect("reduce_scatter", own, BLOCK, sum + n * (int32_t)rank * BLOCK, n);
    check(sumac_reduce_scatter(comm, wide, wide + rank * BLOCK, BLOCK, SUMAC_I32, SUMAC_SUM, NULL, NULL),
          "reduce_scatter in place");
    expect("reduce_scatter in place", wide + rank * BLOCK, BLOCK, sum + n * (int32_t)rank * BLOCK, n);
}

static void movements(sumac_comm *comm) {
    const int32_t n = (int32_t)ranks;
    fill(own, BLOCK);
    check(sumac_broadcast(comm, own, BLOCK, SUMAC_I32, 1, NULL, NULL), "broadcast");
    expect("broadcast", own, BLOCK, BLOCK, 1);

    fill(own, BLOCK);
    check(sumac_all_gather(comm, own, more, BLOCK, SUMAC_I32, NULL, NULL), "all_gather");
    expect("all_gather", more, ranks * BLOCK, 0, 1);
    memcpy(wide + rank * BLOCK, own, sizeof own);
    check(sumac_all_gather(comm, wide + rank * BLOCK, wide, BLOCK, SUMAC_I32, NULL, NULL), "all_gather in place");
    expect("all_gather in place", wide, ranks * BLOCK, 0, 1);

    memset(more, 0, sizeof more);
    check(sumac_gather(comm, own, rank == 0 ? more : NULL, BLOCK, SUMAC_I32, 0, NULL, NULL), "gather");
    expect("gather", more, ranks * BLOCK, 0, rank == 0 ? 1 : 0);
    check(sumac_scatter(comm, rank == 0 ? more : NULL, own, BLOCK, SUMAC_I32, 0, NULL, NULL), "scatter");
    expect("scatter", own, BLOCK, (int32_t)rank * BLOCK, 1);

    /* Block b of rank r becomes block r of rank b: element i of it is r * BLOCK + b * BLOCK + i. */
    fill(wide, ranks * BLOCK);
    check(sumac_all_to_all(comm, wide, more, BLOCK, SUMAC_I32, NULL, NULL), "all_to_all");
    for (int32_t from = 0; from < n; from++) {
        expect("all_to_all", more + from * BLOCK, BLOCK, (from + (int32_t)rank) * BLOCK, 1);
    }

    /* Rank r sends r + 1 elements to each rank. */
    size_t sends[RANKS_MAX], receives[RANKS_MAX], at = 0;
    for (uint32_t i = 0; i < ranks; i++) {
        sends[i] = rank + 1;
        receives[i] = i + 1;
    }
    check(sumac_all_to_all_v(comm, wide, sends, more, receives, SUMAC_I32, NULL, NULL), "all_to_all_v");
    for (uint32_t from = 0; from < ranks; at += ++from) {
        expect("all_to_all_v", more + at, from + 1, (int32_t)(from * BLOCK + rank * (from + 1)), 1);
    }

    /* Rank r's block has r + 1 elements. */
    size_t whole = 0, before = 0;
    for (uint32_t i = 0; i < ranks; i++) {
        before += i < rank ? receives[i] : 0;
        whole += receives[i];
    }
    fill(own, BLOCK);
    check(sumac_all_gather_v(comm, own, more, receives, SUMAC_I32, NULL, NULL), "all_gather_v");
    at = 0;
    for (uint32_t from = 0; from < ranks; at += ++from) {
        expect("all_gather_v", more + at, from + 1, (int32_t)from * BLOCK, 1);
    }
    fill(wide, whole);
    check(sumac_reduce_scatter_v(comm, wide, receives, more, SUMAC_I32, SUMAC_SUM, NULL, NULL), "reduce_scatter_v");
    expect("reduce_scatter_v", more, rank + 1, n * (n - 1) / 2 * BLOCK + n * (int32_t)before, n);

    /* Seven elements over all ranks: blocks that differ by one. */
    const size_t seven = 7 * sizeof *wide;
    fill(wide, 7);
    check(sumac_run(comm, SUMAC_ALL_REDUCE, SUMAC_I32, SUMAC_SUM, 0, 7, wide, seven, more, seven, NULL, NULL), "run");
    expect("run", more, 7, n * (n - 1) / 2 * BLOCK, n);
}

static void messages(sumac_comm *comm) {
    const uint32_t next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
    fill(wide, BLOCK);
    check(sumac_send_receive(comm, wide, sizeof own, next, own, sizeof own, previous, 7), "send_receive");
    expect("send_receive", own, BLOCK, (int32_t)previous * BLOCK, 1);
    if (rank == 0) {
        check(sumac_send(comm, wide, sizeof own, 1, 8), "send");
    } else if (rank == 1) {
        check(sumac_receive(comm, own, sizeof own, 0, 8), "receive");
        expect("receive", own, BLOCK, 0, 1);
    }
    if (rank != 0) {
        check(sumac_send(comm, wide, sizeof own, 0, 9), "send to whoever receives");
        return;
    }
    /* From all others, in any order: half of them by a call, the others by requests. */
    uint32_t seen = 0, source = ranks;
    for (uint32_t i = 1; i < ranks; i++) {
        sumac_request *request;
        if (i % 2 == 0) {
            check(sumac_receive_any(comm, own, sizeof own, 9, &source), "receive_any");
        } else {
            check(sumac_start_receive_any(comm, own, sizeof own, 9, &request), "start_receive_any");
            check(sumac_wait_message(&request, &source), "wait_message");
        }
        expect("receive_any", own, BLOCK, (int32_t)source * BLOCK, 1);
        seen += source;
    }
    if (seen != ranks * (ranks - 1) / 2) {
        fprintf(stderr, "Error: a message of each rank\n");
        exit(EXIT_FAILURE);
    }
}

/* The even and the odd ranks, each in reverse order. */
static void split(sumac_comm *comm) {
    sumac_comm *half, *none;
    check(sumac_comm_split(comm, rank % 2, -(int64_t)rank, &half), "split");
    int32_t value = (int32_t)rank, expected = 0;
    check(sumac_all_reduce(half, &value, &value, 1, SUMAC_I32, SUMAC_SUM, NULL, NULL), "all_reduce of a half");
    for (uint32_t i = rank % 2; i < ranks; i += 2) {
        expected += (int32_t)i;
    }
    expect("all_reduce of a half", &value, 1, expected, 0);
    check(sumac_comm_leave(&half, -1), "leave a half");
    check(sumac_comm_split(comm, rank == 0 ? 0 : SUMAC_NO_COLOR, 0, &none), "split off one");
    if ((none != NULL) != (rank == 0)) {
        fprintf(stderr, "Error: SUMAC_NO_COLOR\n");
        exit(EXIT_FAILURE);
    }
    if (none != NULL) {
        check(sumac_comm_leave(&none, -1), "leave a communicator of one");
    }
}

static void explain(sumac_comm *comm) {
    sumac_explanation *explanation;
    check(sumac_explain(comm, SUMAC_ALL_REDUCE, SUMAC_F32, SUMAC_SUM, 0, 1 << 20, NULL, &explanation), "explain");
    const char *name = NULL, *ruled_out = NULL;
    double cost_s = 0;
    int32_t path = SUMAC_PATH_NONE;
    size_t count = sumac_explanation_candidates(explanation), index = 0;
    while (sumac_explanation_candidate(explanation, index, &path, &name, &cost_s, &ruled_out) &&
           path != sumac_explanation_chosen(explanation)) {
        index++;
    }
    if (index == count || ruled_out != NULL) {
        fprintf(stderr, "Error: no path is chosen:\n%s", sumac_explanation_text(explanation));
        exit(EXIT_FAILURE);
    }
    if (rank == 0) {
        printf("1 Mi floats go by %s, which should take %.0f us\n", name, cost_s * 1e6);
    }
    sumac_explanation_free(explanation);
}

int main(void) {
    sumac_comm *comm;
    check(sumac_join(NULL, &comm), "join");
    rank = sumac_comm_rank(comm);
    ranks = sumac_comm_size(comm);
    if (ranks < 2 || ranks > RANKS_MAX) {
        fprintf(stderr, "Error: between 2 and %d ranks\n", RANKS_MAX);
        return EXIT_FAILURE;
    }
    reductions(comm);
    movements(comm);
    messages(comm);
    split(comm);
    explain(comm);
    check(sumac_barrier(comm, NULL, NULL), "barrier");
    check(sumac_comm_leave(&comm, -1), "leave");
    if (rank == 0) {
        printf("all collectives are right\n");
    }
    return EXIT_SUCCESS;
}
