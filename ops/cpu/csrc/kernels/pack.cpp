#include "kernels/pack.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <type_traits>

#include "kernels/records.h"
#include "kernels/vector.h"

namespace umbra {
namespace {

constexpr int kMostBlocks = 8;   // row blocks of one task
constexpr int kMostGroup = 128;  // columns of a group

struct Place {  // where a row block is stored
    uint8_t* quants;
    uint16_t* scales;
    uint8_t* zeros;
};

Place place_of(const Matrix& w, int64_t block) {
    return {const_cast<uint8_t*>(w.quants) + block * w.quant_stride(),
            const_cast<uint16_t*>(w.scales) + block * w.scale_count(),
            w.zeros ? const_cast<uint8_t*>(w.zeros) + block * w.scale_count() : nullptr};
}

// 32 columns from c on. Scales are multiplied by the row's first.
void unpack_sixteens(const Matrix& w, const Place& from, int64_t c, int lane, float* to) {
    const FormatTraits& of = w.traits();
    const uint8_t* block = from.quants + c / kBlock * w.block_bytes();
    float scale[2];
    for (int i = 0; i < 2; i++) {
        scale[i] =
            reinterpret_cast<const float*>(from.scales)[lane] * f8_to_float(w.nested_bytes(from.scales, c, i)[lane]);
        scale[i] *= of.unit;
    }
    for (int i = 0; i < kBlock; i++)
        to[i] = static_cast<float>(byte_at(of, w.order, block, lane, i) - of.middle) * scale[i / 16];
}

// Scales are multiplied by theirs first, as by GGUF's other readers.
void unpack_nested(const Matrix& w, const Place& from, int64_t c, int lane, float* to) {
    const uint8_t* block = from.quants + c / kBlock * w.block_bytes();
    const auto half = [&](int which) { return half_to_float(w.nested_halves(from.scales, c, which)[lane]); };
    const auto byte = [&](int which) { return w.nested_bytes(from.scales, c, which)[lane]; };
    const auto scale = [&](int which) { return half(0) * static_cast<float>(static_cast<int8_t>(byte(which))); };
    const FormatTraits& of = w.traits();
    const float lowest = of.minimums() ? half(1) * static_cast<float>(byte(1)) : 0;
    for (int i = 0; i < kBlock; i++) {
        const int level = byte_at(of, w.order, block, lane, i) - of.middle;
        to[i] = scale(of.sixteens() && i >= 16) * static_cast<float>(level) - lowest;
    }
}

void unpack_records(const Matrix& w, const Place& from, int64_t c, int lane, float* to) {
    alignas(64) uint8_t bytes[kBlock * kRows];
    alignas(64) float scales[2 * kRows], lowest[2 * kRows] = {};
    expand(w, from.quants, from.scales, c, kBlock, Order::fours, {bytes, scales, lowest});
    const FormatTraits& of = traits_of(kExpanded);
    for (int i = 0; i < kBlock; i++) {
        const int level = byte_at(of, Order::fours, bytes, lane, i) - of.middle, at = i / 16 * kRows + lane;
        to[i] = scales[at] * static_cast<float>(level) - lowest[at];
    }
}

// The scale of the group at `at` in units of its plane's elements; formats without nested scales.
float scale_of(const Matrix& w, const Place& from, int64_t at) {
    switch (w.traits().scales) {
        case Scales::floats: return reinterpret_cast<const float*>(from.scales)[at];
        case Scales::exponents: return e8m0_to_float(reinterpret_cast<const uint8_t*>(from.scales)[at]);
        default: return half_to_float(from.scales[at]);
    }
}

void unpack_quantised(const Matrix& w, const Place& from, int lane, float* to) {
    const FormatTraits& of = w.traits();
    for (int64_t c = 0; c < w.k; c += kBlock) {
        const uint8_t* block = from.quants + c / kBlock * w.block_bytes();
        if (of.records()) {
            unpack_records(w, from, c, lane, to + c);
            continue;
        }
        if (of.nested() || of.f8_scales()) {
            (of.nested() ? unpack_nested : unpack_sixteens)(w, from, c, lane, to + c);
            continue;
        }
        const int64_t at = c / w.group * kRows + lane;
        const int zero = from.zeros ? from.zeros[at] : of.middle;
        const float scale = scale_of(w, from, at) * of.unit;
        if (of.bytes() && w.order == Order::fours) {  // as below, four at once
            for (int i = 0; i < kBlock; i += 4)
                for (int j = 0; j < 4; j++)
                    to[c + i + j] = static_cast<float>(block[i * kRows + lane * 4 + j] - zero) * scale;
            continue;
        }
        for (int i = 0; i < kBlock; i++)
            to[c + i] = static_cast<float>(byte_at(of, w.order, block, lane, i) - zero) * scale;
    }
}

// Whether all are finite.
template <class S, class T>
bool copy_floats(const S* from, int64_t count, T* to) {
    bool finite = true;
    for (int64_t i = 0; i < count; i++) {
        S value;
        std::memcpy(&value, from + i, sizeof value);  // at any alignment
        const float wide = widen(value);
        uint32_t bits;
        std::memcpy(&bits, &wide, 4);
        finite &= (bits & 0x7f800000) != 0x7f800000;
        if constexpr (std::is_same_v<S, T>)
            to[i] = value;
        else
            to[i] = narrow<T>(wide);
    }
    return finite;
}

struct RowBlock {  // sixteen rows of `w`, some of which are written or read
    Matrix w;
    Place place;  // of lane 0
    LaneRows rows;
};

// Calls f(blocks, count) for every `unit` (at most 8) neighbouring row blocks, shared over the pool.
template <class F>
void for_blocks(Context& context, const SplitMatrix& w, const RowRange& where, int64_t count, int unit, F&& f) {
    const int64_t skipped = where.first % kRows;  // rows of the first block that stay unchanged
    const int64_t all = count ? (skipped + count + kRows - 1) / kRows : 0;
    context.pool.each(static_cast<int>((all + unit - 1) / unit), [&](int task, int) {
        RowBlock blocks[kMostBlocks];
        int found = 0;
        for (int64_t i = int64_t{task} * unit; i < std::min(all, (int64_t{task} + 1) * unit); i++) {
            const int64_t block = where.first / kRows + i * where.step;
            size_t node = 0;
            while (block >= w.first[node + 1]) node++;
            const int64_t first = std::max<int64_t>(0, i * kRows - skipped);
            const int64_t end = std::min(count, (i + 1) * kRows - skipped);
            const Matrix part = w.parts[node].at(where.index);
            const LaneRows rows{first, static_cast<int>(first + skipped - i * kRows), static_cast<int>(end - first)};
            blocks[found++] = {part, place_of(part, block - w.first[node]), rows};
        }
        f(blocks, found);
    });
}

// The scales of 32 columns from `c` on, and at the beginning of a group their own.
int pack_nested(const RowBlock& to, const Given& from, int64_t c) {
    const Matrix& w = to.w;
    const FormatTraits& of = w.traits();
    const auto halves = [&](int which) { return const_cast<uint16_t*>(w.nested_halves(to.place.scales, c, which)); };
    const auto bytes = [&](int which) { return const_cast<uint8_t*>(w.nested_bytes(to.place.scales, c, which)); };
    int flags = 0;
    for (int l = to.rows.lane; l < to.rows.lane + to.rows.count; l++) {
        const int64_t row = to.rows.row(l), each = of.sixteens() ? kBlock / 2 : kBlock;
        bytes(0)[l] = byte_at(from.scales, row, c / each);
        if (of.minimums()) bytes(1)[l] = byte_at(from.zeros, row, c / each);
        if (of.sixteens()) bytes(1)[l] = byte_at(from.scales, row, c / each + 1);
        if (of.f8_scales()) {
            const float factor = reinterpret_cast<float*>(to.place.scales)[l] = scale_at(from.of_scales, row, 0);
            for (int which = 0; which < 2; which++)
                if ((bytes(which)[l] & 0x7f) == 0x7f || !std::isfinite(factor)) flags = kStrange;
        }
        for (int which = 0; which < of.scale_halves() && c % w.group == 0; which++) {
            const uint16_t half = half_at(which ? from.of_zeros : from.of_scales, row, c / from.group);
            if ((half & 0x7c00) == 0x7c00) flags = kStrange;
            halves(which)[l] = half;
        }
    }
    return flags;
}

int pack_records(const RowBlock& to, const Blocks& from, int64_t c) {
    const Matrix& w = to.w;
    const FormatTraits& of = w.traits();
    RecordRows records;
    read_records(from, of, to.rows, c, records);
    uint8_t* record = to.place.quants + c / kBlock * of.block_bytes();
    const auto put = [&](int at, int bytes) {
        std::memcpy(record + at + to.rows.lane * bytes, records.record + at + to.rows.lane * bytes,
                    static_cast<size_t>(to.rows.count) * bytes);
    };
    for (int k = 0; k < of.words; k++) put(64 * k, 4);
    for (int k = 0; k < of.bytes_more; k++) put(64 * of.words + kRows * k, 1);
    for (int which = 0; which < of.scale_halves() && c % w.group == 0; which++)
        std::copy_n(records.halves[which] + to.rows.lane, to.rows.count,
                    const_cast<uint16_t*>(w.nested_halves(to.place.scales, c, which)) + to.rows.lane);
    return records.finite ? 0 : kStrange;
}

// The levels of 32 columns from `c` on, and their scales.
int pack_blocks(const RowBlock& to, const Blocks& from, int64_t c) {
    const Matrix& w = to.w;
    const FormatTraits& of = w.traits();
    if (of.records()) return pack_records(to, from, c);
    Words levels;
    BlockScales scales;
    read_blocks(from, to.rows, c, levels, scales);
    write_levels(of, w.order, levels, to.rows, to.place.quants + c / kBlock * w.block_bytes());
    const auto put = [&](auto* plane, const auto* given) {
        std::copy_n(given + to.rows.lane, to.rows.count, plane + to.rows.lane);
    };
    if (of.scales == Scales::exponents) {
        put(reinterpret_cast<uint8_t*>(to.place.scales) + c / w.group * kRows, scales.scale[0]);
    } else if (!of.nested() && !of.f8_scales()) {
        put(to.place.scales + c / w.group * kRows, scales.d);
    } else {
        const uint8_t* second = of.minimums() ? scales.minimum[0] : scales.scale[1];
        for (int which = 0; which < of.scale_bytes(); which++)
            put(const_cast<uint8_t*>(w.nested_bytes(to.place.scales, c, which)), which ? second : scales.scale[0]);
        if (of.f8_scales()) {
            float* factors = reinterpret_cast<float*>(to.place.scales);
            std::fill_n(factors + to.rows.lane, to.rows.count, from.factor);
        }
        for (int which = 0; which < of.scale_halves() && c % w.group == 0; which++)
            put(const_cast<uint16_t*>(w.nested_halves(to.place.scales, c, which)), which ? scales.dmin : scales.d);
    }
    return scales.finite && std::isfinite(from.factor) ? 0 : kStrange;
}

// The levels of 32 columns from `c` on, and at the beginning of a group its scales and zero points.
int pack_levels(const RowBlock& to, const Given& from, int64_t c) {
    const Matrix& w = to.w;
    const FormatTraits& of = w.traits();
    if (from.blocks.at) return pack_blocks(to, from.blocks, c);
    Panel panel;
    read_levels(from.values, to.rows, c, kBlock, panel);
    write_levels(of, w.order, panel, to.rows, to.place.quants + c / kBlock * w.block_bytes());
    if (of.nested() || of.f8_scales()) return pack_nested(to, from, c);
    if (c % w.group) return 0;
    int flags = 0;
    for (int l = to.rows.lane; l < to.rows.lane + to.rows.count; l++) {
        const int64_t at = c / w.group * kRows + l, row = to.rows.row(l);
        if (of.scales == Scales::exponents) {
            const uint8_t e = byte_at(from.scales, row, c / from.group);
            if (e == 255) flags |= kStrange;
            reinterpret_cast<uint8_t*>(to.place.scales)[at] = e;
            continue;
        }
        const float scale = scale_at(from.scales, row, c / from.group);
        if (of.scales == Scales::floats) {
            if (!std::isfinite(scale)) flags |= kStrange;
            reinterpret_cast<float*>(to.place.scales)[at] = scale;
            continue;
        }
        const uint16_t half = float_to_half(scale);
        if ((half & 0x7c00) == 0x7c00) flags = kLargeScale;
        to.place.scales[at] = half;
        if (to.place.zeros) to.place.zeros[at] = from.zeros.at ? zero_at(from.zeros, row, c / from.group) : from.middle;
    }
    return flags;
}

// 32 columns of e4m3 floats from `c` on.
int pack_f8(const RowBlock& to, const Given& from, int64_t c) {
    const Matrix& w = to.w;
    Panel panel;
    const bool finite = read_levels(from.values, to.rows, c, kBlock, panel);
    write_f8(panel, to.rows, to.place.quants + c * kRows);
    if (c % w.group == 0) {
        float* scales = reinterpret_cast<float*>(to.place.scales) + c / w.group * kRows;
        for (int l = to.rows.lane; l < to.rows.lane + to.rows.count; l++)
            scales[l] = scale_at(from.scales, to.rows.row(l), c / from.group);
    }
    return finite ? 0 : kStrange;
}

// 32 columns of floats from `c` on, or fewer at the end of a row; in quantised formats a group at its beginning.
int pack_floats(const RowBlock& to, const Given& from, int64_t c, int64_t columns) {
    const Matrix& w = to.w;
    const FormatTraits& of = w.traits();
    if (!of.quantised()) {
        Panel panel;
        const int count = static_cast<int>(std::min<int64_t>(kBlock, columns - c));
        const bool finite = read_floats(from, to.rows, c, count, panel);
        write_floats(of.storage, panel, to.rows, count, to.place.quants + c * of.bits / 8 * kRows);
        return finite ? 0 : kStrange;
    }
    if (c % w.group) return 0;
    Panel panels[kMostGroup / kBlock];
    const int count = w.group / kBlock;
    bool finite = true;
    for (int i = 0; i < count; i++) finite &= read_floats(from, to.rows, c + i * kBlock, kBlock, panels[i]);
    if (of.scales == Scales::exponents) {
        uint8_t exponents[kRows];
        quantise_e2m1(panels[0], exponents);
        write_levels(of, w.order, panels[0], to.rows, to.place.quants + c / kBlock * w.block_bytes());
        uint8_t* scales = reinterpret_cast<uint8_t*>(to.place.scales) + c / kBlock * kRows;
        std::copy_n(exponents + to.rows.lane, to.rows.count, scales + to.rows.lane);
        return finite ? 0 : kStrange;
    }
    uint16_t scales[kRows];
    uint8_t zeros[kRows];
    quantise_group(of.bits, panels, count, scales, to.place.zeros ? zeros : nullptr);
    for (int i = 0; i < count; i++)
        write_levels(of, w.order, panels[i], to.rows, to.place.quants + (c / kBlock + i) * w.block_bytes());
    for (int l = to.rows.lane; l < to.rows.lane + to.rows.count; l++) {
        to.place.scales[c / w.group * kRows + l] = scales[l];
        if (to.place.zeros) to.place.zeros[c / w.group * kRows + l] = zeros[l];
    }
    return finite ? 0 : kStrange;
}

void unpack(const Matrix& w, const Place& from, int lane, float* out) {
    if (w.quantised()) return unpack_quantised(w, from, lane, out);
    if (w.traits().storage == Storage::e4m3) {
        const float* scales = reinterpret_cast<const float*>(from.scales) + lane;
        for (int64_t c = 0; c < w.k; c++)
            out[c] = f8_to_float(from.quants[c * kRows + lane]) * scales[c / w.group * kRows];
        return;
    }
    with_type(static_cast<Type>(w.traits().storage), [&](auto example) {
        using T = decltype(example);
        const T* column = reinterpret_cast<const T*>(from.quants) + lane;
        for (int64_t c = 0; c < w.k; c++) out[c] = widen(column[c * kRows]);
    });
}

}  // namespace

int pack_rows(Context& context, const SplitMatrix& split, const RowRange& where, int64_t count, int64_t columns,
              const Given& from, bool keep) {
    // AWQ's words hold a column each, so that a cache line has sixteen columns' neighbours: they are read panel by panel
    // for several row blocks, all others row block by row block.
    const bool across = from.values.kind == Kind::awq;
    const int64_t blocks = count / kRows;
    const int unit = across ? static_cast<int>(std::clamp<int64_t>(blocks / (2 * context.pool.threads()), 1, 8)) : 1;
    std::atomic<int> flags{0};
    for_blocks(context, split, where, count, unit, [&](const RowBlock* to, int found) {
        int seen = 0;
        for (int64_t c = 0; c < columns; c += kBlock)
            for (int i = 0; i < found; i++) {
                if (!keep)
                    seen |= pack_floats(to[i], from, c, columns);
                else if (to[i].w.traits().storage == Storage::e4m3)
                    seen |= pack_f8(to[i], from, c);
                else
                    seen |= pack_levels(to[i], from, c);
            }
        if (seen) flags |= seen;
    });
    return flags;
}

bool fill_table(Context& context, void* to, Type type, int64_t rows, int64_t columns, const Given& from) {
    std::atomic<bool> finite{true};
    const auto floats = [&](int row, int) {
        const uint8_t* at = from.values.at + row * from.values.row;
        with_type(static_cast<Type>(from.values.kind), [&](auto source) {
            with_type(type, [&](auto target) {
                using S = decltype(source);
                using T = decltype(target);
                T* out = static_cast<T*>(to) + row * columns;
                if (!copy_floats<S, T>(reinterpret_cast<const S*>(at), columns, out)) finite = false;
            });
        });
    };
    const auto blocks = [&](int task, int) {
        const int64_t first = int64_t{task} * kRows;
        const LaneRows lanes{first, 0, static_cast<int>(std::min<int64_t>(kRows, rows - first))};
        with_type(type, [&](auto target) {
            using T = decltype(target);
            Panel panel;
            T tile[kBlock][kRows];
            for (int64_t c = 0; c < columns; c += kBlock) {
                if (!dequantise_blocks(from.blocks, lanes, c, panel.floats)) finite = false;
                write_floats(static_cast<Storage>(type), panel, lanes, kBlock, reinterpret_cast<uint8_t*>(tile));
                for (int l = 0; l < lanes.count; l++) {
                    T* out = static_cast<T*>(to) + (first + l) * columns + c;
                    for (int i = 0; i < kBlock; i++) out[i] = tile[i][l];
                }
            }
        });
    };
    if (from.blocks.at)
        context.pool.each(static_cast<int>((rows + kRows - 1) / kRows), blocks);
    else
        context.pool.each(static_cast<int>(rows), floats);
    return finite;
}

void EmbeddingOf::run(Context& context) const {
    context.pool.each(static_cast<int>(tokens), [&](int t, int) {
        const int64_t row = ids[t] - first_id;
        float* to = out + t * hidden;
        if (row < 0 || row >= vocabulary) {
            std::memset(to, 0, hidden * sizeof(float));
            return;
        }
        unpack_row(table, 0, row, to);
    });
}

void unpack_rows(Context& context, const SplitMatrix& split, const RowRange& where, int64_t count, float* to) {
    for_blocks(context, split, where, count, 1, [&](const RowBlock* block, int) {
        for (int lane = block->rows.lane; lane < block->rows.lane + block->rows.count; lane++)
            unpack(block->w, block->place, lane, to + block->rows.row(lane) * block->w.k);
    });
}

void unpack_row(const SplitMatrix& w, int64_t index, int64_t row, float* to) {
    const auto [part, block] = w.at(index, row / kRows);
    unpack(part, place_of(part, block), static_cast<int>(row % kRows), to);
}

}  // namespace umbra
