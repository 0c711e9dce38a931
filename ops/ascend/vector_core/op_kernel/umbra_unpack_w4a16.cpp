// y (E, N, K) = 4-bit matrices w in planes, as values of the type of scales; K stays in the order of planes. With `pairs`
// the columns of gate and up, which w has in turns, become the first and the second half of y's rows. With `tiles` y is
// stored as FRACTAL_NZ, (E, K / 16, N, 16).
//
// A task is some columns of an expert. The scales of a section are spread over the lanes of a plane once; then a block
// of planes is converted to float, multiplied, rounded, and turned so that a column's planes follow each other or, in
// tiles, so that the columns of 16 lanes do.
#include "umbra_matrix.h"

namespace umbra {

constexpr uint32_t kRowColumns = 8, kTileColumns = 16;  // of a task
constexpr uint32_t kTileRows = 16;                      // values of K side by side in a tile
constexpr uint32_t kPitch = kTileColumns + 1;           // blocks from 16 lanes to the next: an odd number for the banks
constexpr uint32_t kBlockColumns = 64;                  // most columns of a block, over all its planes
constexpr uint32_t kPairs = 16;

template <typename T> class Unpacker {
public:
    __aicore__ inline Unpacker(const Matrix& matrix, const GlobalTensor<T>& y, uint32_t experts, bool pairs, bool tiles)
        : m(matrix), y(y), columns(tiles ? kTileColumns : kRowColumns),
          step(Least(matrix.planes, kBlockColumns / columns)), tasks(experts * (matrix.n / columns)), pairs(pairs),
          tiles(tiles) {
        const uint32_t plane = columns * m.lanes, most = step * plane;  // weights of a plane, of a block
        pipe.InitBuffer(stream, 3, most / 2);
        pipe.InitBuffer(scales, 3, (m.hasZeros ? 2 : 1) * ScalesBytes());
        pipe.InitBuffer(out, 2, (tiles ? most / columns * kPitch : most) * sizeof(T));
        pipe.InitBuffer(halvesBuf, most * sizeof(half));
        pipe.InitBuffer(floatsBuf, most * sizeof(float));
        pipe.InitBuffer(lanesBuf, 2 * plane * sizeof(float));
        pipe.InitBuffer(spreadBuf, columns * m.kept * (m.unit > 1 ? 9 : 1) * sizeof(float));
        halves = halvesBuf.template Get<half>();
        floats = floatsBuf.template Get<float>();
        scaleOf = lanesBuf.template Get<float>();
        zeroOf = scaleOf[plane];
        spread = spreadBuf.template Get<float>();
    }

    __aicore__ inline void Run() {
        load.task = work.task = AscendC::GetBlockIdx();
        for (uint32_t i = 0; i < 2; ++i) Load();
        while (work.task < tasks) {
            Load();
            Unpack();
            Next(work);
        }
    }

private:
    struct Block {
        uint32_t task, section = 0, plane = 0;
    };

    AscendC::TPipe pipe;
    AscendC::TQue<TPosition::VECIN, 3> stream;
    AscendC::TQue<TPosition::VECIN, 3> scales;
    AscendC::TQue<TPosition::VECOUT, 2> out;
    AscendC::TBuf<TPosition::VECCALC> halvesBuf, floatsBuf, lanesBuf, spreadBuf;
    LocalTensor<half> halves;
    LocalTensor<float> floats, scaleOf, zeroOf, spread;
    const Matrix& m;
    const GlobalTensor<T>& y;
    const uint32_t columns, step, tasks;  // columns of a task, planes of a block
    const bool pairs, tiles;
    Block load, work;

    __aicore__ inline uint32_t ScalesBytes() const { return columns * m.kept * sizeof(T); }

    __aicore__ inline void Next(Block& b) const {
        b.plane += step;
        if (b.plane < m.planes) return;
        b.plane = 0;
        if (++b.section < m.sections) return;
        b.section = 0;
        b.task += AscendC::GetBlockNum();
    }

    template <typename V> __aicore__ inline void Fetch(const LocalTensor<V>& to, const GlobalTensor<V>& from,
                                                       uint32_t bytes) {
        AscendC::DataCopyPad(to, from, {1, bytes, 0, 0, 0}, AscendC::DataCopyPadExtParams<V>());
    }

    __aicore__ inline void Load() {
        if (load.task >= tasks) return;
        const uint32_t groups = m.n / columns, bytes = columns * m.lanes / 2;
        const uint64_t expert = load.task / groups, column = load.task % groups * columns;
        const uint64_t plane = load.section * m.planes + load.plane;
        LocalTensor<int8_t> in = stream.template AllocTensor<int8_t>();
        AscendC::DataCopyPad(in, m.w[expert * m.apart + (plane * m.n + column) * (m.lanes / 2)],
                             {static_cast<uint16_t>(step), bytes, m.n * m.lanes / 2 - bytes, 0, 0},
                             AscendC::DataCopyPadExtParams<int8_t>());
        stream.EnQue(in);
        if (load.plane == 0) {
            const uint64_t at = expert * m.scalesApart + (load.section * m.n + column) * m.kept * sizeof(T);
            LocalTensor<int8_t> kept = scales.template AllocTensor<int8_t>();
            Fetch(kept, m.scales[at], ScalesBytes());
            if (m.hasZeros) Fetch(kept[ScalesBytes()], m.zeros[at], ScalesBytes());
            scales.EnQue(kept);
        }
        Next(load);
    }

    // to (columns, lanes) = scales or zero points `from` (columns, kept), each at all lanes of its group.
    __aicore__ inline void Spread(const LocalTensor<float>& to, const LocalTensor<T>& from) {
        AscendC::Cast(spread, from, RoundMode::CAST_NONE, columns * m.kept);
        Barrier();
        LocalTensor<float> source = spread;
        if (m.unit > 1) {  // a group has eight lanes: (columns, kept, 8)
            source = spread[columns * m.kept];
            AscendC::Brcb(source, spread, static_cast<uint8_t>(columns * m.kept / 8), {1, 8});
            Barrier();
        }
        const uint8_t row = m.lanes / 8, sourceRow = m.kept * m.unit / 8;
        for (uint32_t at = 0; at < m.lanes; at += m.wide)
            for (uint32_t lane = 0; lane < m.wide; lane += kLanes)
                AscendC::Adds(to[at + lane], source[lane], 0.0f, Least(m.wide - lane, kLanes), columns,
                              {1, 1, row, sourceRow});
        Barrier();
    }

    __aicore__ inline void Unpack() {
        const uint32_t plane = columns * m.lanes, count = step * plane;
        LocalTensor<int8_t> in = stream.template DeQue<int8_t>();
        AscendC::Cast(halves, in.template ReinterpretCast<AscendC::int4b_t>(), RoundMode::CAST_NONE, count);
        if (work.plane == 0) {
            LocalTensor<int8_t> kept = scales.template DeQue<int8_t>();
            Spread(scaleOf, kept.template ReinterpretCast<T>());
            if (m.hasZeros) Spread(zeroOf, kept[ScalesBytes()].template ReinterpretCast<T>());
            scales.FreeTensor(kept);
        }
        Barrier();
        stream.FreeTensor(in);
        AscendC::Cast(floats, halves, RoundMode::CAST_NONE, count);
        Barrier();
        if (m.hasZeros) {
            for (uint32_t p = 0; p < step; ++p) AscendC::Add(floats[p * plane], floats[p * plane], zeroOf, plane);
            Barrier();
        }
        for (uint32_t p = 0; p < step; ++p) AscendC::Mul(floats[p * plane], floats[p * plane], scaleOf, plane);
        Barrier();
        LocalTensor<T> values = out.template AllocTensor<T>();
        const uint32_t each = step * m.lanes;  // values of a column
        for (uint32_t p = 0; p < step; ++p)
            for (uint32_t lane = 0; lane < m.lanes; lane += kLanes) {
                const uint32_t at = p * m.lanes + lane;
                AscendC::Cast(values[tiles ? at * kPitch : at], floats[p * plane + lane], RoundMode::CAST_RINT,
                              Least(m.lanes - lane, kLanes), columns,
                              {static_cast<uint16_t>(tiles ? kPitch : 1), 1,
                               static_cast<uint8_t>(tiles ? 1 : each / 16), static_cast<uint8_t>(m.lanes / 8)});
            }
        out.EnQue(values);
        values = out.template DeQue<T>();
        const uint32_t groups = m.n / columns, row = Row(work.task % groups * columns);
        const uint64_t expert = static_cast<uint64_t>(work.task / groups) * m.n * m.k;
        const uint64_t k = (work.section * m.planes + work.plane) * m.lanes;
        if (tiles)
            Store(expert + k * m.n + row * kTileRows, values, each / kTileRows, columns * kTileRows, kPitch - columns,
                  m.n * kTileRows);
        else
            Store(expert + static_cast<uint64_t>(row) * m.k + k, values, columns, each, 0, m.k);
        out.FreeTensor(values);
    }

    // Stores `count` runs of `length` values, with `gap` blocks between them, in y from `at` on, `apart` from each
    // other.
    __aicore__ inline void Store(uint64_t at, const LocalTensor<T>& values, uint32_t count, uint32_t length,
                                 uint32_t gap, uint32_t apart) {
        AscendC::DataCopyPad(y[at], values,
                             {static_cast<uint16_t>(count), static_cast<uint32_t>(length * sizeof(T)), gap,
                              static_cast<uint32_t>((apart - length) * sizeof(T)), 0});
    }

    // The row of an expert's y for a column of w.
    __aicore__ inline uint32_t Row(uint32_t column) const {
        if (!pairs) return column;
        return column / kPairs % 2 * (m.n / 2) + column / (2 * kPairs) * kPairs + column % kPairs;
    }
};

template <typename T> __aicore__ inline void Unpack(const Bank& bank, GM_ADDR yAt, const UmbraGemvTiling& t) {
    const Matrix matrix(bank, t.n, t.zeros, std::is_same<T, bfloat16_t>::value, false, t.sections, t.groups, t.planes,
                        t.lanes, t.unit);
    GlobalTensor<T> y;
    y.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(yAt));
    Unpacker<T>(matrix, y, t.experts, t.pairs, t.tiles).Run();
}

}  // namespace umbra

extern "C" __global__ __aicore__ void umbra_unpack_w4a16(GM_ADDR w, GM_ADDR scales, GM_ADDR zeros, GM_ADDR y,
                                                         GM_ADDR workspace, GM_ADDR tiling) {
    KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_MIX_AIV_1_0);
    GET_TILING_DATA(t, tiling);
    const umbra::Bank bank{w, scales, zeros, 0};
    if (TILING_KEY_IS(1))
        umbra::Unpack<half>(bank, y, t);
    else if (TILING_KEY_IS(2))
        umbra::Unpack<bfloat16_t>(bank, y, t);
}
