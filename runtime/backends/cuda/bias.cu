// Biases added to outputs, with or without a ReLU after them, and their gradients; see bias.py.

template <bool RECTIFIES>
struct AddBias {
    static constexpr int CONSTANTS = 1;
    const float* bias;
    float k[CONSTANTS];
    __device__ void enter(u32 channel) { k[0] = bias[channel]; }
    __device__ float operator()(const float (&v)[1]) const {
        const float y = v[0] + k[0];
        return RECTIFIES ? rectified(y) : y;
    }
};

// y[n, k, i] += b[k], or max(y[n, k, i] + b[k], 0)
extern "C" __global__ void __launch_bounds__(THREADS) bias_add(
    Real* y, i64 y_stride, const float* b, u32 hw, u32 inner, u32 chunks, int width, int rectifies) {
    const Source in[] = {{y, y_stride}};
    if (rectifies)
        map_channels(in, y, y_stride, hw, inner, chunks, width, AddBias<true>{b, {}});
    else
        map_channels(in, y, y_stride, hw, inner, chunks, width, AddBias<false>{b, {}});
}

struct Sum {
    static constexpr int CONSTANTS = 0;
    __device__ void enter(u32) {}
    __device__ void operator()(const float (&v)[1], float& a, float&) const { a += v[0]; }
};

// partials of channel k: the sum of this block's share of dy[:, k]
extern "C" __global__ void __launch_bounds__(THREADS) bias_sums(
    const Real* dy, i64 dy_stride, u32 channels, u32 hw, u32 count, u32 splits, u32 share, int width,
    double* partials) {
    const Source in[] = {{dy, dy_stride}};
    channel_sums(in, Split{hw, count, splits, share}, channels, partials, width, Sum{});
}

struct Passed {
    static constexpr int CONSTANTS = 0;
    __device__ void enter(u32) {}
    __device__ float operator()(const float (&v)[2], float& a, float&) const {
        const float dx = v[0] > 0 ? v[1] : 0.0f;
        a += dx;
        return dx;
    }
};

// dx = dy where y > 0, else 0, and the sums of dx in the order of bias_sums. dx may be the bytes of dy.
extern "C" __global__ void __launch_bounds__(THREADS) relu_bias_sums(
    const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx, i64 dx_stride, u32 channels, u32 hw,
    u32 count, u32 splits, u32 share, int width, double* partials) {
    const Source in[] = {{y, y_stride}, {dy, dy_stride}};
    map_and_sum_channels(
        in, Target{dx, dx_stride}, Split{hw, count, splits, share}, channels, partials, width, Passed{});
}

// db[k] = sum of its partials
extern "C" __global__ void __launch_bounds__(THREADS) bias_finish(
    const double* partials, u32 splits, u32 channels, float* db, int accumulate) {
    double sum, unused;
    u32 k;
    if (join_sums(partials, splits, channels, k, sum, unused)) db[k] = (accumulate ? db[k] : 0.0f) + float(sum);
}
