// Softmax, cross-entropy and "was the first choice right"; see softmax_loss.py. One block an image of K scores.

struct Choice {
    float score;
    int index;
};

// The larger score; the first of equal ones; a NaN before everything, as it makes every probability one.
__device__ __forceinline__ Choice better(Choice a, Choice b) {
    const bool a_nan = a.score != a.score, b_nan = b.score != b.score;
    if (a_nan != b_nan) return a_nan ? a : b;
    if (a.score == b.score || a_nan) return a.index < b.index ? a : b;
    return a.score > b.score ? a : b;
}

__device__ __forceinline__ Choice best_of_block(Choice own) {
    __shared__ Choice held[THREADS];
    const int t = threadIdx.x;
    held[t] = own;
    __syncthreads();
    for (int half = THREADS / 2; half > 0; half /= 2) {
        if (t < half) held[t] = better(held[t], held[t + half]);
        __syncthreads();
    }
    return held[0];
}

// A label outside of 0 .. K - 1 gives a loss that is not a number: no host waits here to raise an error.
extern "C" __global__ void __launch_bounds__(THREADS) softmax_loss_forward(
    const Real* x, i64 x_stride, const int* labels, float* probs, float* loss, u8* correct, int k, float smoothing) {
    const i64 image = blockIdx.x;
    const Real* scores = x + image * x_stride;
    float* row = probs + image * k;
    Choice own{__int_as_float(0xff800000), 0x7fffffff};
    for (int i = threadIdx.x; i < k; i += THREADS) own = better(own, Choice{scores[i], i});
    const Choice first = best_of_block(own);
    double total = 0, shifted = 0;
    for (int i = threadIdx.x; i < k; i += THREADS) {
        const float score = scores[i] - first.score;
        row[i] = expf(score);
        total += row[i], shifted += score;
    }
    block_sums(total, shifted);
    for (int i = threadIdx.x; i < k; i += THREADS) row[i] = row[i] / float(total);
    if (threadIdx.x != 0) return;
    const int label = labels[image];
    const bool known = label >= 0 && label < k;
    const float shifted_label = known ? scores[label] - first.score : not_a_number();
    loss[image] = logf(float(total)) - (1 - smoothing) * shifted_label - smoothing * float(shifted / k);
    correct[image] = label == first.index;
}

// dx[n, i] = (probs[n, i] - smoothing / K - (1 - smoothing where i is the label)) * weight * gradient_scale
extern "C" __global__ void __launch_bounds__(THREADS) softmax_loss_backward(
    const float* probs, const int* labels, const StepRecord* step, Real* dx, i64 dx_stride, int k, float share,
    float at_label, double weight, int accumulate) {
    const i64 image = blockIdx.x;
    const int label = labels[image];
    const float scale = label >= 0 && label < k ? float(weight * step->gradient_scale) : not_a_number();
    Real* row = dx + image * dx_stride;
    for (int i = threadIdx.x; i < k; i += THREADS) {
        const float gradient = (probs[image * k + i] - share - (i == label ? at_label : 0.0f)) * scale;
        row[i] = accumulate ? row[i] + gradient : gradient;
    }
}
