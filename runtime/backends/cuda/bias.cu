// Biases added to outputs, and their gradients; see bias.py.

struct AddBias {
    const float* bias;
    float b;
    __device__ void enter(u32 channel) { b = bias[channel]; }
    __device__ float operator()(const float (&v)[1]) const { return v[0] + b; }
};

// y[n, k, i] += b[k]
extern "C" __global__ void __launch_bounds__(THREADS) bias_add(
    float* y, i64 y_stride, const float* b, u32 hw, u32 inner, u32 chunks, int width) {
    const Source in[] = {{y, y_stride}};
    map_channels(in, y, y_stride, hw, inner, chunks, width, AddBias{b, 0});
}

// partials[k][s] = sum of this share of dy[:, k]
extern "C" __global__ void __launch_bounds__(THREADS) bias_sums(
    const float* dy, i64 dy_stride, u32 hw, u32 count, u32 splits, u32 share, int width, double* partials) {
    const Source in[] = {{dy, dy_stride}};
    channel_sums(in, Split{hw, count, splits, share}, partials, width,
                 [](const float (&v)[1], float& a, float&) { a += v[0]; });
}

constexpr int COLUMNS = 32;  // of dy that a block of bias_column_sums sums

// The same where a channel has one number an image: dy (N, K), COLUMNS columns a block, and `share` images a split.
// Threads of a row of COLUMNS read neighbours; the rows take turns at the images.
extern "C" __global__ void __launch_bounds__(THREADS) bias_column_sums(
    const float* dy, i64 dy_stride, u32 n, u32 k, u32 splits, u32 share, double* partials) {
    __shared__ double held[THREADS];
    const u32 block = blockIdx.x / splits, part = blockIdx.x - block * splits;
    const u32 column = block * COLUMNS + threadIdx.x % COLUMNS;
    const u32 end = min((part + 1) * share, n);
    double sum = 0;
    if (column < k)
        for (u32 image = part * share + threadIdx.x / COLUMNS; image < end; image += THREADS / COLUMNS)
            sum += dy[image * dy_stride + column];
    held[threadIdx.x] = sum;
    __syncthreads();
    for (int half = THREADS / 2; half >= COLUMNS; half /= 2) {
        if (threadIdx.x < half) held[threadIdx.x] += held[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x < COLUMNS && column < k) {
        partials[2 * (i64(column) * splits + part)] = held[threadIdx.x];
        partials[2 * (i64(column) * splits + part) + 1] = 0;
    }
}

// db[k] = sum of its partials
extern "C" __global__ void __launch_bounds__(THREADS) bias_finish(
    const double* partials, u32 splits, u32 channels, float* db, int accumulate) {
    double sum, unused;
    u32 k;
    if (join_sums(partials, splits, channels, k, sum, unused)) db[k] = (accumulate ? db[k] : 0.0f) + float(sum);
}
