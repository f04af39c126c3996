// Images and filters as the first convolution reads them, with a stride in their channels: see images.py.
//
// Channel (a * fold + b) * C + c of pixel (i, j) is channel c of the pixel (i * fold + a - top, j * fold + b - left) of
// an image, or of tap (i * fold + a, j * fold + b) of a filter, and 0 where there is none; so are channels that follow.

// A byte of x as a number: (byte / 255 - mean) / std.
__device__ __forceinline__ float scaled(float byte, float scale, float shift) { return byte * scale + shift; }

template <bool INSIDE, int WIDTH>
__device__ __forceinline__ void normalize_share(
    const Share<WIDTH>& share, const u8* x, Real* y, i64 inner, float scale, float shift) {
    float value[UNROLL][WIDTH];
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) load<INSIDE>(x, share.index(k), inner, value[k]);
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) value[k][w] = scaled(value[k][w], scale, shift);
        store<INSIDE>(y, share.index(k), inner, value[k]);
    }
}

template <int WIDTH>
__device__ __forceinline__ void normalize_by(
    const u8* x, i64 x_stride, Real* y, i64 y_stride, i64 inner, u32 chunks, float scale, float shift) {
    const Share<WIDTH> share(chunks);
    x += share.row * x_stride;
    y += share.row * y_stride;
    if (share.inside(inner))
        normalize_share<true>(share, x, y, inner, scale, shift);
    else
        normalize_share<false>(share, x, y, inner, scale, shift);
}

// One channel of all images, NCHW: x and y begin at that channel, inner = H * W.
extern "C" __global__ void __launch_bounds__(THREADS) normalize_channel(
    const u8* x, i64 x_stride, Real* y, i64 y_stride, i64 inner, u32 chunks, int width, float scale, float shift) {
    if (width == WIDE)
        normalize_by<WIDE>(x, x_stride, y, y_stride, inner, chunks, scale, shift);
    else
        normalize_by<1>(x, x_stride, y, y_stride, inner, chunks, scale, shift);
}

constexpr int SQUARE = 64;  // images, and pixels of each, that a block of normalize_columns makes

// One channel of all images, CHWN: x begins at that channel of the first image, y at its first pixel. The bytes pass
// through shared memory; a row of it has a word more, so that bytes of neighbouring images lie in other banks.
// by_words: rows of x can be read by four bytes; by_pieces: rows of y can be written by 16.
extern "C" __global__ void __launch_bounds__(THREADS) normalize_columns(
    const u8* x, i64 x_stride, Real* y, u32 images, u32 pixels, int by_words, int by_pieces, float scale, float shift) {
    constexpr u32 PITCH = SQUARE + 4, WORDS = SQUARE / 4, PIECES = SQUARE / WIDE;
    __shared__ u32 words[SQUARE * PITCH / 4];
    u8* held = reinterpret_cast<u8*>(words);
    const u32 across = (pixels + SQUARE - 1) / SQUARE, row = blockIdx.x / across;
    const u32 image = row * SQUARE, pixel = (blockIdx.x - row * across) * SQUARE;
    x += i64(image) * x_stride + pixel;
    y += i64(pixel) * images + image;
    const u32 tall = min(images - image, u32(SQUARE)), broad = min(pixels - pixel, u32(SQUARE));
    if (by_words) {
#pragma unroll
        for (u32 k = 0; k < SQUARE * WORDS / THREADS; ++k) {
            const u32 i = k * THREADS + threadIdx.x, n = i / WORDS, word = i % WORDS;
            if (n < tall && 4 * word < broad)
                words[n * (PITCH / 4) + word] = *reinterpret_cast<const u32*>(x + n * x_stride + 4 * word);
        }
    } else {
#pragma unroll
        for (u32 k = 0; k < SQUARE * SQUARE / THREADS; ++k) {
            const u32 i = k * THREADS + threadIdx.x, n = i / SQUARE, p = i % SQUARE;
            if (n < tall && p < broad) held[n * PITCH + p] = x[n * x_stride + p];
        }
    }
    __syncthreads();
    if (by_pieces) {
#pragma unroll
        for (u32 k = 0; k < SQUARE * PIECES / THREADS; ++k) {
            const u32 i = k * THREADS + threadIdx.x, p = i / PIECES, n = i % PIECES * WIDE;
            if (n >= tall || p >= broad) continue;
            float value[WIDE];
#pragma unroll
            for (u32 w = 0; w < WIDE; ++w) value[w] = scaled(held[(n + w) * PITCH + p], scale, shift);
            store_all(y + i64(p) * images + n, value);
        }
    } else {
#pragma unroll
        for (u32 k = 0; k < SQUARE * SQUARE / THREADS; ++k) {
            const u32 i = k * THREADS + threadIdx.x, p = i / SQUARE, n = i % SQUARE;
            if (n < tall && p < broad) y[i64(p) * images + n] = scaled(held[n * PITCH + p], scale, shift);
        }
    }
}

constexpr int SCALED = 4;  // channels of x that a launch scales

struct Scaling {
    float scale[SCALED], shift[SCALED];
};

// Of images of `channels` planes, height x width, `rows` x `columns` pixels of `filled` channels are made. This launch
// makes those from channels `begin` to `begin + count` of x, and if it is the first, the zeros.
struct ImageForm {
    u32 images, height, width, channels, rows, columns, filled, fold, top, left, begin, count;
};

// Where the bytes of WIDTH channels of a pixel lie, from the begin of its first row on, in which row below that, and how
// they become numbers: times 0 for those of no byte.
template <int WIDTH>
struct Bytes {
    u32 place[WIDTH], below[WIDTH];
    float scale[WIDTH], shift[WIDTH];
};

// The channels of `bytes` of `rows` pixels of y, UNROLL at most, `step` elements apart: their first rows of x begin at
// row `top` and are `fold` rows apart. INSIDE says that all these rows are rows of the image.
template <bool INSIDE, int WIDTH>
__device__ __forceinline__ void normalize_rows(
    const u8* x, const ImageForm& form, const Bytes<WIDTH>& bytes, int top, Real* y, i64 step, u32 rows) {
    float value[UNROLL][WIDTH];
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
        const int row = top + k * int(form.fold);
        const u8* line = x + i64(INSIDE ? row : 0) * form.width;
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) {
            const bool there = INSIDE || u32(row + int(bytes.below[w])) < form.height;
            const u32 place = INSIDE ? bytes.place[w] : there ? u32(row * int(form.width) + int(bytes.place[w])) : 0;
            value[k][w] = there ? float(line[place]) : -1;
        }
    }
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
        if (!INSIDE && k >= rows) return;
#pragma unroll
        for (int w = 0; w < WIDTH; ++w) {
            const float number = scaled(value[k][w], bytes.scale[w], bytes.shift[w]);
            value[k][w] = INSIDE || value[k][w] >= 0 ? number : 0.0f;
        }
        store<true>(y + k * step, 0, WIDTH, value[k]);
    }
}

constexpr int STRIP = 8;  // pixels of a thread, one below the other: they have all but the row in common

// WIDTH neighbouring channels of STRIP pixels.
template <int WIDTH>
__device__ __forceinline__ void normalize_pixels_by(
    const u8* x, i64 x_stride, Real* y, i64 y_stride, const ImageForm& form, const Scaling& scaling) {
    const u32 groups = form.filled / WIDTH, tall = (form.rows + STRIP - 1) / STRIP;
    const u32 unit = blockIdx.x * THREADS + threadIdx.x, pixel = unit / groups, strip = pixel / form.columns;
    const u32 image = strip / tall, column = pixel - strip * form.columns, channel = (unit - pixel * groups) * WIDTH;
    if (image >= form.images) return;
    const u32 tap = channel / form.channels;
    u32 c = channel - tap * form.channels, a = tap / form.fold, b = tap - a * form.fold;
    if (WIDTH == 1 && (a < form.fold ? c - form.begin >= form.count : form.begin > 0)) return;  // another launch makes it
    Bytes<WIDTH> bytes;
#pragma unroll
    for (int w = 0; w < WIDTH; ++w) {
        const u32 from = column * form.fold + b - form.left, own = c - form.begin;
        const bool there = a < form.fold && from < form.width;
        bytes.below[w] = there ? a : 0;
        bytes.place[w] = there ? (c * form.height + a) * form.width + from : 0;
        bytes.scale[w] = bytes.shift[w] = 0;
#pragma unroll
        for (u32 k = 0; k < SCALED; ++k)
            if (there && own == k) bytes.scale[w] = scaling.scale[k], bytes.shift[w] = scaling.shift[k];
        if (++c == form.channels) {
            c = 0;
            if (++b == form.fold) b = 0, ++a;
        }
    }
    const u32 first = (strip - image * tall) * STRIP, end = min(first + STRIP, form.rows);
    const i64 step = form.columns * y_stride;
    x += i64(image) * x_stride;
    y += i64(image) * form.rows * step + column * y_stride + channel;
#pragma unroll 1
    for (u32 row = first; row < end; row += UNROLL) {
        const int top = int(row * form.fold) - int(form.top), bottom = top + UNROLL * int(form.fold);
        if (row + UNROLL <= end && top >= 0 && bottom <= int(form.height))
            normalize_rows<true>(x, form, bytes, top, y + row * step, step, UNROLL);
        else
            normalize_rows<false>(x, form, bytes, top, y + row * step, step, end - row);
    }
}

// Images for NHWC: those of x are x_stride apart, pixels of y y_stride. Width WIDE says that all channels of y can be
// written by 16 bytes, and that this launch makes all.
extern "C" __global__ void __launch_bounds__(THREADS) normalize_pixels(
    const u8* x, i64 x_stride, Real* y, i64 y_stride, u32 images, u32 height, u32 width_of_x, u32 channels, u32 rows,
    u32 columns, u32 filled, u32 fold, u32 top, u32 left, u32 begin, u32 count, int width, float scale0, float scale1,
    float scale2, float scale3, float shift0, float shift1, float shift2, float shift3) {
    const ImageForm form{images, height, width_of_x, channels, rows, columns, filled, fold, top, left, begin, count};
    const Scaling scaling{{scale0, scale1, scale2, scale3}, {shift0, shift1, shift2, shift3}};
    if (width == WIDE)
        normalize_pixels_by<WIDE>(x, x_stride, y, y_stride, form, scaling);
    else
        normalize_pixels_by<1>(x, x_stride, y, y_stride, form, scaling);
}

// y = w, folded: `size` numbers of y, one a thread.
extern "C" __global__ void __launch_bounds__(THREADS) filter_fold(
    const float* w, Real* y, u32 size, u32 r, u32 s, u32 c, u32 rows, u32 columns, u32 channels, u32 fold) {
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= size) return;
    const u32 pixel = i / channels, channel = i - pixel * channels, line = pixel / columns, k = line / rows;
    const u32 tap = channel / c, a = tap / fold, b = tap - a * fold;
    const u32 row = (line - k * rows) * fold + a, column = (pixel - line * columns) * fold + b;
    const bool there = a < fold && row < r && column < s;
    y[i] = there ? w[(i64(k * r + row) * s + column) * c + (channel - tap * c)] : 0.0f;
}

// dw = scratch, or dw += scratch, where the scratch is folded: `size` numbers of dw, one a thread.
extern "C" __global__ void __launch_bounds__(THREADS) filter_gradient_unfold(
    const Real* scratch, float* dw, u32 size, u32 r, u32 s, u32 c, u32 rows, u32 columns, u32 channels, u32 fold,
    int accumulate) {
    const u32 i = blockIdx.x * THREADS + threadIdx.x;
    if (i >= size) return;
    const u32 pixel = i / c, line = pixel / s, k = line / r, row = line - k * r, column = pixel - line * s;
    const u32 high = row / fold, across = column / fold;
    const u32 channel = ((row - high * fold) * fold + column - across * fold) * c + (i - pixel * c);
    const float value = scratch[(i64(k * rows + high) * columns + across) * channels + channel];
    dw[i] = accumulate ? dw[i] + value : value;
}
