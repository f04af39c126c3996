// Batch normalisation; see batchnorm.py. hw = H * W, count = N * H * W, inner = C * H * W; in NHWC hw = 1, inner = C.

struct Deviation {
    const float* x;
    u32 hw;
    float shift;
    __device__ void enter(u32 c) { shift = x[i64(c) * hw]; }
    __device__ void operator()(const float (&v)[1], float& a, float& b) const {
        const float deviation = v[0] - shift;
        a += deviation;
        b += deviation * deviation;
    }
};

// Sums of x - shift and of its square, where shift is the channel's first number, so that a mean far from 0 costs no
// digits of the variance. partials: [C][splits][2].
extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_sums(
    const float* x, i64 x_stride, u32 channels, u32 hw, u32 count, u32 splits, u32 share, int width,
    double* partials) {
    const Source in[] = {{x, x_stride}};
    channel_sums(in, Split{hw, count, splits, share}, channels, partials, width, Deviation{x, hw, 0});
}

// mean and invstd of each channel
extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_finish(
    const float* x, u32 hw, u32 count, const double* partials, u32 splits, u32 channels, double eps, float* mean,
    float* invstd) {
    double sum, squares;
    u32 c;
    if (!join_sums(partials, splits, channels, c, sum, squares)) return;
    const double from_shift = sum / count;
    const double variance = squares / count - from_shift * from_shift;
    mean[c] = float(x[i64(c) * hw] + from_shift);
    invstd[c] = float(1 / sqrt((variance < 0 ? 0 : variance) + eps));  // a NaN is not below 0 and stays
}

// y = (x - mean) * (invstd * weight) + bias
struct Normalize {
    const float *mean, *invstd, *weight, *bias;
    float center, factor, offset;
    __device__ void enter(u32 c) { center = mean[c], factor = invstd[c] * weight[c], offset = bias[c]; }
    __device__ float operator()(const float (&v)[1]) const { return (v[0] - center) * factor + offset; }
};

extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_normalize(
    const float* x, i64 x_stride, float* y, i64 y_stride, const float* mean, const float* invstd, const float* weight,
    const float* bias, u32 hw, u32 inner, u32 chunks, int width) {
    const Source in[] = {{x, x_stride}};
    map_channels(in, y, y_stride, hw, inner, chunks, width, Normalize{mean, invstd, weight, bias, 0, 0, 0});
}

// y = (x - running_mean) * (weight / sqrt(running_var + eps)) + bias
struct Infer {
    const float *mean, *variance, *weight, *bias;
    float eps, center, factor, offset;
    __device__ void enter(u32 c) {
        center = mean[c], factor = weight[c] / sqrtf(variance[c] + eps), offset = bias[c];
    }
    __device__ float operator()(const float (&v)[1]) const { return (v[0] - center) * factor + offset; }
};

extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_inference(
    const float* x, i64 x_stride, float* y, i64 y_stride, const float* running_mean, const float* running_var,
    const float* weight, const float* bias, float eps, u32 hw, u32 inner, u32 chunks, int width) {
    const Source in[] = {{x, x_stride}};
    map_channels(in, y, y_stride, hw, inner, chunks, width,
                 Infer{running_mean, running_var, weight, bias, eps, 0, 0, 0});
}

// running = (1 - momentum) * running + momentum * batch; unbias = count / (count - 1). One thread a channel.
extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_update_stats(
    const float* mean, const float* invstd, float* running_mean, float* running_var, u32 channels, double momentum,
    double eps, double unbias) {
    const u32 c = blockIdx.x * THREADS + threadIdx.x;
    if (c >= channels) return;
    const double deviation = 1 / double(invstd[c]);
    const double variance = deviation * deviation - eps;
    const double batch = (variance < 0 ? 0 : variance) * unbias;
    running_mean[c] = float((1 - momentum) * running_mean[c] + momentum * mean[c]);
    running_var[c] = float((1 - momentum) * running_var[c] + momentum * batch);
}

struct GradientTerms {
    const float* mean;
    float center;
    __device__ void enter(u32 c) { center = mean[c]; }
    __device__ void operator()(const float (&v)[2], float& a, float& b) const {
        a += v[1];
        b += (v[0] - center) * v[1];
    }
};

// Sums of dy and of dy * (x - mean). partials: [C][splits][2].
extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_gradient_sums(
    const float* x, i64 x_stride, const float* dy, i64 dy_stride, const float* mean, u32 channels, u32 hw,
    u32 count, u32 splits, u32 share, int width, double* partials) {
    const Source in[] = {{x, x_stride}, {dy, dy_stride}};
    channel_sums(in, Split{hw, count, splits, share}, channels, partials, width, GradientTerms{mean, 0});
}

// dbias, dweight of each channel, and for dx: means[c] = {invstd * dweight / count, dbias / count} of this call.
extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_gradient_finish(
    const double* partials, u32 splits, u32 channels, u32 count, const float* invstd, float* dweight, float* dbias,
    float* means, int accumulate_weight, int accumulate_bias) {
    double bias_sum, weight_sum;
    u32 c;
    if (!join_sums(partials, splits, channels, c, bias_sum, weight_sum)) return;
    weight_sum *= invstd[c];
    dweight[c] = (accumulate_weight ? dweight[c] : 0.0f) + float(weight_sum);
    dbias[c] = (accumulate_bias ? dbias[c] : 0.0f) + float(bias_sum);
    means[2 * c] = float(weight_sum * invstd[c] / count);
    means[2 * c + 1] = float(bias_sum / count);
}

// dx = weight * invstd * (dy - means[1] - (x - mean) * means[0])
struct Gradient {
    const float *mean, *invstd, *weight, *means;
    float center, factor, slope, shift;
    __device__ void enter(u32 c) {
        center = mean[c], factor = weight[c] * invstd[c], slope = means[2 * c], shift = means[2 * c + 1];
    }
    template <int COUNT>
    __device__ float operator()(const float (&v)[COUNT]) const {
        const float dx = (v[1] - (v[0] - center) * slope - shift) * factor;
        if constexpr (COUNT == 3) return v[2] + dx;
        return dx;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_gradient(
    const float* x, i64 x_stride, const float* dy, i64 dy_stride, float* dx, i64 dx_stride, const float* mean,
    const float* invstd, const float* weight, const float* means, u32 hw, u32 inner, u32 chunks, int width,
    int accumulate) {
    const Gradient gradient{mean, invstd, weight, means, 0, 0, 0, 0};
    if (accumulate) {
        const Source in[] = {{x, x_stride}, {dy, dy_stride}, {dx, dx_stride}};
        map_channels(in, dx, dx_stride, hw, inner, chunks, width, gradient);
    } else {
        const Source in[] = {{x, x_stride}, {dy, dy_stride}};
        map_channels(in, dx, dx_stride, hw, inner, chunks, width, gradient);
    }
}
