// Batch normalisation, backward; see batchnorm.py and batchnorm.cu. g is the gradient that counts: dy, or with a ReLU
// dy where y > 0, else 0.

constexpr int NO_MASK = 0, BY_X = 1, BY_Y = 2;  // how it is known where y > 0: not asked, computed again from x, read

struct Norm {
    const float *mean, *invstd, *weight, *bias;
};

// Sums of g and of g * (x - mean). v: x, dy, and BY_Y: y, dz; returns what dz becomes.
template <int MASK>
struct GradientTerms {
    static constexpr int CONSTANTS = MASK == BY_X ? 3 : 1;
    Norm norm;
    float k[CONSTANTS];
    __device__ void enter(u32 c) {
        k[0] = norm.mean[c];
        if constexpr (MASK == BY_X) k[1] = norm.invstd[c] * norm.weight[c], k[2] = norm.bias[c];
    }
    template <int COUNT>
    __device__ float operator()(const float (&v)[COUNT], float& a, float& b) const {
        const float deviation = v[0] - k[0];
        float g = v[1];
        if constexpr (MASK == BY_X) g = deviation * k[1] + k[2] > STORED_AS_ZERO<Real> ? g : 0.0f;
        if constexpr (MASK == BY_Y) g = v[2] > 0 ? g : 0.0f;
        a += g;
        b += deviation * g;
        if constexpr (COUNT == 4) return v[3] + g;
        return g;
    }
};

// partials: [splits][C][2]
extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_gradient_sums(
    const Real* x, i64 x_stride, const Real* dy, i64 dy_stride, const float* mean, u32 channels, u32 hw, u32 count,
    u32 splits, u32 share, int width, double* partials) {
    const Source in[] = {{x, x_stride}, {dy, dy_stride}};
    const GradientTerms<NO_MASK> terms{{mean, nullptr, nullptr, nullptr}, {}};
    channel_sums(in, Split{hw, count, splits, share}, channels, partials, width, terms);
}

extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_gradient_sums_by_x(
    const Real* x, i64 x_stride, const Real* dy, i64 dy_stride, const float* mean, const float* invstd,
    const float* weight, const float* bias, u32 channels, u32 hw, u32 count, u32 splits, u32 share, int width,
    double* partials) {
    const Source in[] = {{x, x_stride}, {dy, dy_stride}};
    const GradientTerms<BY_X> terms{{mean, invstd, weight, bias}, {}};
    channel_sums(in, Split{hw, count, splits, share}, channels, partials, width, terms);
}

// dz = g, or dz += g
extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_gradient_sums_by_y(
    const Real* x, i64 x_stride, const Real* dy, i64 dy_stride, const Real* y, i64 y_stride, Real* dz, i64 dz_stride,
    const float* mean, u32 channels, u32 hw, u32 count, u32 splits, u32 share, int width, double* partials,
    int accumulate) {
    const Split split{hw, count, splits, share};
    const GradientTerms<BY_Y> terms{{mean, nullptr, nullptr, nullptr}, {}};
    const Target out{dz, dz_stride};
    if (accumulate) {
        const Source in[] = {{x, x_stride}, {dy, dy_stride}, {y, y_stride}, {dz, dz_stride}};
        map_and_sum_channels(in, out, split, channels, partials, width, terms);
    } else {
        const Source in[] = {{x, x_stride}, {dy, dy_stride}, {y, y_stride}};
        map_and_sum_channels(in, out, split, channels, partials, width, terms);
    }
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

// dx = weight * invstd * (g - means[1] - (x - mean) * means[0]). v: x, dy, BY_Y: y, and dx where it is added to.
template <int MASK>
struct Gradient {
    static constexpr int CONSTANTS = MASK == BY_X ? 5 : 4, INPUTS = MASK == BY_Y ? 3 : 2;
    Norm norm;
    const float* means;
    float k[CONSTANTS];
    __device__ void enter(u32 c) {
        k[0] = norm.mean[c], k[1] = norm.weight[c] * norm.invstd[c], k[2] = means[2 * c], k[3] = means[2 * c + 1];
        if constexpr (MASK == BY_X) k[4] = norm.bias[c];
    }
    template <int COUNT>
    __device__ float operator()(const float (&v)[COUNT]) const {
        const float deviation = v[0] - k[0];
        float g = v[1];
        if constexpr (MASK == BY_X) g = deviation * k[1] + k[4] > STORED_AS_ZERO<Real> ? g : 0.0f;
        if constexpr (MASK == BY_Y) g = v[2] > 0 ? g : 0.0f;
        const float dx = (g - deviation * k[2] - k[3]) * k[1];
        if constexpr (COUNT > INPUTS) return v[INPUTS] + dx;
        return dx;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_gradient(
    const Real* x, i64 x_stride, const Real* dy, i64 dy_stride, Real* dx, i64 dx_stride, const float* mean,
    const float* invstd, const float* weight, const float* means, u32 hw, u32 inner, u32 chunks, u32 count, int width,
    int accumulate) {
    const Gradient<NO_MASK> gradient{{mean, invstd, weight, nullptr}, means, {}};
    const Target out{dx, dx_stride};
    if (accumulate) {
        const Source in[] = {{x, x_stride}, {dy, dy_stride}, {dx, dx_stride}};
        map_batch(in, out, hw, inner, chunks, count, width, gradient);
    } else {
        const Source in[] = {{x, x_stride}, {dy, dy_stride}};
        map_batch(in, out, hw, inner, chunks, count, width, gradient);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_gradient_by_x(
    const Real* x, i64 x_stride, const Real* dy, i64 dy_stride, Real* dx, i64 dx_stride, const float* mean,
    const float* invstd, const float* weight, const float* bias, const float* means, u32 hw, u32 inner, u32 chunks,
    u32 count, int width, int accumulate) {
    const Gradient<BY_X> gradient{{mean, invstd, weight, bias}, means, {}};
    const Target out{dx, dx_stride};
    if (accumulate) {
        const Source in[] = {{x, x_stride}, {dy, dy_stride}, {dx, dx_stride}};
        map_batch(in, out, hw, inner, chunks, count, width, gradient);
    } else {
        const Source in[] = {{x, x_stride}, {dy, dy_stride}};
        map_batch(in, out, hw, inner, chunks, count, width, gradient);
    }
}

// Where dz is a sum, from which g cannot be had.
extern "C" __global__ void __launch_bounds__(THREADS) batchnorm_gradient_by_y(
    const Real* x, i64 x_stride, const Real* dy, i64 dy_stride, const Real* y, i64 y_stride, Real* dx, i64 dx_stride,
    const float* mean, const float* invstd, const float* weight, const float* means, u32 hw, u32 inner, u32 chunks,
    u32 count, int width, int accumulate) {
    const Gradient<BY_Y> gradient{{mean, invstd, weight, nullptr}, means, {}};
    const Target out{dx, dx_stride};
    if (accumulate) {
        const Source in[] = {{x, x_stride}, {dy, dy_stride}, {y, y_stride}, {dx, dx_stride}};
        map_batch(in, out, hw, inner, chunks, count, width, gradient);
    } else {
        const Source in[] = {{x, x_stride}, {dy, dy_stride}, {y, y_stride}};
        map_batch(in, out, hw, inner, chunks, count, width, gradient);
    }
}
