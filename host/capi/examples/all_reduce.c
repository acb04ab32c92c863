/* The shortest program: every rank contributes its number, and all get the sum.
 *
 *   cc -std=c11 all_reduce.c -o all_reduce $(pkg-config --cflags --libs sumac)
 *   sumac run -n 4 ./all_reduce
 */
#include <stdio.h>
#include <stdlib.h>
#include <sumac.h>

/* Print what Rust would print, and end this rank. */
static void check(sumac_status status) {
    if (status != SUMAC_OK) {
        fprintf(stderr, "Error: %s\n", sumac_last_error());
        exit(EXIT_FAILURE);
    }
}

int main(void) {
    enum { COUNT = 1 << 20 };
    sumac_comm *comm;
    sumac_memory *memory;
    sumac_outcome *outcome;

    /* What torchrun, mpirun, srun or `sumac run` set, and SUMAC_*. */
    check(sumac_join(NULL, &comm));
    /* Zero-copy where a device of this host shares memory; any other memory works as well. */
    check(sumac_memory_alloc(comm, COUNT * sizeof(float), &memory));
    float *gradients = sumac_memory_data(memory);
    for (size_t i = 0; i < COUNT; i++) {
        gradients[i] = (float)sumac_comm_rank(comm);
    }

    /* In place: input and output are the same. */
    check(sumac_all_reduce(comm, gradients, gradients, COUNT, SUMAC_F32, SUMAC_SUM, NULL, &outcome));
    printf("rank %u of %u: %g by %s\n", sumac_comm_rank(comm), sumac_comm_size(comm), gradients[COUNT - 1],
           sumac_outcome_text(outcome));

    sumac_outcome_free(outcome);
    sumac_memory_free(memory);
    check(sumac_comm_leave(&comm, -1));
    return EXIT_SUCCESS;
}
