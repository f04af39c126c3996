// Stochastic gradient descent in two kernels, so that a gradient which is not finite never touches a weight; see sgd.py.

// Sets not_finite if any of dw is a NaN or an infinity. Every thread that writes writes the same 1.
extern "C" __global__ void __launch_bounds__(THREADS) sgd_check(
    const float* dw, i64 size, u32 chunks, StepRecord* step) {
    const Share<4> share(chunks);
    float value[UNROLL][4];
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) load<4>(dw, share.index(k), size, value[k]);
    bool finite = true;
#pragma unroll
    for (int k = 0; k < UNROLL; ++k)
#pragma unroll
        for (int w = 0; w < 4; ++w) finite = finite && value[k][w] - value[k][w] == 0;
    if (!finite) step->not_finite = 1;
}

// v = momentum * v + dw + decay * w; w -= lr * (v, or dw + decay * w + momentum * v for Nesterov). Without momentum
// (v is null) w -= lr * (dw + decay * w). Nothing while not_finite is set.
extern "C" __global__ void __launch_bounds__(THREADS) sgd_update(
    const float* dw, float* w, float* v, i64 size, u32 chunks, const StepRecord* step, float momentum, float decay,
    int nesterov) {
    if (step->not_finite) return;
    const float rate = step->lr;
    const Share<4> share(chunks);
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
        const i64 i = share.index(k);
        if (i >= size) return;
        float gradient[4], weight[4], velocity[4] = {};
        load<4>(dw, i, size, gradient);
        load<4>(w, i, size, weight);
        if (v) load<4>(v, i, size, velocity);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float change = gradient[j] + decay * weight[j];
            if (v) {
                velocity[j] = velocity[j] * momentum + change;
                change = nesterov ? change + momentum * velocity[j] : velocity[j];
            }
            weight[j] -= change * rate;
        }
        store<4>(w, i, size, weight);
        if (v) store<4>(v, i, size, velocity);
    }
}
