// Cache and attention against plain loops: the vector types that attention.cpp is written in are lowered differently for
// every instruction set.
#pragma once

#include "checks.h"
#include "kernels/vector.h"

namespace {

// What a cache of this type keeps of a row: itself, or rounded.
std::vector<float> rounded(umbra::Type type, const std::vector<float>& row) {
    std::vector<float> out(row);
    float most = 0;
    for (float v : row) most = std::max(most, std::fabs(v));
    for (float& v : out) {
        if (type == umbra::Type::bf16) v = umbra::widen(umbra::narrow<umbra::Bf16>(v));
        if (type == umbra::Type::f16) v = umbra::widen(umbra::narrow<umbra::F16>(v));
        if (type == umbra::Type::i8) v = std::nearbyint(v * (127.0f / most)) * (most / 127.0f);
    }
    return out;
}

// With `rotary` columns over latents: a key is a whole row, its value the first `width` columns.
void check_attention(const umbra::Kernels& kernels, umbra::Type type, int page_size, int width, int rotary = 0) {
    std::printf("attention, cache type %d, pages of %d, heads of %d + %d\n", static_cast<int>(type), page_size, width,
                rotary);
    constexpr int kHeads = 6, kPages = 40;
    const int kKvHeads = rotary ? 1 : 2, deep = width + rotary;
    const std::vector<int64_t> lens{70, 1, 48}, fresh{3, 1, 48};  // cached tokens; those that ask
    const int64_t most_pages = 70 / page_size + 1;
    std::vector<int64_t> tables(lens.size() * most_pages), slots, starts{0};
    int64_t next = kPages - 1, tokens = 0, asking = 0;
    for (size_t s = 0; s < lens.size(); s++) {
        for (int64_t p = 0; p * page_size < lens[s]; p++) tables[s * most_pages + p] = next--;
        for (int64_t i = 0; i < lens[s]; i++)
            slots.push_back(tables[s * most_pages + i / page_size] * page_size + i % page_size);
        tokens += lens[s], asking += fresh[s];
        starts.push_back(asking);
    }
    const std::vector<float> k = random_floats(tokens * kKvHeads * deep), v = rotary ? k : random_floats(k.size());
    std::vector<float> q = random_floats(asking * kHeads * width), out(q.size()), expected(q.size());
    std::vector<float> turned = rotary ? random_floats(asking * kHeads * rotary) : std::vector<float>();
    for (float& x : q) x *= 4;
    std::vector<float> k_cache(kPages * kKvHeads * page_size * (deep + 1)), v_cache(k_cache.size());
    const float scale = 0.3f;
    const auto of = [&](const umbra::Kernels& set) {
        return (rotary ? set.latents : set.attend)[static_cast<int>(type)];
    };
    const bool rounds = of(kernels) != of(umbra::kernels_generic());

    int64_t first = 0;  // token of a sequence in k and v
    for (size_t s = 0; s < lens.size(); first += lens[s++])
        for (int64_t t = starts[s]; t < starts[s + 1]; t++)
            for (int h = 0; h < kHeads; h++) {
                const int64_t seen = lens[s] - (starts[s + 1] - t) + 1;
                const auto row = [&](const std::vector<float>& x, int64_t i) {
                    const auto at = x.begin() + ((first + i) * kKvHeads + h / (kHeads / kKvHeads)) * deep;
                    return rounded(type, std::vector<float>(at, at + deep));
                };
                std::vector<double> weights;
                double total = 0;
                for (int64_t i = 0; i < seen; i++) {
                    double score = 0;
                    const std::vector<float> key = row(k, i);
                    for (int d = 0; d < width; d++) score += q[(t * kHeads + h) * width + d] * key[d];
                    for (int d = 0; d < rotary; d++) score += turned[(t * kHeads + h) * rotary + d] * key[width + d];
                    weights.push_back(std::exp(score * scale));
                    total += weights.back();
                }
                for (int64_t i = 0; i < seen; i++) {
                    const std::vector<float> value = row(v, i);
                    for (int d = 0; d < width; d++)
                        expected[(t * kHeads + h) * width + d] += static_cast<float>(weights[i] / total * value[d]);
                }
            }
    for (int threads : {1, 3}) {
        umbra::Pool pool(threads);
        umbra::Context context{pool, kernels};
        if (rotary)
            umbra::WriteLatents{k.data(), k.data() + width, k_cache.data(), slots.data(), tokens, width,
                                rotary,   page_size,        deep,           deep,         type}
                .run(context);
        else
            umbra::WriteKv{k.data(), v.data(), k_cache.data(), v_cache.data(),   slots.data(),     tokens,
                           kKvHeads, width,    page_size,      kKvHeads * width, kKvHeads * width, type}
                .run(context);
        umbra::Attention all{q.data(),
                             k_cache.data(),
                             (rotary ? k_cache : v_cache).data(),
                             tables.data(),
                             starts.data(),
                             lens.data(),
                             out.data(),
                             static_cast<int64_t>(lens.size()),
                             kHeads,
                             kKvHeads,
                             width,
                             page_size,
                             most_pages,
                             asking,
                             scale,
                             type};
        all.rotary = rotary, all.q_rotary = turned.data();
        all.run(context);
        close("attention", out, expected, rounds ? 0.05f : 2e-5f);  // queries times keys in bfloat16
#if defined(__x86_64__)
        if (rounds) {  // the same numbers multiplied, but added in another order
            std::vector<float> likewise(out.size());
            umbra::Attention other = all;
            other.out = likewise.data();
            umbra::Context vectors{pool, umbra::kernels_avx512_bf16()};
            other.run(vectors);
            close("attention in bfloat16", out, likewise, 2e-3f);
        }
#endif
        for (int64_t token : {int64_t{1}, starts[2] + 40}) {  // of the first and the third sequence
            const int64_t sequence = token < starts[1] ? 0 : 2, alone[] = {0, 1};
            const int64_t seen = lens[sequence] - (starts[sequence + 1] - token) + 1;
            std::vector<float> row(kHeads * width);
            umbra::Attention one = all;
            one.q += token * row.size(), one.q_rotary += token * kHeads * rotary;
            one.block_tables += sequence * most_pages;
            one.query_starts = alone, one.kv_lens = &seen, one.out = row.data();
            one.sequences = one.tokens = 1;
            one.run(context);
            same("a token alone and beside others", row,
                 std::vector<float>(out.begin() + token * row.size(), out.begin() + (token + 1) * row.size()));
        }
    }
}

}  // namespace
