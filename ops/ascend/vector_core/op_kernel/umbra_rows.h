// The rows that are multiplied: half, in the order of planes, divided by the power of two of the row's largest value.
// Dividing loses no bit of values down to 2^-14 of the largest.
#pragma once
#include "umbra_matrix.h"

namespace umbra {

// The sums of each group of `count` rows of `values`, which lie k apart: room.sumsOfX (slot, sections, kept), for zero
// points.
__aicore__ inline void SumGroups(Room& room, const Matrix& m, const LocalTensor<half>& values,
                                 const LocalTensor<float>& to, uint32_t count) {
    const LocalTensor<float> x = room.words.ReinterpretCast<float>();
    const uint32_t section = m.planes * m.lanes, sections = count * m.sections;
    AscendC::Duplicate(to, 0.0f, sections * m.kept);
    AscendC::Cast(x, values, RoundMode::CAST_NONE, sections * section);
    Barrier();
    for (uint32_t half = section / 2; half >= m.wide; half /= 2) {  // planes, then lanes of a group
        for (uint32_t s = 0; s < sections; ++s)
            AscendC::Add(x[s * section], x[s * section], x[s * section + half], half);
        Barrier();
    }
    for (uint32_t s = 0; s < sections; ++s)
        if (m.unit > 1)
            Eighth<true>(to[s * m.kept], x[s * section], m.wide);
        else
            AscendC::Adds(to[s * m.kept], x[s * section], 0.0f, m.wide);
    Barrier();
}

// Rows of x, of type T in global memory; pair p uses row p / sharing. The buffer keeps as many rows as it has room for.
template <typename T> class InputRows {
public:
    __aicore__ inline InputRows(Room& room, const Matrix& matrix, const GlobalTensor<T>& x, uint32_t tokens,
                                uint32_t sharing, uint32_t slots)
        : room(room), m(matrix), x(x), tokens(tokens), sharing(sharing), slots(slots), k(matrix.k),
          sums(matrix.sections * matrix.kept) {
        for (uint32_t i = 0; i < kMostRows; ++i) token[i] = kNone;
    }

    __aicore__ inline bool Lacks(const Unit& unit) const {
        for (uint32_t r = 0; r < unit.rows; ++r)
            if (Slot(unit.pair[r] / sharing) == slots) return true;
        return false;
    }

    // Puts the unit's tokens, and those that follow them, into slots without a token of this unit.
    __aicore__ inline void Prepare(const Unit& unit) {
        uint32_t free = 0, count = 0, next = 0, slot[kMostRows], row[kMostRows];
        bool taken[kMostRows] = {};
        for (uint32_t r = 0; r < unit.rows; ++r) {
            const uint32_t own = unit.pair[r] / sharing, at = Slot(own);
            if (at < slots) taken[at] = true;
            next = own + 1;
        }
        for (uint32_t r = 0; r < unit.rows + tokens; ++r) {
            const uint32_t wanted = r < unit.rows ? unit.pair[r] / sharing : next + r - unit.rows;
            if (wanted >= tokens || Slot(wanted) < slots || (count + 1) * k > kMoved / 2) continue;
            while (free < slots && taken[free]) ++free;
            if (free == slots) break;
            taken[free] = true;
            token[free] = wanted;
            slot[count] = free;
            row[count++] = wanted;
        }
        Fill(slot, row, count);
    }

    __aicore__ inline LocalTensor<half> Values(const Unit& unit, uint32_t r) const {
        return room.values[Slot(unit.pair[r] / sharing) * k];
    }
    __aicore__ inline LocalTensor<float> Power(const Unit& unit, uint32_t r) const {
        return room.rowPowers[Slot(unit.pair[r] / sharing) * 8];
    }
    __aicore__ inline LocalTensor<float> SumsOfX(const Unit& unit, uint32_t r, uint32_t section) const {
        if (!m.hasZeros) return room.sumsOfX;  // no tensor, and not used
        return room.sumsOfX[Slot(unit.pair[r] / sharing) * sums + section * m.kept];
    }

private:
    static constexpr uint32_t kNone = ~0u;
    Room& room;
    const Matrix& m;
    const GlobalTensor<T>& x;
    const uint32_t tokens, sharing, slots, k, sums;
    uint32_t token[kMostRows];  // in each slot

    __aicore__ inline uint32_t Slot(uint32_t wanted) const {
        uint32_t s = 0;
        while (s < slots && token[s] != wanted) ++s;
        return s;
    }

    // Slot slot[i] = row[i] of x. Nothing else may use words, sums, scaled.
    __aicore__ inline void Fill(const uint32_t* slot, const uint32_t* row, uint32_t count) {
        const LocalTensor<float> rows = room.words.ReinterpretCast<float>(), other = rows[kWords / 4];
        LocalTensor<T> in = room.stream.template AllocTensor<T>();
        for (uint32_t i = 0; i < count; ++i) room.Fetch(in[i * k], x[static_cast<uint64_t>(row[i]) * k], k);
        Hand<HardEvent::MTE2_V>(room.pipe);
        AscendC::Cast(rows, in, RoundMode::CAST_NONE, count * k);
        Barrier();
        room.stream.FreeTensor(in);
        FindPowers(rows, other, count);
        for (uint32_t i = 0; i < count; ++i) AscendC::Adds(room.rowPowers[slot[i] * 8], room.powers[i * 8], 0.0f, 8);
        if (m.unit > 1)
            DivideIntoPlanes(other, rows, count);
        else
            for (uint32_t i = 0; i < count; ++i) Scale(rows[i * k], rows[i * k], room.inverses[i * 8], k);
        Barrier();
        if (m.unit > 1) {
            for (uint32_t i = 0; i < count; ++i)
                AscendC::Cast(room.values[slot[i] * k], other[i * k], RoundMode::CAST_RINT, k);
        } else {
            const LocalTensor<half> halves = other.ReinterpretCast<half>();
            AscendC::Cast(halves, rows, RoundMode::CAST_RINT, count * k);
            Barrier();
            for (uint32_t i = 0; i < count; ++i) Transpose(room.values[slot[i] * k], halves[i * k]);
        }
        Barrier();
        if (m.hasZeros)
            for (uint32_t i = 0; i < count; ++i)
                SumGroups(room, m, room.values[slot[i] * k], room.sumsOfX[slot[i] * sums], 1);
    }

    // room.powers, room.inverses: of the largest magnitudes of rows (count, k). `other` is overwritten.
    __aicore__ inline void FindPowers(const LocalTensor<float>& rows, const LocalTensor<float>& other, uint32_t count) {
        AscendC::Abs(other, rows, count * k);
        Barrier();
        LocalTensor<float> from = other, to = room.sums, spare = room.scaled;
        uint32_t left = k, pitch = k;
        while (left > kLanes) {
            const uint32_t apart = Up(Ceil(left, 8), kLanes);
            for (uint32_t i = 0; i < count; ++i) Eighth<false>(to[i * apart], from[i * pitch], left);
            Barrier();
            left = Ceil(left, 8);
            pitch = apart;
            from = to;
            to = spare;
            spare = from;
        }
        AscendC::WholeReduceMax<float>(room.largest, from, left, count, 1, 1, pitch / 8,
                                       AscendC::ReduceOrder::ORDER_ONLY_VALUE);
        Barrier();
        room.PowersOf(room.largest);
    }

    // to (sections, planes, split, groups, 8) = rows (sections, groups, split, planes, 8), divided by the powers: blocks
    // of eight floats change places.
    __aicore__ inline void DivideIntoPlanes(const LocalTensor<float>& to, const LocalTensor<float>& rows,
                                            uint32_t count) {
        const uint32_t split = m.lanes / m.wide, blocks = split * m.planes, group = blocks * 8;
        for (uint32_t s = 0; s < count * m.sections; ++s) {
            const LocalTensor<float> inverse = room.inverses[s / m.sections * 8];
            const uint32_t section = s * m.planes * m.lanes;
            for (uint32_t b = 0; b < blocks; ++b) {
                const uint32_t at = section + b % m.planes * m.lanes + b / m.planes * m.wide;
                for (uint32_t g = 0; g < m.groups; g += 8)
                    AscendC::Mul(to[at + g * 8], rows[section + g * group + b * 8], inverse, Least(m.groups - g, 8) * 8,
                                 1, {1, static_cast<uint8_t>(blocks), 0, 8, 8, 0});
            }
        }
    }

    // to (sections, planes, split, groups) = row (sections, groups, split, planes), in squares of 16 by 16.
    __aicore__ inline void Transpose(const LocalTensor<half>& to, const LocalTensor<half>& row) {
        const uint32_t group = m.lanes / m.wide * m.planes;
        for (uint32_t s = 0; s < m.sections; ++s)
            for (uint32_t b = 0; b < group; b += 16) {
                const uint32_t section = s * m.planes * m.lanes;
                LocalTensor<half> tos[16], froms[16];
                for (uint32_t i = 0; i < 16; ++i) {
                    tos[i] = to[section + (b + i) % m.planes * m.lanes + (b + i) / m.planes * m.groups];
                    froms[i] = row[section + i * group + b];
                }
                AscendC::TransDataTo5HD<half>(
                    tos, froms, {false, false, static_cast<uint8_t>(m.groups / 16), 1, static_cast<uint16_t>(group)});
            }
    }
};

// Rows of h, float in global memory, already in the order of planes; row r of a unit is its row unit.first + r. The
// buffer keeps a window of rows that follow each other.
class HiddenRows {
public:
    // powers, inverses (rows): of all rows of h; blocks: room for those of the window, eight times each.
    __aicore__ inline HiddenRows(Room& room, const Matrix& matrix, const GlobalTensor<float>& h, uint32_t rows,
                                 uint32_t slots, const LocalTensor<float>& powers, const LocalTensor<float>& inverses,
                                 const LocalTensor<float>& blocks)
        : room(room), m(matrix), h(h), rows(rows), slots(slots), k(matrix.k), sums(matrix.sections * matrix.kept),
          powers(powers), inverses(inverses), powersOf(blocks), inversesOf(blocks[(kWindow + 8) * 8]) {}

    __aicore__ inline bool Lacks(const Unit& unit) const { return unit.first < begin || unit.first + unit.rows > end; }

    __aicore__ inline void Prepare(const Unit& unit) {
        begin = unit.first;
        end = Least(rows, begin + slots);
        const uint32_t whole = begin / 8 * 8, eights = Ceil(end - whole, 8);
        AscendC::Brcb(powersOf, powers[whole], eights, {1, 8});
        AscendC::Brcb(inversesOf, inverses[whole], eights, {1, 8});
        Barrier();
        const uint32_t some = kMoved / 4 / k;
        for (uint32_t at = begin; at < end; at += some) {
            const uint32_t count = Least(some, end - at);
            LocalTensor<float> in = room.stream.AllocTensor<float>();
            room.Fetch(in, h[static_cast<uint64_t>(at) * k], count * k);
            Hand<HardEvent::MTE2_V>(room.pipe);
            for (uint32_t i = 0; i < count; ++i) Scale(in[i * k], in[i * k], inversesOf[(at + i - whole) * 8], k);
            Barrier();
            AscendC::Cast(room.values[(at - begin) * k], in, RoundMode::CAST_RINT, count * k);
            Barrier();
            room.stream.FreeTensor(in);
        }
        for (uint32_t i = 0; m.hasZeros && begin + i < end; ++i)
            SumGroups(room, m, room.values[i * k], room.sumsOfX[i * sums], 1);
    }

    __aicore__ inline LocalTensor<half> Values(const Unit& unit, uint32_t r) const {
        return room.values[(unit.first + r - begin) * k];
    }
    __aicore__ inline LocalTensor<float> Power(const Unit& unit, uint32_t r) const {
        return powersOf[(unit.first + r - begin / 8 * 8) * 8];
    }
    __aicore__ inline LocalTensor<float> SumsOfX(const Unit& unit, uint32_t r, uint32_t section) const {
        if (!m.hasZeros) return room.sumsOfX;  // no tensor, and not used
        return room.sumsOfX[(unit.first + r - begin) * sums + section * m.kept];
    }

private:
    Room& room;
    const Matrix& m;
    const GlobalTensor<float>& h;
    const uint32_t rows, slots, k, sums;
    const LocalTensor<float> powers, inverses, powersOf, inversesOf;
    uint32_t begin = 0, end = 0;
};

}  // namespace umbra
