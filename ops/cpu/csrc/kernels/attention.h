// Causal attention over paged keys and values with online softmax (arXiv 1805.02867), in blocks that stay in the caches.
//
// Layout of one page of one KV head, P tokens of D elements, both even; a contiguous piece of memory:
//   keys    [D/2][P][2]  two neighbouring elements of P keys: scores of P keys are P lanes and need no horizontal sums
//   values  [P/2][D][2]  two neighbouring tokens: sums of D elements are D lanes
//   int8 only: after the elements float32 [P], each token's scale; element = int8 * scale, scale = max|row| / 127
// The pairs are what dot instructions of bfloat16 multiply and add in one lane.
// A page of latents has one row for each token, keys and values at once: rows [P][D], D = width + rotary; int8: scales.
//
// A block is up to kMostRows query rows of one sequence and one KV head: some tokens, and all query heads that share the
// head. Keys are scored in tiles of kKeys, then their values are added; every row meets a tile while it is in the cache.
// Scores and sums are the same product, of up to 32 columns at a time.
//
// Sections of kSection keys are computed from nothing each, and added in order. So a thread may compute one section of a
// long sequence and another thread the next, and the result has the same bits as if one had computed all.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/vector.h"

namespace umbra {

constexpr int kKeys = 64;       // of a tile
constexpr int kMostRows = 64;   // of a block
constexpr int kSection = 1024;  // keys, a multiple of kKeys
constexpr int kColumns = 32;    // of a product
constexpr int kMostTileRuns = kKeys / 2;
constexpr float kSlack = 8;  // most that scores exceed what is subtracted from them

// The tokens token .. token + count - 1 of one sequence, and one KV head. With `parts` only section `section` is
// computed: for each (token, head) and section `parts` gets the sums (D), their largest score and their total weight.
struct Span {
    int64_t sequence, token, count, kv_head;
    float* parts = nullptr;  // (T, heads, sections, D + 2)
    int64_t section = 0, sections = 0;
};

// Adds sums, largest score and total weight of later keys to those of earlier ones.
void merge(int64_t width, const float* sums, float most, float total, float* all_sums, float& all_most,
           float& all_total);
// to = from, as floats
void widen_all(const float* from, int64_t count, float* to);
void widen_all(const Bf16* from, int64_t count, float* to);
void widen_all(const F16* from, int64_t count, float* to);
void widen_all(const int8_t* from, int64_t count, float* to);
// to [d][kKeys] = from [key][d] for 16 * `lanes` keys of `columns` elements.
void turn(const float* from, int64_t lanes, int64_t columns, float* to);
// to = x * factor
void scale_to(const float* x, float factor, float* to, int64_t count);

template <class T>
struct Piece {  // the keys or values of one page and KV head
    const T* elements;
    const float* scales;  // int8 only
};

template <class T>
Piece<T> piece_of(const void* cache, int64_t index, int64_t elements, int64_t page_size) {
    const int64_t bytes = elements * sizeof(T) + (std::is_same_v<T, int8_t> ? page_size * sizeof(float) : 0);
    const uint8_t* at = static_cast<const uint8_t*>(cache) + index * bytes;
    return {reinterpret_cast<const T*>(at), reinterpret_cast<const float*>(at + elements * sizeof(T))};
}

// Consecutive steps of a product's second operand.
template <class E>
struct Run {
    const E* at;
    int64_t steps;
};

// Memory to prefetch while a product runs: at every step a line after each of two addresses.
struct Ahead {
    const uint8_t *first, *second;
    int64_t stride;
};

// A tile of latents, row by row, and what to prefetch meanwhile: `lines` cache lines of each row of the next tile.
template <class E>
struct LatentRows {
    const E* const* at;  // (kKeys) those behind `count` repeat the last
    int64_t count;
    const uint8_t* const* next;  // (kKeys)
    int64_t lines;
};

// The scores of a tile, and what is known of their rows.
template <class E>
struct Softened {
    const float* scores;         // (rows, kKeys)
    const int64_t* skipped;      // (rows) keys before the first that each sees, less than `seen` or 0
    const int64_t* seen;         // (rows) end of those that each sees; 0: none. Other `scores` are undefined
    const float* key_scales;     // (kKeys) factors of the scores, or null
    const float* value_scales;   // (kKeys) factors of the weights, or null
    float *most, *total, *sums;  // of each row: a bound of its scores, its total weight, its sums (wide)
    int64_t rows, wide;
    E* weights;  // (rows, kKeys)
};

// `Dot` multiplies. It has
//   Operand   the type of both operands; kDepth  elements of a row that one step of the product takes
//   kKeysAtOnce  runs of values are multiples of so many keys, an even number
//   takes<T>()  whether pieces of T can be the second operand of `product` as they are
//   operand(x, factor, count, to)                 x * factor as Operand
//   copy(from, pairs, columns, from_columns, to, to_columns)  part of a piece (pairs, columns, 2) as steps of the product
//   product(fresh, rows, a, a_stride, runs, count, shift, step, second, c, c_stride, ahead)
//     c (rows, 32) = (`fresh`: the scores, one run) or += (the values) a (rows, all steps) times the runs, whose steps are
//     `step` elements apart; columns 0 to 15 are `shift` elements after a run's start, and 16 to 31 `second` after those
//   soften(of)  weights = exp(scores - most), 0 for keys that are not seen; adds to `total`. Where `most` has to grow,
//     total and sums shrink with it.
// and for latents
//   widen(from, count, to)  elements as Operand; count is even
//   kByRows  whether latents are multiplied as they lie, row by row:
//     score(rows, q, deep, latents, scores)  scores (rows, kKeys) = q (rows, deep) times the latents
//     add(rows, weights, latents, width, sums, wide)  sums (rows, wide) += weights (rows, kKeys) times the latents
// and where these are not multiplied as they lie
//   values(from, pairs, columns, stride, to, to_columns)  rows `stride` apart as steps of the product
template <class Dot, class T, bool kLatent>
class QueryRows {
    using E = typename Dot::Operand;
    static constexpr int kDepth = Dot::kDepth, kAtOnce = Dot::kKeysAtOnce;
    static constexpr bool kDirect = !kLatent && Dot::template takes<T>();  // pieces are operands as they are
    static constexpr bool kByRows = kLatent && Dot::kByRows;

public:
    QueryRows(const Attention& a, const Span& span)
        : a_(a), span_(span), group_(a.heads / a.kv_heads), deep_(a.width + a.rotary),
          wide_((a.width + kColumns - 1) / kColumns * kColumns), pages_(a.block_tables + span.sequence * a.most_pages),
          first_position_(a.kv_lens[span.sequence] - (a.query_starts[span.sequence + 1] - span.token)) {}

    // Rows begin .. begin + rows - 1; row r is query head r % group of token r / group.
    void run(int64_t begin, int64_t rows) {
        begin_ = begin, rows_ = rows;
        for (int64_t r = 0; r < rows; r++) {
            Dot::operand(a_.q + place(r), a_.scale, a_.width, q_ + r * deep_);
            if constexpr (kLatent)
                Dot::operand(a_.q_rotary + place(r) / a_.width * a_.rotary, a_.scale, a_.rotary,
                             q_ + r * deep_ + a_.width);
        }
        const int64_t seen_by_last = end_ = seen(rows - 1), first = a_.first_seen(seen(0));
        if (span_.parts) {
            const int64_t start = span_.section * kSection;
            if (start >= seen_by_last) return;
            section(start, std::min(seen_by_last, start + kSection));
            for (int64_t r = 0; r < rows; r++) {
                float* part = span_.parts + (place(r) / a_.width * span_.sections + span_.section) * (a_.width + 2);
                std::copy_n(sums_ + r * wide_, a_.width, part);
                part[a_.width] = most_[r], part[a_.width + 1] = total_[r];
            }
            return;
        }
        float all_most[kMostRows], all_total[kMostRows];
        const int64_t first_section = first / kSection * kSection;
        for (int64_t start = first_section; start < seen_by_last; start += kSection) {
            section(start, std::min(seen_by_last, start + kSection));
            for (int64_t r = 0; r < rows; r++) {
                float* out = a_.out + place(r);
                if (start == first_section) {
                    std::copy_n(sums_ + r * wide_, a_.width, out);
                    all_most[r] = most_[r], all_total[r] = total_[r];
                } else if (seen(r) > start) {
                    merge(a_.width, sums_ + r * wide_, most_[r], total_[r], out, all_most[r], all_total[r]);
                }
            }
        }
        for (int64_t r = 0; r < rows; r++) {
            float* out = a_.out + place(r);
            scale_to(out, 1 / a_.whole(all_total[r], all_most[r], head(r)), out, a_.width);
        }
    }

private:
    // Offset of a row in q and out.
    int64_t place(int64_t r) const {
        const int64_t row = begin_ + r;
        return ((span_.token + row / group_) * a_.heads + span_.kv_head * group_ + row % group_) * a_.width;
    }
    int64_t head(int64_t r) const { return span_.kv_head * group_ + (begin_ + r) % group_; }
    // A query sees the keys up to its own position.
    int64_t seen(int64_t r) const { return first_position_ + (begin_ + r) / group_ + 1; }

    void section(int64_t start, int64_t end) {
        std::fill_n(most_, rows_, -std::numeric_limits<float>::infinity());
        std::fill_n(total_, rows_, 0.0f);
        std::fill_n(sums_, rows_ * wide_, 0.0f);
        const int64_t first = std::max(start, a_.first_seen(seen(0)) / kKeys * kKeys);
        for (int64_t at = first; at < end; at += kKeys) tile(at, std::min<int64_t>(kKeys, end - at));
    }

    // Calls f(piece index, offset in the page, number of keys, first key in the tile) for the pages of a tile.
    template <class F>
    void for_pages(int64_t start, int64_t count, F&& f) const {
        const int64_t size = a_.page_size;
        for (int64_t at = 0, keys; at < count; at += keys) {
            keys = std::min(size - (start + at) % size, count - at);
            const int64_t page = pages_[(start + at) / size];
            f(kLatent ? page : page * a_.kv_heads + span_.kv_head, (start + at) % size, keys, at);
        }
    }

    void tile(int64_t start, int64_t count) {
        score(start, count);
        constexpr bool kScaled = std::is_same_v<T, int8_t>;
        if (kScaled)
            for_pages(start, count, [&](int64_t index, int64_t offset, int64_t keys, int64_t at) {
                std::copy_n(piece(a_.k_cache, index).scales + offset, keys, key_scales_ + at);
                std::copy_n(piece(a_.v_cache, index).scales + offset, keys, value_scales_ + at);
            });
        for (int64_t r = 0; r < rows_; r++) {
            const int64_t first = std::max<int64_t>(0, a_.first_seen(seen(r)) - start);
            seen_[r] = first < count ? std::clamp<int64_t>(seen(r) - start, 0, count) : 0;
            skipped_[r] = seen_[r] ? first : 0;
        }
        Dot::soften(Softened<E>{scores_, skipped_, seen_, kScaled ? key_scales_ : nullptr,
                                kScaled ? value_scales_ : nullptr, most_, total_, sums_, rows_, wide_, weights_});
        add_values(start, count);
    }

    // What to prefetch during a product: of the pieces of the tile at `start`, 16 tokens one after another in parts of 32
    // elements, part `first` and part `second` and those after them. Pages lie anywhere, and the processor's own prefetching starts anew at
    // each of them.
    Ahead ahead(const void* cache, bool keys, int64_t start, int64_t first, int64_t second) const {
        if constexpr (kLatent) {  // rows follow one another
            const uint8_t* here = reinterpret_cast<const uint8_t*>(q_);
            return {here, here, 0};
        }
        const int64_t size = a_.page_size, lines = a_.width / 2, stride = (keys ? size * 2 : kColumns) * sizeof(T);
        const auto line = [&](int64_t i) {
            const int64_t token = std::min(start + i / lines * kLanes, end_ - 1) / kLanes * kLanes, at = token % size;
            const Piece<T> from = piece(cache, pages_[token / size] * a_.kv_heads + span_.kv_head);
            return reinterpret_cast<const uint8_t*>(from.elements + at * (keys ? 2 : a_.width)) + i % lines * stride;
        };
        return {line(first), line(second), stride};
    }

    Piece<T> piece(const void* cache, int64_t index) const {
        return piece_of<T>(cache, index, deep_ * a_.page_size, a_.page_size);
    }

    void find_latents(int64_t start, int64_t count) {
        for_pages(start, count, [&](int64_t index, int64_t offset, int64_t keys, int64_t at) {
            const T* from = piece(a_.k_cache, index).elements + offset * deep_;
            const E* to = latents_ + at * deep_;
            if constexpr (std::is_same_v<T, E>)
                to = from;
            else
                Dot::widen(from, keys * deep_, latents_ + at * deep_);
            for (int64_t i = 0; i < keys; i++) rows_of_keys_[at + i] = to + i * deep_;
        });
        std::fill_n(rows_of_keys_ + count, kKeys - count, rows_of_keys_[count - 1]);
        const int64_t after = start + kKeys, more = std::clamp<int64_t>(end_ - after, 0, kKeys);
        for_pages(after, more, [&](int64_t index, int64_t offset, int64_t keys, int64_t at) {
            const T* from = piece(a_.k_cache, index).elements + offset * deep_;
            for (int64_t i = 0; i < keys; i++) next_[at + i] = reinterpret_cast<const uint8_t*>(from + i * deep_);
        });
        std::fill_n(next_ + more, kKeys - more, reinterpret_cast<const uint8_t*>(q_));
        tile_of_rows_ = {rows_of_keys_, count, next_, deep_ * static_cast<int64_t>(sizeof(T)) / 64};
    }

    // scores = q times the keys start .. start + count - 1
    void score(int64_t start, int64_t count) {
        if constexpr (kByRows) {
            find_latents(start, count);
            return Dot::score(rows_, q_, deep_, tile_of_rows_, scores_);
        }
        if constexpr (kDirect) {
            if (a_.page_size % kLanes == 0) {
                const T* lanes[kKeys / kLanes] = {};  // where each 16 keys begin
                for_pages(start, count, [&](int64_t index, int64_t offset, int64_t keys, int64_t at) {
                    const T* elements = piece(a_.k_cache, index).elements + offset * 2;
                    for (int64_t i = 0; i < keys; i += kLanes) lanes[(at + i) / kLanes] = elements + i * 2;
                });
                for (auto& at : lanes) at = at ? at : lanes[0];  // their scores are not read
                return score(start, count, lanes, a_.page_size);
            }
        }
        const E* lanes[kKeys / kLanes];
        if constexpr (kLatent && !kByRows) {
            for_pages(start, count, [&](int64_t index, int64_t offset, int64_t keys, int64_t at) {
                Dot::widen(piece(a_.k_cache, index).elements + offset * deep_, keys * deep_, latents_ + at * deep_);
            });
            std::fill_n(latents_ + count * deep_, (kKeys - count) * deep_, E{});
            turn(reinterpret_cast<const float*>(latents_), (count + kLanes - 1) / kLanes, deep_ / kDepth,
                 reinterpret_cast<float*>(tile_));
        } else if constexpr (!kLatent) {
            for_pages(start, count, [&](int64_t index, int64_t offset, int64_t keys, int64_t at) {
                Dot::copy(piece(a_.k_cache, index).elements + offset * 2, a_.width / 2, keys, a_.page_size,
                          tile_ + at * kDepth, kKeys);
            });
        }
        for (int i = 0; i < kKeys / kLanes; i++) lanes[i] = tile_ + i * kLanes * kDepth;
        score(start, count, lanes, kKeys);
    }
    template <class S>
    void score(int64_t start, int64_t count, const S* const* lanes, int64_t columns) {
        const int64_t steps = deep_ / kDepth;
        for (int i = 0; i * kLanes < count; i += 2) {
            const Run<S> run{lanes[i], steps};
            Dot::product(true, rows_, q_, deep_, &run, 1, 0, columns * kDepth, lanes[i + 1] - lanes[i],
                         scores_ + i * kLanes, kKeys, ahead(a_.v_cache, false, start, i * steps, (i + 1) * steps));
        }
    }

    // sums += weights times the values start .. start + count - 1
    void add_values(int64_t start, int64_t count) {
        if constexpr (kByRows) return Dot::add(rows_, weights_, tile_of_rows_, a_.width, sums_, wide_);
        if constexpr (kDirect) {
            // Behind the last value lies whatever the next token's place holds.
            if (a_.width % kColumns == 0 && count % kAtOnce == 0 && a_.page_size % kAtOnce == 0) {
                Run<T> runs[kMostTileRuns];
                int pieces = 0;
                for_pages(start, count, [&](int64_t index, int64_t offset, int64_t keys, int64_t) {
                    runs[pieces++] = {piece(a_.v_cache, index).elements + offset * a_.width, keys / kDepth};
                });
                return add_values(start, runs, pieces);
            }
        }
        if constexpr (kLatent && !kByRows) {
            const int64_t whole = (count + kAtOnce - 1) / kAtOnce * kAtOnce;
            Dot::values(latents_, whole / 2, a_.width, deep_, tile_, wide_);
            const Run<E> run{tile_, whole / kDepth};
            return add_values(start, &run, 1);
        }
        for_pages(start, count, [&](int64_t index, int64_t offset, int64_t keys, int64_t at) {
            Dot::copy(piece(a_.v_cache, index).elements + offset * a_.width, (keys + 1) / 2, a_.width, a_.width,
                      tile_ + at * wide_, wide_);
        });
        if (count % 2)
            for (int64_t j = 0; j < wide_; j++)
                tile_[count / kDepth * kDepth * wide_ + (kDepth == 2 ? 2 * j + 1 : j)] = E{};
        const int64_t taken = (count + 1) / 2 * 2, whole = (count + kAtOnce - 1) / kAtOnce * kAtOnce;
        std::fill_n(tile_ + taken * wide_, (whole - taken) * wide_, E{});
        const Run<E> run{tile_, whole / kDepth};
        add_values(start, &run, 1);
    }
    template <class S>
    void add_values(int64_t start, const Run<S>* runs, int pieces) {
        for (int64_t j = 0; j < wide_; j += kColumns)
            Dot::product(false, rows_, weights_, kKeys, runs, pieces, j * kDepth, wide_ * kDepth, kLanes * kDepth,
                         sums_ + j, wide_, ahead(a_.k_cache, true, start + kKeys, 2 * j, 2 * j + kKeys / kDepth));
    }

    static constexpr int kMost = kLatent ? kMostLatent : kMostWidth, kDeepest = kLatent ? kMost + kMostRotary : kMost;
    static constexpr int kWidest = (kMost + kColumns - 1) / kColumns * kColumns;
    const Attention& a_;
    const Span& span_;
    const int64_t group_, deep_, wide_;
    const int64_t* pages_;
    const int64_t first_position_;
    int64_t begin_ = 0, rows_ = 0, end_ = 0;
    alignas(64) E q_[kMostRows * kDeepest];
    alignas(64) float scores_[kMostRows * kKeys];
    alignas(64) E weights_[kMostRows * kKeys];
    alignas(64) float sums_[kMostRows * kWidest];
    alignas(
        64) E tile_[kByRows ? 1 : kKeys * std::max(kWidest, kDeepest)];  // keys or values, if no operand as they are
    alignas(64) E latents_[kLatent ? kKeys * kDeepest : 1];              // those of a tile, row by row
    const E* rows_of_keys_[kByRows ? kKeys : 1];
    const uint8_t* next_[kByRows ? kKeys : 1];
    LatentRows<E> tile_of_rows_;
    float most_[kMostRows], total_[kMostRows], key_scales_[kKeys], value_scales_[kKeys];
    int64_t skipped_[kMostRows], seen_[kMostRows];
};

template <class Dot, class T, bool kLatent = false>
void attend(const Attention& a, const Span& span) {
    QueryRows<Dot, T, kLatent> block(a, span);
    const int64_t rows = span.count * (a.heads / a.kv_heads);
    for (int64_t begin = 0; begin < rows; begin += kMostRows)
        block.run(begin, std::min<int64_t>(kMostRows, rows - begin));
}

}  // namespace umbra
