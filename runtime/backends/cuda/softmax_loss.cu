// The gradient of softmax and cross-entropy from stored probabilities; see softmax_loss.py. One block an image of K
// scores. What makes loss and gradient at once is in softmax.cu.

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
