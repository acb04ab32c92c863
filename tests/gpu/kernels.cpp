// Runs the GPU kernels on the host. The test `kernels_match_the_cpu_bit_for_bit` of `sumac` sends jobs on standard
// input and compares the results with the CPU kernels'.
//
// A job: kernel (0 land, 1 scale), type, operator, threads; three buffers (src, own, dst), each as (length, offset from
// 16-byte alignment, index of the earlier buffer that it aliases, or 3); the parameters with null pointers; the
// buffers' bytes. The reply is dst with 16 guard bytes on each side.

#define SUMAC_HOST
#include "../../host/src/gpu/cuda/kernels.cu"
#include <cstdio>
#include <cstdlib>
#include <cstring>

static void take(void *to, size_t len) {
    if (len && fread(to, len, 1, stdin) != 1) exit(3);
}

struct Buffer {
    u64 len, off, same_as;
};

int main() {
    u64 job[4];
    while (fread(job, sizeof job, 1, stdin) == 1) {
        Buffer buffers[3];
        Landing landing;
        Scaling scaling;
        take(buffers, sizeof buffers);
        if (job[0] == 0) take(&landing, sizeof landing);
        else take(&scaling, sizeof scaling);
        unsigned char *memory[3], *start[3];
        for (int i = 0; i < 3; i++) {
            memory[i] = (unsigned char *)aligned_alloc(16, (buffers[i].len + 63) / 16 * 16);
            if (!memory[i]) return 4;
            memset(memory[i], 0xa5, (buffers[i].len + 63) / 16 * 16);
            start[i] = memory[i] + 16 + buffers[i].off;
            if (buffers[i].same_as < 3) start[i] = start[buffers[i].same_as];
            else take(start[i], buffers[i].len);
        }
        int result;
        if (job[0] == 0) {
            landing.src = start[0], landing.own = start[1], landing.dst = start[2];
            result = sumac_host_land((u32)job[1], (u32)job[2], &landing, job[3]);
        } else {
            scaling.src = start[0], scaling.dst = start[2];
            result = sumac_host_scale((u32)job[1], &scaling, job[3]);
        }
        if (result) return 5;
        fwrite(start[2] - 16, buffers[2].len + 32, 1, stdout);
        fflush(stdout);
        for (int i = 0; i < 3; i++) free(memory[i]);
    }
}
