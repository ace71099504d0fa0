// `STEP` with emulated halves, see `step.h`.
//
// Rounding is monotonic, so the smallest sum is taken before it is rounded. Where its f32 does not tell
// how the exact sum rounds, the run is computed again.

#define NODES (65536u >> KOUT)
#define CANDIDATES (1u << KOUT)
#define GROUPS (NODES / (WORK_GROUP * RUN))

// The costs that the nodes of a run come from, for one candidate: neighbours share them.
#define COST(at) of_bits(from[at])
#if RUN >> KIN < 2
#define SOURCES (lanes)(COST(0))
#elif RUN >> KIN == 2
#define SOURCES CONCAT(two_repeated, RUN)((float2)(COST(0), COST(1)))
#elif RUN >> KIN == 4
#define SOURCES CONCAT(four_repeated, RUN)((float4)(COST(0), COST(1), COST(2), COST(3)))
#else
#define SOURCES ((float8)(COST(0), COST(1), COST(2), COST(3), COST(4), COST(5), COST(6), COST(7))).s0011223344556677
#endif

inline lanes CONCAT(STEP, _candidate)(
    __global const VALUE* table, const float w, COST_SPACE const ushort* before, uint state, const int exact
) {
    COST_SPACE const ushort* from = before + (state >> KIN);
    const lanes d = difference(LOAD_LANES(0, table + state), (lanes)(w));
    const lanes cost = SOURCES;
    return exact ? square_add_to_odd(d, cost) : d * d + cost;
}

inline void STEP(
    __global const VALUE* table,
    const float w,
    COST_SPACE const ushort* before,
    COST_SPACE ushort* after,
    __global ushort* row
) {
    for (uint g = 0; g < GROUPS; ++g) {
        const uint node = (g * WORK_GROUP + get_local_id(0)) * RUN;
        lanes best = (lanes)(INFINITY);
        for (uint q = 0; q < CANDIDATES; ++q) {
            best = fmin(best, CONCAT(STEP, _candidate)(table, w, before, q << (16 - KOUT) | node, 0));
        }
        if (undecided(best)) {
            best = (lanes)(INFINITY);
            for (uint q = 0; q < CANDIDATES; ++q) {
                best = fmin(best, CONCAT(STEP, _candidate)(table, w, before, q << (16 - KOUT) | node, 1));
            }
        }
        const halves costs = to_bits(round_to_half(best));
        STORE_HALVES(costs, 0, after + node);
        if (row) STORE_HALVES(costs, 0, row + node);
    }
    barrier(COST_FENCE);
}

#undef NODES
#undef CANDIDATES
#undef GROUPS
#undef COST
#undef SOURCES
