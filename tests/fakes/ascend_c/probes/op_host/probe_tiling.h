// The tiling data of the test kernels.
#pragma once
#include "register/tilingdata_base.h"

namespace optiling {
BEGIN_TILING_DATA_DEF(ProbeTiling)
TILING_DATA_FIELD_DEF(uint32_t, first);
TILING_DATA_FIELD_DEF(uint64_t, wide);
TILING_DATA_FIELD_DEF(uint8_t, last);
END_TILING_DATA_DEF;
}  // namespace optiling
