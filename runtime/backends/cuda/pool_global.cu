// Averages over whole images, and gradients of maxima in turns; see pool.py. In NCHW an image has C planes of hw pixels,
// in NHWC hw pixels of C channels, of which a thread has those of 16 bytes; the host checks that they can be loaded at
// once.

// dx of an average over whole planes of hw pixels: rows of `inner` = C * hw numbers, all of a plane the same. by_hw: see
// quotient.
template <int WIDTH>
__device__ __forceinline__ void spread_by(
    const Real* dy, Real* dx, u32 hw, u64 by_hw, u32 inner, u32 start, int accumulate) {
    const float weight = 1.0f / float(hw);
    float first[UNROLL], second[UNROLL];  // of the plane of a thread's first number, and of the next
    u32 left[UNROLL];                     // pixels of the former from that number on
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
        const u32 i = start + (k * THREADS + threadIdx.x) * WIDTH, plane = quotient(i, by_hw);
        left[k] = hw - (i - plane * hw);
        first[k] = i < inner ? float(dy[plane]) : 0.0f;
        second[k] = WIDTH > 1 && i + left[k] < inner ? float(dy[plane + 1]) : 0.0f;
    }
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
        const u32 i = start + (k * THREADS + threadIdx.x) * WIDTH;
        if (i >= inner) return;
        const float now = first[k] * weight, then = second[k] * weight;
        float share[WIDTH], total[WIDTH] = {};
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) share[j] = u32(j) < left[k] ? now : then;
        if (hw < WIDTH) {
#pragma unroll
            for (int j = 0; j < WIDTH; ++j) share[j] = i + j < inner ? dy[quotient(i + j, by_hw)] * weight : 0.0f;
        }
        if (accumulate) load<false>(dx, i, inner, total);
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) total[j] += share[j];
        store<false>(dx, i, inner, total);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_spread(
    const Real* dy, i64 dy_stride, Real* dx, i64 dx_stride, u32 hw, u64 by_hw, u32 inner, u32 chunks, int width,
    int accumulate) {
    const u32 image = blockIdx.x / chunks, chunk = blockIdx.x - image * chunks;
    dy += i64(image) * dy_stride;
    dx += i64(image) * dx_stride;
    if (width == WIDE)
        spread_by<WIDE>(dy, dx, hw, by_hw, inner, chunk * (THREADS * UNROLL * WIDE), accumulate);
    else
        spread_by<1>(dy, dx, hw, by_hw, inner, chunk * (THREADS * UNROLL), accumulate);
}

// A block has the pixels of one image and some of its channels: `across` threads side by side, in as many rows as there
// is room for, which take the pixels in turns.
extern "C" __global__ void __launch_bounds__(THREADS) pool_pixels_mean(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u32 hw, u32 groups, u32 across) {
    __shared__ float held[WIDE][THREADS];
    const u32 parts = (groups + across - 1) / across, image = blockIdx.x / parts, t = threadIdx.x;
    const u32 begin = (blockIdx.x - image * parts) * across, down = THREADS / across;
    const u32 row = t / across, group = begin + t - row * across;
    float total[WIDE] = {};
    if (row < down && group < groups) {
        const Real* at = x + i64(image) * hw * x_stride + group * WIDE;
#pragma unroll 4
        for (u32 pixel = row; pixel < hw; pixel += down) {
            float value[WIDE];
            load_all(at + i64(pixel) * x_stride, value);
#pragma unroll
            for (int w = 0; w < WIDE; ++w) total[w] += value[w];
        }
    }
#pragma unroll
    for (int w = 0; w < WIDE; ++w) held[w][t] = total[w];
    __syncthreads();
    if (t >= across * WIDE || begin * WIDE + t >= groups * WIDE) return;
    float sum = 0;
    for (u32 i = 0; i < down; ++i) sum += held[t % WIDE][i * across + t / WIDE];
    y[i64(image) * y_stride + begin * WIDE + t] = sum * (1.0f / float(hw));
}

// The gradient: a thread has UNROLL pixels of an image, of `chunks` times as many. by_*: see quotient.
extern "C" __global__ void __launch_bounds__(THREADS) pool_pixels_spread(
    const Real* dy, i64 dy_stride, Real* dx, i64 dx_stride, u32 hw, u32 images, u32 groups, u32 chunks, u64 by_groups,
    u64 by_chunks, int accumulate) {
    const u32 unit = blockIdx.x * THREADS + threadIdx.x, part = quotient(unit, by_groups);
    const u32 image = quotient(part, by_chunks), first = (unit - part * groups) * WIDE;
    if (image >= images) return;
    const float weight = 1.0f / float(hw);
    float share[WIDE];
    load_all(dy + i64(image) * dy_stride + first, share);
#pragma unroll
    for (int w = 0; w < WIDE; ++w) share[w] *= weight;
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
        const u32 pixel = (part - image * chunks) * UNROLL + k;
        if (pixel >= hw) return;
        Real* at = dx + (i64(image) * hw + pixel) * dx_stride + first;
        float total[WIDE] = {};
        if (accumulate) load_all(at, total);
#pragma unroll
        for (int w = 0; w < WIDE; ++w) total[w] += share[w];
        store_all(at, total);
    }
}

// A block has `group` whole planes, THREADS at most, in shared memory, and as many threads for each as there are.
extern "C" __global__ void __launch_bounds__(THREADS) pool_planes_mean(
    const Real* x, i64 x_stride, Real* y, i64 y_stride, u32 hw, u32 planes, u32 group) {
    __shared__ uint4 room[PLANES_BYTES / 16];
    __shared__ float held[THREADS];
    const u32 groups = (planes + group - 1) / group, image = blockIdx.x / groups, t = threadIdx.x;
    const u32 first = (blockIdx.x - image * groups) * group, count = min(group, planes - first);
    const u32 lanes = THREADS / group, plane = t / lanes, lane = t - plane * lanes;
    const Real* staged = stage(reinterpret_cast<u8*>(room), x + i64(image) * x_stride + first * hw, count * hw);
    arrive();
    __syncthreads();
    float total = 0;
    if (plane < count)
        for (u32 k = lane; k < hw; k += lanes) total += staged[plane * hw + k];
    held[t] = total;
    __syncthreads();
    if (plane >= count || lane > 0) return;
    for (u32 k = 1; k < lanes; ++k) total += held[t + k];
    y[i64(image) * y_stride + first + plane] = total * (1.0f / float(hw));
}

// ---- gradients of maxima in NCHW, in turns

constexpr int TURNS_BYTES = 28736;  // of shared memory: 28 KiB of pixels as floats, and 64 bytes for what lies before
constexpr int TURNS_WINDOWS = 6;    // of a thread at most

// Has the compiler hold an address as it is: it would make one for each of several loads from there.
template <class T>
__device__ __forceinline__ const T* held(const T* at) {
#if __CUDA_ARCH__ > 0
    asm("" : "+l"(at));
    __builtin_assume(__isGlobal(at));
#endif
    return at;
}

// A block's `count` pixels as floats from `made` on, `lead` after the beginning of `room`, so that what lies at 16 bytes
// outside does so here: `chunks` of WIDE numbers after the first `head`, up to `rest`.
struct FloatPixels {
    u32 lead, head, chunks, rest, count;
    float* made;

    __device__ FloatPixels(uint4* room, const Real* to, u32 count) : count(count) {
        lead = u32(reinterpret_cast<u64>(to) % 16) / u32(sizeof(Real));
        head = min((WIDE - lead) % WIDE, count), chunks = (count - head) / WIDE, rest = head + chunks * WIDE;
        made = reinterpret_cast<float*>(room) + lead;
    }
    __device__ __forceinline__ void clear(uint4* room) const {
#pragma unroll 1
        for (u32 i = threadIdx.x; i < (lead + count + 3) / 4; i += THREADS) room[i] = make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void fetch(const Real* from) const {
#pragma unroll 1
        for (u32 i = threadIdx.x; i < chunks; i += THREADS) {
            float value[WIDE];
            load_all(from + head + i * WIDE, value);
            store_all(made + head + i * WIDE, value);
        }
        if (threadIdx.x < head) made[threadIdx.x] = from[threadIdx.x];
        if (rest + threadIdx.x < count) made[rest + threadIdx.x] = from[rest + threadIdx.x];
    }
    __device__ __forceinline__ void put(Real* to) const {
        const float* source = made + head + threadIdx.x * WIDE;
        Real* target = to + head + threadIdx.x * WIDE;
#pragma unroll 1
        for (u32 i = threadIdx.x; i < chunks; i += THREADS) {
            float value[WIDE];
            load_all(source, value);
            store_all(target, value);
            source += THREADS * WIDE, target += THREADS * WIDE;
        }
        if (threadIdx.x < head) to[threadIdx.x] = made[threadIdx.x];
        if (rest + threadIdx.x < count) to[rest + threadIdx.x] = made[rest + threadIdx.x];
    }
};

// By indices, and by y as a mask if it is given. A block has planes or a band of one as in pool_planes.cu; its threads add
// what their windows pass on to pixels in shared memory. A turn is for the windows whose winner lies so many STEPs below
// and to the right of their first pixel: the pixels of one turn all differ, and over the turns each pixel takes its
// windows from the last to the first, as in pool.cu. `columns` and `strips` of g are those of windows in a plane.
template <int R, int STEP, bool ADDS>
__device__ __forceinline__ void scatter_planes(
    const u8* indices, const Real* y, const Real* dy, Real* dx, const Planes& g, const GradientBlock<R, STEP>& of,
    uint4* room) {
    constexpr int SIDE = (R - 1) / STEP + 1;
    constexpr u32 NEVER = SIDE * SIDE;
    const FloatPixels pixels(room, dx, of.pixels);
    indices = held(indices + threadIdx.x), dy = held(dy + threadIdx.x);
    const int left = int(of.windows) - int(threadIdx.x);
    float value[TURNS_WINDOWS];
    u32 place[TURNS_WINDOWS], turn[TURNS_WINDOWS];
#pragma unroll
    for (int k = 0; k < TURNS_WINDOWS; ++k) {
        const bool there = k * THREADS < left;
        place[k] = there ? indices[k * THREADS] : NO_WINNER;
        value[k] = there ? float(dy[k * THREADS]) : 0.0f;
    }
    if (y) {
        float kept[TURNS_WINDOWS];
        y = held(y + threadIdx.x);
#pragma unroll
        for (int k = 0; k < TURNS_WINDOWS; ++k) kept[k] = k * THREADS < left ? float(y[k * THREADS]) : 0.0f;
#pragma unroll
        for (int k = 0; k < TURNS_WINDOWS; ++k) place[k] = kept[k] > 0 ? place[k] : NO_WINNER;
    }
    if (ADDS)
        pixels.fetch(dx);
    else
        pixels.clear(room);
    // From here on `place` is one in `room`. Rows above a band may write what lies before its first pixel there.
    const int start = (of.p_first * STEP - int(g.pad) - of.h_first) * int(g.w) - int(g.pad) + int(pixels.lead);
    const u32 end = pixels.lead + of.pixels, by_row = (g.w - g.q) * STEP, by_plane = (g.h - g.p * STEP) * g.w;
#pragma unroll
    for (int k = 0; k < TURNS_WINDOWS; ++k) {
        const u32 i = threadIdx.x + k * THREADS, row = quotient(i, g.by_columns), plane = quotient(row, g.by_strips);
        const u32 r = place[k] * (128 / R + 1) >> 7, s = place[k] - r * R;  // of a winner; else r is R or more
        place[k] += i * STEP + u32(start) + row * by_row + plane * by_plane + r * (g.w - R);
        turn[k] = r < R && place[k] < end ? r / STEP * SIDE + s / STEP : NEVER;
    }
    float* made = reinterpret_cast<float*>(room);
    __syncthreads();
#pragma unroll
    for (u32 t = 0; t < NEVER; ++t) {
        float before[TURNS_WINDOWS];
#pragma unroll
        for (int k = 0; k < TURNS_WINDOWS; ++k)
            before[k] = (ADDS || t > 0) && turn[k] == t ? made[place[k]] : 0.0f;
#pragma unroll
        for (int k = 0; k < TURNS_WINDOWS; ++k)
            if (turn[k] == t) made[place[k]] = before[k] + value[k];
        __syncthreads();
    }
    pixels.put(dx);
}

template <int R, int STEP>
__device__ __forceinline__ void turns(
    const u8* indices, i64 indices_stride, Source y, Source dy, Real* dx, i64 dx_stride, const Planes& g,
    int accumulate) {
    __shared__ uint4 room[TURNS_BYTES / 16];
    const GradientBlock<R, STEP> of(g);
    indices += i64(of.image) * indices_stride + of.outputs;
    const Real* passed = dy.data + i64(of.image) * dy.stride + of.outputs;
    const Real* mask = y.data ? y.data + i64(of.image) * y.stride + of.outputs : nullptr;
    dx += i64(of.image) * dx_stride + of.inputs;
    if (accumulate)
        scatter_planes<R, STEP, true>(indices, mask, passed, dx, g, of, room);
    else
        scatter_planes<R, STEP, false>(indices, mask, passed, dx, g, of, room);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_turns_2_2(
    const u8* indices, i64 indices_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 pad, u32 planes, u32 group, u32 groups, u32 band, u32 bands,
    u32 rows, u64 by_q, u64 by_p, u64 by_bands, u64 by_groups, int accumulate) {
    const Planes g{h, w, p, q, pad, planes, group, groups, band, bands, rows, q, 1, p, by_q, by_p, by_bands, by_groups};
    turns<2, 2>(indices, indices_stride, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, g, accumulate);
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_turns_3_2(
    const u8* indices, i64 indices_stride, const Real* y, i64 y_stride, const Real* dy, i64 dy_stride, Real* dx,
    i64 dx_stride, u32 h, u32 w, u32 p, u32 q, u32 pad, u32 planes, u32 group, u32 groups, u32 band, u32 bands,
    u32 rows, u64 by_q, u64 by_p, u64 by_bands, u64 by_groups, int accumulate) {
    const Planes g{h, w, p, q, pad, planes, group, groups, band, bands, rows, q, 1, p, by_q, by_p, by_bands, by_groups};
    turns<3, 2>(indices, indices_stride, {y, y_stride}, {dy, dy_stride}, dx, dx_stride, g, accumulate);
}
