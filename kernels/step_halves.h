// `STEP` in half arithmetic, see `step.h`.

#define NODES (65536u >> KOUT)
#define CANDIDATES (1u << KOUT)
#define LANES (WORK_GROUP / SPLIT)
#define GROUPS (NODES / (LANES * RUN))

inline void STEP(
    __global const VALUE* table,
    const pair* cache,
    const pair w,
    COST_SPACE const ushort* before,
    COST_SPACE ushort* after,
    __local ushort* partial,
    __global ushort* row
) {
    const uint lane = get_local_id(0) % LANES;
    const uint share = get_local_id(0) / LANES;
#if COSTS == STAGED
    pair best[GROUPS * RUN / 2];
#else
    pair best[RUN / 2];
#endif
    STEP_UNROLL
    for (uint g = 0; g < GROUPS; ++g) {
        const uint node = (g * LANES + lane) * RUN;
#if COSTS == STAGED
        pair* const least = best + g * (RUN / 2);
#else
        pair* const least = best;
#endif
        UNROLL
        for (uint p = 0; p < RUN / 2; ++p) least[p] = both(INFINITE);
        STEP_UNROLL
        for (uint i = 0; i < CANDIDATES / SPLIT; ++i) {
            const uint q = share * (CANDIDATES / SPLIT) + i;
            const uint state = q << (16 - KOUT) | node;
            COST_SPACE const ushort* from = before + (state >> KIN);
            uint word = 0;
            UNROLL
            for (uint p = 0; p < RUN / 2; ++p) {
                // Neighbours share the cost that they come from.
                const uint source = 2 * p >> KIN;
                pair cost;
                if (RUN >> KIN < 2) {
                    if (p == 0) word = from[0];
                    cost = both(word);
                } else {
                    if ((2 * p & ((2u << KIN) - 1)) == 0) word = ((COST_SPACE const uint*)from)[source / 2];
                    cost = source % 2 ? both_high(word) : both_low(word);
                }
#if VALUES == CACHED
                const pair value = cache[(i * GROUPS + g) * (RUN / 2) + p];
#else
                const pair value = loaded(table, state + 2 * p);
#endif
                least[p] = smaller(least[p], square_add(subtract(value, w), cost));
            }
        }
#if COSTS != STAGED && SPLIT == 1
        STORE_RUN(COST_SPACE, least, after + node);
        if (row) STORE_RUN(__global, least, row + node);
#endif
    }
#if SPLIT > 1
    // The shares of a run meet in local memory.
    STORE_RUN(__local, best, partial + share * NODES + lane * RUN);
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint word = get_local_id(0); word < NODES / 2; word += WORK_GROUP) {
        __local const uint* words = (__local const uint*)partial + word;
        pair least = pair_of(words[0]);
        UNROLL
        for (uint other = 1; other < SPLIT; ++other) least = smaller(least, pair_of(words[other * (NODES / 2)]));
        ((COST_SPACE uint*)after)[word] = word_of(least);
        if (row) ((__global uint*)row)[word] = word_of(least);
    }
#elif COSTS == STAGED
    // One buffer: it is written after everyone has read it.
    barrier(CLK_LOCAL_MEM_FENCE);
    STEP_UNROLL
    for (uint g = 0; g < GROUPS; ++g) {
        const uint node = (g * LANES + lane) * RUN;
        STORE_RUN(COST_SPACE, best + g * (RUN / 2), after + node);
        if (row) STORE_RUN(__global, best + g * (RUN / 2), row + node);
    }
#endif
    barrier(COST_FENCE);
}

#undef NODES
#undef CANDIDATES
#undef LANES
#undef GROUPS
