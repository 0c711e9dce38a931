// The tiling struct, which all ops share. The kernel reads the fields in this order.
//
//          tokens        topK  experts  k  n       zeros: 1 if there are zero points
//   fused  rows of x, T  k     E        H  I       sections .. unit: the layout of w13, or of w (planes.py)
//   gemv   rows of x, T  1     1        K  N       sections2 .. unit2: that of w2; otherwise 0
//   unpack 0             0     E        K  N       pairs: 1 if gate and up lie in turns; tiles: 1 if y is in tiles
//
// s13 .. z2: first bytes of the parts of an expert's block, only for experts in slots of an arena; otherwise 0.
// scored .. floatScores: experts that the scores choose from, the first of them here, whether scores become sigmoids,
// and whether they are float; only where the kernel chooses, otherwise 0.
// The tiling key: 1 half, 2 bfloat16; 3, 4 the same with float sums (attribute float_sums).
#pragma once
#include "register/tilingdata_base.h"

namespace optiling {

BEGIN_TILING_DATA_DEF(UmbraGemvTiling)
TILING_DATA_FIELD_DEF(uint32_t, tokens);
TILING_DATA_FIELD_DEF(uint32_t, topK);
TILING_DATA_FIELD_DEF(uint32_t, experts);
TILING_DATA_FIELD_DEF(uint32_t, k);
TILING_DATA_FIELD_DEF(uint32_t, n);
TILING_DATA_FIELD_DEF(uint32_t, zeros);
TILING_DATA_FIELD_DEF(uint32_t, pairs);
TILING_DATA_FIELD_DEF(uint32_t, tiles);
TILING_DATA_FIELD_DEF(uint32_t, sections);
TILING_DATA_FIELD_DEF(uint32_t, groups);
TILING_DATA_FIELD_DEF(uint32_t, planes);
TILING_DATA_FIELD_DEF(uint32_t, lanes);
TILING_DATA_FIELD_DEF(uint32_t, unit);
TILING_DATA_FIELD_DEF(uint32_t, sections2);
TILING_DATA_FIELD_DEF(uint32_t, groups2);
TILING_DATA_FIELD_DEF(uint32_t, planes2);
TILING_DATA_FIELD_DEF(uint32_t, lanes2);
TILING_DATA_FIELD_DEF(uint32_t, unit2);
TILING_DATA_FIELD_DEF(uint32_t, s13);
TILING_DATA_FIELD_DEF(uint32_t, z13);
TILING_DATA_FIELD_DEF(uint32_t, w2);
TILING_DATA_FIELD_DEF(uint32_t, s2);
TILING_DATA_FIELD_DEF(uint32_t, z2);
TILING_DATA_FIELD_DEF(uint32_t, scored);
TILING_DATA_FIELD_DEF(uint32_t, first);
TILING_DATA_FIELD_DEF(uint32_t, sigmoid);
TILING_DATA_FIELD_DEF(uint32_t, floatScores);
END_TILING_DATA_DEF;

}  // namespace optiling
