// Rows of a GGUF file in the blocks of ggml's types, sixteen at a time (panel.h).
#pragma once

#include "kernels/matrix.h"

namespace umbra {

struct LaneRows;

// By ggml's own numbers.
enum class Ggml : int32_t {
    q4_0 = 2,
    q4_1 = 3,
    q5_0 = 6,
    q5_1 = 7,
    q8_0 = 8,
    q2_k = 10,
    q3_k = 11,
    q4_k = 12,
    q5_k = 13,
    q6_k = 14,
    iq2_xxs = 16,
    iq2_xs = 17,
    iq3_xxs = 18,
    iq1_s = 19,
    iq4_nl = 20,
    iq3_s = 21,
    iq2_s = 22,
    iq4_xs = 23,
    iq1_m = 29,
    tq1_0 = 34,
    tq2_0 = 35,
    mxfp4 = 39,
    nvfp4 = 40
};

struct Blocks {
    const uint8_t* at = nullptr;  // the first row's first block, at any alignment; null: none are given
    Ggml type = Ggml::q4_0;
    int64_t row = 0;      // bytes from a row to the next
    int64_t skipped = 0;  // columns of a row that come before the given ones, a multiple of 32
    float factor = 1;     // of all weights, which a tensor of its own holds
};

// The levels of 32 columns of sixteen rows, unsigned: word i of a row has those of columns 4i .. 4i+3, one in each byte.
struct alignas(64) Words {
    uint32_t of[kBlock / 4][kRows];
};

// What 32 columns of sixteen rows are scaled by: a weight is d * scale * value - dmin * minimum, where each half of the
// columns has a scale and a minimum, and value is what a level stands for. In mxfp4, `scale` are the exponents; in
// nvfp4, e4m3 floats.
struct BlockScales {
    uint16_t d[kRows], dmin[kRows];
    uint8_t scale[2][kRows], minimum[2][kRows];
    bool finite;
};

// 32 columns of sixteen rows in one of the formats of records, whose halves are d and dmin.
struct alignas(64) RecordRows {
    uint8_t record[64 * 3 + 16 * 3];
    uint16_t halves[2][kRows];
    bool finite;
};

// All read 32 columns from `start`, a multiple of 32. The last one returns whether all scales are finite.
void read_records(const Blocks& from, const FormatTraits& format, const LaneRows& rows, int64_t start, RecordRows& to);
void read_blocks(const Blocks& from, const LaneRows& rows, int64_t start, Words& levels, BlockScales& scales);
bool dequantise_blocks(const Blocks& from, const LaneRows& rows, int64_t start, float (*to)[kRows]);

}  // namespace umbra
