// Dropout, its mask drawn from counters; see dropout.py and, for the counters, vdnn.layers.dropout.

struct Words {
    u32 word[4];
};

// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
__device__ __forceinline__ Words philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
#pragma unroll
    for (int turn = 0; turn < 10; ++turn) {
        const u64 first = u64(0xD2511F53u) * c0, second = u64(0xCD9E8D57u) * c2;
        c0 = u32(second >> 32) ^ c1 ^ k0, c1 = u32(second);
        c2 = u32(first >> 32) ^ c3 ^ k1, c3 = u32(first);
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// y = x * scale where the value's word is at least `threshold`, else 0; added to y if `accumulate`. Four numbers of one
// image a thread, those of one counter. `width` 4: every image begins on 16 bytes in x and in y.
template <int WIDTH>
__device__ __forceinline__ void drop(
    const Real* x, Real* y, u32 first, u32 inner, const Words& words, u64 threshold, float scale, int accumulate) {
#pragma unroll
    for (int i = 0; i < 4; i += WIDTH) {
        float value[WIDTH], held[WIDTH] = {};
        load<false>(x, first + i, inner, value);
        if (accumulate) load<false>(y, first + i, inner, held);
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) {
            const float kept = words.word[i + w] >= threshold ? value[w] * scale : 0.0f;
            value[w] = accumulate ? held[w] + kept : kept;
        }
        store<false>(y, first + i, inner, value);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) dropout(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, const StepRecord* step, u32 inner, u32 chunks, int width,
    u32 key, u64 threshold, float scale, int accumulate) {
    const u32 image = blockIdx.x / chunks;
    const u32 counter = (blockIdx.x - image * chunks) * THREADS + threadIdx.x, first = 4 * counter;
    if (first >= inner) return;
    const u64 seed = step->seed;
    const Words words =
        philox(counter, step->sample + image, u32(step->step), key, u32(seed), u32(seed >> 32));
    x += i64(image) * x_stride;
    y += i64(image) * y_stride;
    if (width == 4)
        drop<4>(x, y, first, inner, words, threshold, scale, accumulate);
    else
        drop<1>(x, y, first, inner, words, threshold, scale, accumulate);
}

// The same in CHWN: the number at `place` of an image lies `images` elements before the next one, between those of the
// other images. Four numbers of one image a thread, those of one counter; neighbours have neighbouring images.
extern "C" __global__ void __launch_bounds__(THREADS) dropout_columns(
    const Real* x, Real* y, const StepRecord* step, u32 images, u32 places, u32 key, u64 threshold, float scale,
    int accumulate) {
    const u32 unit = blockIdx.x * THREADS + threadIdx.x, counter = unit / images, image = unit - counter * images;
    if (4 * i64(counter) >= places) return;
    const u64 seed = step->seed;
    const Words words =
        philox(counter, step->sample + image, u32(step->step), key, u32(seed), u32(seed >> 32));
    const u32 first = 4 * counter, count = min(places - first, 4u);
    const i64 start = i64(first) * images + image;
    float value[4] = {};
#pragma unroll
    for (u32 i = 0; i < 4; ++i)
        if (i < count) value[i] = x[start + i64(i) * images];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        if (i >= count) return;
        Real* target = y + start + i64(i) * images;
        const float kept = words.word[i] >= threshold ? value[i] * scale : 0.0f;
        *target = accumulate ? *target + kept : kept;
    }
}

// The same in NHWC: a number a thread, in the order of memory. Each takes its word of the counter that its logical place
// in the image, of hw pixels, has. Pixels are `*_stride` elements apart.
extern "C" __global__ void __launch_bounds__(THREADS) dropout_pixels(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, const StepRecord* step, u32 hw, u32 channels, u32 pixels,
    u32 key, u64 threshold, float scale, int accumulate) {
    const u32 unit = blockIdx.x * THREADS + threadIdx.x, pixel = unit / channels, c = unit - pixel * channels;
    if (pixel >= pixels) return;
    const u32 image = pixel / hw, place = c * hw + (pixel - image * hw);
    const u64 seed = step->seed;
    const Words words =
        philox(place / 4, step->sample + image, u32(step->step), key, u32(seed), u32(seed >> 32));
    Real* target = y + i64(pixel) * y_stride + c;
    const float kept = words.word[place % 4] >= threshold ? x[i64(pixel) * x_stride + c] * scale : 0.0f;
    *target = accumulate ? *target + kept : kept;
}
