// Reduction in flight: the bulk copy engine of sm_90 and later fetches tiles into shared memory and adds them to global
// memory, and no thread touches an element.
//
// Compiled once for each type and operator: SUMAC_BULK is what stands behind `bulk_group.` in PTX. One thread of a block
// drives the engine; tiles are apart, so each address is written once by each launch, and the bits do not depend on order.
// Addresses and lengths are multiples of 16.

typedef unsigned int u32;
typedef unsigned long long u64;

const int STAGES = 4;
const u32 TILE = 8192;

static __device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

extern "C" __global__ void __launch_bounds__(32)
    sumac_bulk(const unsigned char *src, unsigned char *dst, u64 len_bytes, const volatile u32 *stop) {
    __shared__ alignas(128) unsigned char stage[STAGES][TILE];
    __shared__ alignas(8) u64 full[STAGES];
    if (threadIdx.x != 0 || *stop) return;
    for (int s = 0; s < STAGES; s++) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&full[s])) : "memory");
    }
    // The engine sees the barriers.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    u64 tiles = (len_bytes + TILE - 1) / TILE;
    u64 mine = tiles > blockIdx.x ? (tiles - blockIdx.x + gridDim.x - 1) / gridDim.x : 0;
    auto begin = [&](u64 k) { return (blockIdx.x + k * gridDim.x) * TILE; };
    auto bytes = [&](u64 at) { return (u32)(len_bytes - at < TILE ? len_bytes - at : TILE); };
    auto fetch = [&](u64 k) {
        int s = (int)(k % STAGES);
        u64 at = begin(k);
        u32 barrier = shared_address(&full[s]);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes(at)) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_address(stage[s])),
                     "l"(__cvta_generic_to_global(src + at)), "r"(bytes(at)), "r"(barrier)
                     : "memory");
    };
    for (u64 k = 0; k < mine && k < STAGES; k++) fetch(k);
    for (u64 k = 0; k < mine; k++) {
        int s = (int)(k % STAGES);
        u64 at = begin(k);
        u32 parity = (u32)(k / STAGES) & 1, done;
        do {
            asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                         : "=r"(done)
                         : "r"(shared_address(&full[s])), "r"(parity)
                         : "memory");
        } while (!done);
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group." SUMAC_BULK " [%0], [%1], %2;" ::"l"(
                         __cvta_generic_to_global(dst + at)),
                     "r"(shared_address(stage[s])), "r"(bytes(at))
                     : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        // The tile before has left its stage: the next one for it may come.
        if (k >= 1 && k - 1 + STAGES < mine) {
            asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
            fetch(k - 1 + STAGES);
        }
    }
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Two words, the second before the first, each in one piece.
extern "C" __global__ void __launch_bounds__(32) sumac_publish(volatile u64 *dst, u64 first, u64 second) {
    if (threadIdx.x != 0) return;
    dst[1] = second;
    __threadfence_system();
    dst[0] = first;
}
