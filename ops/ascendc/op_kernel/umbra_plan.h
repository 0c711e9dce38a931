// Who computes what: known only on the device, for it follows from the ids.
//
// Pairs p = token * top-k + place, each an expert that a token chose. Pairs with the same expert form a unit, so that its
// weights are read once for all of them; a unit has at most kMostRows rows, more make another one. Ids outside 0 .. E - 1
// belong to no unit.
//
// A task is one unit's tile of columns, over one part of K. Tasks are numbered columns first: neighbouring cores read
// neighbouring columns of the same rows. Core c takes tasks c, c + cores, ...
#pragma once
#include "kernel_operator.h"

namespace umbra {

constexpr uint32_t kMostPairs = 256;
constexpr uint32_t kMostExperts = 8192; // or slots of a bank
constexpr uint32_t kMostRows = 8;

__aicore__ inline uint32_t Ceil(uint32_t a, uint32_t b) { return (a + b - 1) / b; }
__aicore__ inline uint32_t Up(uint32_t a, uint32_t b) { return Ceil(a, b) * b; }
__aicore__ inline uint32_t Least(uint32_t a, uint32_t b) { return a < b ? a : b; }

struct Unit {
    uint32_t expert;
    uint32_t rows;
    uint16_t pair[kMostRows];
};

struct Units {
    uint32_t count = 0;
    Unit unit[kMostPairs];
    bool here[kMostPairs]; // whether a pair is in some unit

    // From ids (pairs) in global memory.
    template <typename Room>
    __aicore__ inline void Read(Room& room, GM_ADDR ids, uint32_t pairs, uint32_t experts);

    __aicore__ inline void Add(uint32_t pair, uint32_t expert, bool seen) {
        here[pair] = true;
        uint32_t u = count;
        if (seen) // the newest unit of this expert may have room
            for (u = count - 1; unit[u].expert != expert; --u) {
            }
        if (u == count || unit[u].rows == kMostRows) {
            u = count++;
            unit[u].expert = expert;
            unit[u].rows = 0;
        }
        unit[u].pair[unit[u].rows++] = pair;
    }
};

// Takes ids one by one.
struct Chosen {
    Units& units;
    uint32_t experts;
    uint64_t seen[kMostExperts / 64]; // one bit an expert

    __aicore__ inline void Take(uint32_t pair, int32_t id) {
        units.here[pair] = false;
        if (id < 0 || static_cast<uint32_t>(id) >= experts)
            return;
        const uint64_t bit = 1ull << (id % 64);
        units.Add(pair, id, seen[id / 64] & bit);
        seen[id / 64] |= bit;
    }
};

template <typename Room>
__aicore__ inline void Units::Read(Room& room, GM_ADDR ids, uint32_t pairs, uint32_t experts) {
    AscendC::GlobalTensor<int32_t> from;
    from.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(ids));
    Chosen chosen{*this, experts, {}};
    room.ReadScalars(from, pairs, chosen);
}

// How the columns and K of a product are cut so that every core has work.
struct Split {
    uint32_t width = 0; // columns of a tile
    uint32_t tiles = 0; // of a unit
    uint32_t parts = 1;
    uint32_t rows = 0; // of K in a part

    // The widest tiles, so that x is read seldom, unless they leave cores without work. Then the longest core's share decides;
    // K is cut only where that shortens it by a fifth: sums of parts go through global memory and one more synchronisation.
    __aicore__ inline void Choose(
        uint32_t units, uint32_t columns, uint32_t k, uint32_t cores, uint32_t widest, uint32_t narrowest,
        uint32_t mostParts) {
        if (units == 0) // nobody was chosen
            return;
        uint64_t best = ~0ull;
        for (uint32_t w = widest; w >= narrowest; w /= 2) {
            const uint32_t across = Ceil(columns, w), tasks = units * across;
            for (uint32_t cut = 0; cut < 2; ++cut) {
                uint32_t p = cut && tasks < cores ? Least(cores / tasks, mostParts) : 1;
                const uint32_t r = Up(Ceil(k, p), 128);
                p = Ceil(k, r);
                if (cut && p == 1)
                    continue;
                uint64_t cost = static_cast<uint64_t>(Ceil(tasks * p, cores)) * Least(w, columns) * Least(r, k);
                cost = cut ? cost * 5 : cost * 4;
                if (cost < best) {
                    best = cost;
                    width = w;
                    tiles = across;
                    parts = p;
                    rows = r;
                }
            }
            if (units * tiles >= cores)
                return;
        }
    }
};

} // namespace umbra
