// The paged KV cache: writing it, and causal attention over it, in floats; kernels/x86 has the products of bfloat16.

#include "kernels/attention.h"

#include "kernels/expanded.h"
#include "kernels/products.h"

namespace umbra {
namespace {

constexpr int64_t kMostExpanded = 16 << 20;  // bytes of keys and values of a section, of a few heads

// Rows whose 16 sums take half of the registers.
template <class V>
constexpr int kAtOnce = kWidth<V> == 16 ? 8 : 4;

// c (R, 16) = or += a (R, all steps) times the runs.
template <class V, int R>
ALWAYS_INLINE void tile(bool fresh, const float* a, int64_t a_stride, const Run<float>* runs, int count, int64_t shift,
                        int64_t step, float* c, int64_t c_stride) {
    constexpr int kParts = kLanes / kWidth<V>;
    V sums[R][kParts];
    for (int r = 0; r < R; r++)
        for (int i = 0; i < kParts; i++) {
            if (fresh)
                sums[r][i] = V{};
            else
                load(c + r * c_stride + i * kWidth<V>, sums[r][i]);
        }
    for (const Run<float>* run = runs; run < runs + count; run++) {
        const float* at = run->at + shift;
        for (int64_t k = 0; k < run->steps; k++, at += step) {
            V v[kParts];
            for (int i = 0; i < kParts; i++) load(at + i * kWidth<V>, v[i]);
            for (int r = 0; r < R; r++)
                for (int i = 0; i < kParts; i++) sums[r][i] += a[r * a_stride + k] * v[i];
        }
        a += run->steps;
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < kParts; i++) std::memcpy(c + r * c_stride + i * kWidth<V>, &sums[r][i], sizeof(V));
}

template <class V>
ALWAYS_INLINE void tiles(bool fresh, int64_t rows, const float* a, int64_t a_stride, const Run<float>* runs, int count,
                         int64_t shift, int64_t step, float* c, int64_t c_stride) {
    for (int64_t r = 0, done; r < rows; r += done, a += done * a_stride, c += done * c_stride) {
#define TILE(R) (done = R, tile<V, R>(fresh, a, a_stride, runs, count, shift, step, c, c_stride))
        rows - r >= kAtOnce<V> ? TILE(kAtOnce<V>) : rows - r >= 4 ? TILE(4) : rows - r >= 2 ? TILE(2) : TILE(1);
#undef TILE
    }
}
BY_WIDTH(void product(bool fresh, int64_t rows, const float* a, int64_t a_stride, const Run<float>* runs, int count,
                      int64_t shift, int64_t step, float* c, int64_t c_stride),
         tiles<V>(fresh, rows, a, a_stride, runs, count, shift, step, c, c_stride);)

// The first and the second elements of as many pairs as a vector has lanes.
template <class V, class T>
ALWAYS_INLINE void load_pairs(const T* from, V& first, V& second) {
    typename Vectors<kWidth<V>>::Bits bits;
    if constexpr (std::is_same_v<T, Bf16>) {
        std::memcpy(&bits, from, sizeof bits);
        first = reinterpret_cast<V>(bits << 16), second = reinterpret_cast<V>(bits & 0xffff0000);
        return;
    }
    V low, high;
    load(from, low);
    load(from + kWidth<V>, high);
    for (int l = 0; l < kWidth<V>; l++) bits[l] = 2 * l;
    first = __builtin_shuffle(low, high, bits), second = __builtin_shuffle(low, high, bits + 1);
}

// from (pairs, columns, 2) -> to (2 * pairs, columns), in floats.
template <class V, class T>
ALWAYS_INLINE void unpair(const T* from, int64_t pairs, int64_t columns, int64_t from_columns, float* to,
                          int64_t to_columns) {
    for (int64_t i = 0; i < pairs; i++, from += 2 * from_columns, to += 2 * to_columns) {
        int64_t j = 0;
        for (; j + kWidth<V> <= columns; j += kWidth<V>) {
            V first, second;
            load_pairs(from + 2 * j, first, second);
            std::memcpy(to + j, &first, sizeof first);
            std::memcpy(to + to_columns + j, &second, sizeof second);
        }
        for (; j < columns; j++) {
            to[j] = widen(from[2 * j]);
            to[to_columns + j] = widen(from[2 * j + 1]);
        }
    }
}

#define COPY(T)                                                                                                        \
    BY_WIDTH(                                                                                                          \
        void copy(const T* from, int64_t pairs, int64_t columns, int64_t from_columns, float* to, int64_t to_columns), \
        unpair<V>(from, pairs, columns, from_columns, to, to_columns);)
COPY(float)
COPY(Bf16)
COPY(F16)
COPY(int8_t)
#undef COPY

// Exchanges lanes that differ in the bit `Half` between rows that do.
template <int Half, class V>
ALWAYS_INLINE void exchange(V (&rows)[kWidth<V>]) {
    constexpr int kAll = kWidth<V>;
    typename Vectors<kAll>::Bits low, high;
    for (int l = 0; l < kAll; l++) low[l] = l & Half ? kAll + l - Half : l, high[l] = low[l] + Half;
    for (int r = 0; r < kAll; r++) {
        if (r & Half) continue;
        const V first = rows[r], second = rows[r + Half];
        rows[r] = __builtin_shuffle(first, second, low);
        rows[r + Half] = __builtin_shuffle(first, second, high);
    }
}

// As `turn`, of a register's lanes of keys and elements at a time.
template <class V>
ALWAYS_INLINE void turn_all(const float* from, int64_t keys, int64_t columns, float* to) {
    constexpr int kAll = kWidth<V>;
    for (int64_t first = 0; first < keys; first += kAll) {
        const float* at = from + first * columns;
        int64_t d = 0;
        for (; d + kAll <= columns; d += kAll) {
            V rows[kAll];
            for (int r = 0; r < kAll; r++) load(at + r * columns + d, rows[r]);
            if constexpr (kAll > 8) exchange<8>(rows);
            if constexpr (kAll > 4) exchange<4>(rows);
            exchange<2>(rows), exchange<1>(rows);
            for (int r = 0; r < kAll; r++) std::memcpy(to + (d + r) * kKeys + first, &rows[r], sizeof(V));
        }
        for (; d < columns; d++)
            for (int r = 0; r < kAll; r++) to[d * kKeys + first + r] = at[r * columns + d];
    }
}
BY_WIDTH(void turn_here(const float* from, int64_t keys, int64_t columns, float* to),
         turn_all<V>(from, keys, columns, to);)

template <class V, class T>
ALWAYS_INLINE void widen_some(const T* from, int64_t count, float* to) {
    int64_t i = 0;
    for (; i + kWidth<V> <= count; i += kWidth<V>) {
        V v;
        load(from + i, v);
        std::memcpy(to + i, &v, sizeof v);
    }
    for (; i < count; i++) to[i] = widen(from[i]);
}
#define WIDEN(T) BY_WIDTH(void widen_here(const T* from, int64_t count, float* to), widen_some<V>(from, count, to);)
WIDEN(float)
WIDEN(Bf16)
WIDEN(F16)
WIDEN(int8_t)
#undef WIDEN

CLONES void soften(const Softened<float>& of) {
    for (int64_t r = 0; r < of.rows; r++) {
        float* to = of.weights + r * kKeys;
        const float* scores = of.scores + r * kKeys;
        const int64_t skipped = of.skipped[r], seen = of.seen[r];
        std::memset(to, 0, kKeys * sizeof(float));
        if (seen == 0) continue;
        for (int64_t i = skipped; i < seen; i++) to[i] = of.key_scales ? scores[i] * of.key_scales[i] : scores[i];
        float least = to[skipped], most = to[skipped];
        widen_range(to + skipped, seen - skipped, least, most);
        if (most > of.most[r] + kSlack) {
            const float factor = std::exp(of.most[r] - most);
            for (int64_t i = 0; i < of.wide; i++) of.sums[r * of.wide + i] *= factor;
            of.total[r] *= factor;
            of.most[r] = most;
        }
        most = of.most[r];
        float lanes[kLanes] = {}, sum = 0;
        int64_t i = skipped;
        for (; i + kLanes <= seen; i += kLanes)
            for (int l = 0; l < kLanes; l++) lanes[l] += to[i + l] = fast_exp(to[i + l] - most);
        for (; i < seen; i++) sum += to[i] = fast_exp(to[i] - most);
        of.total[r] += sum + add_lanes(lanes);
        if (of.value_scales)
            for (i = skipped; i < seen; i++) to[i] *= of.value_scales[i];
    }
}

struct FloatDot {
    using Operand = float;
    static constexpr int kDepth = 1, kKeysAtOnce = 2;
    static constexpr bool kByRows = false;
    template <class T>
    static constexpr bool takes() {
        return false;
    }
    static void operand(const float* x, float factor, int64_t count, float* to) { scale_to(x, factor, to, count); }
    template <class T>
    static void copy(const T* from, int64_t pairs, int64_t columns, int64_t from_columns, float* to,
                     int64_t to_columns) {
        umbra::copy(from, pairs, columns, from_columns, to, to_columns);
    }
    static void product(bool fresh, int64_t rows, const float* a, int64_t a_stride, const Run<float>* runs, int count,
                        int64_t shift, int64_t step, int64_t second, float* c, int64_t c_stride, const Ahead&) {
        umbra::product(fresh, rows, a, a_stride, runs, count, shift, step, c, c_stride);
        umbra::product(fresh, rows, a, a_stride, runs, count, shift + second, step, c + kLanes, c_stride);
    }
    static void soften(const Softened<float>& of) { umbra::soften(of); }
    template <class T>
    static void widen(const T* from, int64_t count, float* to) {
        widen_all(from, count, to);
    }
    static void values(const float* from, int64_t pairs, int64_t columns, int64_t stride, float* to,
                       int64_t to_columns) {
        for (int64_t i = 0; i < 2 * pairs; i++) std::copy_n(from + i * stride, columns, to + i * to_columns);
    }
};

// Stores one token of one head: element d goes to to[d / 2 * pair + d % 2 * one].
template <class T>
void store(const float* x, int64_t width, T* to, int64_t pair, int64_t one, float*) {
    for (int64_t d = 0; d < width; d += 2) {
        to[d / 2 * pair] = narrow<T>(x[d]);
        to[d / 2 * pair + one] = narrow<T>(x[d + 1]);
    }
}
CLONES float quantise(const float* x, int64_t width, int8_t* to) {  // returns the scale
    float least = 0, most = 0;
    widen_range(x, width, least, most);
    most = std::max(most, -least);
    const float inverse = most > 0 ? 127.0f / most : 0.0f;
    for (int64_t d = 0; d < width; d++) to[d] = static_cast<int8_t>(nearest(x[d] * inverse));
    return most / 127.0f;
}
void store(const float* x, int64_t width, int8_t* to, int64_t pair, int64_t one, float* scale) {
    int8_t row[kMostWidth];
    *scale = quantise(x, width, row);
    for (int64_t d = 0; d < width; d++) to[d / 2 * pair + d % 2 * one] = row[d];
}

}  // namespace

void widen_all(const float* from, int64_t count, float* to) { widen_here(from, count, to); }
void widen_all(const Bf16* from, int64_t count, float* to) { widen_here(from, count, to); }
void widen_all(const F16* from, int64_t count, float* to) { widen_here(from, count, to); }
void widen_all(const int8_t* from, int64_t count, float* to) { widen_here(from, count, to); }

CLONES void merge(int64_t width, const float* sums, float most, float total, float* all_sums, float& all_most,
                  float& all_total) {
    const float peak = std::max(most, all_most);
    const float factor = std::exp(most - peak), all_factor = std::exp(all_most - peak);
    for (int64_t i = 0; i < width; i++) all_sums[i] = all_sums[i] * all_factor + sums[i] * factor;
    all_total = all_total * all_factor + total * factor;
    all_most = peak;
}

void turn(const float* from, int64_t lanes, int64_t columns, float* to) {
    turn_here(from, lanes * kLanes, columns, to);
}

CLONES void scale_to(const float* x, float factor, float* to, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = x[i] * factor;
}

void attend_f32(const Attention& a, const Span& span) { attend<FloatDot, float>(a, span); }
void attend_bf16(const Attention& a, const Span& span) { attend<FloatDot, Bf16>(a, span); }
void attend_f16(const Attention& a, const Span& span) { attend<FloatDot, F16>(a, span); }
void attend_i8(const Attention& a, const Span& span) { attend<FloatDot, int8_t>(a, span); }

void attend_latents_f32(const Attention& a, const Span& span) { attend<FloatDot, float, true>(a, span); }
void attend_latents_bf16(const Attention& a, const Span& span) { attend<FloatDot, Bf16, true>(a, span); }
void attend_latents_f16(const Attention& a, const Span& span) { attend<FloatDot, F16, true>(a, span); }
void attend_latents_i8(const Attention& a, const Span& span) { attend<FloatDot, int8_t, true>(a, span); }

const ExpandedSteps expanded_f32 = Expanded<FloatDot, float>::kSteps;
const ExpandedSteps expanded_bf16 = Expanded<FloatDot, Bf16>::kSteps;
const ExpandedSteps expanded_f16 = Expanded<FloatDot, F16>::kSteps;
const ExpandedSteps expanded_i8 = Expanded<FloatDot, int8_t>::kSteps;

int64_t Attention::latent_parts(int64_t heads) {
    int64_t parts = (heads + 31) / 32;
    while (heads % parts) parts++;
    return parts;
}

float Attention::whole(float total, float most, int64_t head) const {
    return sinks ? total + std::exp(sinks[head] - most) : total;
}

void WriteKv::run(Context& context) const {
    const auto write = [&](auto example) {
        using T = decltype(example);
        context.pool.each(static_cast<int>(tokens), [&](int t, int) {
            const int64_t page = slots[t] / page_size, offset = slots[t] % page_size;
            for (int64_t h = 0; h < heads; h++) {
                const auto piece = [&](void* cache) {
                    return piece_of<T>(cache, page * heads + h, width * page_size, page_size);
                };
                const Piece<T> keys = piece(k_cache), values = piece(v_cache);
                store(k + t * k_stride + h * width, width, const_cast<T*>(keys.elements) + offset * 2, page_size * 2, 1,
                      const_cast<float*>(keys.scales) + offset);
                store(v + t * v_stride + h * width, width,
                      const_cast<T*>(values.elements) + offset / 2 * 2 * width + offset % 2, 4, 2,
                      const_cast<float*>(values.scales) + offset);
            }
        });
    };
    type == Type::i8 ? write(int8_t{}) : with_type(type, write);
}

void WriteLatents::run(Context& context) const {
    const int64_t deep = width + rotary;
    const auto write = [&](auto example) {
        using T = decltype(example);
        context.pool.each(static_cast<int>(tokens), [&](int t, int) {
            float row[kMostLatent + kMostRotary];
            std::copy_n(latents + t * latent_stride, width, row);
            std::copy_n(keys + t * key_stride, rotary, row + width);
            const int64_t offset = slots[t] % page_size;
            const Piece<T> page = piece_of<T>(cache, slots[t] / page_size, deep * page_size, page_size);
            T* to = const_cast<T*>(page.elements) + offset * deep;
            if constexpr (std::is_same_v<T, int8_t>)
                const_cast<float*>(page.scales)[offset] = quantise(row, deep, to);
            else
                for (int64_t d = 0; d < deep; d++) to[d] = narrow<T>(row[d]);
        });
    };
    type == Type::i8 ? write(int8_t{}) : with_type(type, write);
}

void Attention::run(Context& context) const {
    if (tokens == 0) return;  // a data-parallel group without sequences
    const Kernels& kernels = context.kernels;
    const int64_t longest = *std::max_element(kv_lens, kv_lens + sequences);
    // Queries of a window see parts of few sections, which are not worth dividing.
    const int64_t sections = window ? 1 : (longest + kSection - 1) / kSection;
    if (rotary && tokens == sequences && heads / kv_heads % 2 == 0 && heads / kv_heads > 4 &&
        tokens * kv_heads * sections < context.pool.threads()) {  // half of the heads read the same latents
        Attention finer = *this;
        finer.kv_heads *= 2;
        return finer.run(context);
    }
    const Attend one = (rotary ? kernels.latents : kernels.attend)[static_cast<int>(type)];
    const int64_t group = heads / kv_heads, threads = context.pool.threads();
    const int64_t most = std::max<int64_t>(1, kMostRows / group);  // tokens of a block
    // Tokens of a sequence that are computed together share the keys they read. Each of a decode step has its own.
    const int64_t step = tokens == sequences ? 1
                         : sections > 1      ? most
                                             : std::clamp<int64_t>(tokens * kv_heads / (threads * 4), 1, most);
    const int64_t cuts = (tokens + step - 1) / step;
    // With few tasks the sections of long sequences are tasks too, if there is room for their sums.
    const bool split = threads > 1 && sections > 1 && cuts * kv_heads < 8 * threads &&
                       tokens * heads * sections * (width + 2) <= context.room.floats;
    const int64_t parts = split ? sections : 1;
    context.pool.each(static_cast<int>(cuts * kv_heads * parts), [&](int task, int) {
        const int64_t section = task / (cuts * kv_heads), cut = task / kv_heads % cuts, kv_head = task % kv_heads;
        const int64_t end = std::min(tokens, (cut + 1) * step);
        for (int64_t token = cut * step, count; token < end; token += count) {
            const int64_t* next = std::upper_bound(query_starts, query_starts + sequences + 1, token);
            const int64_t sequence = next - query_starts - 1;
            count = std::min(end, *next) - token;
            if (!split)
                one(*this, {sequence, token, count, kv_head});
            else if (section * kSection < kv_lens[sequence])
                one(*this, {sequence, token, count, kv_head, context.room.memory, section, sections});
        }
    });
    if (!split) return;
    context.pool.each(static_cast<int>(tokens * kv_heads), [&](int task, int) {
        const int64_t token = task / kv_heads;
        const int64_t* next = std::upper_bound(query_starts, query_starts + sequences + 1, token);
        const int64_t seen = kv_lens[next - query_starts - 1] - (*next - token) + 1;
        for (int64_t row = token * heads + task % kv_heads * group, end = row + group; row < end; row++) {
            const float* part = context.room.memory + row * sections * (width + 2);
            float *to = out + row * width, peak = part[width], total = part[width + 1];
            std::copy_n(part, width, to);
            for (int64_t s = 1; s * kSection < seen; s++) {
                part += width + 2;
                merge(width, part, part[width], part[width + 1], to, peak, total);
            }
            scale_to(to, 1 / whole(total, peak, row % heads), to, width);
        }
    });
}

int64_t ExpandedAttention::together(const Kernels& kernels) const {
    const int64_t bytes = ExpandedSizes(*this).head * kernels.expanded[static_cast<int>(type)]->bytes;
    return std::clamp<int64_t>(kMostExpanded / bytes, 1, heads);
}

int64_t ExpandedAttention::memory_bytes(const Kernels& kernels) const {
    return together(kernels) * ExpandedSizes(*this).head * kernels.expanded[static_cast<int>(type)]->bytes + 64;
}

void ExpandedAttention::run(Context& context) const {
    const ExpandedSteps& steps = *context.kernels.expanded[static_cast<int>(type)];
    Pool& pool = context.pool;
    const int64_t most = together(context.kernels), parts = (heads + most - 1) / most;
    const int64_t slabs = (width + kKeys - 1) / kKeys + (value + kKeys - 1) / kKeys;
    for (int64_t part = 0; part < parts; part++) {
        const int64_t first = heads * part / parts, count = heads * (part + 1) / parts - first;
        const ExpandedHeads of{*this, first, count, aligned(memory)};
        pool.each(static_cast<int>(count * slabs),
                  [&](int task, int) { steps.matrices(of, first + task / slabs, task % slabs); });
        for (int64_t s = 0; s < sequences; s++) {
            const int64_t begin = query_starts[s], end = query_starts[s + 1];
            const int64_t blocks = (end - begin + kMostRows - 1) / kMostRows;
            for (int64_t start = 0; start < kv_lens[s]; start += kSection) {
                const int64_t tiles = (std::min<int64_t>(kSection, kv_lens[s] - start) + kKeys - 1) / kKeys;
                // A task makes all heads' keys of a tile, or if there are few tiles some heads'.
                const int64_t shares = std::clamp<int64_t>(4 * pool.threads() / tiles, 1, count);
                pool.each(static_cast<int>(tiles * shares), [&](int task, int) {
                    const int64_t share = task % shares;
                    steps.tile(of, s, start + task / shares * kKeys, first + count * share / shares,
                               first + count * (share + 1) / shares);
                });
                pool.each(static_cast<int>(count * blocks), [&](int task, int) {
                    const int64_t token = begin + task % blocks * kMostRows;
                    steps.rows(of, s, start, first + task / blocks, token, std::min<int64_t>(kMostRows, end - token));
                });
            }
        }
    }
}

}  // namespace umbra
