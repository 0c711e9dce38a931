// What a product reads, and how a core goes through it.
#pragma once
#include "umbra_room.h"

namespace umbra {

constexpr uint32_t kPlace = 512; // bytes; where an expert lies in an arena counts in these

// A bank of matrices w (K, N / 8) int32 with scales and perhaps zeros (K / G, N): bytes on their way in. Those at a place
// begin `place` times `apart` and `scalesApart` bytes after the first.
struct Bank {
    GlobalTensor<int8_t> w, scales, zeros;
    uint32_t k, n, group;
    bool hasZeros;
    uint64_t apart, scalesApart;

    // Side by side: w (E, K, N / 8), scales and zeros (E, K / G, N).
    __aicore__ inline Bank(GM_ADDR w, GM_ADDR scales, GM_ADDR zeros, bool hasZeros, uint32_t k, uint32_t n, uint32_t group)
        : k(k), n(n), group(group), hasZeros(hasZeros), apart(static_cast<uint64_t>(k) * n / 2),
          scalesApart(static_cast<uint64_t>(k) / group * n * sizeof(half)) {
        this->w.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(w));
        this->scales.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(scales));
        if (hasZeros)
            this->zeros.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(zeros));
    }

    // In blocks of an arena: what is at a place is `apart` bytes from what is at the next, whatever it is.
    __aicore__ inline Bank(
        GM_ADDR w, GM_ADDR scales, GM_ADDR zeros, bool hasZeros, uint32_t k, uint32_t n, uint32_t group, uint64_t apart)
        : Bank(w, scales, zeros, hasZeros, k, n, group) {
        this->apart = scalesApart = apart;
    }
};

// One move of a task: rows k .. k + rows of the matrix, at most `step`. Global memory serves cores one after another that
// ask for the same 512 bytes at a time, so tasks with neighbouring columns begin at different rows, and go round.
struct Move {
    uint32_t task, unit, part, column, width; // the task
    uint32_t begin, end, step, moves, shift;  // its rows, and how they are cut
    uint32_t index, k, rows;                  // the move
};

// What a task has summed up: a unit's rows of `width` columns from `column` on, in each range.
struct Done {
    const Unit& unit;
    uint32_t part, column, width, pitch; // pitch: of a range in room.y
};

// Rows of half and the power of two that each run of `run` values of a row is to be multiplied with: eight floats, all the same.
struct Powered {
    GlobalTensor<half> rows;
    GlobalTensor<float> powers; // (rows, K / run, 8)
    uint32_t run;
};

} // namespace umbra
