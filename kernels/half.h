// Half arithmetic on pairs: the one place that knows how a device rounds.
//
// A `pair` holds the halves of two neighbouring nodes. Every operation rounds once, to nearest even.
// A cost is never negative, so its bits are ordered as unsigned integers.
//
// ARITHMETIC:
//   NATIVE    cl_khr_fp16
//   PTX       NVIDIA's compiler has no cl_khr_fp16, but takes PTX of compute capability 8.0
//   EMULATED  exact in f32: the smallest sum is taken before it is rounded, for rounding is monotonic;
//             where its f32 does not tell how the exact sum rounds, `exact` is asked

#define EMULATED 0
#define NATIVE 1
#define PTX 2

#pragma OPENCL FP_CONTRACT OFF

#define INFINITE 0x7c00u

#if ARITHMETIC == NATIVE

#pragma OPENCL EXTENSION cl_khr_fp16 : enable

typedef half2 pair;

inline pair pair_of(uint word) { return as_half2(word); }
inline uint word_of(pair x) { return as_uint(x); }
inline pair subtract(pair a, pair b) { return a - b; }
inline pair square_add(pair d, pair c) { return fma(d, d, c); }
inline pair smaller(pair a, pair b) { return as_half2(min(as_ushort2(a), as_ushort2(b))); }

#elif ARITHMETIC == PTX

typedef uint pair;

inline pair pair_of(uint word) { return word; }
inline uint word_of(pair x) { return x; }

inline pair subtract(pair a, pair b) {
    pair d;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

inline pair square_add(pair d, pair c) {
    pair cost;
    asm("fma.rn.f16x2 %0, %1, %1, %2;" : "=r"(cost) : "r"(d), "r"(c));
    return cost;
}

inline pair smaller(pair a, pair b) {
    pair least;
    asm("min.f16x2 %0, %1, %2;" : "=r"(least) : "r"(a), "r"(b));
    return least;
}

#else

typedef float2 pair;

// Rounds to the nearest half, ties to even: adding and taking away 2^13 last places leaves the nearest
// multiple of one. The last place of a half is 2^-10 of its binade, and 2^-24 below 2^-14.
inline float2 round_to_half(float2 x) {
    const float2 magnitude = fabs(x);
    const float2 binade = as_float2(as_uint2(fmax(magnitude, (float2)(0x1p-14f))) & 0x7f800000u);
    const float2 magic = binade * 8192.0f;
    const float2 rounded = (magnitude + magic) - magic;
    return copysign(select(rounded, (float2)(INFINITY), isgreaterequal(magnitude, (float2)(65520.0f))), x);
}

// The square is exact and the sum is rounded to odd, so that rounding it again, to half, is right.
inline float to_odd(float d, float c) {
    const float square = d * d;
    const float sum = square + c;
    const float c_part = sum - square;
    const float error = (square - (sum - c_part)) + (c - c_part);
    const uint bits = as_uint(sum);
    if (isinf(sum) || error == 0.0f || (bits & 1u)) return sum;
    return as_float(error > 0.0f ? bits + 1u : bits - 1u);
}

inline pair pair_of(uint word) { return vload_half2(0, (const half*)&word); }

inline uint word_of(pair x) {
    uint word;
    vstore_half2(x, 0, (half*)&word); // x is half-valued: nothing is rounded
    return word;
}

inline pair subtract(pair a, pair b) { return round_to_half(a - b); }
inline pair square_add(pair d, pair c) { return d * d + c; }
inline pair exact(pair d, pair c) { return (float2)(to_odd(d.x, c.x), to_odd(d.y, c.y)); }
inline pair smaller(pair a, pair b) { return fmin(a, b); }

// Whether a sum lies half way between two halves, or below the smallest normal half.
inline int undecided(pair x) {
    const uint2 low_bits = as_uint2(x) << 19;
    return low_bits.x == 0x80000000u || low_bits.y == 0x80000000u || x.x < 0x1p-14f || x.y < 0x1p-14f;
}

#endif

inline pair both(uint half_bits) { return pair_of(half_bits | half_bits << 16); }

#if ARITHMETIC == PTX
inline pair both_low(uint word) {
    pair x;
    asm("prmt.b32 %0, %1, %1, 0x1010;" : "=r"(x) : "r"(word));
    return x;
}
inline pair both_high(uint word) {
    pair x;
    asm("prmt.b32 %0, %1, %1, 0x3232;" : "=r"(x) : "r"(word));
    return x;
}
#else
inline pair both_low(uint word) { return both(word & 0xffffu); }
inline pair both_high(uint word) { return both(word >> 16); }
#endif

// The bits of `half(d * d + c)`, for the bits of one half-valued difference and cost.
inline uint cost_bits(pair d, pair c) {
#if ARITHMETIC == EMULATED
    return word_of(round_to_half(exact(d, c))) & 0xffffu;
#else
    return word_of(square_add(d, c)) & 0xffffu;
#endif
}
