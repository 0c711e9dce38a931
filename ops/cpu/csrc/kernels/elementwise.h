// Parts of the elementwise ops that other kernels use.
#pragma once

#include <cstdint>

namespace umbra {

constexpr int64_t kWorthSharing = 1 << 15;  // elements below which waking the pool costs more than it saves

// silu(gate) * up, `width` of each.
void silu_mul(const float* gate, const float* up, float* out, int64_t width);

}  // namespace umbra
