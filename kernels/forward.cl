// One pass of the search through a batch of tiles: the costs of all nodes after every step.
//
// A work-group takes one tile. Pass 1 starts half way round the ring and is free; pass 2 starts at ring
// position 0 from `start[tile]`. No branches are stored: `trace` finds them again from the costs.
//
// COSTS, where the costs of the latest step are kept:
//   GLOBAL   in the history alone
//   DOUBLE   in two buffers of local memory, one barrier per step
//   STAGED   in one buffer of local memory and the registers, two barriers per step
//
// VALUES, where the values of the states come from:
//   TABLE    from a table in global memory, at every use
//   CACHED   from registers: the states of a work-item are the same at every step

#include "half.h"

#define TABLE 0
#define CACHED 1

#define GLOBAL 0
#define DOUBLE 1
#define STAGED 2

#if COSTS == GLOBAL
#define COST_SPACE __global
#define COST_FENCE (CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)
#else
#define COST_SPACE __local
#define COST_FENCE CLK_LOCAL_MEM_FENCE
#endif

#define UNROLL __attribute__((opencl_unroll_hint))
#if VALUES == CACHED || COSTS == STAGED
#define STEP_UNROLL UNROLL // arrays that are indexed by constants alone live in registers
#else
#define STEP_UNROLL __attribute__((opencl_unroll_hint(1)))
#endif

#if ARITHMETIC == EMULATED

#if RUN == 16
inline lanes two_repeated16(float2 x) { return x.s0000000011111111; }
inline lanes four_repeated16(float4 x) { return x.s0000111122223333; }
#elif RUN == 8
inline lanes two_repeated8(float2 x) { return x.s00001111; }
inline lanes four_repeated8(float4 x) { return x.s00112233; }
#elif RUN == 4
inline lanes two_repeated4(float2 x) { return x.s0011; }
#endif

#else

// The values of `state` and `state + 1`; `state` is even.
inline pair loaded(__global const VALUE* table, uint state) {
    return pair_of(((__global const uint*)table)[state / 2]);
}

// Stores the halves of a run, a power of two of them, as words.
#define WORD(least, p) word_of((least)[p])
#if RUN == 2
#define STORE_RUN(SPACE, least, at) *(SPACE uint*)(at) = WORD(least, 0)
#elif RUN == 4
#define STORE_RUN(SPACE, least, at) *(SPACE uint2*)(at) = (uint2)(WORD(least, 0), WORD(least, 1))
#else
#define WORDS(least, p) (uint4)(WORD(least, p), WORD(least, p + 1), WORD(least, p + 2), WORD(least, p + 3))
#define STORE_RUN(SPACE, least, at) \
    do { \
        UNROLL \
        for (uint part = 0; part < RUN / 8; ++part) ((SPACE uint4*)(at))[part] = WORDS(least, 4 * part); \
    } while (0)
#endif

#endif

#if HALF_RATE
#define STEP step_widening
#define KIN BITS
#define KOUT (BITS + 1)
#include "step.h"
#define STEP step_narrowing
#define KIN (BITS + 1)
#define KOUT BITS
#include "step.h"
#else
#define STEP step
#define KIN BITS
#define KOUT BITS
#include "step.h"
#endif

#if ARITHMETIC == EMULATED
#define RUN_STEP(STEP) STEP(table, w, before, after, row)
#else
#define RUN_STEP(STEP) STEP(table, cache, w, before, after, partial, row)
#endif

// Rows of costs are as long as the most nodes of any step.
#define STRIDE (65536u >> BITS)
#define KEEP_FROM (LEN / 2 - 1)

// The row of the history that takes the costs after step `i`; -1 stands for the start. The traceback of
// pass 1 reads the second half of the ring only: the other steps share two rows that are free then.
inline uint row_after(int i, int pass) {
    const int unkept = i < 0 || (pass == 1 && i < KEEP_FROM);
    if (unkept) return LEN - 1 - (i + 1 & 1);
    return pass == 1 ? i - KEEP_FROM : i;
}

__kernel __attribute__((reqd_work_group_size(WORK_GROUP, 1, 1))) SIZED_SUB_GROUP
void forward(
    __global const float* restrict tiles,  // [count, LEN]
    __global const VALUE* restrict table,  // [65536]
    __global const ushort* restrict start, // [count], nodes; read in pass 2
    __global ushort* history,              // [count, LEN, STRIDE], half bits
    const int pass
) {
    const uint item = get_local_id(0);
    const size_t tile = get_group_id(0);
    const int roll = pass == 1 ? LEN / 2 : 0;
    history += tile * LEN * STRIDE;

    __local ushort weights[LEN];
    for (uint i = item; i < LEN; i += WORK_GROUP) vstore_half_rte(tiles[tile * LEN + i], i, (__local half*)weights);

#if COSTS == GLOBAL
    COST_SPACE ushort* before = history + (size_t)row_after(-1, pass) * STRIDE;
    COST_SPACE ushort* after = before;
#elif COSTS == DOUBLE
    __local ushort costs[2 * STRIDE] __attribute__((aligned(16)));
    COST_SPACE ushort* before = costs;
    COST_SPACE ushort* after = costs + STRIDE;
#else
    __local ushort costs[STRIDE] __attribute__((aligned(16)));
    COST_SPACE ushort* before = costs;
    COST_SPACE ushort* after = costs;
#endif
#if ARITHMETIC == EMULATED
    // Emulated sums are not shared.
#elif SPLIT > 1
    __local ushort partial[WORK_GROUP * RUN] __attribute__((aligned(16)));
#else
    __local ushort* partial = 0;
#endif

    // A cost of zero before the first step makes it `d * d`; infinity shuts a start node out.
    const uint start_node = pass == 1 ? 65536u : start[tile];
    for (uint e = item; e < STRIDE; e += WORK_GROUP) before[e] = pass == 1 || e == start_node ? 0 : INFINITE;

#if VALUES == CACHED
    const uint lanes = WORK_GROUP / SPLIT;
    const uint parts = 65536u / (WORK_GROUP * RUN);
    pair cache[32768 / WORK_GROUP];
    UNROLL
    for (uint part = 0; part < parts; ++part) {
        UNROLL
        for (uint p = 0; p < RUN / 2; ++p) {
            const uint state = (item / lanes * parts + part) * lanes * RUN + item % lanes * RUN + 2 * p;
            cache[part * (RUN / 2) + p] = loaded(table, state);
        }
    }
#elif ARITHMETIC != EMULATED
    const pair* cache = 0;
#endif
    barrier(COST_FENCE);

    for (int i = 0; i < LEN; ++i) {
        const int r = (i + roll) % LEN;
#if ARITHMETIC == EMULATED
        const float w = weight_of(weights, r);
#else
        const pair w = weight_of(weights, r);
#endif
        __global ushort* row = history + (size_t)row_after(i, pass) * STRIDE;
#if COSTS == GLOBAL
        after = row;
        row = 0;
#else
        if (pass == 1 && i < KEEP_FROM) row = 0;
#endif
#if HALF_RATE
        if (r % 2) RUN_STEP(step_narrowing);
        else RUN_STEP(step_widening);
#else
        RUN_STEP(step);
#endif
        COST_SPACE ushort* const spent = before;
        before = after;
        after = spent;
    }
}
