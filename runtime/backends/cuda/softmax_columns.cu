// Softmax of scores that lie as [K][N], as classifiers of CHWN networks make them; see softmax.py.
//
// A block has COLUMN_IMAGES images, neighbours in memory, and some of their categories, which its warps share. The first
// launch finds the largest score and the sum of every image and share, the second joins them in a fixed order. It begins
// where the first has ended: what that has read last is still in the cache.

constexpr int COLUMN_IMAGES = 32;
constexpr int COLUMN_ROWS = THREADS / COLUMN_IMAGES;
constexpr int COLUMN_LOADS = 16;  // that a thread starts before it waits for the first

struct ScoreColumn {
    u32 image, row, split;
    int start, end;

    __device__ ScoreColumn(u32 block, u32 tiles, int k, int share) {
        split = block / tiles;
        image = (block - split * tiles) * COLUMN_IMAGES + threadIdx.x % COLUMN_IMAGES;
        row = threadIdx.x / COLUMN_IMAGES;
        start = int(split) * share, end = min(start + share, k);
    }
};

// The largest score of an image and the sum of exp(score - largest), of all threads of a block that have the image.
__device__ __forceinline__ void join_column(float& largest, double& total) {
    __shared__ float most[THREADS];
    __shared__ double held[THREADS];
    const u32 lane = threadIdx.x % COLUMN_IMAGES;
    most[threadIdx.x] = largest, held[threadIdx.x] = total;
    __syncthreads();
    float found = minus_infinity();
    for (u32 r = 0; r < COLUMN_ROWS; ++r) found = fmaxf(found, most[r * COLUMN_IMAGES + lane]);
    double sum = 0;
    for (u32 r = 0; r < COLUMN_ROWS; ++r)
        sum += held[r * COLUMN_IMAGES + lane] * relative(most[r * COLUMN_IMAGES + lane], found);
    largest = found, total = sum;
    __syncthreads();
}

// Adds `more`, whose exponentials are relative to `its`, to a sum whose own are relative to `largest`.
__device__ __forceinline__ void add_column(float& largest, double& total, float its, double more) {
    const float both = fmaxf(largest, its);
    total = total * relative(largest, both) + more * relative(its, both);
    largest = both;
}

extern "C" __global__ void __launch_bounds__(THREADS) softmax_columns_sum(
    const Real* x, u32 n, int k, u32 tiles, int share, double* totals, float* mosts) {
    const ScoreColumn at(blockIdx.x, tiles, k, share);
    float largest = minus_infinity();
    double total = 0;
    for (int first = at.start + int(at.row); at.image < n && first < at.end; first += COLUMN_ROWS * COLUMN_LOADS) {
        float value[COLUMN_LOADS], most = minus_infinity(), sum = 0;
#pragma unroll
        for (int j = 0; j < COLUMN_LOADS; ++j) {
            const int i = first + j * COLUMN_ROWS;
            value[j] = i < at.end ? float(x[i64(i) * n + at.image]) : minus_infinity();
        }
#pragma unroll
        for (int j = 0; j < COLUMN_LOADS; ++j) most = fmaxf(most, value[j]);
#pragma unroll
        for (int j = 0; j < COLUMN_LOADS; ++j) sum += relative(value[j], most);
        add_column(largest, total, most, sum);
    }
    join_column(largest, total);
    if (at.row != 0 || at.image >= n) return;
    const i64 place = i64(at.split) * n + at.image;
    mosts[place] = largest, totals[place] = total;
}

extern "C" __global__ void __launch_bounds__(THREADS) softmax_columns(
    const Real* x, Real* y, u32 n, int k, u32 tiles, int share, u32 splits, const double* totals, const float* mosts) {
    const ScoreColumn at(tiles * splits - 1 - blockIdx.x, tiles, k, share);
    float largest = minus_infinity();
    double total = 0;
    for (u32 s = at.row; at.image < n && s < splits; s += COLUMN_ROWS)
        add_column(largest, total, mosts[i64(s) * n + at.image], totals[i64(s) * n + at.image]);
    join_column(largest, total);
    if (at.image >= n) return;
    const float factor = float(1 / total);
    for (int first = at.start + int(at.row); first < at.end; first += COLUMN_ROWS * COLUMN_LOADS) {
        float value[COLUMN_LOADS];
#pragma unroll
        for (int j = 0; j < COLUMN_LOADS; ++j) {
            const int i = first + j * COLUMN_ROWS;
            value[j] = i < at.end ? float(x[i64(i) * n + at.image]) : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < COLUMN_LOADS; ++j) {
            const int i = first + j * COLUMN_ROWS;
            if (i < at.end) y[i64(i) * n + at.image] = relative(value[j], largest) * factor;
        }
    }
}
