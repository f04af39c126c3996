// Stochastic gradient descent in two kernels, so that a gradient which is not finite never touches a weight: of one
// parameter, or of many in a table; see sgd.py.

template <bool INSIDE>
__device__ __forceinline__ bool all_finite(const Share<4>& share, const float* dw, i64 size) {
    float value[UNROLL][4];
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) load<INSIDE>(dw, share.index(k), size, value[k]);
    bool finite = true;
#pragma unroll
    for (int k = 0; k < UNROLL; ++k)
#pragma unroll
        for (int w = 0; w < 4; ++w) finite = finite && value[k][w] - value[k][w] == 0;
    return finite;
}

// Sets not_finite if any of dw is a NaN or an infinity. Every thread that writes writes the same 1.
extern "C" __global__ void __launch_bounds__(THREADS) sgd_check(
    const float* dw, i64 size, u32 chunks, StepRecord* step) {
    const Share<4> share(chunks);
    const bool finite = share.inside(size) ? all_finite<true>(share, dw, size) : all_finite<false>(share, dw, size);
    if (!finite) step->not_finite = 1;
}

struct Rule {
    float rate, momentum, decay, unscale;
    bool nesterov;
};

// All loads come before the first store: the compiler cannot know that w and v are not each other's bytes.
template <bool INSIDE, bool MOMENTUM>
__device__ __forceinline__ void update_share(
    const Share<4>& share, const float* dw, float* w, float* v, i64 size, Rule rule) {
    float gradient[UNROLL][4], weight[UNROLL][4], velocity[UNROLL][4];
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
        load<INSIDE>(dw, share.index(k), size, gradient[k]);
        load<INSIDE>(w, share.index(k), size, weight[k]);
        if (MOMENTUM) load<INSIDE>(v, share.index(k), size, velocity[k]);
    }
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float change = gradient[k][j] * rule.unscale + rule.decay * weight[k][j];
            if (MOMENTUM) {
                velocity[k][j] = velocity[k][j] * rule.momentum + change;
                change = rule.nesterov ? change + rule.momentum * velocity[k][j] : velocity[k][j];
            }
            weight[k][j] -= change * rule.rate;
        }
        store<INSIDE>(w, share.index(k), size, weight[k]);
        if (MOMENTUM) store<INSIDE>(v, share.index(k), size, velocity[k]);
    }
}

__device__ __forceinline__ void update(
    const Share<4>& share, const float* dw, float* w, float* v, i64 size, Rule rule) {
    if (v && share.inside(size))
        update_share<true, true>(share, dw, w, v, size, rule);
    else if (v)
        update_share<false, true>(share, dw, w, v, size, rule);
    else if (share.inside(size))
        update_share<true, false>(share, dw, w, v, size, rule);
    else
        update_share<false, false>(share, dw, w, v, size, rule);
}

// With g = dw * unscale + decay * w: v = momentum * v + g; w -= lr * (v, or g + momentum * v for Nesterov). Without
// momentum (v is null) w -= lr * g. Nothing while not_finite is set.
extern "C" __global__ void __launch_bounds__(THREADS) sgd_update(
    const float* dw, float* w, float* v, i64 size, u32 chunks, const StepRecord* step, float momentum, float decay,
    int nesterov) {
    if (step->not_finite) return;
    const Rule rule{step->lr, momentum, decay, step->unscale, nesterov != 0};
    update(Share<4>(chunks), dw, w, v, size, rule);
}

constexpr int UPDATES = 96;  // parameters in a table: the arguments of a kernel have 4 KiB in all

// One parameter; its part of the grid begins at block `first`. vdnn.runtime.backends.cuda.source.STRUCTS
struct Update {
    const float* dw;
    float *w, *v;
    i64 size;
    float decay;
    u32 first;
};

struct Updates {
    Update of[UPDATES];
};
static_assert(sizeof(Updates) == 40 * UPDATES, "an update has 40 bytes");

// sgd_check of `count` parameters
extern "C" __global__ void __launch_bounds__(THREADS) sgd_check_all(
    const __grid_constant__ Updates table, u32 count, StepRecord* step) {
    const Update& one = row_of_block(table, count);
    const Share<4> share(0, blockIdx.x - one.first);
    const bool finite =
        share.inside(one.size) ? all_finite<true>(share, one.dw, one.size) : all_finite<false>(share, one.dw, one.size);
    if (!finite) step->not_finite = 1;
}

// sgd_update of `count` parameters
extern "C" __global__ void __launch_bounds__(THREADS) sgd_update_all(
    const __grid_constant__ Updates table, u32 count, const StepRecord* step, float momentum, int nesterov) {
    if (step->not_finite) return;
    const Update& one = row_of_block(table, count);
    const Rule rule{step->lr, momentum, one.decay, step->unscale, nesterov != 0};
    update(Share<4>(0, blockIdx.x - one.first), one.dw, one.w, one.v, one.size, rule);
}
