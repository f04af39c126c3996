// Batch normalisation, forward; see batchnorm.py. hw = H * W, count = N * H * W, inner = C * H * W; in NHWC hw = 1,
// inner = C.

struct Deviation {
    static constexpr int CONSTANTS = 1;
    const Real* x;
    u32 hw;
    float k[CONSTANTS];
    __device__ void enter(u32 c) { k[0] = x[i64(c) * hw]; }
    __device__ void operator()(const float (&v)[1], float& a, float& b) const {
        const float deviation = v[0] - k[0];
        a += deviation;
        b += deviation * deviation;
    }
};

// Sums of x - shift and of its square, where shift is the channel's first number, so that a mean far from 0 costs no
// digits of the variance. partials: [splits][C][2].
extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_sums(
    const Real* x, i64 x_stride, u32 channels, u32 hw, u32 count, u32 splits, u32 share, int width,
    double* partials) {
    const Source in[] = {{x, x_stride}};
    channel_sums(in, Split{hw, count, splits, share}, channels, partials, width, Deviation{x, hw, {}});
}

// mean and invstd of each channel
extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_finish(
    const Real* x, u32 hw, u32 count, const double* partials, u32 splits, u32 channels, double eps, float* mean,
    float* invstd) {
    double sum, squares;
    u32 c;
    if (!join_sums(partials, splits, channels, c, sum, squares)) return;
    const double from_shift = sum / count;
    const double variance = squares / count - from_shift * from_shift;
    mean[c] = float(x[i64(c) * hw] + from_shift);
    invstd[c] = float(1 / sqrt((variance < 0 ? 0 : variance) + eps));  // a NaN is not below 0 and stays
}

// (x - mean) * (invstd * weight) + bias, and + z if there is one; what is below `floor` becomes it, a NaN stays a NaN.
// In inference `spread` is the variance, else invstd.
struct Normalize {
    static constexpr int CONSTANTS = 3;
    const float *mean, *spread, *weight, *bias;
    float eps, floor;
    int inference;
    float k[CONSTANTS];
    __device__ void enter(u32 c) {
        k[0] = mean[c], k[1] = inference ? weight[c] / sqrtf(spread[c] + eps) : spread[c] * weight[c], k[2] = bias[c];
    }
    template <int COUNT>
    __device__ float operator()(const float (&v)[COUNT]) const {
        float y = (v[0] - k[0]) * k[1] + k[2];
        if constexpr (COUNT == 2) y += v[1];
        return y < floor ? floor : y;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_normalize(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, const float* mean, const float* spread, const float* weight,
    const float* bias, float eps, float floor, int inference, u32 hw, u32 inner, u32 chunks, u32 count, int width) {
    const Source in[] = {{x, x_stride}};
    const Normalize normalize{mean, spread, weight, bias, eps, floor, inference, {}};
    map_batch(in, Target{y, y_stride}, hw, inner, chunks, count, width, normalize);
}

extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_normalize_and_add(
    const Real* x, i64 x_stride, const Real* z, i64 z_stride, Real* y, i64 y_stride, const float* mean,
    const float* spread, const float* weight, const float* bias, float eps, float floor, int inference, u32 hw,
    u32 inner, u32 chunks, u32 count, int width) {
    const Source in[] = {{x, x_stride}, {z, z_stride}};
    const Normalize normalize{mean, spread, weight, bias, eps, floor, inference, {}};
    map_batch(in, Target{y, y_stride}, hw, inner, chunks, count, width, normalize);
}

// running = (1 - momentum) * running + momentum * batch; unbias = count / (count - 1). One thread a channel.
struct Statistics {
    const float *mean, *invstd;
    float *running_mean, *running_var;
    double momentum, eps, unbias;
    u32 size, first;

    __device__ __forceinline__ void move(u32 c) const {
        if (c >= size) return;
        const double deviation = 1 / double(invstd[c]);
        const double variance = deviation * deviation - eps;
        const double batch = (variance < 0 ? 0 : variance) * unbias;
        running_mean[c] = float((1 - momentum) * running_mean[c] + momentum * mean[c]);
        running_var[c] = float((1 - momentum) * running_var[c] + momentum * batch);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_update_stats(
    const float* mean, const float* invstd, float* running_mean, float* running_var, u32 channels, double momentum,
    double eps, double unbias) {
    const Statistics one{mean, invstd, running_mean, running_var, momentum, eps, unbias, channels, 0};
    one.move(blockIdx.x * THREADS + threadIdx.x);
}

constexpr int NORMS = 62;  // norms in a table, see UPDATES in sgd.cu

// vdnn.runtime.backends.cuda.source.STRUCTS
struct Norms {
    Statistics of[NORMS];
};
static_assert(sizeof(Norms) == 64 * NORMS, "a norm has 64 bytes");

// The same of `count` norms.
extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_update_stats_all(
    const __grid_constant__ Norms table, u32 count) {
    const Statistics& one = row_of_block(table, count);
    one.move((blockIdx.x - one.first) * THREADS + threadIdx.x);
}
