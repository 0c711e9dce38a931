// What the scenarios of the shadow pool share: a layer's work on a few bytes. The products themselves are left out, only
// the memory that they read and write is kept: shadow.h says which thread accesses what.
#pragma once

#include "machine.h"
#include "shadow/shadow.h"

namespace umbra {

// In place of kernels/moe.cpp. `scratch` has a number for `sort`'s result, and whether it was computed.
bool MoeRows::sort() const {
    scratch[0] = 0;
    for (int64_t a = 0; a < tokens * k; a++)
        if (ids[a] >= 0 && ids[a] < experts && !(elsewhere && elsewhere[ids[a]])) scratch[0]++;
    return scratch[0] != 0;
}
void MoeRows::compute(Context&) const { rows[0] = x[0] + scratch[0]; }
void AddRows::run(Context&) const { out[0] = rows[0] * weights[0]; }

}  // namespace umbra

struct Layer {
    std::vector<int64_t> address{64, 128}, elsewhere{0, 0}, ids{0, 1}, counts{0, 0}, times = std::vector<int64_t>(4);
    std::vector<float> x{0}, rows{0}, weights{1, 1}, out{0};
    std::vector<uint8_t> scratch{0};
    int64_t step = 0;

    umbra::MoeRows moe() {
        return {umbra::Matrix{},
                umbra::Matrix{},
                address.data(),
                elsewhere.data(),
                x.data(),
                ids.data(),
                rows.data(),
                scratch.data(),
                1,
                2,
                2,
                0,
                1,
                0};
    }
};

// Kernels that nothing calls.
inline const umbra::Kernels& no_kernels() {
    alignas(64) static char none[sizeof(umbra::Kernels)];
    return *reinterpret_cast<const umbra::Kernels*>(none);
}
