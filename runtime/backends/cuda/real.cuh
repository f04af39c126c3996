// Numbers as activations and their gradients are stored: Real is float, bfloat16 or float16, one of them a module.
//
// STORAGE is set by the host. Both 16-bit types round to nearest, ties to even, and keep NaN; they become float in any
// expression, and take one by assignment. PTX has instructions for it from sm_80 on, bfloat16 else takes integers.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct bfloat16 {
    u16 bits;

    bfloat16() = default;
    __device__ explicit bfloat16(float value) : bits(narrow(value)) {}
    __device__ bfloat16& operator=(float value) {
        bits = narrow(value);
        return *this;
    }
    __device__ operator float() const { return __int_as_float(u32(bits) << 16); }

    static __device__ __forceinline__ u16 narrow(float value) {
#if __CUDA_ARCH__ >= 800
        u16 out;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out) : "f"(value));
        return out;
#else
        const u32 wide = __float_as_uint(value);
        return value != value ? 0x7fff : u16((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
#endif
    }
    // The second of two neighbours lies in the upper half.
    static __device__ __forceinline__ u32 pack(float first, float second) {
#if __CUDA_ARCH__ >= 800
        u32 out;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(second), "f"(first));
        return out;
#else
        return u32(narrow(second)) << 16 | narrow(first);
#endif
    }
    static __device__ __forceinline__ void unpack(u32 both, float& first, float& second) {
        first = __int_as_float(both << 16);
        second = __int_as_float(both & 0xffff0000u);
    }
};

struct float16 {
    u16 bits;

    float16() = default;
    __device__ explicit float16(float value) : bits(narrow(value)) {}
    __device__ float16& operator=(float value) {
        bits = narrow(value);
        return *this;
    }
    __device__ operator float() const { return widen(bits); }

    static __device__ __forceinline__ u16 narrow(float value) {
#if __CUDA_ARCH__ > 0
        u16 out;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(value));
        return out;
#else
        const u32 wide = __float_as_uint(value), sign = wide >> 16 & 0x8000, size = wide & 0x7fffffff;
        if (size > 0x7f800000) return 0x7fff;
        if (size >= 0x47800000) return u16(sign | 0x7c00);  // 65536 or more
        if (size >= 0x38800000) return u16(sign | ((size + 0xfff + (size >> 13 & 1)) >> 13) - (112 << 10));
        const u32 shift = 126 - (size >> 23), digits = (size & 0x7fffff) | 0x800000;  // below 2^-14: multiples of 2^-24
        if (shift > 24) return u16(sign);
        const u32 whole = digits >> shift, rest = digits & ((1u << shift) - 1), tie = 1u << (shift - 1);
        return u16(sign | (whole + (rest > tie || (rest == tie && whole & 1))));
#endif
    }
    static __device__ __forceinline__ float widen(u16 bits) {
#if __CUDA_ARCH__ > 0
        float out;
        asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
        return out;
#else
        const u32 sign = u32(bits & 0x8000) << 16, exponent = bits >> 10 & 31, digits = bits & 0x3ff;
        if (exponent == 0) return (sign ? -1.0f : 1.0f) * float(digits) / 16777216.0f;
        return __int_as_float(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | digits << 13);
#endif
    }
    static __device__ __forceinline__ u32 pack(float first, float second) {
#if __CUDA_ARCH__ >= 800
        u32 out;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(second), "f"(first));
        return out;
#else
        return u32(narrow(second)) << 16 | narrow(first);
#endif
    }
    static __device__ __forceinline__ void unpack(u32 both, float& first, float& second) {
        first = widen(u16(both)), second = widen(u16(both >> 16));
    }
};

// The largest number that is 0 once it is stored: half the smallest that can be, as ties go to even.
template <class T>
constexpr float STORED_AS_ZERO = 0.0f;
template <>
constexpr float STORED_AS_ZERO<bfloat16> = 0x1p-134f;
template <>
constexpr float STORED_AS_ZERO<float16> = 0x1p-25f;

using Real = STORAGE;
constexpr int WIDE = 16 / sizeof(Real);  // numbers of 16 bytes, which a thread loads and stores at once
static_assert(sizeof(bfloat16) == 2 && sizeof(float16) == 2, "16 bits");
