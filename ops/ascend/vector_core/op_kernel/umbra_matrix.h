// 4-bit matrices in planes (planes.py describes the layout), and the way through them that a core takes.
#pragma once
#include "umbra_plan.h"

namespace umbra {

constexpr uint32_t kPlace = 512;  // bytes: the unit of an expert's place in an arena
constexpr uint32_t kRun = 8;      // most products that are added up in half

// Where a bank of matrices begins. apart: bytes from one place to the next, or 0 if the matrices lie side by side.
struct Bank {
    GM_ADDR w;  // GM_ADDR is a macro, which makes one pointer a declaration
    GM_ADDR scales;
    GM_ADDR zeros;
    uint64_t apart;
};

struct Matrix {
    GlobalTensor<int8_t> w, scales, zeros;
    uint64_t apart, scalesApart;
    uint32_t n, sections, groups, planes, lanes, unit;
    bool hasZeros, bfloat16;  // bfloat16: the type of scales and zero points, otherwise half
    uint32_t k, kept, wide;   // wide: lanes of all groups, once each; lanes is a power of two times as many
    uint32_t step;            // planes of a block
    uint32_t folded;          // lanes of a block's sums
    uint32_t grain;           // columns of a tile are a multiple of this, so that each plane of it fills whole blocks

    // Side by side: w (E, sections * planes, N, lanes / 2), scales and zeros (E, sections, N, kept).
    __aicore__ inline Matrix(const Bank& bank, uint32_t n, bool hasZeros, bool bfloat16, bool floatSums,
                             uint32_t sections, uint32_t groups, uint32_t planes, uint32_t lanes, uint32_t unit)
        : n(n), sections(sections), groups(groups), planes(planes), lanes(lanes), unit(unit), hasZeros(hasZeros),
          bfloat16(bfloat16) {
        w.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(bank.w));
        scales.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(bank.scales));
        if (hasZeros) zeros.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(bank.zeros));
        k = sections * planes * lanes;
        kept = unit == 1 ? groups : Up(groups, 8);
        wide = groups * unit;
        step = Least(kRun, planes);
        folded = lanes;
        for (uint32_t run = step; !floatSums && run < kRun && folded > wide && folded % 32 == 0; run *= 2) folded /= 2;
        grain = lanes % 32 == 0 ? 2 : 4;
        apart = bank.apart ? bank.apart : static_cast<uint64_t>(k) * n / 2;
        scalesApart = bank.apart ? bank.apart : static_cast<uint64_t>(sections) * n * kept * sizeof(half);
    }

    // Bytes from one plane of a tile to the next. Twice this in half is 256 bytes more than a multiple of 512, so that
    // sums of planes with an odd distance read different banks.
    __aicore__ inline uint32_t Pitch(uint32_t width) const {
        const uint32_t bytes = width * lanes / 2;
        return bytes <= 64 ? 64 : Up(bytes - 64, 128) + 64;
    }

    // Columns of the widest tile that the buffers hold.
    __aicore__ inline uint32_t Widest() const {
        uint32_t most = Least(kPlane / folded, kKept / kept);
        most = Least(most, kGroups / (unit == 1 ? 8 : kept));
        most = most / grain * grain;
        while (Pitch(most) * (step > 1 ? step : 2) > kMoved) most -= grain;
        return most;
    }
};

}  // namespace umbra
