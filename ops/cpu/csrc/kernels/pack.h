// Converts ordinary rows to the layouts of matrix.h and back.
#pragma once

#include "kernels/ops.h"

namespace umbra {

// Where rows go: matrix `index` of those that follow each other, from row `first` on. With `step` 2 each 16 rows are
// followed by a gap of 16 rows (`first` is then a multiple of 16), which is how gate and up share a matrix.
struct RowRange {
    int64_t index, first, step;
};

// Writes `count` float32 rows of k columns, rounded to the nearest level in quantised formats. With zero points, scale
// and zero point cover the range from the group's least to its largest value, 0 included. Without, the scale is max|w|
// / 127 for q8; for q4 it maps the element of largest magnitude to -8, which uses all sixteen levels.
void pack_rows(Context& context, const SplitMatrix& w, const RowRange& where, int64_t count, const float* from);

// Writes `count` rows that are quantised already: levels (count, k), scales and zeros (count, k / group). If the matrix
// has zero points but `zeros` is null, every zero point is the middle of the levels.
void pack_levels(Context& context, const SplitMatrix& w, const RowRange& where, int64_t count, const uint8_t* levels,
                 const uint16_t* scales, const uint8_t* zeros);

// Writes `count` rows of e4m3 floats: values (count, k), scales (count, k / group).
void pack_f8(Context& context, const SplitMatrix& w, const RowRange& where, int64_t count, const uint8_t* values,
             const float* scales);

// The inverse: reads `count` rows and writes them dequantised to float32.
void unpack_rows(Context& context, const SplitMatrix& w, const RowRange& where, int64_t count, float* to);

}  // namespace umbra
