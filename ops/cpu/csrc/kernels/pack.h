// Fills the layouts of matrix.h from ordinary rows.
#pragma once

#include "kernels/ops.h"

namespace umbra {

// Where rows go: into matrix `index` of those that follow each other, from row `first` on; with `step` 2 each 16 rows
// are followed by room for 16 others (`first` is then a multiple of 16), which is how gate and up share a matrix.
struct RowRange {
    int64_t index, first, step;
};

// Put `count` float32 rows (k long each) there, quantising to nearest where the format says so. With zero points, scale
// and zero span from the least to the largest of the group, 0 included. Without, scale is max|w| / 127 (q8) or, for q4,
// what maps the element of largest magnitude to -8, which uses all sixteen values.
void pack_rows(Context& context, const SplitMatrix& w, const RowRange& where, int64_t count, const float* from);

// Put `count` rows there that are quantised already: levels (count, k), scales and zeros (count, k / group). Zeros may be
// null where the matrix has zero points: they are then the middle of the levels.
void pack_levels(Context& context, const SplitMatrix& w, const RowRange& where, int64_t count, const uint8_t* levels,
                 const uint16_t* scales, const uint8_t* zeros);

// The inverse, dequantised.
void unpack_rows(Context& context, const SplitMatrix& w, const RowRange& where, int64_t count, float* to);

}  // namespace umbra
