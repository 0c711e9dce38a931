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

typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(64)));

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
    Bits words[kMost], bytes[kMost];
    Bits index[8];             // of entries
    Bits signs;                // bit c is column c's
    Bits negative[4];          // of 8 columns: whether an eighth is taken off, and not added
    Bits scale[2], lowest[2];  // of 16 columns; signed
};

constexpr bool levels(Record kind) { return kind >= Record::q2_k; }
constexpr bool eighths(Record kind) { return kind == Record::iq1_s || kind == Record::iq1_m; }
constexpr int columns_of(Record kind) { return kind == Record::iq3_xxs || kind == Record::iq3_s ? 4 : 8; }

template <Format F>
ALWAYS_INLINE void load_record(const uint8_t* record, Fields& to) {
    constexpr FormatTraits kOf = kTraits<F>;
    static_assert(kOf.words <= kMost && kOf.bytes_more <= kMost);
    for (int i = 0; i < kOf.words; i++) std::memcpy(&to.words[i], record + i * 64, 64);
    for (int i = 0; i < kOf.bytes_more; i++) {
        typedef uint8_t Few __attribute__((vector_size(kRows)));
        Few few;
        std::memcpy(&few, record + kOf.words * 64 + i * kRows, sizeof few);
        to.bytes[i] = __builtin_convertvector(few, Bits);
    }
}

// The signs of four times eight columns of which seven are given; their number is even.
ALWAYS_INLINE void with_eighths(const Bits& sevens, Bits& to) {
    const Bits low =
        (sevens & 0x7f) | (sevens >> 7 & 0x7f) << 8 | (sevens >> 14 & 0x7f) << 16 | (sevens >> 21 & 0x7f) << 24;
    Bits sum = low ^ (low >> 4 & 0x0f * kEach);
    sum ^= sum >> 2 & 0x03 * kEach;
    sum ^= sum >> 1 & kEach;
    to = low | (sum & kEach) << 7;
}

ALWAYS_INLINE void nibbles(const Bits& v, Fields& to) {
    to.scale[0] = 2 * (v & 15) + 1;
    to.scale[1] = 2 * (v >> 4) + 1;
}

template <Record Kind>
ALWAYS_INLINE void read(Fields& of) {
    constexpr int kEntries = kBlock / columns_of(Kind);
    const Bits(&w)[kMost] = of.words, (&b)[kMost] = of.bytes;
    if constexpr (!levels(Kind) && Kind != Record::iq2_xs)
        for (int i = 0; i < kEntries; i++) of.index[i] = w[i / 4] >> 8 * (i % 4) & 255;
    if constexpr (Kind == Record::iq2_xxs || Kind == Record::iq3_xxs) {
        const Bits& last = w[kEntries / 4];
        with_eighths(last, of.signs);
        of.scale[0] = of.scale[1] = 2 * (last >> 28) + 1;
    } else if constexpr (Kind == Record::iq2_xs) {
        Bits sevens{};
        for (int i = 0; i < kEntries; i++) {
            const Bits both = w[i / 2] >> 16 * (i % 2) & 0xffff;
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
        const Bits high = b[0] | b[1] << 8;
        for (int i = 0; i < kEntries; i++) {
            of.index[i] |= (high >> 3 * i & 7) << 8;
            of.negative[i] = high >> 15;
        }
        of.scale[0] = of.scale[1] = 2 * (high >> 12 & 7) + 1;
    } else if constexpr (Kind == Record::iq1_m) {
        for (int i = 0; i < kEntries; i++) {
            const Bits high = b[i / 2] >> 4 * (i % 2);
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
        of.scale[0] = of.scale[1] = Bits{} + 1;
    }
}

// The entries of a grid, as they are there.
template <Record Kind>
ALWAYS_INLINE void look_up(const Fields& of, uint32_t (*to)[kRows]) {
    constexpr int kEntries = kBlock / columns_of(Kind);
    uint32_t index[8][kRows];
    std::memcpy(index, of.index, sizeof index);
    if constexpr (kEntries == 8) {
        constexpr const uint32_t* kGrid = Kind == Record::iq3_xxs ? iq3_xxs : iq3_s;
        for (int i = 0; i < kEntries; i++)
            for (int l = 0; l < kRows; l++) to[i][l] = kGrid[index[i][l]];
    } else {
        constexpr const uint64_t* kGrid = Kind == Record::iq2_xxs  ? iq2_xxs
                                          : Kind == Record::iq2_xs ? iq2_xs
                                          : Kind == Record::iq2_s  ? iq2_s
                                                                   : iq1;
        for (int i = 0; i < kEntries; i++)
            for (int l = 0; l < kRows; l++) {
                const uint64_t entry = kGrid[index[i][l]];
                to[2 * i][l] = static_cast<uint32_t>(entry);
                to[2 * i + 1][l] = static_cast<uint32_t>(entry >> 32);
            }
    }
}

// The bytes of 32 columns.
template <Record Kind>
ALWAYS_INLINE void fill(const Fields& of, uint32_t (*to)[kRows]) {
    if constexpr (!levels(Kind)) look_up<Kind>(of, to);
    for (int i = 0; i < 8; i++) {
        Bytes v;
        if constexpr (levels(Kind)) {
            constexpr int kLess = Kind == Record::q3_k ? 4 : Kind == Record::tq2_0 ? 1 : 0;
            Bits found = of.words[i / 4] >> 2 * (i % 4) & 3 * kEach;
            if constexpr (Kind == Record::q3_k) found |= (of.words[2] >> i & kEach) << 2;
            v = reinterpret_cast<Bytes>(found) + static_cast<uint8_t>(kMiddle - kLess);
        } else {
            std::memcpy(&v, to[i], sizeof v);
            if constexpr (eighths(Kind)) {
                const Bits offset = (kMiddle + 1 - 2 * of.negative[i / 2]) * kEach;
                v += reinterpret_cast<Bytes>(offset);
            } else {
                const Bits bits = of.signs >> 4 * i & 15;
                const Bits ones = (bits | bits << 7 | bits << 14 | bits << 21) & kEach;
                const Bytes mask = reinterpret_cast<Bytes>((ones << 8) - ones);
                v = (v ^ mask) - mask + static_cast<uint8_t>(kMiddle);
            }
        }
        std::memcpy(to[i], &v, sizeof v);
    }
}

ALWAYS_INLINE void put(const uint16_t* halves, float unit, const Bits (&numbers)[2], float* to) {
    Lanes d;
    load(reinterpret_cast<const F16*>(halves), d);
    for (int i = 0; i < 2; i++) {
        const Lanes v = d * unit * __builtin_convertvector(reinterpret_cast<Ints>(numbers[i]), Lanes);
        std::memcpy(to + i * kRows, &v, sizeof v);
    }
}

template <Format F>
ALWAYS_INLINE void expand_all(const Matrix& like, const uint8_t* quants, const uint16_t* scales, int64_t first,
                              int64_t columns, Order order, const Expansion& to) {
    constexpr FormatTraits kOf = kTraits<F>;
    for (int64_t c = first; c < first + columns; c += kBlock) {
        const int64_t within = c - first;
        uint8_t* bytes = to.bytes + within * kRows;
        Fields fields;
        load_record<F>(quants + c / kBlock * kOf.block_bytes(), fields);
        read<kOf.record>(fields);
        if (order == Order::fours) {
            fill<kOf.record>(fields, reinterpret_cast<uint32_t (*)[kRows]>(bytes));
        } else {
            Words words;
            fill<kOf.record>(fields, words.of);
            write_levels(traits_of(kExpanded), order, words, {0, 0, kRows}, bytes);
        }
        put(like.nested_halves(scales, c, 0), kOf.unit, fields.scale, to.scales + within);
        if constexpr (kOf.minimums()) put(like.nested_halves(scales, c, 1), 1, fields.lowest, to.lowest + within);
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
    Lanes sum{}, before;
    for (int64_t b = 0; b < blocks; b++)
        for (int i = 0; i < 2; i++) {
            const int32_t total = (i ? x[b].start - x[b].first : x[b].first) >> 3;  // less than nothing
            Lanes v;
            load(lowest + (2 * b + i) * kRows, v);
            sum += v * (static_cast<float>(total) * x[b].scale);
        }
    load(y, before);
    before += sum;
    std::memcpy(y, &before, sizeof before);
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
