// Softmax as the libraries that the memory-efficiency study compares with have it, for its ratios on one GPU, and what
// follows a softmax in training as kernels of its own.
//
// float32. `image` and `step` are the elements between neighbouring images, and between categories of one image: scores
// [N][K] have K and 1, [K][N] have 1 and N. Caffe and cuda-convnet run five kernels: the largest score of every image, by
// one thread each, subtract it, exp, the sum, again by one thread each, divide by it. Caffe copies x to y before.

constexpr int THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) largest(
    const float* x, float* found, int n, int k, i64 image, i64 step) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) return;
    float most = -3.402823466e38f;
    for (int j = 0; j < k; ++j) most = max(most, x[i * image + j * step]);
    found[i] = most;
}

extern "C" __global__ void __launch_bounds__(THREADS) total(
    const float* x, float* found, int n, int k, i64 image, i64 step) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= n) return;
    float sum = 0;
    for (int j = 0; j < k; ++j) sum += x[i * image + j * step];
    found[i] = sum;
}

// The image of a number: at [N][K] numbers / K, at [K][N] numbers % N; `apart` and `images` are K, N or 1, N.
__device__ __forceinline__ u32 image_of(u32 number, u32 apart, u32 images) { return number / apart % images; }

extern "C" __global__ void __launch_bounds__(THREADS) subtract(
    const float* x, const float* of_image, float* y, u32 count, u32 apart, u32 images) {
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i < count) y[i] = x[i] - of_image[image_of(i, apart, images)];
}

extern "C" __global__ void __launch_bounds__(THREADS) exponential(const float* x, float* y, u32 count) {
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i < count) y[i] = expf(x[i]);
}

extern "C" __global__ void __launch_bounds__(THREADS) divide(
    const float* x, const float* of_image, float* y, u32 count, u32 apart, u32 images) {
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i < count) y[i] = x[i] / of_image[image_of(i, apart, images)];
}

// loss = -log probs[label]; of [N][K]
extern "C" __global__ void __launch_bounds__(THREADS) loss_of(
    const float* probs, const int* labels, float* loss, int n, int k) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i < n) loss[i] = -logf(probs[i64(i) * k + labels[i]]);
}

// dx = (probs - 1 at the label) * scale
extern "C" __global__ void __launch_bounds__(THREADS) gradient(
    const float* probs, const int* labels, float* dx, u32 count, int k, float scale) {
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    const int image = i / k;
    dx[i] = (probs[i] - (int(i - u32(image) * k) == labels[image] ? 1.0f : 0.0f)) * scale;
}

// dy = d loss / d probs: -scale / probs at the label, else 0
extern "C" __global__ void __launch_bounds__(THREADS) gradient_of_probs(
    const float* probs, const int* labels, float* dy, u32 count, int k, float scale) {
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    const int image = i / k;
    dy[i] = int(i - u32(image) * k) == labels[image] ? -scale / probs[i] : 0.0f;
}
