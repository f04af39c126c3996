// Stochastic gradient descent in two kernels, so that a gradient which is not finite never touches a weight; see sgd.py.

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
    float rate, momentum, decay;
    bool nesterov;
};

template <bool INSIDE>
__device__ __forceinline__ void update_share(
    const Share<4>& share, const float* dw, float* w, float* v, i64 size, Rule rule) {
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
        const i64 i = share.index(k);
        if (!INSIDE && i >= size) return;
        float gradient[4], weight[4], velocity[4] = {};
        load<INSIDE>(dw, i, size, gradient);
        load<INSIDE>(w, i, size, weight);
        if (v) load<INSIDE>(v, i, size, velocity);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float change = gradient[j] + rule.decay * weight[j];
            if (v) {
                velocity[j] = velocity[j] * rule.momentum + change;
                change = rule.nesterov ? change + rule.momentum * velocity[j] : velocity[j];
            }
            weight[j] -= change * rule.rate;
        }
        store<INSIDE>(w, i, size, weight);
        if (v) store<INSIDE>(v, i, size, velocity);
    }
}

// v = momentum * v + dw + decay * w; w -= lr * (v, or dw + decay * w + momentum * v for Nesterov). Without momentum
// (v is null) w -= lr * (dw + decay * w). Nothing while not_finite is set.
extern "C" __global__ void __launch_bounds__(THREADS) sgd_update(
    const float* dw, float* w, float* v, i64 size, u32 chunks, const StepRecord* step, float momentum, float decay,
    int nesterov) {
    if (step->not_finite) return;
    const Rule rule{step->lr, momentum, decay, nesterov != 0};
    const Share<4> share(chunks);
    if (share.inside(size))
        update_share<true>(share, dw, w, v, size, rule);
    else
        update_share<false>(share, dw, w, v, size, rule);
}
