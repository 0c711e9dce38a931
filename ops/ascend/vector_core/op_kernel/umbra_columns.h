// A core's own columns of an output: their tiles, and how these are stored.
#pragma once
#include "umbra_product.h"

namespace umbra {

constexpr uint32_t kTilePitch = 96;  // floats from one row of a tile's sums to the next

__aicore__ inline Route OwnColumns(const Matrix& m, const Units& units, bool unitsFirst) {
    const uint64_t grains = m.n / m.grain, core = AscendC::GetBlockIdx(), cores = AscendC::GetBlockNum();
    const uint32_t begin = grains * core / cores * m.grain, end = grains * (core + 1) / cores * m.grain;
    const uint32_t tiles = Ceil(end - begin, m.Widest());
    const uint32_t width = tiles ? Up(Ceil(end - begin, tiles), m.grain) : 0;
    return {0, tiles * units.count, 1, tiles, begin, end, width, unitsFirst};
}

// Stores `count` rows of sums, room.task (count, kTilePitch), rounded to T, in `to`, whose rows are `stride` apart. Then
// they are 0 again.
template <typename T>
__aicore__ inline void StoreTile(Room& room, const GlobalTensor<T>& to, uint32_t count, uint32_t width,
                                 uint32_t stride) {
    LocalTensor<T> out = room.out.template AllocTensor<T>();
    const uint32_t pitch = Up(width, 16);
    for (uint32_t r = 0; r < count; ++r)
        AscendC::Cast(out[r * pitch], room.task[r * kTilePitch], RoundMode::CAST_RINT, width);
    Barrier();
    AscendC::Duplicate(room.task, 0.0f, kTask);
    Barrier();
    room.out.EnQue(out);
    out = room.out.template DeQue<T>();
    const uint32_t bytes = width * sizeof(T);
    AscendC::DataCopyPad(
        to, out, {static_cast<uint16_t>(count), bytes, 0, static_cast<uint32_t>(stride * sizeof(T) - bytes), 0});
    room.out.FreeTensor(out);
}

}  // namespace umbra
