#include "kernels/records.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/panel.h"
#include "kernels/vector.h"

namespace umbra {
namespace {

constexpr int kMiddle = traits_of(kExpanded).middle;
constexpr uint32_t kEach = 0x01010101;  // times a byte: that byte four times
constexpr int64_t kChunk = 1024;        // columns that are expanded at once: they stay in the first cache
constexpr int64_t kLeastChunk = 256;

// Half of the rows at a time: a register of AVX2.
constexpr int kHalf = kRows / 2;
typedef Vectors<kHalf>::Bits Word;
typedef Vectors<kHalf>::Ints Ints;
typedef Vectors<kHalf>::Floats Floats;
typedef uint8_t Bytes __attribute__((vector_size(sizeof(Word))));

// Entries of eight bytes, and of four.
alignas(64) uint64_t iq2_xxs[256], iq2_xs[512], iq2_s[1024], iq1[2048];
alignas(64) uint32_t iq3_xxs[256], iq3_s[512];

struct Entries {
    void* at;
    int64_t count, columns;
};
Entries entries_of(Record kind) {
    switch (kind) {
        case Record::iq2_xxs: return {iq2_xxs, 256, 8};
        case Record::iq2_xs: return {iq2_xs, 512, 8};
        case Record::iq2_s: return {iq2_s, 1024, 8};
        case Record::iq3_xxs: return {iq3_xxs, 256, 4};
        case Record::iq3_s: return {iq3_s, 512, 4};
        default: return {iq1, 2048, 8};
    }
}

constexpr int kMost = 3;  // words or bytes of a record

// Of 32 columns; each lane is a row.
struct Fields {
    Word words[kMost], bytes[kMost];
    Word index[8];             // of entries
    Word signs;                // bit c is column c's
    Word negative[4];          // of 8 columns: whether an eighth is taken off, and not added
    Word scale[2], lowest[2];  // of 16 columns; signed
};

constexpr bool levels(Record kind) { return kind >= Record::q2_k; }
constexpr bool eighths(Record kind) { return kind == Record::iq1_s || kind == Record::iq1_m; }
constexpr int columns_of(Record kind) { return kind == Record::iq3_xxs || kind == Record::iq3_s ? 4 : 8; }

// Of the rows from `row` on.
template <Format F>
ALWAYS_INLINE void load_record(const uint8_t* record, int row, Fields& to) {
    constexpr FormatTraits kOf = kTraits<F>;
    static_assert(kOf.words <= kMost && kOf.bytes_more <= kMost);
    for (int i = 0; i < kOf.words; i++) std::memcpy(&to.words[i], record + i * 64 + 4 * row, sizeof(Word));
    for (int i = 0; i < kOf.bytes_more; i++) {
        typedef uint8_t Few __attribute__((vector_size(kHalf)));
        Few few;
        std::memcpy(&few, record + kOf.words * 64 + i * kRows + row, sizeof few);
        to.bytes[i] = __builtin_convertvector(__builtin_convertvector(few, Vectors<kHalf>::Halves), Word);
    }
}

// The signs of four times eight columns of which seven are given; their number is even.
ALWAYS_INLINE void with_eighths(const Word& sevens, Word& to) {
    const Word low =
        (sevens & 0x7f) | (sevens >> 7 & 0x7f) << 8 | (sevens >> 14 & 0x7f) << 16 | (sevens >> 21 & 0x7f) << 24;
    Word sum = low ^ (low >> 4 & 0x0f * kEach);
    sum ^= sum >> 2 & 0x03 * kEach;
    sum ^= sum >> 1 & kEach;
    to = low | (sum & kEach) << 7;
}

ALWAYS_INLINE void nibbles(const Word& v, Fields& to) {
    to.scale[0] = 2 * (v & 15) + 1;
    to.scale[1] = 2 * (v >> 4) + 1;
}

template <Record Kind>
ALWAYS_INLINE void read(Fields& of) {
    constexpr int kEntries = kBlock / columns_of(Kind);
    const Word(&w)[kMost] = of.words, (&b)[kMost] = of.bytes;
    if constexpr (!levels(Kind) && Kind != Record::iq2_xs)
        for (int i = 0; i < kEntries; i++) of.index[i] = w[i / 4] >> 8 * (i % 4) & 255;
    if constexpr (Kind == Record::iq2_xxs || Kind == Record::iq3_xxs) {
        const Word& last = w[kEntries / 4];
        with_eighths(last, of.signs);
        of.scale[0] = of.scale[1] = 2 * (last >> 28) + 1;
    } else if constexpr (Kind == Record::iq2_xs) {
        Word sevens{};
        for (int i = 0; i < kEntries; i++) {
            const Word both = w[i / 2] >> 16 * (i % 2) & 0xffff;
            of.index[i] = both & 511;
            sevens |= both >> 9 << 7 * i;
        }
        with_eighths(sevens, of.signs);
        nibbles(b[0], of);
    } else if constexpr (Kind == Record::iq2_s) {
        for (int i = 0; i < kEntries; i++) of.index[i] |= (b[0] >> 2 * i & 3) << 8;
        of.signs = w[1];
        nibbles(b[1], of);
    } else if constexpr (Kind == Record::iq3_s) {
        for (int i = 0; i < kEntries; i++) of.index[i] |= (b[0] >> i & 1) << 8;
        of.signs = w[2];
        of.scale[0] = of.scale[1] = 2 * (b[1] & 15) + 1;
    } else if constexpr (Kind == Record::iq1_s) {
        const Word high = b[0] | b[1] << 8;
        for (int i = 0; i < kEntries; i++) {
            of.index[i] |= (high >> 3 * i & 7) << 8;
            of.negative[i] = high >> 15;
        }
        of.scale[0] = of.scale[1] = 2 * (high >> 12 & 7) + 1;
    } else if constexpr (Kind == Record::iq1_m) {
        for (int i = 0; i < kEntries; i++) {
            const Word high = b[i / 2] >> 4 * (i % 2);
            of.index[i] |= (high & 7) << 8;
            of.negative[i] = high >> 3 & 1;
        }
        for (int i = 0; i < 2; i++) of.scale[i] = 2 * (b[2] >> 3 * i & 7) + 1;
    } else if constexpr (Kind == Record::q2_k) {
        for (int i = 0; i < 2; i++) {
            of.scale[i] = b[i] & 15;
            of.lowest[i] = b[i] >> 4;
        }
    } else if constexpr (Kind == Record::q3_k) {
        for (int i = 0; i < 2; i++) of.scale[i] = (b[i] ^ 128) - 128;
    } else {
        of.scale[0] = of.scale[1] = Word{} + 1;
    }
}

// Four bytes of entry index[0], of index[1] and so on, and the four behind them where entries have eight.
ALWAYS_INLINE void look_up(const uint32_t* grid, const uint32_t* index, Word& to) {
    for (int l = 0; l < kHalf; l++) to[l] = grid[index[l]];
}
ALWAYS_INLINE void look_up(const uint64_t* grid, const uint32_t* index, Word& first, Word& second) {
    typedef uint64_t Pairs __attribute__((vector_size(4 * kHalf)));
    const auto of = [&](int i) { return grid[index[i]]; };
    const Word a = reinterpret_cast<Word>(Pairs{of(0), of(1), of(4), of(5)});
    const Word b = reinterpret_cast<Word>(Pairs{of(2), of(3), of(6), of(7)});
    first = __builtin_shuffle(a, b, Word{0, 2, 8, 10, 4, 6, 12, 14});
    second = __builtin_shuffle(a, b, Word{1, 3, 9, 11, 5, 7, 13, 15});
}

// The entries of a grid, as they are there, of four columns each.
template <Record Kind>
ALWAYS_INLINE void look_up_all(const Fields& of, Word (&to)[8]) {
    constexpr int kEntries = kBlock / columns_of(Kind);
    uint32_t index[8][kHalf];
    std::memcpy(index, of.index, sizeof index);
    if constexpr (kEntries == 8) {
        constexpr const uint32_t* kGrid = Kind == Record::iq3_xxs ? iq3_xxs : iq3_s;
        for (int i = 0; i < kEntries; i++) look_up(kGrid, index[i], to[i]);
    } else {
        constexpr const uint64_t* kGrid = Kind == Record::iq2_xxs  ? iq2_xxs
                                          : Kind == Record::iq2_xs ? iq2_xs
                                          : Kind == Record::iq2_s  ? iq2_s
                                                                   : iq1;
        for (int i = 0; i < kEntries; i++) look_up(kGrid, index[i], to[2 * i], to[2 * i + 1]);
    }
}

// The bytes of 32 columns of the rows from `row` on.
template <Record Kind>
ALWAYS_INLINE void fill(const Fields& of, int row, uint32_t (*to)[kRows]) {
    Word entries[8];
    if constexpr (!levels(Kind)) look_up_all<Kind>(of, entries);
    for (int i = 0; i < 8; i++) {
        Bytes v;
        if constexpr (levels(Kind)) {
            constexpr int kLess = Kind == Record::q3_k ? 4 : Kind == Record::tq2_0 ? 1 : 0;
            Word found = of.words[i / 4] >> 2 * (i % 4) & 3 * kEach;
            if constexpr (Kind == Record::q3_k) found |= (of.words[2] >> i & kEach) << 2;
            v = reinterpret_cast<Bytes>(found) + static_cast<uint8_t>(kMiddle - kLess);
        } else {
            v = reinterpret_cast<Bytes>(entries[i]);
            if constexpr (eighths(Kind)) {
                const Word offset = (kMiddle + 1 - 2 * of.negative[i / 2]) * kEach;
                v += reinterpret_cast<Bytes>(offset);
            } else {
                const Word ones = (of.signs >> 4 * i & 15) * 0x00204081 & kEach;  // a bit to each byte
                const Bytes mask = reinterpret_cast<Bytes>((ones << 8) - ones);
                v = (v ^ mask) - mask + static_cast<uint8_t>(kMiddle);
            }
        }
        std::memcpy(to[i] + row, &v, sizeof v);
    }
}

// Scales of 16 columns each, `d` times `numbers`.
ALWAYS_INLINE void put(const float* d, const Word (&numbers)[2], float* to) {
    Floats of;
    load(d, of);
    for (int i = 0; i < 2; i++) {
        const Floats v = of * __builtin_convertvector(reinterpret_cast<Ints>(numbers[i]), Floats);
        std::memcpy(to + i * kRows, &v, sizeof v);
    }
}

ALWAYS_INLINE void read_halves(const uint16_t* halves, float unit, float* to) {
    Lanes d;
    load(reinterpret_cast<const F16*>(halves), d);
    d *= unit;
    std::memcpy(to, &d, sizeof d);
}

template <Format F>
ALWAYS_INLINE void expand_all(const Matrix& like, const uint8_t* quants, const uint16_t* scales, int64_t first,
                              int64_t columns, Order order, const Expansion& to) {
    constexpr FormatTraits kOf = kTraits<F>;
    alignas(64) float d[kRows], least[kRows];
    for (int64_t c = first; c < first + columns; c += kBlock) {
        if (c == first || c % like.group == 0) {
            read_halves(like.nested_halves(scales, c, 0), kOf.unit, d);
            if constexpr (kOf.minimums()) read_halves(like.nested_halves(scales, c, 1), 1, least);
        }
        const int64_t within = c - first;
        uint8_t* bytes = to.bytes + within * kRows;
        Words words;
        uint32_t (*const at)[kRows] = order == Order::fours ? reinterpret_cast<uint32_t (*)[kRows]>(bytes) : words.of;
        for (int row = 0; row < kRows; row += kHalf) {
            Fields fields;
            load_record<F>(quants + c / kBlock * kOf.block_bytes(), row, fields);
            read<kOf.record>(fields);
            fill<kOf.record>(fields, row, at);
            put(d + row, fields.scale, to.scales + within + row);
            if constexpr (kOf.minimums()) put(least + row, fields.lowest, to.lowest + within + row);
        }
        if (order != Order::fours) write_levels(traits_of(kExpanded), order, words, {0, 0, kRows}, bytes);
    }
}

template <int I>
ALWAYS_INLINE void expand_as(const Matrix& like, const uint8_t* quants, const uint16_t* scales, int64_t first,
                             int64_t columns, Order order, const Expansion& to) {
    if constexpr (I < kFormats) {
        if constexpr (traits_of(Format{I}).records())
            if (like.format == Format{I}) return expand_all<Format{I}>(like, quants, scales, first, columns, order, to);
        expand_as<I + 1>(like, quants, scales, first, columns, order, to);
    }
}

// Subtracts from y the products of minimums with sums of activations.
CLONES void subtract(const float* lowest, const Block* x, int64_t blocks, float* y) {
    for (int row = 0; row < kRows; row += kHalf) {
        Floats sum{}, v;
        for (int64_t b = 0; b < blocks; b++)
            for (int i = 0; i < 2; i++) {
                const int32_t total = (i ? x[b].start - x[b].first : x[b].first) >> 3;  // less than nothing
                load(lowest + (2 * b + i) * kRows + row, v);
                sum += v * (static_cast<float>(total) * x[b].scale);
            }
        load(y + row, v);
        v += sum;
        std::memcpy(y + row, &v, sizeof v);
    }
}

// The largest divisor of k that is not above kChunk, unless that is small.
int64_t chunk_of(int64_t k) {
    for (int64_t columns = kChunk; columns >= kLeastChunk; columns -= kBlock)
        if (k % columns == 0) return columns;
    return k;
}

}  // namespace

void set_grid(Record kind, const int8_t* entries, int64_t count) {
    const Entries to = entries_of(kind);
    std::memcpy(to.at, entries, std::min(count, to.count) * to.columns);
}

CLONES void expand(const Matrix& like, const uint8_t* quants, const uint16_t* scales, int64_t first, int64_t columns,
                   Order order, const Expansion& to) {
    expand_as<0>(like, quants, scales, first, columns, order, to);
}

void multiply_records(const Matrix& w, int block, const Rows& rows, const int32_t* index, int count, float* y,
                      size_t stride, Product product) {
    const int64_t columns = chunk_of(w.k), chunks = w.k / columns, floats = columns / 16 * kRows;
    thread_local std::vector<float> memory, sums;
    thread_local std::vector<int32_t> numbers;
    memory.resize(columns * kRows / 4 + 2 * floats + 16);
    sums.resize(static_cast<size_t>(count) * kRows);
    numbers.resize(count);
    float* at = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64 / 4;
    const Expansion to{reinterpret_cast<uint8_t*>(at), at + columns * kRows / 4, at + columns * kRows / 4 + floats};
    Matrix part;
    part.format = kExpanded, part.order = w.order, part.n = kRows, part.k = static_cast<int32_t>(columns);
    part.group = kBlock, part.quants = to.bytes, part.scales = reinterpret_cast<const uint16_t*>(to.scales);
    // A row of a part begins after those of the parts before, `chunks` of them a row.
    for (int t = 0; t < count; t++) numbers[t] = static_cast<int32_t>((index ? index[t] : t) * chunks);
    for (int64_t c = 0; c < w.k; c += columns) {
        expand(w, w.quants + block * w.quant_stride(), w.scales + block * w.scale_count(), c, columns, w.order, to);
        const Rows here{nullptr, rows.blocks + c / kBlock};
        product(part, 0, here, numbers.data(), count, c ? sums.data() : y, c ? kRows : stride);
        for (int t = 0; t < count; t++) {
            float* out = y + t * stride;
            for (int r = 0; c && r < kRows; r++) out[r] += sums[t * kRows + r];
            if (w.traits().minimums())
                subtract(to.lowest, here.blocks + numbers[t] * (columns / kBlock), columns / kBlock, out);
        }
    }
}

}  // namespace umbra
