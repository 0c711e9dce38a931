// Fills the layouts of matrix.h from ordinary rows.
#pragma once

#include "ops.h"

namespace umbra {

// Put `count` float32 rows (w.k long each) at row `first` of `w`, quantising to nearest where its format says so.
// With zero points, scale and zero span from the least to the largest of the group, 0 included. Without, scale is
// max|w| / 127 (q8) or, for q4, what maps the element of largest magnitude to -8, which uses all sixteen values.
void pack_rows(Context& context, const Matrix& w, int64_t first, int64_t count, const float* from);

// The inverse, dequantised.
void unpack_rows(Context& context, const Matrix& w, int64_t first, int64_t count, float* to);

}  // namespace umbra
