// Rows of x times 4-bit matrices, each unit's rows with its own: y[n] = sum over k of x[k] (q[k, n] + zero[g, n]) scale[g, n].
//
//   global memory --16 KB--> nibbles --Cast--> half --MulAddDst--> float, 8 rows to a sum --Add--> one sum a group
//                                         x in half, spread               + zero * sum of x, * scale, + y
//
// Precision: products and sums are float. x is multiplied in half. A bfloat16 row is first divided by the power of two of its
// largest value in the move, so that nothing overflows and it keeps all its bits down to 2^-14 of that largest value; what a
// kernel has computed itself (Gated in umbra_finish.h) is kept so already, with its powers beside it. Sums are added in an
// order that depends on the shapes alone: the same bits every time.
//
// Repeats of one instruction never read what another of them has written: such overlap is not promised for mixed types.
#pragma once
#include <type_traits>

#include "umbra_room.h"

namespace umbra {

// A bank of matrices w (E, K, N / 8) int32 with scales and perhaps zeros (E, K / G, N): bytes on their way in.
struct Bank {
    GlobalTensor<int8_t> w, scales, zeros;
    uint32_t k, n, group;
    bool hasZeros;

    __aicore__ inline Bank(GM_ADDR w, GM_ADDR scales, GM_ADDR zeros, bool hasZeros, uint32_t k, uint32_t n, uint32_t group)
        : k(k), n(n), group(group), hasZeros(hasZeros) {
        this->w.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(w));
        this->scales.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(scales));
        if (hasZeros)
            this->zeros.SetGlobalBuffer(reinterpret_cast<__gm__ int8_t*>(zeros));
    }
};

// One move of a task: rows k .. k + rows of the matrix, at most `step`. Global memory serves cores one after another that
// ask for the same 512 bytes at a time, so tasks with neighbouring columns begin at different rows, and go round.
struct Move {
    uint32_t task, unit, part, column, width; // the task
    uint32_t begin, end, step, moves, shift;  // its rows, and how they are cut
    uint32_t index, k, rows;                  // the move
};

// What a task has summed up: a unit's rows of `width` columns from `column` on, in each range.
struct Done {
    const Unit& unit;
    uint32_t part, column, width, pitch; // pitch: of a range in room.y
};

// Rows of half and the power of two that each run of `run` values of a row is to be multiplied with: eight floats, all the same.
struct Powered {
    GlobalTensor<half> rows;
    GlobalTensor<float> powers; // (rows, K / run, 8)
    uint32_t run;
};

// X, what x is in global memory: half, bfloat16_t or Powered rows of K values; pair p meets row p / sharing. T: the type of
// scales. A tile has `ranges` equal runs of columns, N / ranges apart: gate and up side by side.
template <typename T, typename X> class Product {
  public:
    static constexpr bool kPowered = std::is_same<X, Powered>::value;
    static constexpr bool kNormalised = std::is_same<X, bfloat16_t>::value;
    using Value = typename std::conditional<kPowered, half, X>::type;
    using Rows = typename std::conditional<kPowered, Powered, GlobalTensor<Value>>::type;

    __aicore__ inline Product(
        Room& room, const Units& units, const Bank& bank, const Rows& x, uint32_t sharing, uint32_t ranges)
        : room(room), units(units), bank(bank), x(x), sharing(sharing), ranges(ranges),
          cores(AscendC::GetBlockNum()) {}

    Split split;

    __aicore__ inline void Cut(uint32_t mostParts, uint32_t narrowest = kLanes) {
        split.Choose(units.count, bank.n / ranges, bank.k, cores, kWidest / ranges, narrowest, mostParts);
    }

    // `finish` gets every task when its sums in room.y (rows, ranges * pitch) are complete.
    template <typename Finish> __aicore__ inline void Run(const Finish& finish) {
        const uint32_t tasks = units.count * split.tiles * split.parts;
        Move load{}, work{};
        Start(load, AscendC::GetBlockIdx(), tasks);
        Start(work, AscendC::GetBlockIdx(), tasks);
        for (uint32_t ahead = 1; ahead < kDepth && load.task < tasks; ++ahead)
            Load(load, tasks);
        while (work.task < tasks) {
            if (load.task < tasks)
                Load(load, tasks);
            Compute(work);
            if (work.index + 1 == work.moves)
                finish.Store({units.unit[work.unit], work.part, work.column, work.width, Pitch(work)});
            Next(work, tasks);
        }
    }

  private:
    Room& room;
    const Units& units;
    const Bank& bank;
    const Rows& x;
    const uint32_t sharing, ranges, cores;

    __aicore__ inline uint32_t Pitch(const Move& m) const { return Up(m.width, kLanes); } // of one range

    __aicore__ inline void Start(Move& m, uint32_t task, uint32_t tasks) const {
        m.task = task;
        if (task >= tasks)
            return;
        const uint32_t tile = task % split.tiles, rest = task / split.tiles;
        m.part = rest % split.parts;
        m.unit = rest / split.parts;
        m.column = tile * split.width;
        m.width = Least(split.width, bank.n / ranges - m.column);
        m.begin = m.part * split.rows;
        m.end = Least(m.begin + split.rows, bank.k);
        // A power of two times 32 rows: whole groups of any size.
        const uint32_t most = Least(kMoved / (ranges * Pitch(m)), kMostX / units.unit[m.unit].rows);
        m.step = kMostStep;
        if constexpr (kPowered)
            m.step = Least(m.step, x.run);
        while (m.step > most)
            m.step /= 2;
        m.moves = Ceil(m.end - m.begin, m.step);
        m.shift = tile * m.moves / split.tiles;
        m.index = 0;
        Place(m);
    }

    __aicore__ inline void Next(Move& m, uint32_t tasks) const {
        if (++m.index == m.moves)
            Start(m, m.task + cores, tasks);
        else
            Place(m);
    }

    __aicore__ inline void Place(Move& m) const {
        m.k = m.begin + (m.index + m.shift) % m.moves * m.step;
        m.rows = Least(m.step, m.end - m.k);
    }

    __aicore__ inline void Load(Move& m, uint32_t tasks) {
        const Unit& unit = units.unit[m.unit];
        const uint32_t pitch = Pitch(m), groups = m.rows / bank.group, apart = bank.n / ranges;
        const uint64_t row = static_cast<uint64_t>(unit.expert) * bank.k + m.k;
        LocalTensor<int8_t> in = room.stream.template AllocTensor<int8_t>();
        const uint32_t each = sizeof(T);
        for (uint32_t r = 0; r < ranges; ++r) {
            const uint32_t column = m.column + r * apart;
            const uint64_t at = (row / bank.group * bank.n + column) * each;
            Copy(in[r * pitch / 2], bank.w[(row * bank.n + column) / 2], m.rows, m.width / 2, bank.n / 2, pitch / 2);
            Copy(in[kScalesAt + r * pitch * each], bank.scales[at], groups, m.width * each, bank.n * each, pitch * each);
            if (bank.hasZeros)
                Copy(
                    in[kZerosAt + r * pitch * each], bank.zeros[at], groups, m.width * each, bank.n * each,
                    pitch * each);
        }
        const LocalTensor<Value> rows = in[kXAt].template ReinterpretCast<Value>();
        for (uint32_t r = 0; r < unit.rows; ++r) {
            const uint64_t row = unit.pair[r] / sharing;
            if constexpr (kPowered) {
                CopyX(rows[r * m.rows], x.rows[row * bank.k + m.k], m.rows);
                const LocalTensor<float> powers = in[kPowersAt].template ReinterpretCast<float>();
                CopyX(powers[r * 8], x.powers[(row * Ceil(bank.k, x.run) + m.k / x.run) * 8], 8u);
            } else {
                CopyX(rows[r * m.rows], x[row * bank.k + m.k], m.rows);
            }
        }
        room.stream.EnQue(in);
        Next(m, tasks);
    }

    template <typename V>
    __aicore__ inline void CopyX(const LocalTensor<V>& to, const GlobalTensor<V>& from, uint32_t count) {
        AscendC::DataCopyPad(
            to, from, {1, static_cast<uint32_t>(count * sizeof(V)), 0, 0, 0}, AscendC::DataCopyPadExtParams<V>());
    }

    // One range of `count` rows: `width` bytes, `stride` apart in global memory, ranges * pitch apart here.
    __aicore__ inline void Copy(
        const LocalTensor<int8_t>& to, const GlobalTensor<int8_t>& from, uint32_t count, uint32_t width, uint32_t stride,
        uint32_t pitch) {
        const uint8_t pad = Up(width, 32) - width;
        AscendC::DataCopyPad(
            to, from,
            {static_cast<uint16_t>(count), width, stride - width, (ranges * pitch - width - pad) / 32, 0},
            {pad != 0, 0, pad, 0});
    }

    __aicore__ inline void Compute(const Move& m) {
        const uint32_t rows = units.unit[m.unit].rows, wide = ranges * Pitch(m), groups = m.rows / bank.group;
        LocalTensor<int8_t> in = room.stream.template DeQue<int8_t>();
        AscendC::Cast(
            room.weights, in.template ReinterpretCast<AscendC::int4b_t>(), RoundMode::CAST_NONE, m.rows * wide);
        AscendC::Cast(
            room.scales, in[kScalesAt].template ReinterpretCast<T>(), RoundMode::CAST_NONE, groups * wide);
        if (bank.hasZeros)
            AscendC::Cast(
                room.zeros, in[kZerosAt].template ReinterpretCast<T>(), RoundMode::CAST_NONE, groups * wide);
        if (m.index == 0)
            AscendC::Duplicate(room.y, 0.0f, rows * wide);
        const LocalTensor<half> xHalf = HalfRows(in[kXAt].template ReinterpretCast<Value>(), rows, m.rows);
        for (uint32_t r = 0; r < rows; ++r) {
            AddRow(r, xHalf[r * m.rows], m.rows, wide);
            const LocalTensor<float> y = room.y[r * wide];
            const BinaryRepeatParams spread{1, 1, 0, 8, 8, 0};
            const uint8_t vectors = wide / kLanes;
            if constexpr (kPowered) {
                const LocalTensor<float> powers = in[kPowersAt].template ReinterpretCast<float>();
                AscendC::MulAddDst(y, room.scaled, powers[r * 8], kLanes, vectors, spread);
            } else if constexpr (kNormalised) {
                AscendC::MulAddDst(y, room.scaled, room.power[r * 8], kLanes, vectors, spread);
            } else {
                AscendC::Add(y, y, room.scaled, wide);
            }
            AscendC::PipeBarrier<PIPE_V>();
        }
        room.stream.FreeTensor(in);
    }

    // x (rows, step) in half; in float in room.x too where that is needed.
    __aicore__ inline LocalTensor<half> HalfRows(const LocalTensor<Value>& in, uint32_t rows, uint32_t step) {
        if constexpr (kNormalised) {
            AscendC::Cast(room.x, in, RoundMode::CAST_NONE, rows * step);
            AscendC::PipeBarrier<PIPE_V>();
            room.Normalise(rows, step, step);
            AscendC::Cast(room.xHalf, room.x, RoundMode::CAST_RINT, rows * step);
            AscendC::PipeBarrier<PIPE_V>();
            return room.xHalf;
        } else {
            if (bank.hasZeros)
                AscendC::Cast(room.x, in, RoundMode::CAST_NONE, rows * step);
            AscendC::PipeBarrier<PIPE_V>();
            return in;
        }
    }

    // room.scaled (wide) = x (step) * weights (step, wide). Sum i has rows 8 i .. 8 i + 7, which are in one group.
    __aicore__ inline void AddRow(uint32_t r, const LocalTensor<half>& row, uint32_t step, uint32_t wide) {
        const uint8_t sums = step / kPasses, blocks = wide / 8; // blocks: of a row of floats
        const uint32_t each = bank.group / kPasses, groups = step / bank.group; // sums in a group
        AscendC::Brcb(room.spread, row, sums, {1, 8});
        AscendC::Duplicate(room.sums, 0.0f, sums * wide);
        AscendC::PipeBarrier<PIPE_V>();
        const BinaryRepeatParams eight{1, 1, 0, blocks, static_cast<uint8_t>(blocks * kPasses / 2), kPasses};
        for (uint32_t pass = 0; pass < kPasses; ++pass) {
            for (uint32_t c = 0; c < wide; c += kLanes)
                AscendC::MulAddDst(
                    room.sums[c], room.weights[pass * wide + c], room.spread[pass * 16], kLanes, sums, eight);
            AscendC::PipeBarrier<PIPE_V>();
        }
        for (uint32_t span = each / 2; span; span /= 2) {
            for (uint32_t g = 0; g < groups; ++g) {
                const LocalTensor<float> first = room.sums[g * each * wide];
                AscendC::Add(first, first, first[span * wide], span * wide);
            }
            AscendC::PipeBarrier<PIPE_V>();
        }
        if (bank.hasZeros)
            AddZeros(r, step, wide);
        for (uint32_t g = 0; g < groups; ++g)
            AscendC::Mul(room.scaled[g * wide], room.sums[g * each * wide], room.scales[g * wide], wide);
        AscendC::PipeBarrier<PIPE_V>();
        room.AddUp(room.scaled, groups, wide);
    }

    // Each group's sum += zero * sum of x, by 32 rows of x.
    __aicore__ inline void AddZeros(uint32_t r, uint32_t step, uint32_t wide) {
        const uint32_t each = bank.group / kPasses, groups = step / bank.group, blocks = bank.group / 32;
        AscendC::WholeReduceSum<float>(room.sumsOfX, room.x[r * step], 32, step / 32, 1, 1, 4);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Brcb(room.spreadSums, room.sumsOfX, 1, {1, 8});
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t b = 0; b < blocks; ++b) {
            for (uint32_t g = 0; g < groups; ++g)
                AscendC::MulAddDst(
                    room.sums[g * each * wide], room.zeros[g * wide], room.spreadSums[(g * blocks + b) * 8], kLanes,
                    static_cast<uint8_t>(wide / kLanes), {1, 1, 0, 8, 8, 0});
            AscendC::PipeBarrier<PIPE_V>();
        }
    }
};

} // namespace umbra
