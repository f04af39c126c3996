// Max-pools as the libraries that the memory-efficiency study compares with have them, for its ratios on one GPU.
//
// float32, square windows without padding, outputs rounded up: a last window may lie partly outside. Nothing is reused
// between windows but through caches. Indices within a tensor are below 2^31.
//   caffe: NCHW, one thread an output (backward: an input), in the order n, c, row, column. Forward can write down
//     where in its plane the maximum lies, as 32 bits, which backward reads.
//   convnet: CHWN, a block for one position of 32 * IMAGES images and 4 * CHANNELS channels: 32 threads along the
//     images times 4 along the channels. Backward compares what it reads with the maximum, so that ties share none: all
//     of them take the gradient.

constexpr int THREADS = 128;
constexpr int LANES = 32;
constexpr int CHANNELS = 4;

struct Planes {
    int height, width, rows, columns, window, stride;  // of x, of y, and of the windows

    // the first and the last window, plus 1, with input row or column `at`, of `count`
    __device__ int first(int at) const { return at < window ? 0 : (at - window) / stride + 1; }
    __device__ int end(int at, int count) const { return min(at / stride + 1, count); }
};

extern "C" __global__ void __launch_bounds__(THREADS) caffe_forward(
    const float* x, float* y, int* places, int height, int width, int rows, int columns, int window, int stride,
    int count) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    const int column = i % columns, row = i / columns % rows;
    const float* plane = x + i / (rows * columns) * (height * width);
    const int top = row * stride, left = column * stride;
    const int bottom = min(top + window, height), right = min(left + window, width);
    float largest = -3.402823466e38f;
    int place = -1;
    for (int h = top; h < bottom; ++h) {
        for (int w = left; w < right; ++w) {
            const float value = plane[h * width + w];
            if (value > largest) largest = value, place = h * width + w;
        }
    }
    y[i] = largest;
    if (places != nullptr) places[i] = place;
}

extern "C" __global__ void __launch_bounds__(THREADS) caffe_backward(
    const float* dy, const int* places, float* dx, int height, int width, int rows, int columns, int window, int stride,
    int count) {
    const int i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    const Planes planes{height, width, rows, columns, window, stride};
    const int w = i % width, h = i / width % height;
    const int start = i / (height * width) * (rows * columns);
    float sum = 0;
    for (int row = planes.first(h); row < planes.end(h, rows); ++row) {
        for (int column = planes.first(w); column < planes.end(w, columns); ++column) {
            const int output = start + row * columns + column;
            if (places[output] == h * width + w) sum += dy[output];
        }
    }
    dx[i] = sum;
}

// Where a thread works: a position in a plane, its first image and its first channel.
struct Spot {
    int row, column, image, channel;
};

template <int IMAGES>
__device__ __forceinline__ Spot spot(int images, int channels, int columns) {
    const int image_blocks = (images + LANES * IMAGES - 1) / (LANES * IMAGES);
    const int height = THREADS / LANES * CHANNELS;
    const int channel_blocks = (channels + height - 1) / height;
    int block = blockIdx.x;
    const int image = block % image_blocks * (LANES * IMAGES) + threadIdx.x % LANES;
    block /= image_blocks;
    const int column = block % columns;
    block /= columns;
    const int channel = block % channel_blocks * height + threadIdx.x / LANES;
    return {block / channel_blocks, column, image, channel};
}

template <int IMAGES>
__device__ __forceinline__ void convnet_forward(
    const float* x, float* y, int images, int channels, const Planes& planes) {
    const Spot at = spot<IMAGES>(images, channels, planes.columns);
    const int top = at.row * planes.stride, left = at.column * planes.stride;
    const int bottom = min(top + planes.window, planes.height), right = min(left + planes.window, planes.width);
    float largest[CHANNELS][IMAGES];
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c)
#pragma unroll
        for (int i = 0; i < IMAGES; ++i) largest[c][i] = -3.402823466e38f;
    for (int h = top; h < bottom; ++h) {
        for (int w = left; w < right; ++w) {
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) {
                const int channel = at.channel + c * (THREADS / LANES);
                const float* pixel = x + ((channel * planes.height + h) * planes.width + w) * images;
#pragma unroll
                for (int i = 0; i < IMAGES; ++i) {
                    const int image = at.image + i * LANES;
                    if (channel < channels && image < images) largest[c][i] = fmaxf(largest[c][i], pixel[image]);
                }
            }
        }
    }
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
        const int channel = at.channel + c * (THREADS / LANES);
        float* pixel = y + ((channel * planes.rows + at.row) * planes.columns + at.column) * images;
#pragma unroll
        for (int i = 0; i < IMAGES; ++i) {
            const int image = at.image + i * LANES;
            if (channel < channels && image < images) pixel[image] = largest[c][i];
        }
    }
}

template <int IMAGES>
__device__ __forceinline__ void convnet_backward(
    const float* x, const float* y, const float* dy, float* dx, int images, int channels, const Planes& planes) {
    const Spot at = spot<IMAGES>(images, channels, planes.width);
    float value[CHANNELS][IMAGES], sum[CHANNELS][IMAGES];
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
        const int channel = at.channel + c * (THREADS / LANES);
        const float* pixel = x + ((channel * planes.height + at.row) * planes.width + at.column) * images;
#pragma unroll
        for (int i = 0; i < IMAGES; ++i) {
            const int image = at.image + i * LANES;
            value[c][i] = channel < channels && image < images ? pixel[image] : 0.0f;
            sum[c][i] = 0;
        }
    }
    for (int row = planes.first(at.row); row < planes.end(at.row, planes.rows); ++row) {
        for (int column = planes.first(at.column); column < planes.end(at.column, planes.columns); ++column) {
#pragma unroll
            for (int c = 0; c < CHANNELS; ++c) {
                const int channel = at.channel + c * (THREADS / LANES);
                const int output = ((channel * planes.rows + row) * planes.columns + column) * images;
#pragma unroll
                for (int i = 0; i < IMAGES; ++i) {
                    const int image = at.image + i * LANES;
                    if (channel < channels && image < images)
                        sum[c][i] += y[output + image] == value[c][i] ? dy[output + image] : 0.0f;
                }
            }
        }
    }
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) {
        const int channel = at.channel + c * (THREADS / LANES);
        float* pixel = dx + ((channel * planes.height + at.row) * planes.width + at.column) * images;
#pragma unroll
        for (int i = 0; i < IMAGES; ++i) {
            const int image = at.image + i * LANES;
            if (channel < channels && image < images) pixel[image] = sum[c][i];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) convnet_forward_1(
    const float* x, float* y, int images, int channels, int height, int width, int rows, int columns, int window,
    int stride) {
    convnet_forward<1>(x, y, images, channels, {height, width, rows, columns, window, stride});
}

extern "C" __global__ void __launch_bounds__(THREADS) convnet_forward_2(
    const float* x, float* y, int images, int channels, int height, int width, int rows, int columns, int window,
    int stride) {
    convnet_forward<2>(x, y, images, channels, {height, width, rows, columns, window, stride});
}

extern "C" __global__ void __launch_bounds__(THREADS) convnet_forward_4(
    const float* x, float* y, int images, int channels, int height, int width, int rows, int columns, int window,
    int stride) {
    convnet_forward<4>(x, y, images, channels, {height, width, rows, columns, window, stride});
}

extern "C" __global__ void __launch_bounds__(THREADS) convnet_backward_1(
    const float* x, const float* y, const float* dy, float* dx, int images, int channels, int height, int width,
    int rows, int columns, int window, int stride) {
    convnet_backward<1>(x, y, dy, dx, images, channels, {height, width, rows, columns, window, stride});
}

extern "C" __global__ void __launch_bounds__(THREADS) convnet_backward_2(
    const float* x, const float* y, const float* dy, float* dx, int images, int channels, int height, int width,
    int rows, int columns, int window, int stride) {
    convnet_backward<2>(x, y, dy, dx, images, channels, {height, width, rows, columns, window, stride});
}

extern "C" __global__ void __launch_bounds__(THREADS) convnet_backward_4(
    const float* x, const float* y, const float* dy, float* dx, int images, int channels, int height, int width,
    int rows, int columns, int window, int stride) {
    convnet_backward<4>(x, y, dy, dx, images, channels, {height, width, rows, columns, window, stride});
}
