// A product of two square matrices of f32, to be beside: what a program computes while its ranks communicate.
//
// Tiles of 64 by 64, of which each of 256 threads has 4 by 4 elements; n is a multiple of 64.

const int TILE = 64;
const int DEPTH = 16;

extern "C" __global__ void __launch_bounds__(256)
    sumac_product(const float *a, const float *b, float *c, unsigned int n) {
    __shared__ float left[DEPTH][TILE + 1];
    __shared__ float right[DEPTH][TILE];
    const int x = threadIdx.x % 16, y = threadIdx.x / 16;
    const unsigned long long row = (unsigned long long)blockIdx.y * TILE, column = (unsigned long long)blockIdx.x * TILE;
    float sum[4][4] = {};
    for (unsigned int k = 0; k < n; k += DEPTH) {
        for (int i = threadIdx.x; i < TILE * DEPTH; i += 256) {
            left[i % DEPTH][i / DEPTH] = a[(row + i / DEPTH) * n + k + i % DEPTH];
            right[i / TILE][i % TILE] = b[(unsigned long long)(k + i / TILE) * n + column + i % TILE];
        }
        __syncthreads();
        for (int d = 0; d < DEPTH; d++) {
            for (int i = 0; i < 4; i++) {
                for (int j = 0; j < 4; j++) sum[i][j] += left[d][y * 4 + i] * right[d][x * 4 + j];
            }
        }
        __syncthreads();
    }
    for (int i = 0; i < 4; i++) {
        for (int j = 0; j < 4; j++) c[(row + y * 4 + i) * n + column + x * 4 + j] = sum[i][j];
    }
}
