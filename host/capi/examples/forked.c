/* A process that a rank forks, as data loaders do: its calls return SUMAC_ERROR_FORKED, and the job goes on.
 *
 *   cc -std=c11 forked.c -o forked $(pkg-config --cflags --libs sumac)
 *   sumac run -n 4 ./forked
 *   sumac run -n 4 ./forked --_exit       children end without running what is registered with atexit()
 */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sumac.h>
#include <sys/wait.h>
#include <unistd.h>

enum { COUNT = 1000, CHILDREN = 2, CHILD_LIMIT_S = 60 };

static int32_t values[COUNT];
static uint32_t ranks;

static void check(sumac_status status, const char *what) {
    if (status != SUMAC_OK) {
        fprintf(stderr, "Error: %s: %s: %s\n", what, sumac_status_name(status), sumac_last_error());
        exit(EXIT_FAILURE);
    }
}

static void sum(sumac_comm *comm) {
    for (size_t i = 0; i < COUNT; i++) {
        values[i] = 1;
    }
    check(sumac_all_reduce(comm, values, values, COUNT, SUMAC_I32, SUMAC_SUM, NULL, NULL), "all_reduce");
    if (values[0] != (int32_t)ranks || values[COUNT - 1] != (int32_t)ranks) {
        fprintf(stderr, "Error: a wrong sum\n");
        exit(EXIT_FAILURE);
    }
}

/* Use everything that was the parent's. Returns the number of the first call that did not say that this is a child. */
static int use(sumac_comm *comm, sumac_request *request, const int32_t *memory) {
    sumac_comm *group = comm;
    sumac_request *started = request;
    const sumac_status statuses[] = {
        sumac_all_reduce(comm, values, values, COUNT, SUMAC_I32, SUMAC_SUM, NULL, NULL),
        sumac_barrier(comm, NULL, NULL),
        sumac_send(comm, values, sizeof values, 0, 0),
        sumac_start_all_reduce(comm, values, values, COUNT, SUMAC_I32, SUMAC_SUM, NULL, &started),
        sumac_comm_split(comm, 0, 0, &group),
        sumac_wait(&request, NULL),
    };
    const int count = sizeof statuses / sizeof statuses[0];
    for (int call = 0; call < count; call++) {
        if (statuses[call] != SUMAC_ERROR_FORKED) {
            return call + 1;
        }
    }
    if (sumac_last_error_status() != SUMAC_ERROR_FORKED || strstr(sumac_last_error(), "fork") == NULL) {
        return count + 1;
    }
    if (started != NULL || group != NULL || memory[0] != 7 || memory[COUNT - 1] != 7) {
        return count + 2;
    }
    sumac_comm_free(comm);
    return 0;
}

int main(int argc, char **argv) {
    const int runs_handlers = argc < 2 || strcmp(argv[1], "--_exit") != 0;
    sumac_comm *comm;
    sumac_request *request;
    sumac_memory *memory;
    check(sumac_join(NULL, &comm), "join");
    ranks = sumac_comm_size(comm);
    check(sumac_memory_alloc(comm, sizeof values, &memory), "memory");
    int32_t *shared = sumac_memory_data(memory);
    for (size_t i = 0; i < COUNT; i++) {
        shared[i] = 7;
    }
    for (int number = 0; number < CHILDREN; number++) {
        int status = 0;
        sum(comm);
        /* The parent waits for this after the fork. */
        check(sumac_start_barrier(comm, NULL, &request), "start a barrier");
        const pid_t child = fork();
        if (child == 0) {
            /* A call that hangs ends the child by a signal. */
            alarm(CHILD_LIMIT_S);
            const int failed = use(comm, request, shared);
            if (runs_handlers) {
                exit(failed);
            }
            _exit(failed);
        }
        if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
            fprintf(stderr, "Error: child %d of %d: status %d\n", number, (int)child, status);
            return EXIT_FAILURE;
        }
        check(sumac_wait(&request, NULL), "wait for the barrier");
        sum(comm);
    }
    const uint32_t rank = sumac_comm_rank(comm);
    sumac_memory_free(memory);
    check(sumac_comm_leave(&comm, -1), "leave");
    if (rank == 0) {
        printf("forked children change nothing\n");
    }
    return EXIT_SUCCESS;
}
