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

struct Sum {
    __device__ void enter(u32) {}
    __device__ void operator()(const float (&v)[1], float& a, float&) const { a += v[0]; }
};

// partials[k][s] = sum of this share of dy[:, k]
extern "C" __global__ void __launch_bounds__(THREADS) bias_sums(
    const float* dy, i64 dy_stride, u32 channels, u32 hw, u32 count, u32 splits, u32 share, int width,
    double* partials) {
    const Source in[] = {{dy, dy_stride}};
    channel_sums(in, Split{hw, count, splits, share}, channels, partials, width, Sum{});
}

// db[k] = sum of its partials
extern "C" __global__ void __launch_bounds__(THREADS) bias_finish(
    const double* partials, u32 splits, u32 channels, float* db, int accumulate) {
    double sum, unused;
    u32 k;
    if (join_sums(partials, splits, channels, k, sum, unused)) db[k] = (accumulate ? db[k] : 0.0f) + float(sum);
}
