// The layout of 4-bit matrices in planes, as planes.py describes and computes it, and the kernels' limits. op_host and the
// torch extension include this file.
#pragma once
#include <algorithm>
#include <cstdint>

namespace umbra {

constexpr int64_t kStep = 32, kColumns = 8;                                // K and N are multiples of these
constexpr int64_t kMostTokens = 8, kMostPairs = 256, kMostExperts = 8192;  // the capacity of a kernel's plan
constexpr int64_t kMostScored = 512, kMostChosen = 8;   // experts that a kernel chooses from; experts of a token then
constexpr int64_t kMostRows = 8192, kMostInner = 4096;  // most values of K in a kernel's buffers; of w2
constexpr int64_t kPairs = 16;                          // columns of gate, and of up, that lie side by side
constexpr int64_t kLanes = 128, kSection = 4096, kBlock = 16;

// The layout of a matrix.
struct Planes {
    int64_t k, sections, groups, planes, lanes, unit;
    int64_t kept() const { return unit == 1 ? groups : (groups + 7) / 8 * 8; }
};

// The largest power of two that is at most `limit`.
inline int64_t power_below(int64_t limit) {
    int64_t power = 1;
    while (power * 2 <= limit) power *= 2;
    return power;
}

// planes_of of planes.py. k is a multiple of the group.
inline Planes planes_of(int64_t k, int64_t group, bool ordered) {
    const int64_t count = k / group;
    for (int64_t groups = std::min(std::min(count, kLanes), kSection / group); groups > 0; --groups) {
        const int64_t unit = groups <= 16 ? 8 : 1;
        if (count % groups || (unit == 1 && groups % (ordered ? 8 : kBlock))) continue;
        const int64_t split = power_below(std::min(group, kLanes / groups));
        if (groups * split % kBlock == 0) return {k, count / groups, groups, group / split, groups * split, unit};
    }
    return Planes();
}

}  // namespace umbra
