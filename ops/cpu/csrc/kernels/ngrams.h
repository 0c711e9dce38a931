// Rows of a table by hashes of the last tokens. ops/ngrams.py says what it means.
//
// The table lies in parts of equally many rows, anywhere in memory: in mapped files too, whose pages the system reads
// when a row is first read. Threads of the pool take a token's rows each, so that they wait for the disk together.
#pragma once

#include "kernels/ops.h"

namespace umbra {

struct NgramRows {
    const int64_t* ids;                             // (T)
    const int64_t* before;                          // (T, size - 1): the tokens before, the nearest first; -1: none
    const int64_t *multipliers, *moduli, *offsets;  // (size), (heads), (heads)
    const int64_t* parts;                           // addresses of (part_rows, width)
    float* out;                                     // (T, heads * width)
    int64_t tokens, size, heads, width, part_rows, end;  // end: the token that begins a text
    Type type;
    static constexpr int64_t kMostSize = 8;
    void run(Context&) const;
};

// u (T, S * hidden): the value (hidden) in each stream, times the sigmoid of a root of what its key and query agree by.
struct AgreeingValues {
    const float *keys, *queries;  // (T, streams * hidden)
    const float* values;          // (T, hidden)
    float* out;                   // (T, streams * hidden)
    int64_t tokens, hidden, streams;
    void run(Context&) const;
};

}  // namespace umbra
