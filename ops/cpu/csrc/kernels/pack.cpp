#include "kernels/pack.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels/vector.h"

namespace umbra {
namespace {

struct Place {        // where one row is stored
    uint8_t* quants;  // of its row block
    uint16_t* scales;
    uint8_t* zeros;
    int lane;
};

Place place_of(const Matrix& w, int64_t row) {
    const int64_t block = row / kRows;
    const int lane = static_cast<int>(row % kRows);
    return {const_cast<uint8_t*>(w.quants) + block * w.quant_stride(),
            const_cast<uint16_t*>(w.scales) + block * w.scale_count() + lane,
            w.zeros ? const_cast<uint8_t*>(w.zeros) + block * w.scale_count() + lane : nullptr, lane};
}

template <class Word>
Word word_at(const uint8_t* at) {
    Word word;
    std::memcpy(&word, at, sizeof(Word));
    return word;
}
template <class Word>
void put_word(uint8_t* at, Word word) {
    std::memcpy(at, &word, sizeof(Word));
}

// A Word is the columns that stand side by side; `flip` is the sign bits of as many bytes.
template <class Word>
void put_words(Format format, Word flip, uint8_t* plane, int lane, const uint8_t* q) {
    constexpr int kColumns = sizeof(Word);
    for (int i = 0; i < kBlock; i += kColumns) {
        uint8_t* to = plane + i * kRows + lane * kColumns;
        if (format == Format::q8)
            put_word<Word>(to, word_at<Word>(q + i) ^ flip);
        else if (i < 16)
            put_word<Word>(to, (word_at<Word>(q + i) | word_at<Word>(q + 16 + i) << 4) ^ flip);
    }
}

// Writes the quants of one row and one block of 32 columns in the layout of matrix.h.
void put_block(Format format, Order order, uint8_t* plane, int lane, const uint8_t* q) {
    const uint32_t flip = 0x01010101u * sign_bits(format, order);
    if (order == Order::signed_eights)
        put_words<uint64_t>(format, static_cast<uint64_t>(flip) << 32 | flip, plane, lane, q);
    else
        put_words<uint32_t>(format, flip, plane, lane, q);
}

CLONES void range(const float* x, int64_t count, float* least, float* most) {
    *least = *most = 0;
    widen_range(x, count, *least, *most);
}

// q = round(x * inverse) + zero, clamped to 0 .. largest.
CLONES void levels(const float* x, float inverse, int zero, int largest, uint8_t* q) {
    for (int i = 0; i < kBlock; i++) {
        const int32_t level = nearest(x[i] * inverse) + zero;
        q[i] = static_cast<uint8_t>(level < 0 ? 0 : level > largest ? largest : level);
    }
}

// Quantises one group of columns of one row, from column `start` on.
void pack_group(const Matrix& w, const Place& to, int64_t start, const float* from) {
    const int largest = w.format == Format::q8 ? 255 : 15, middle = (largest + 1) / 2;
    float least, most;
    range(from + start, w.group, &least, &most);
    float exact;
    if (to.zeros)
        exact = (most - least) / static_cast<float>(largest);
    else if (w.format == Format::q8)
        exact = std::max(most, -least) / 127.0f;
    else
        exact = (most > -least ? most : least) / -8.0f;
    const uint16_t half = float_to_half(exact);
    const float scale = half_to_float(half), inverse = scale != 0 ? 1.0f / scale : 0.0f;
    const int64_t at = start / w.group * kRows;
    to.scales[at] = half;
    int zero = middle;
    if (to.zeros) {
        zero = std::clamp(static_cast<int>(std::nearbyint(-least * inverse)), 0, largest);
        to.zeros[at] = static_cast<uint8_t>(zero);
    }
    for (int64_t c = start; c < start + w.group; c += kBlock) {
        uint8_t q[kBlock];
        levels(from + c, inverse, zero, largest, q);
        put_block(w.format, w.order, to.quants + c / kBlock * w.block_bytes(), to.lane, q);
    }
}

void unpack_quantised(const Matrix& w, const Place& from, int64_t k, float* to) {
    for (int64_t c = 0; c < k; c += kBlock) {
        const uint8_t* block = from.quants + c / kBlock * w.block_bytes();
        const int64_t at = c / w.group * kRows;
        const int zero = from.zeros ? from.zeros[at] : w.format == Format::q8 ? 128 : 8;
        for (int i = 0; i < kBlock; i++)
            to[c + i] = static_cast<float>(quant_at(w.format, w.order, block, from.lane, i) - zero) *
                        half_to_float(from.scales[at]);
    }
}

// Calls f(part, row, first, end) for each row block, shared over the pool: rows first .. end - 1 of the `count` given
// rows go to `part` from its row `row` on.
template <class F>
void for_blocks(Context& context, const SplitMatrix& w, const RowRange& where, int64_t count, F&& f) {
    const int64_t skipped = where.first % kRows;  // rows of the first block that stay unchanged
    const int64_t tasks = count ? (skipped + count + kRows - 1) / kRows : 0;
    context.pool.each(static_cast<int>(tasks), [&](int task, int) {
        const int64_t block = where.first / kRows + task * where.step;
        size_t node = 0;
        while (block >= w.first[node + 1]) node++;
        const int64_t first = std::max<int64_t>(0, task * kRows - skipped);
        const int64_t end = std::min(count, (task + 1) * kRows - skipped);
        const int64_t lane = first + skipped - task * kRows;
        f(w.parts[node].at(where.index), (block - w.first[node]) * kRows + lane, first, end);
    });
}

}  // namespace

void pack_rows(Context& context, const SplitMatrix& split, const RowRange& where, int64_t count, const float* from) {
    for_blocks(context, split, where, count, [&](const Matrix& w, int64_t row, int64_t first, int64_t end) {
        const int64_t k = w.k;
        if (w.quantised()) {  // group by group, so that the cache lines that rows share stay in L1
            for (int64_t start = 0; start < k; start += w.group)
                for (int64_t i = first; i < end; i++) pack_group(w, place_of(w, row + i - first), start, from + i * k);
            return;
        }
        with_type(static_cast<Type>(w.format), [&](auto example) {
            using T = decltype(example);
            for (int64_t i = first; i < end; i++) {
                const Place to = place_of(w, row + i - first);
                T* column = reinterpret_cast<T*>(to.quants) + to.lane;
                for (int64_t c = 0; c < k; c++) column[c * kRows] = narrow<T>(from[i * k + c]);
            }
        });
    });
}

void pack_levels(Context& context, const SplitMatrix& split, const RowRange& where, int64_t count,
                 const uint8_t* levels, const uint16_t* scales, const uint8_t* zeros) {
    for_blocks(context, split, where, count, [&](const Matrix& w, int64_t row, int64_t first, int64_t end) {
        const int64_t groups = w.k / w.group;
        const uint8_t middle = w.format == Format::q8 ? 128 : 8;
        for (int64_t i = first; i < end; i++) {
            const Place to = place_of(w, row + i - first);
            for (int64_t g = 0; g < groups; g++) {
                to.scales[g * kRows] = scales[i * groups + g];
                if (to.zeros) to.zeros[g * kRows] = zeros ? zeros[i * groups + g] : middle;
            }
        }
        const Place to = place_of(w, row);
        const auto put = [&](auto format) {  // block by block: the rows share its cache lines
            for (int64_t block = 0; block < w.k / kBlock; block++)
                for (int64_t i = first; i < end; i++)
                    put_block(format, w.order, to.quants + block * w.block_bytes(),
                              to.lane + static_cast<int>(i - first), levels + i * w.k + block * kBlock);
        };
        if (w.format == Format::q8)
            put(std::integral_constant<Format, Format::q8>());
        else
            put(std::integral_constant<Format, Format::q4>());
    });
}

void pack_f8(Context& context, const SplitMatrix& split, const RowRange& where, int64_t count, const uint8_t* values,
             const float* scales) {
    for_blocks(context, split, where, count, [&](const Matrix& w, int64_t row, int64_t first, int64_t end) {
        const int64_t groups = w.k / w.group, lane = row % kRows;
        uint8_t* plane = const_cast<uint8_t*>(w.quants) + row / kRows * w.quant_stride() + lane;
        float* to = const_cast<float*>(w.f8_scales(row / kRows)) + lane;
        for (int64_t g = 0; g < groups; g++)
            for (int64_t i = first; i < end; i++) to[g * kRows + i - first] = scales[i * groups + g];
        for (int64_t c = 0; c < w.k; c++)
            for (int64_t i = first; i < end; i++) plane[c * kRows + i - first] = values[i * w.k + c];
    });
}

void unpack_rows(Context& context, const SplitMatrix& split, const RowRange& where, int64_t count, float* to) {
    for_blocks(context, split, where, count, [&](const Matrix& w, int64_t row, int64_t first, int64_t end) {
        for (int64_t i = first; i < end; i++) {
            const Place from = place_of(w, row + i - first);
            float* out = to + i * w.k;
            if (w.quantised()) {
                unpack_quantised(w, from, w.k, out);
                continue;
            }
            if (w.format == Format::f8) {
                const float* scales = w.f8_scales((row + i - first) / kRows) + from.lane;
                for (int64_t c = 0; c < w.k; c++)
                    out[c] = f8_to_float(from.quants[c * kRows + from.lane]) * scales[c / w.group * kRows];
                continue;
            }
            with_type(static_cast<Type>(w.format), [&](auto example) {
                using T = decltype(example);
                const T* column = reinterpret_cast<const T*>(from.quants) + from.lane;
                for (int64_t c = 0; c < w.k; c++) out[c] = widen(column[c * kRows]);
            });
        }
    });
}

}  // namespace umbra
