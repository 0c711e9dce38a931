// The weights that a product reads, and the order in which a core reads them.
#pragma once
#include "umbra_room.h"

namespace umbra {

constexpr uint32_t kPlace = 512;  // bytes: the unit of an expert's place in an arena

// A bank of matrices w (K, N / 8) int32 with scales and perhaps zeros (K / G, N), addressed as bytes. The matrix at
// place p begins p * apart bytes after the first matrix, and its scales and zeros begin p * scalesApart bytes after the
// first.
struct Bank {
    GlobalTensor<int8_t> w, scales, zeros;
    uint32_t k, n, group;
    bool hasZeros;
    uint64_t apart, scalesApart;

    // Side by side: w (E, K, N / 8), scales and zeros (E, K / G, N).
    __aicore__ inline Bank(GM_ADDR w, GM_ADDR scales, GM_ADDR zeros, bool hasZeros, uint32_t k, uint32_t n,
                           uint32_t group)
        : k(k), n(n), group(group), hasZeros(hasZeros), apart(static_cast<uint64_t>(k) * n / 2),
          scalesApart(static_cast<uint64_t>(k) / group * n * sizeof(half)) {
        this->w.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(w));
        this->scales.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(scales));
        if (hasZeros) this->zeros.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(zeros));
    }

    // In blocks of an arena: all planes of neighbouring places are `apart` bytes apart.
    __aicore__ inline Bank(GM_ADDR w, GM_ADDR scales, GM_ADDR zeros, bool hasZeros, uint32_t k, uint32_t n,
                           uint32_t group, uint64_t apart)
        : Bank(w, scales, zeros, hasZeros, k, n, group) {
        this->apart = scalesApart = apart;
    }
};

// One move of a task: rows k .. k + rows of the matrix, at most `step`. Global memory serves cores that ask for the same
// 512 bytes one after another, so tasks with neighbouring columns begin at different rows and wrap around.
struct Move {
    uint32_t task, unit, part, column, width;  // the task
    uint32_t begin, end, step, moves, shift;   // its rows, and how they are divided into moves
    uint32_t index, k, rows;                   // the move
};

// The sums of a task: a unit's rows of `width` columns from `column` on, in each range.
struct Done {
    const Unit& unit;
    uint32_t part, column, width, pitch;  // pitch: that of a range in room.y
};

// Rows of half. Each run of `run` values of a row must be multiplied by a power of two, which is stored as eight equal
// floats.
struct Powered {
    GlobalTensor<half> rows;
    GlobalTensor<float> powers;  // (rows, K / run, 8)
    uint32_t run;
};

}  // namespace umbra
