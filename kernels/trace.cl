// The way back along the cheapest path, from the costs that `forward` stored.
//
// A work-group takes one tile. In pass 1 it finds the node that closes the ring and stores it in `start`;
// in pass 2 it stores the states. The branch into a node is the first candidate whose cost is the node's.

#include "half.h"

#define STRIDE (65536u >> BITS)
#define KEEP_FROM (LEN / 2 - 1)
#define NONE 0xffffffffu

inline uint width(uint r) { return BITS + (HALF_RATE & r & 1); }

// Five bits in reverse. (A table: the usual expression becomes an instruction that oclgrind lacks.)
__constant uchar REVERSED[32] = {
    0, 16, 8, 24, 4, 20, 12, 28, 2, 18, 10, 26, 6, 22, 14, 30,
    1, 17, 9, 25, 5, 21, 13, 29, 3, 19, 11, 27, 7, 23, 15, 31,
};

// The order of final nodes of equal cost.
inline uint rank_of(uint node) {
    const uint v = node & 1023;
    return (uint)REVERSED[v >> 5] << 10 | (uint)REVERSED[v & 31] << 5 | node >> 10;
}

inline uint node_of(uint rank) {
    return (rank & 31) << 10 | (uint)REVERSED[rank >> 10] << 5 | (uint)REVERSED[rank >> 5 & 31];
}

__kernel __attribute__((reqd_work_group_size(TRACE_GROUP, 1, 1)))
void trace(
    __global const float* restrict tiles,    // [count, LEN]
    __global const VALUE* restrict table,    // [65536]
    __global const ushort* restrict history, // [count, LEN, STRIDE], half bits
    __global ushort* restrict start,         // [count], nodes; written in pass 1, read in pass 2
    __global ushort* restrict states,        // [count, LEN]; written in pass 2
    const int pass
) {
    const uint item = get_local_id(0);
    const size_t tile = get_group_id(0);
    history += tile * LEN * STRIDE;
    const int last = pass == 1 ? LEN / 2 : 0;
    const int roll = last;
    // Row 0 of pass 1 holds the costs after step KEEP_FROM.
    const int first_row = pass == 1 ? KEEP_FROM : 0;

    __local ushort weights[LEN];
    for (uint i = item; i < LEN; i += TRACE_GROUP) vstore_half_rte(tiles[tile * LEN + i], i, (__local half*)weights);
    // Three slots: one is read, one written, one made ready for the next step, with one barrier a step.
    __local uint found[3];
    __local uint cheapest;
    if (item == 0) {
        for (int slot = 0; slot < 3; ++slot) found[slot] = NONE;
        cheapest = NONE;
    }
    barrier(CLK_LOCAL_MEM_FENCE);

    uint node;
    const uint start_node = pass == 1 ? 0 : start[tile];
    if (pass == 1) {
        __global const ushort* row = history + (size_t)(LEN - 1 - first_row) * STRIDE;
        const uint nodes = 65536u >> width((LEN - 1 + roll + 1) % LEN);
        uint least = NONE;
        for (uint e = item; e < nodes; e += TRACE_GROUP) least = min(least, (uint)row[e] << 16 | rank_of(e));
        atomic_min(&cheapest, least);
        barrier(CLK_LOCAL_MEM_FENCE);
        // All costs infinite: node 0 stands.
        node = cheapest >> 16 >= INFINITE ? 0 : node_of(cheapest & 0xffffu);
    } else {
        node = start_node;
    }

    for (int i = LEN - 1; i >= last; --i) {
        const uint r = (i + roll) % LEN;
        const uint kin = width(r);
        const uint kout = width((r + 1) % LEN);
        __global const ushort* row = history + (size_t)(i - first_row) * STRIDE;
        const uint target = row[node];
        for (uint q = item; q < 1u << kout; q += TRACE_GROUP) {
            const uint state = q << (16 - kout) | node;
            const uint from = state >> kin;
            const uint cost = i > 0 ? row[(int)from - (int)STRIDE] : from == start_node ? 0 : INFINITE;
            if (candidate_cost(table[state], weight_of(weights, r), cost) == target) {
                atomic_min(&found[i % 3], q);
                break;
            }
        }
        if (item == 0) found[(i + 2) % 3] = NONE;
        barrier(CLK_LOCAL_MEM_FENCE);
        // One is always found, unless the device miscalculates: then the path is wrong and stays in bounds.
        const uint q = found[i % 3] == NONE ? 0 : found[i % 3];
        const uint state = q << (16 - kout) | node;
        if (pass == 2 && item == 0) states[tile * LEN + i] = state;
        node = state >> kin;
    }
    if (pass == 1 && item == 0) start[tile] = node;
}
