// Bytes filled with a pattern, and the first byte that no longer holds it; see debug.py.

constexpr int SHARE = 64;  // bytes a thread

extern "C" __global__ void __launch_bounds__(THREADS) fill_bytes(u8* bytes, i64 nbytes, u32 pattern) {
    const i64 start = i64(blockIdx.x) * THREADS * SHARE + threadIdx.x * 16;
#pragma unroll
    for (int k = 0; k < SHARE / 16; ++k) {
        const i64 i = start + i64(k) * THREADS * 16;
        if (i + 16 <= nbytes && reinterpret_cast<u64>(bytes) % 16 == 0) {
            const u32 four = pattern * 0x01010101u;
            *reinterpret_cast<uint4*>(bytes + i) = make_uint4(four, four, four, four);
        } else {
            for (i64 j = i; j < i + 16 && j < nbytes; ++j) bytes[j] = u8(pattern);
        }
    }
}

// first_wrong = the least of itself and the number of the first byte that is not `pattern`
extern "C" __global__ void __launch_bounds__(THREADS) check_bytes(
    const u8* bytes, i64 nbytes, u32 pattern, u64* first_wrong) {
    const i64 start = (i64(blockIdx.x) * THREADS + threadIdx.x) * SHARE;
    for (i64 i = start; i < start + SHARE && i < nbytes; ++i)
        if (bytes[i] != u8(pattern)) {
            atomicMin(first_wrong, u64(i));
            return;
        }
}
