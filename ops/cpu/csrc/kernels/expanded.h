// Attention over latents in its expanded form: each head's keys and values are made of the latents (ops.h).
//
// It goes through the sections of a sequence's keys, and in each through two phases. The first makes the keys and values
// of the section, as operands of products, in memory that all threads share; the second computes all query rows' part of
// the section, in blocks, and adds it to what they have of those before. Sections are those of attention.h, so bits
// depend neither on threads nor on blocks nor on other rows.
//
// Of each head the memory has, in elements of products, which take kDepth of them in a lane:
//   matrices  of keys [width / kDepth][key columns][kDepth]; of values, 64 columns after another,
//             [width / kDepth][64][kDepth]
//   tiles     of 64 keys each: keys [deep / kDepth][64][kDepth], values [64 / kDepth][value columns][kDepth]
#pragma once

#include "kernels/attention.h"
#include "kernels/pack.h"

namespace umbra {

constexpr int kTiles = kSection / kKeys;

struct ExpandedSizes {
    explicit ExpandedSizes(const ExpandedAttention& a)
        : deep((a.key + a.rotary + 1) / 2 * 2), key_columns((a.key + kColumns - 1) / kColumns * kColumns),
          value_columns((a.value + kKeys - 1) / kKeys * kKeys), matrices(a.width * (key_columns + value_columns)),
          tile(kKeys * (deep + value_columns)), head(matrices + kTiles * tile) {}
    int64_t deep;                        // columns of a key and its rotated part, even
    int64_t key_columns, value_columns;  // whole parts of products
    int64_t matrices, tile, head;        // elements
};

// Heads first .. first + heads - 1 of an op, with their memory.
struct ExpandedHeads {
    const ExpandedAttention& a;
    int64_t first, heads;
    uint8_t* memory;
};

// What tasks do; each writes memory of its own.
struct ExpandedSteps {
    int64_t bytes;  // of an element
    // Part `slab` of a head's matrices: 64 rows of that of keys, then of values.
    void (*matrices)(const ExpandedHeads&, int64_t head, int64_t slab);
    // The tile of keys from `start` on of heads begin .. end - 1.
    void (*tile)(const ExpandedHeads&, int64_t sequence, int64_t start, int64_t begin, int64_t end);
    // What the section from `start` on adds to `count` tokens of a head.
    void (*rows)(const ExpandedHeads&, int64_t sequence, int64_t start, int64_t head, int64_t token, int64_t count);
};

template <class Dot, class T>
class Expanded {
    using E = typename Dot::Operand;
    static constexpr int kDepth = Dot::kDepth;

    static E* place(const ExpandedHeads& of, const ExpandedSizes& sizes, int64_t head) {
        return reinterpret_cast<E*>(of.memory) + (head - of.first) * sizes.head;
    }

    static void matrices(const ExpandedHeads& of, int64_t head, int64_t slab) {
        const ExpandedAttention& a = of.a;
        const ExpandedSizes sizes(a);
        const int64_t slabs_of_keys = (a.width + kKeys - 1) / kKeys;
        E* to = place(of, sizes, head);
        if (slab < slabs_of_keys) {
            const int64_t begin = slab * kKeys;
            keys_matrix(a, head, begin, std::min<int64_t>(kKeys, a.width - begin), sizes.key_columns,
                        to + begin * sizes.key_columns);
        } else {
            const int64_t begin = (slab - slabs_of_keys) * kKeys;
            values_matrix(a, head, begin, std::min<int64_t>(kKeys, a.value - begin),
                          to + (sizes.key_columns + begin) * a.width);
        }
    }

    // Whether blocks of a matrix have elements of products.
    static bool kept(const SplitMatrix& w) { return kDepth == 2 && w.like().traits().storage == Storage::bf16; }

    template <class Element>
    static const Element* block_of(const SplitMatrix& w, int64_t head, int64_t row) {
        const auto [part, block] = w.at(head, row / kRows);
        return reinterpret_cast<const Element*>(part.quants + block * part.quant_stride());
    }

    // Rows begin .. begin + count - 1 of a head's matrix of keys.
    static void keys_matrix(const ExpandedAttention& a, int64_t head, int64_t begin, int64_t count, int64_t columns,
                            E* to) {
        if (kept(a.keys)) {  // in a block pairs of rows lie side by side
            for (int64_t row = 0; row < count; row += kRows) {
                const float* from = block_of<float>(a.keys, head, begin + row);
                float* pairs = reinterpret_cast<float*>(to + row * columns);
                for (int64_t i = 0; i < std::min<int64_t>(kRows, count - row) / 2; i++)
                    for (int64_t c = 0; c < a.key; c++) pairs[i * columns + c] = from[c * kRows / 2 + i];
            }
            return;
        }
        float row[kMostWidth];
        alignas(64) E rows[kKeys * kMostWidth];
        for (int64_t r = 0; r < count; r++) {
            unpack_row(a.keys, head, begin + r, row);
            Dot::operand(row, 1, a.key, rows + r * columns);
        }
        Dot::values(rows, count / 2, a.key, columns, to, columns);
    }

    static void values_matrix(const ExpandedAttention& a, int64_t head, int64_t begin, int64_t count, E* to) {
        if (kept(a.values)) {  // a column's rows lie side by side, and zeros behind the last
            for (int64_t row = 0; row < count; row += kRows)
                Dot::values(block_of<E>(a.values, head, begin + row), a.width / 2, kRows, kRows, to + row * kDepth,
                            kKeys);
            return;
        }
        float row[kMostLatent];
        alignas(64) E rows[kKeys * kMostLatent];
        for (int64_t r = 0; r < count; r++) {
            unpack_row(a.values, head, begin + r, row);
            Dot::operand(row, 1, a.width, rows + r * a.width);
        }
        std::fill_n(rows + count * a.width, (kKeys - count) * a.width, E{});
        turn(reinterpret_cast<const float*>(rows), kKeys / kLanes, a.width / kDepth, reinterpret_cast<float*>(to));
    }

    static void tile(const ExpandedHeads& of, int64_t sequence, int64_t start, int64_t begin, int64_t end) {
        const ExpandedAttention& a = of.a;
        const ExpandedSizes sizes(a);
        const int64_t deep = a.width + a.rotary, count = std::min<int64_t>(kKeys, a.kv_lens[sequence] - start);
        alignas(64) E latents[kKeys * (kMostLatent + kMostRotary)], turned[kKeys * kMostRotary];
        float scales[kKeys], rotated[kMostRotary];
        const int64_t* pages = a.block_tables + sequence * a.most_pages;
        for (int64_t at = 0, keys; at < count; at += keys) {
            const int64_t offset = (start + at) % a.page_size;
            keys = std::min(a.page_size - offset, count - at);
            const Piece<T> page =
                piece_of<T>(a.cache, pages[(start + at) / a.page_size], deep * a.page_size, a.page_size);
            Dot::widen(page.elements + offset * deep, keys * deep, latents + at * deep);
            for (int64_t i = 0; i < keys; i++) {
                scales[at + i] = std::is_same_v<T, int8_t> ? page.scales[offset + i] : 1;
                for (int64_t d = 0; d < a.rotary; d++)
                    rotated[d] = widen(page.elements[(offset + i) * deep + a.width + d]);
                Dot::operand(rotated, scales[at + i], a.rotary, turned + (at + i) * a.rotary);
            }
        }
        alignas(64) E rows[kKeys * std::max(kMostWidth + kMostRotary, 2 * kKeys)];
        alignas(64) float sums[kKeys * kColumns];
        // rows = the products of all latents with 32 columns of a matrix, from `column` on
        const auto product = [&](const E* matrix, int64_t step, int64_t column, int64_t columns, int64_t stride) {
            const Run<E> run{matrix, a.width / kDepth};
            Dot::product(true, count, latents, deep, &run, 1, 0, step * kDepth, kLanes * kDepth, sums, kColumns,
                         nothing_ahead());
            for (int64_t r = 0; r < count; r++)
                Dot::operand(sums + r * kColumns, scales[r], std::min<int64_t>(kColumns, columns - column),
                             rows + r * stride + column);
        };
        for (int64_t head = begin; head < end; head++) {
            const E* own = place(of, sizes, head);
            E* to = place(of, sizes, head) + sizes.matrices + start % kSection / kKeys * sizes.tile;
            for (int64_t j = 0; j < a.key; j += kColumns)
                product(own + j * kDepth, sizes.key_columns, j, a.key, sizes.deep);
            for (int64_t r = 0; r < count; r++) {
                E* rest = std::copy_n(turned + r * a.rotary, a.rotary, rows + r * sizes.deep + a.key);
                std::fill(rest, rows + (r + 1) * sizes.deep, E{});
            }
            std::fill_n(rows + count * sizes.deep, (kKeys - count) * sizes.deep, E{});
            turn(reinterpret_cast<const float*>(rows), kKeys / kLanes, sizes.deep / kDepth,
                 reinterpret_cast<float*>(to));
            for (int64_t j = 0; j < a.value; j += kColumns)
                product(own + sizes.key_columns * a.width + j / kKeys * kKeys * a.width + j % kKeys * kDepth, kKeys, j,
                        a.value, sizes.value_columns);
            std::fill_n(rows + count * sizes.value_columns, (kKeys - count) * sizes.value_columns, E{});
            Dot::values(rows, kKeys / 2, a.value, sizes.value_columns, to + kKeys * sizes.deep, sizes.value_columns);
        }
    }

    static void rows(const ExpandedHeads& of, int64_t sequence, int64_t start, int64_t head, int64_t token,
                     int64_t count) {
        const ExpandedAttention& a = of.a;
        const ExpandedSizes sizes(a);
        const int64_t before = a.kv_lens[sequence] - (a.query_starts[sequence + 1] - token);  // the first query's
        const int64_t stop = start + kSection, end = std::min(stop, before + count);
        if (end <= start) return;
        const int64_t wide = (a.value + kColumns - 1) / kColumns * kColumns;
        alignas(64) E q[kMostRows * (kMostWidth + kMostRotary)], weights[kMostRows * kKeys];
        alignas(64) float scores[kMostRows * kKeys], sums[kMostRows * kMostWidth];
        float most[kMostRows], total[kMostRows];
        int64_t seen[kMostRows];
        static constexpr int64_t skipped[kMostRows] = {};
        for (int64_t r = 0; r < count; r++) {
            E* to = q + r * sizes.deep;
            std::fill(to + a.key + a.rotary, to + sizes.deep, E{});
            Dot::operand(a.q + (token + r) * a.q_stride + head * a.key, a.scale, a.key, to);
            Dot::operand(a.q_rotary + ((token + r) * a.heads + head) * a.rotary, a.scale, a.rotary, to + a.key);
        }
        std::fill_n(most, count, -std::numeric_limits<float>::infinity());
        std::fill_n(total, count, 0.0f);
        std::fill_n(sums, count * wide, 0.0f);
        const E* keys = place(of, sizes, head) + sizes.matrices;
        for (int64_t at = start; at < end; at += kKeys, keys += sizes.tile) {
            const int64_t some = std::min<int64_t>(kKeys, end - at);
            for (int64_t i = 0; i < some; i += 2 * kLanes) {
                const Run<E> run{keys + i * kDepth, sizes.deep / kDepth};
                Dot::product(true, count, q, sizes.deep, &run, 1, 0, kKeys * kDepth, kLanes * kDepth, scores + i, kKeys,
                             nothing_ahead());
            }
            for (int64_t r = 0; r < count; r++) seen[r] = std::clamp<int64_t>(before + r + 1 - at, 0, some);
            Dot::soften(Softened<E>{scores, skipped, seen, nullptr, nullptr, most, total, sums, count, wide, weights});
            const int64_t whole = (some + Dot::kKeysAtOnce - 1) / Dot::kKeysAtOnce * Dot::kKeysAtOnce;
            const Run<E> run{keys + kKeys * sizes.deep, whole / kDepth};
            for (int64_t j = 0; j < wide; j += kColumns)
                Dot::product(false, count, weights, kKeys, &run, 1, j * kDepth, sizes.value_columns * kDepth,
                             kLanes * kDepth, sums + j, wide, nothing_ahead());
        }
        for (int64_t r = 0; r < count; r++) {
            const int64_t row = (token + r) * a.heads + head;
            float *to = a.out + row * a.value, *all_most = a.peaks + 2 * row, *all_total = all_most + 1;
            if (before + r + 1 <= start) continue;
            if (start == 0) {
                std::copy_n(sums + r * wide, a.value, to);
                *all_most = most[r], *all_total = total[r];
            } else {
                merge(a.value, sums + r * wide, most[r], total[r], to, *all_most, *all_total);
            }
            if (before + r + 1 <= stop) scale_to(to, 1 / *all_total, to, a.value);
        }
    }

    static Ahead nothing_ahead() {
        static const uint8_t here[64] = {};
        return {here, here, 0};
    }

public:
    static constexpr ExpandedSteps kSteps{sizeof(E), matrices, tile, rows};
};

}  // namespace umbra
