// Averages over whole images; see pool.py. In NCHW an image has C planes of hw pixels, in NHWC hw pixels of C channels,
// of which a thread has those of 16 bytes; the host checks that they can be loaded at once.

// dx of an average over whole planes of hw pixels: rows of `inner` = C * hw numbers, all of a plane the same.
template <int WIDTH>
__device__ __forceinline__ void spread_by(
    const Real* dy, Real* dx, u32 hw, u32 inner, u32 start, int accumulate) {
    const float weight = 1.0f / float(hw);
#pragma unroll
    for (int k = 0; k < UNROLL; ++k) {
        const u32 i = start + (k * THREADS + threadIdx.x) * WIDTH;
        if (i >= inner) return;
        u32 plane = i / hw;
        u32 left = hw - (i - plane * hw);  // pixels of the plane from i on
        float share = dy[plane] * weight, total[WIDTH] = {};
        if (accumulate) load<false>(dx, i, inner, total);
#pragma unroll
        for (int j = 0; j < WIDTH; ++j) {
            if (left == 0) share = i + j < inner ? dy[++plane] * weight : 0.0f, left = hw;
            total[j] += share;
            --left;
        }
        store<false>(dx, i, inner, total);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) pool_spread(
    const Real* dy, i64 dy_stride, Real* dx, i64 dx_stride, u32 hw, u32 inner, u32 chunks, int width,
    int accumulate) {
    const u32 image = blockIdx.x / chunks, chunk = blockIdx.x - image * chunks;
    dy += i64(image) * dy_stride;
    dx += i64(image) * dx_stride;
    if (width == WIDE)
        spread_by<WIDE>(dy, dx, hw, inner, chunk * (THREADS * UNROLL * WIDE), accumulate);
    else
        spread_by<1>(dy, dx, hw, inner, chunk * (THREADS * UNROLL), accumulate);
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
