// Residual streams: S rows (hidden) of each token side by side, of which a layer reads one row and to all of which its
// result is added. ops/streams.py says what each op means.
#pragma once

#include "kernels/ops.h"

namespace umbra {

constexpr int kMostStreams = 8;

struct Spread {
    const float* x;  // (T, hidden)
    float* out;      // (T, streams * hidden)
    int64_t tokens, hidden, streams;
    void run(Context&) const;
};

// RMSNorm of each stream alone, by a weight of its own.
struct StreamNorm {
    const float* x;       // (T, streams * hidden)
    const float* weight;  // (streams * hidden)
    float* out;           // (T, streams * hidden)
    int64_t tokens, hidden, streams;
    float eps;
    void run(Context&) const;
};

struct ScaledSilu {
    const float* x;  // (T, width), tokens `stride` apart
    float* out;      // (T, width)
    int64_t tokens, width, stride;
    float factor;
    void run(Context&) const;
};

struct GatedRead {
    const float *gates, *normed;  // (T, streams * hidden)
    float* out;                   // (T, hidden)
    int64_t tokens, hidden, streams;
    void run(Context&) const;
};

struct GatedWrite {
    float* x;             // (T, streams * hidden), in place
    const float* y;       // (T, hidden)
    const float* logits;  // (T, streams), tokens `stride` apart
    int64_t tokens, hidden, streams, stride;
    void run(Context&) const;
};

struct SinkhornRead {
    const float* x;                  // (T, streams * hidden)
    const float *fn, *scale, *base;  // ((2 + streams) * streams, streams * hidden), (3), ((2 + streams) * streams)
    float *out, *post, *comb;        // (T, hidden), (T, streams), (T, streams, streams)
    int64_t tokens, hidden, streams, steps;
    float eps, margin;
    void run(Context&) const;
};

struct SinkhornWrite {
    float* x;                      // (T, streams * hidden), in place
    const float *y, *post, *comb;  // (T, hidden), (T, streams), (T, streams, streams)
    int64_t tokens, hidden, streams;
    void run(Context&) const;
};

}  // namespace umbra
