// Half arithmetic: the one place that knows how a device rounds. Every operation rounds once, to nearest
// even. A cost is never negative, so its bits are ordered as unsigned integers.
//
// ARITHMETIC:
//   NATIVE    cl_khr_fp16
//   PTX       NVIDIA's compiler has no cl_khr_fp16, but takes PTX of compute capability 8.0
//   EMULATED  exact, in vectors of f32
//
// A `run` is RUN neighbouring nodes. With halves it is RUN / 2 `pair`s, the halves of two nodes each;
// emulated, it is one vector of RUN `lanes`.

#define EMULATED 0
#define NATIVE 1
#define PTX 2

#pragma OPENCL FP_CONTRACT OFF

// Where a variant asks for a sub-group size; elsewhere the compiler chooses.
#ifdef SUB_GROUP
#define SIZED_SUB_GROUP __attribute__((intel_reqd_sub_group_size(SUB_GROUP)))
#else
#define SIZED_SUB_GROUP
#endif

#define INFINITE 0x7c00u

#if ARITHMETIC == EMULATED

typedef float VALUE; // of the table of values

#define CONCAT_(a, b) a##b
#define CONCAT(a, b) CONCAT_(a, b)
typedef CONCAT(float, RUN) lanes;
typedef CONCAT(uint, RUN) words;
typedef CONCAT(ushort, RUN) halves;
#define AS_LANES CONCAT(as_float, RUN)
#define AS_WORDS CONCAT(as_uint, RUN)
#define TO_WORDS CONCAT(convert_uint, RUN)
#define TO_HALVES CONCAT(convert_ushort, RUN)
#define LOAD_LANES CONCAT(vload, RUN)
#define STORE_HALVES CONCAT(vstore, RUN)

// Infinity is 2^16 here, its bits read as a number: whatever is added, it rounds to infinity again.
#define OVERFLOWN 65536.0f

// The nearest multiple of the last place of a half, ties to even, of numbers that are not negative.
// Adding and taking away 2^13 last places rounds; a last place is 2^-10 of its binade, and 2^-24 below
// 2^-14.
inline lanes round_to_half(lanes x) {
    const lanes binade = AS_LANES(AS_WORDS(fmax(x, (lanes)(0x1p-14f))) & 0x7f800000u);
    const lanes magic = binade * 8192.0f;
    return (x + magic) - magic;
}

// The magnitude of `value - w`, rounded to half: it is only squared.
inline lanes difference(lanes value, lanes w) { return round_to_half(fabs(value - w)); }

// `d * d + c` rounded to odd, so that rounding it again, to half, is right. The square is exact; TwoSum
// gives the error of the sum.
inline lanes square_add_to_odd(lanes d, lanes c) {
    const lanes square = d * d;
    const lanes sum = square + c;
    const lanes c_part = sum - square;
    const lanes error = (square - (sum - c_part)) + (c - c_part);
    const words bits = AS_WORDS(sum);
    const lanes odd = AS_LANES(error > 0.0f ? bits + 1u : bits - 1u);
    return error == 0.0f || (bits & 1u) != 0u ? sum : odd;
}

// Whether an f32 does not tell how the exact sum rounds: it lies half way between two halves, or below
// the smallest normal half.
inline int undecided(lanes x) { return any(AS_WORDS(x) << 19 == 0x80000000u || x < 0x1p-14f); }

// Half bits of numbers that are half-valued and not negative, and back: moving exponent and mantissa
// into place leaves the exponent 112 off.
inline halves to_bits(lanes x) { return TO_HALVES(AS_WORDS(fmin(x, (lanes)(OVERFLOWN)) * 0x1p-112f) >> 13); }
inline float of_bits(uint bits) { return as_float(bits << 13) * 0x1p112f; }

// The bits of the cost of one candidate.
inline uint candidate_cost(VALUE value, float w, uint cost) {
    const lanes d = difference((lanes)(value), (lanes)(w));
    return to_bits(round_to_half(square_add_to_odd(d, (lanes)(of_bits(cost))))).s0;
}

inline float weight_of(__local const ushort* bits, uint at) { return vload_half(at, (__local const half*)bits); }

#else

typedef ushort VALUE; // of the table of values: half bits

#if ARITHMETIC == NATIVE

#pragma OPENCL EXTENSION cl_khr_fp16 : enable

typedef half2 pair;

inline pair pair_of(uint word) { return as_half2(word); }
inline uint word_of(pair x) { return as_uint(x); }
inline pair subtract(pair a, pair b) { return a - b; }
inline pair square_add(pair d, pair c) { return fma(d, d, c); }
inline pair smaller(pair a, pair b) { return as_half2(min(as_ushort2(a), as_ushort2(b))); }
inline pair both(uint half_bits) { return pair_of(half_bits | half_bits << 16); }
inline pair both_low(uint word) { return both(word & 0xffffu); }
inline pair both_high(uint word) { return both(word >> 16); }

#else

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

inline pair both(uint half_bits) { return both_low(half_bits); }

#endif

// The bits of the cost of one candidate.
inline uint candidate_cost(VALUE value, pair w, uint cost) {
    return word_of(square_add(subtract(both(value), w), both(cost))) & 0xffffu;
}

inline pair weight_of(__local const ushort* bits, uint at) { return both(bits[at]); }

#endif
