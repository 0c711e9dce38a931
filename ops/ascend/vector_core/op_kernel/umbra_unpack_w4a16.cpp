// y (E, N, K) = 4-bit matrices w in planes, as values of the type of scales; K stays in the order of planes. With `pairs`
// the columns of gate and up, which w has in turns, become the first and the second half of y's rows.
//
// A task is 8 columns of an expert. The scales of a section are spread over the lanes of a plane once; then a block of
// planes is converted to float, multiplied, rounded, and turned so that a column's planes follow each other.
#include "umbra_matrix.h"

namespace umbra {

constexpr uint32_t kColumns = 8;               // of a task
constexpr uint32_t kLanesOf = kColumns * 128;  // most lanes of a plane of a task
constexpr uint32_t kPairs = 16;

template <typename T> class Unpacker {
public:
    __aicore__ inline Unpacker(const Matrix& matrix, const GlobalTensor<T>& y, uint32_t experts, bool pairs)
        : m(matrix), y(y), tasks(experts * (matrix.n / kColumns)), pairs(pairs) {
        const uint32_t most = m.step * kColumns * m.lanes;  // weights of a block
        pipe.InitBuffer(stream, 3, most / 2);
        pipe.InitBuffer(scales, 3, (m.hasZeros ? 2 : 1) * ScalesBytes());
        pipe.InitBuffer(out, 2, most * sizeof(T));
        pipe.InitBuffer(halvesBuf, most * sizeof(half));
        pipe.InitBuffer(floatsBuf, most * sizeof(float));
        pipe.InitBuffer(lanesBuf, 2 * kLanesOf * sizeof(float));
        pipe.InitBuffer(spreadBuf, kColumns * m.kept * 9 * sizeof(float));
        halves = halvesBuf.template Get<half>();
        floats = floatsBuf.template Get<float>();
        scaleOf = lanesBuf.template Get<float>();
        zeroOf = scaleOf[kLanesOf];
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
    const uint32_t tasks;
    const bool pairs;
    Block load, work;

    __aicore__ inline uint32_t ScalesBytes() const { return kColumns * m.kept * sizeof(T); }

    __aicore__ inline void Next(Block& b) const {
        b.plane += m.step;
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
        const uint32_t groups = m.n / kColumns, bytes = kColumns * m.lanes / 2;
        const uint64_t expert = load.task / groups, column = load.task % groups * kColumns;
        const uint64_t plane = load.section * m.planes + load.plane;
        LocalTensor<int8_t> in = stream.template AllocTensor<int8_t>();
        AscendC::DataCopyPad(in, m.w[expert * m.apart + (plane * m.n + column) * (m.lanes / 2)],
                             {static_cast<uint16_t>(m.step), bytes, m.n * m.lanes / 2 - bytes, 0, 0},
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
        const LocalTensor<float> eights = spread[kColumns * m.kept];  // (columns, kept, 8), if a group has eight lanes
        AscendC::Cast(spread, from, RoundMode::CAST_NONE, kColumns * m.kept);
        Barrier();
        if (m.unit > 1) {
            AscendC::Brcb(eights, spread, static_cast<uint8_t>(kColumns * m.kept / 8), {1, 8});
            Barrier();
        }
        const LocalTensor<float> source = m.unit > 1 ? eights : spread;
        const uint8_t row = m.lanes / 8, sourceRow = m.kept * m.unit / 8;
        for (uint32_t at = 0; at < m.lanes; at += m.wide)
            for (uint32_t lane = 0; lane < m.wide; lane += kLanes)
                AscendC::Adds(to[at + lane], source[lane], 0.0f, Least(m.wide - lane, kLanes), kColumns,
                              {1, 1, row, sourceRow});
        Barrier();
    }

    __aicore__ inline void Unpack() {
        const uint32_t plane = kColumns * m.lanes, count = m.step * plane;
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
            for (uint32_t p = 0; p < m.step; ++p) AscendC::Add(floats[p * plane], floats[p * plane], zeroOf, plane);
            Barrier();
        }
        for (uint32_t p = 0; p < m.step; ++p) AscendC::Mul(floats[p * plane], floats[p * plane], scaleOf, plane);
        Barrier();
        LocalTensor<T> values = out.template AllocTensor<T>();
        const uint32_t each = m.step * m.lanes;  // values of a column
        for (uint32_t p = 0; p < m.step; ++p)
            for (uint32_t lane = 0; lane < m.lanes; lane += kLanes)
                AscendC::Cast(values[p * m.lanes + lane], floats[p * plane + lane], RoundMode::CAST_RINT,
                              Least(m.lanes - lane, kLanes), kColumns,
                              {1, 1, static_cast<uint8_t>(each / 16), static_cast<uint8_t>(m.lanes / 8)});
        out.EnQue(values);
        values = out.template DeQue<T>();
        const uint32_t groups = m.n / kColumns, bytes = each * sizeof(T);
        const uint64_t row = static_cast<uint64_t>(work.task / groups) * m.n + Row(work.task % groups * kColumns);
        const uint64_t k = (work.section * m.planes + work.plane) * m.lanes;
        AscendC::DataCopyPad(y[row * m.k + k], values,
                             {kColumns, bytes, 0, static_cast<uint32_t>(m.k * sizeof(T) - bytes), 0});
        out.FreeTensor(values);
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
    Unpacker<T>(matrix, y, t.experts, t.pairs).Run();
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
