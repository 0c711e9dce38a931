// The tiling struct, which all ops share. The kernel reads the fields in this order.
//
//          tokens        topK  experts  k  n  group   group2  zeros: 1 if there are zero points
//   fused  rows of x, T  k     E        H  I  of w13  of w2   parts: most parts that a product's K is split into; the
//   gemv   rows of x, T  1     1        K  N  of w    0              workspace has room for them
//                                                             cores: vector cores, one for each block launched
//
// s13 .. z2: first bytes of the planes in an expert's block, only for experts in slots of an arena; otherwise 0.
// The tiling key: 1 half, 2 bfloat16, with float sums; 3, 4 the same with half sums (attribute half_sums).
#pragma once
#include "register/tilingdata_base.h"

namespace optiling {

BEGIN_TILING_DATA_DEF(UmbraGemvTiling)
TILING_DATA_FIELD_DEF(uint32_t, tokens);
TILING_DATA_FIELD_DEF(uint32_t, topK);
TILING_DATA_FIELD_DEF(uint32_t, experts);
TILING_DATA_FIELD_DEF(uint32_t, k);
TILING_DATA_FIELD_DEF(uint32_t, n);
TILING_DATA_FIELD_DEF(uint32_t, group);
TILING_DATA_FIELD_DEF(uint32_t, group2);
TILING_DATA_FIELD_DEF(uint32_t, zeros);
TILING_DATA_FIELD_DEF(uint32_t, cores);
TILING_DATA_FIELD_DEF(uint32_t, parts);
TILING_DATA_FIELD_DEF(uint32_t, s13);
TILING_DATA_FIELD_DEF(uint32_t, z13);
TILING_DATA_FIELD_DEF(uint32_t, w2);
TILING_DATA_FIELD_DEF(uint32_t, s2);
TILING_DATA_FIELD_DEF(uint32_t, z2);
END_TILING_DATA_DEF;

}  // namespace optiling
