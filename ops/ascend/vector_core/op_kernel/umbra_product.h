// Multiplies rows of x by 4-bit matrices, one matrix for each unit:
//   y[n] = sum over k of x[k] (q[k, n] + zero[g, n]) scale[g, n]
//
//   global memory --32 KB--> nibbles --Cast--> half --MulAddDst--> sums of 8 rows, float
//                                               x in half, spread   --Add--> one sum a group, + zero * sum of x,
//                                                                            * scale, * power of two, + y
//
// Sums are float from the first product on. With kHalfSums the products and the first three additions are half (Mul,
// Add), and a Cast follows. By CANN's table for A2 and A3 this is less vector work (128 half or 64 float additions a
// cycle, but 32 additions of a half product to a float sum). But each addition rounds by up to 2^-11 of its result, and
// so does each product unless x is bfloat16, so sums that cancel each other lose precision. In both cases x is
// multiplied as half, so each row is first divided by the power of two of its largest value in the move: products are
// then below 16, and sums of eight below 128. The input of the second product (Gated in umbra_finish.h) is stored
// divided in this way, with its powers beside it. The order of sums depends on shapes alone.
//
// No repeat of an instruction reads what another repeat of it has written, since CANN does not promise that this works.
#pragma once
#include <type_traits>

#include "umbra_bank.h"

namespace umbra {

// X is the form of x in global memory: rows of K values, as half, bfloat16_t or Powered; pair p uses row p / sharing. T
// is the type of scales. A tile has `ranges` runs of columns of equal width, N / ranges apart, such as gate and up.
template <typename T, typename X, bool kHalfSums> class Product {
public:
    static constexpr bool kPowered = std::is_same<X, Powered>::value;
    using Value = typename std::conditional<kPowered, half, X>::type;
    using Given = typename std::conditional<kPowered, Powered, GlobalTensor<Value>>::type;

    __aicore__ inline Product(Room& room, const Units& units, const Bank& bank, const Given& x, uint32_t sharing,
                              uint32_t ranges)
        : room(room), units(units), bank(bank), x(x), sharing(sharing), ranges(ranges), cores(AscendC::GetBlockNum()) {}

    Split split;

    __aicore__ inline void Cut(uint32_t mostParts, uint32_t narrowest, bool sparing) {
        split.Choose(units.count, bank.n / ranges, bank.k, cores, kWidest / ranges, narrowest, mostParts, sparing);
    }

    // Calls finish.Store for every task once its sums in room.y (rows, ranges * pitch) are complete.
    template <typename Finish> __aicore__ inline void Run(const Finish& finish) {
        const uint32_t tasks = units.count * split.tiles * split.parts;
        Move load{}, work{};
        Start(load, AscendC::GetBlockIdx(), tasks);
        Start(work, AscendC::GetBlockIdx(), tasks);
        for (uint32_t ahead = 1; ahead < kDepth && load.task < tasks; ++ahead) Load(load, tasks);
        while (work.task < tasks) {
            if (load.task < tasks) Load(load, tasks);
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
    const Given& x;
    const uint32_t sharing, ranges, cores;

    // The largest number of rows, at most `most`, that is a power of two times 32: whole groups of any size.
    __aicore__ inline uint32_t Rows(uint32_t most) const {
        uint32_t rows = kMostStep;
        while (rows > most) rows /= 2;
        return rows;
    }

    __aicore__ inline uint32_t Pitch(const Move& m) const { return Up(m.width, kLanes); }  // pitch of one range

    __aicore__ inline void Start(Move& m, uint32_t task, uint32_t tasks) const {
        m.task = task;
        if (task >= tasks) return;
        const uint32_t tile = task % split.tiles, rest = task / split.tiles;
        m.part = rest % split.parts;
        m.unit = rest / split.parts;
        m.column = tile * split.width;
        m.width = Least(split.width, bank.n / ranges - m.column);
        m.begin = m.part * split.rows;
        m.end = Least(m.begin + split.rows, bank.k);
        m.step = Rows(Least(kMoved / (ranges * Pitch(m)), kMostX / units.unit[m.unit].rows));
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
        const uint64_t place = unit.place, row = m.k;
        LocalTensor<int8_t> in = room.stream.template AllocTensor<int8_t>();
        const uint32_t each = sizeof(T);
        for (uint32_t r = 0; r < ranges; ++r) {
            const uint32_t column = m.column + r * apart;
            const uint64_t from = place * bank.apart + (row * bank.n + column) / 2;
            const uint64_t at = place * bank.scalesApart + (row / bank.group * bank.n + column) * each;
            Copy(in[r * pitch / 2], bank.w[from], m.rows, m.width / 2, bank.n / 2, pitch / 2);
            Copy(in[kScalesAt + r * pitch * each], bank.scales[at], groups, m.width * each, bank.n * each,
                 pitch * each);
            if (bank.hasZeros)
                Copy(in[kZerosAt + r * pitch * each], bank.zeros[at], groups, m.width * each, bank.n * each,
                     pitch * each);
        }
        const LocalTensor<Value> rows = in[kXAt].template ReinterpretCast<Value>();
        for (uint32_t r = 0; r < unit.rows; ++r) {
            const uint64_t row = unit.pair[r] / sharing;
            if constexpr (kPowered) {
                room.Fetch(rows[r * m.rows], x.rows[row * bank.k + m.k], m.rows);
                const LocalTensor<float> powers = in[kPowersAt].template ReinterpretCast<float>();
                const uint32_t runs = Ceil(m.rows, x.run);
                room.Fetch(powers[r * runs * 8], x.powers[(row * Ceil(bank.k, x.run) + m.k / x.run) * 8], runs * 8);
            } else {
                room.Fetch(rows[r * m.rows], x[row * bank.k + m.k], m.rows);
            }
        }
        room.stream.EnQue(in);
        Next(m, tasks);
    }

    // Copies one range of `count` rows of `width` bytes. Rows are `stride` apart in global memory, ranges * pitch apart
    // here.
    __aicore__ inline void Copy(const LocalTensor<int8_t>& to, const GlobalTensor<int8_t>& from, uint32_t count,
                                uint32_t width, uint32_t stride, uint32_t pitch) {
        const uint8_t pad = Up(width, 32) - width;
        AscendC::DataCopyPad(
            to, from, {static_cast<uint16_t>(count), width, stride - width, (ranges * pitch - width - pad) / 32, 0},
            {pad != 0, 0, pad, 0});
    }

    __aicore__ inline void Compute(const Move& m) {
        const uint32_t rows = units.unit[m.unit].rows, wide = ranges * Pitch(m);
        LocalTensor<int8_t> in = room.stream.template DeQue<int8_t>();
        if (m.index == 0) AscendC::Duplicate(room.y, 0.0f, rows * wide);
        const LocalTensor<half> halves = HalfRows(in[kXAt].template ReinterpretCast<Value>(), rows, m.rows);
        LocalTensor<float> powers = room.power;
        uint32_t run = kMostStep;  // rows with one power
        if constexpr (kPowered) {
            powers = in[kPowersAt].template ReinterpretCast<float>();
            run = x.run;
        }
        const uint32_t block = Rows(Least((kHalfSums ? kBlock : kBlock / 2) / wide, run));
        const uint32_t group = Least(bank.group, block);  // a group of 128 may be two blocks, each scaled on its own
        for (uint32_t at = 0; at < m.rows; at += block) {
            const uint32_t count = Least(block, m.rows - at), groups = count / group;
            const uint32_t scales = at / bank.group * wide * sizeof(T);
            AscendC::Cast(room.scales, in[kScalesAt + scales].template ReinterpretCast<T>(), RoundMode::CAST_NONE,
                          groups * wide);
            if (bank.hasZeros)
                AscendC::Cast(room.zeros, in[kZerosAt + scales].template ReinterpretCast<T>(), RoundMode::CAST_NONE,
                              groups * wide);
            for (uint32_t r = 0; r < rows; ++r) {
                const uint32_t own = r * m.rows + at;
                if (kHalfSums || r == 0)  // products in half overwrite the weights
                    AscendC::Cast(room.weights, in[at * wide / 2].template ReinterpretCast<AscendC::int4b_t>(),
                                  RoundMode::CAST_NONE, count * wide);
                if constexpr (kHalfSums)
                    HalfSums(halves[own], count, wide);
                else
                    FloatSums(halves[own], count, wide);
                AddGroups(own, count, group, wide);
                const LocalTensor<float> power = powers[(r * Ceil(m.rows, run) + at / run) * 8];
                AscendC::MulAddDst(room.y[r * wide], room.scaled, power, kLanes, static_cast<uint8_t>(wide / kLanes),
                                   {1, 1, 0, 8, 8, 0});
                AscendC::PipeBarrier<PIPE_V>();
            }
        }
        room.stream.FreeTensor(in);
    }

    // Returns x (rows, count) in half, divided by powers of two. It is in room.x in float as well if that is needed.
    __aicore__ inline LocalTensor<half> HalfRows(const LocalTensor<Value>& in, uint32_t rows, uint32_t count) {
        if constexpr (kPowered) {
            if (bank.hasZeros) AscendC::Cast(room.x, in, RoundMode::CAST_NONE, rows * count);
            AscendC::PipeBarrier<PIPE_V>();
            return in;
        } else {
            AscendC::Cast(room.x, in, RoundMode::CAST_NONE, rows * count);
            AscendC::PipeBarrier<PIPE_V>();
            room.Normalise(rows, count, count);
            AscendC::Cast(room.xHalf, room.x, RoundMode::CAST_RINT, rows * count);
            AscendC::PipeBarrier<PIPE_V>();
            return room.xHalf;
        }
    }

    // room.sums (count / 8, wide) = x (count) * room.weights (count, wide): row i has rows 8 i .. 8 i + 7, one in each pass.
    __aicore__ inline void FloatSums(const LocalTensor<half>& x, uint32_t count, uint32_t wide) {
        const uint8_t sums = count / kSummed, row = wide / 8;  // row: blocks of floats
        AscendC::Brcb(room.spread, x, sums, {1, 8});
        AscendC::Duplicate(room.sums, 0.0f, sums * wide);
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t pass = 0; pass < kSummed; ++pass) {
            for (uint32_t c = 0; c < wide; c += kLanes)
                AscendC::MulAddDst(room.sums[c], room.weights[pass * wide + c], room.spread[pass * 16], kLanes, sums,
                                   {1, 1, 0, row, static_cast<uint8_t>(row * kSummed / 2), kSummed});
            AscendC::PipeBarrier<PIPE_V>();
        }
    }

    // The same in half; the products overwrite room.weights.
    __aicore__ inline void HalfSums(const LocalTensor<half>& x, uint32_t count, uint32_t wide) {
        const LocalTensor<half> products = room.weights;
        const uint8_t row = wide / 16, sums = count / kSummed;  // row: blocks of halves
        AscendC::Brcb(room.spread, x, sums, {1, 8});
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t k = 0; k < count; k += kMostRepeats)
            for (uint32_t c = 0; c < wide; c += kHalfLanes)
                AscendC::Mul(products[k * wide + c], products[k * wide + c], room.spread[k * 16],
                             Least(kHalfLanes, wide - c), static_cast<uint8_t>(Least(kMostRepeats, count - k)),
                             {1, 1, 0, row, row, 1});
        AscendC::PipeBarrier<PIPE_V>();
        AddNext(products, 1, count, wide);
        AddNext(products, 2, count, wide);
        // The last of the three leaves no gaps; its sums overwrite the spread x, which is not read any more.
        for (uint32_t c = 0; c < wide; c += kHalfLanes)
            AscendC::Add(room.spread[c], products[c], products[4 * wide + c], Least(kHalfLanes, wide - c), sums,
                         {1, 1, 1, row, static_cast<uint8_t>(kSummed * row), static_cast<uint8_t>(kSummed * row)});
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Cast(room.sums, room.spread, RoundMode::CAST_NONE, sums * wide);
        AscendC::PipeBarrier<PIPE_V>();
    }

    // room.scaled (wide) = the sum over groups of (room.sums of the group + zero * sum of its x) * scale; x begins at `own`
    // in room.x.
    __aicore__ inline void AddGroups(uint32_t own, uint32_t count, uint32_t group, uint32_t wide) {
        const uint32_t each = group / kSummed, groups = count / group;  // sums in a group
        for (uint32_t span = each / 2; span; span /= 2) {
            for (uint32_t g = 0; g < groups; ++g) {
                const LocalTensor<float> first = room.sums[g * each * wide];
                AscendC::Add(first, first, first[span * wide], span * wide);
            }
            AscendC::PipeBarrier<PIPE_V>();
        }
        if (bank.hasZeros) AddZeros(own, count, group, wide);
        for (uint32_t g = 0; g < groups; ++g)
            AscendC::Mul(room.scaled[g * wide], room.sums[g * each * wide], room.scales[g * wide], wide);
        AscendC::PipeBarrier<PIPE_V>();
        room.AddUp(room.scaled, groups, wide);
    }

    // Adds to every row whose index is a multiple of 2 * apart the row `apart` after it.
    __aicore__ inline void AddNext(const LocalTensor<half>& rows, uint32_t apart, uint32_t count, uint32_t wide) {
        const uint8_t stride = 2 * apart * wide / 16, repeats = count / (2 * apart);
        for (uint32_t c = 0; c < wide; c += kHalfLanes)
            AscendC::Add(rows[c], rows[c], rows[apart * wide + c], Least(kHalfLanes, wide - c), repeats,
                         {1, 1, 1, stride, stride, stride});
        AscendC::PipeBarrier<PIPE_V>();
    }

    // Each group's sum += zero * sum of x, by 32 rows of x.
    __aicore__ inline void AddZeros(uint32_t own, uint32_t count, uint32_t group, uint32_t wide) {
        const uint32_t each = group / kSummed, groups = count / group, blocks = group / 32;
        AscendC::WholeReduceSum<float>(room.sumsOfX, room.x[own], 32, count / 32, 1, 1, 4);
        AscendC::PipeBarrier<PIPE_V>();
        AscendC::Brcb(room.spreadSums, room.sumsOfX, 1, {1, 8});
        AscendC::PipeBarrier<PIPE_V>();
        for (uint32_t b = 0; b < blocks; ++b) {
            for (uint32_t g = 0; g < groups; ++g)
                AscendC::MulAddDst(room.sums[g * each * wide], room.zeros[g * wide],
                                   room.spreadSums[(g * blocks + b) * 8], kLanes, static_cast<uint8_t>(wide / kLanes),
                                   {1, 1, 0, 8, 8, 0});
            AscendC::PipeBarrier<PIPE_V>();
        }
    }
};

}  // namespace umbra
