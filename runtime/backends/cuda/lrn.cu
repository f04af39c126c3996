// Local response normalisation across channels; see lrn.py. With scale[c] = k + alpha / size * sum of x[j]^2 over the
// channels j from c - below to c + above, below = (size - 1) / 2, above = size / 2.
//
// A thread walks up GROUP channels of one pixel; neighbouring threads take neighbouring pixels, counted through the
// batch. Where SIZE is known at compile time (not 0) the window moves through registers, otherwise it is read again.

constexpr int GROUP = 32;
constexpr int AHEAD = 4;  // channels whose numbers a thread loads at once

struct Formula {
    int size;
    float alpha_over_size, beta, k;

    __device__ float scale(float squares) const { return squares * alpha_over_size + k; }
    // scale^-beta; scale is k or more, and AlexNet's beta of 3/4 needs no logarithm
    __device__ float power(float scale) const {
        if (beta != 0.75f) return exp2f(-beta * log2f(scale));
        const float root = rsqrtf(scale);
        return root * sqrtf(root);
    }
};

// This thread's pixel: where its channel 0 lies in a tensor of that stride, and its channels from `first` to `end`.
struct Column {
    i64 image, pixel;
    int hw, first, end;
    bool exists;

    __device__ Column(int hw, u32 pixels, int channels) : hw(hw) {
        const u32 groups = (u32(channels) + GROUP - 1) / GROUP;
        const u32 block = blockIdx.x / groups;
        const u32 place = block * THREADS + threadIdx.x;
        image = place / u32(hw);
        pixel = place - u32(image) * u32(hw);
        first = int(blockIdx.x - block * groups) * GROUP;
        end = min(first + GROUP, channels);
        exists = place < pixels;
    }
    __device__ i64 at(i64 stride) const { return image * stride + pixel; }
};

// Column of one tensor: the value of a channel, 0 outside of the tensor. A load and a choice, no branch, so that a
// thread can start many loads at once.
struct Reader {
    const Real* data;
    i64 hw;
    int channels;
    __device__ float operator[](int c) const {
        const float value = data[min(max(c, 0), channels - 1) * hw];
        return c >= 0 && c < channels ? value : 0.0f;
    }
};

__device__ __forceinline__ float window_scale(const Formula& f, const Reader& x, int c) {
    float squares = 0;
    for (int j = c - (f.size - 1) / 2; j <= c + f.size / 2; ++j) squares += x[j] * x[j];
    return f.scale(squares);
}

// values[0 .. COUNT - 1) = values[1 .. COUNT), and `next` at the end
template <int COUNT>
__device__ __forceinline__ void push(float (&values)[COUNT], float next) {
#pragma unroll
    for (int i = 0; i + 1 < COUNT; ++i) values[i] = values[i + 1];
    values[COUNT - 1] = next;
}

template <int SIZE>
__device__ __forceinline__ float sum_of_squares(const float (&values)[SIZE]) {
    float total = 0;
#pragma unroll
    for (int i = 0; i < SIZE; ++i) total += values[i] * values[i];
    return total;
}

template <int SIZE>
__device__ __forceinline__ void forward_column(const Formula& f, const Reader& x, Real* y, int first, int end) {
    if constexpr (SIZE == 0) {
        for (int c = first; c < end; ++c) y[c * x.hw] = x[c] * f.power(window_scale(f, x, c));
    } else {
        constexpr int BELOW = (SIZE - 1) / 2, ABOVE = SIZE / 2;
        float value[SIZE] = {};  // of channels c - BELOW to c + ABOVE
#pragma unroll
        for (int j = -BELOW; j < ABOVE; ++j) push(value, x[first + j]);
        for (int c = first; c < end; c += AHEAD) {
            float next[AHEAD];
#pragma unroll
            for (int s = 0; s < AHEAD; ++s) next[s] = x[c + s + ABOVE];
#pragma unroll
            for (int s = 0; s < AHEAD; ++s) {
                push(value, next[s]);
                if (c + s < end) y[(c + s) * x.hw] = value[BELOW] * f.power(f.scale(sum_of_squares(value)));
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) lrn_forward(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, int channels, int hw, u32 pixels, int size,
    float alpha_over_size, float beta, float k) {
    const Column column(hw, pixels, channels);
    if (!column.exists) return;
    const Formula f{size, alpha_over_size, beta, k};
    const Reader values{x + column.at(x_stride), hw, channels};
    if (size == 5)
        forward_column<5>(f, values, y + column.at(y_stride), column.first, column.end);
    else
        forward_column<0>(f, values, y + column.at(y_stride), column.first, column.end);
}

// dx[i] = dy[i] * scale[i]^-beta - slope * x[i] * sum of dy[j] * y[j] / scale[j] over j from i - above to i + below
template <int SIZE>
__device__ __forceinline__ void backward_column(
    const Formula& f, const Reader& x, const Reader& y, const Reader& dy, Real* dx, int first, int end, float slope,
    int accumulate) {
    if constexpr (SIZE == 0) {
        for (int i = first; i < end; ++i) {
            float across = 0;
            for (int j = max(i - f.size / 2, 0); j <= min(i + (f.size - 1) / 2, x.channels - 1); ++j)
                across += dy[j] * y[j] / window_scale(f, x, j);
            const float gradient = dy[i] * f.power(window_scale(f, x, i)) - slope * x[i] * across;
            dx[i * x.hw] = accumulate ? dx[i * x.hw] + gradient : gradient;
        }
    } else {
        constexpr int BELOW = (SIZE - 1) / 2, ABOVE = SIZE / 2;
        float value[SIZE] = {};      // x of channels j - BELOW to j + ABOVE
        float ratio[SIZE] = {};      // dy * y / scale of channels j - SIZE + 1 to j
        float own[BELOW + 1] = {};  // dy * scale^-beta of channels j - BELOW to j
#pragma unroll
        for (int j = -SIZE + 1; j < 0; ++j) push(value, x[first + j]);
        for (int j = first - ABOVE; j < end + BELOW; j += AHEAD) {
            float next[AHEAD], product[AHEAD], gradient[AHEAD], held[AHEAD];
#pragma unroll
            for (int s = 0; s < AHEAD; ++s) {
                next[s] = x[j + s + ABOVE];
                gradient[s] = dy[j + s];
                product[s] = gradient[s] * y[j + s];
                held[s] = accumulate ? Reader{dx, x.hw, x.channels}[j + s - BELOW] : 0.0f;
            }
#pragma unroll
            for (int s = 0; s < AHEAD; ++s) {
                push(value, next[s]);
                const float scale = f.scale(sum_of_squares(value));
                push(ratio, product[s] / scale);
                push(own, gradient[s] * f.power(scale));
                const int i = j + s - BELOW;
                if (i < first || i >= end) continue;
                float across = 0;
#pragma unroll
                for (int w = 0; w < SIZE; ++w) across += ratio[w];
                dx[i * x.hw] = held[s] + (own[0] - slope * value[0] * across);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) lrn_backward(
    const Real* x, i64 x_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, int channels, int hw, u32 pixels, int size, float alpha_over_size, float beta, float k, float slope,
    int accumulate) {
    const Column column(hw, pixels, channels);
    if (!column.exists) return;
    const Formula f{size, alpha_over_size, beta, k};
    const Reader xs{x + column.at(x_stride), hw, channels}, ys{y + column.at(y_stride), hw, channels};
    const Reader dys{dy + column.at(dy_stride), hw, channels};
    Real* out = dx + column.at(dx_stride);
    if (size == 5)
        backward_column<5>(f, xs, ys, dys, out, column.first, column.end, slope, accumulate);
    else
        backward_column<0>(f, xs, ys, dys, out, column.first, column.end, slope, accumulate);
}
