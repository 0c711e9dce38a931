// Attention over latents in its expanded form against plain loops.
#pragma once

#include "attention.h"

namespace {

// The matrices (n, k) of some heads in bfloat16, laid out as matrix.h says, and as plain rows.
struct HeadsMatrices {
    std::vector<umbra::Bf16> kept;
    std::vector<float> plain;
    umbra::Matrix matrix;

    HeadsMatrices(int heads, int n, int k) : plain(heads * n * k) {
        matrix.format = umbra::format_named("bfloat16");
        matrix.n = (n + umbra::kRows - 1) / umbra::kRows * umbra::kRows, matrix.k = k;
        kept.resize(heads * matrix.n * k);
        const std::vector<float> drawn = rounded(umbra::Type::bf16, random_floats(plain.size()));
        for (int h = 0; h < heads; h++)
            for (int r = 0; r < n; r++)
                for (int c = 0; c < k; c++) {
                    const float v = plain[(h * n + r) * k + c] = drawn[(h * n + r) * k + c];
                    const int64_t block = h * matrix.n / umbra::kRows + r / umbra::kRows;
                    kept[(block * k + c) * umbra::kRows + r % umbra::kRows] = umbra::narrow<umbra::Bf16>(v);
                }
        matrix.quants = reinterpret_cast<const uint8_t*>(kept.data());
    }
};

void check_expanded(const umbra::Kernels& kernels, umbra::Type type, int width, int rotary, int key, int value) {
    std::printf("expanded attention, cache type %d, keys of %d + %d, values of %d\n", static_cast<int>(type), key,
                rotary, value);
    constexpr int kHeads = 3, kPage = 6, kPages = 40;
    const std::vector<int64_t> lens{70, 66, 100}, fresh{5, 66, 65};
    const int64_t most_pages = 100 / kPage + 1;
    std::vector<int64_t> tables(lens.size() * most_pages), slots, starts{0};
    int64_t next = kPages - 1, cached = 0, tokens = 0;
    for (size_t s = 0; s < lens.size(); s++) {
        for (int64_t p = 0; p * kPage < lens[s]; p++) tables[s * most_pages + p] = next--;
        for (int64_t i = 0; i < lens[s]; i++) slots.push_back(tables[s * most_pages + i / kPage] * kPage + i % kPage);
        cached += lens[s], tokens += fresh[s];
        starts.push_back(tokens);
    }
    const std::vector<float> latents = random_floats(cached * width), turned = random_floats(cached * rotary);
    const std::vector<float> q = random_floats(tokens * kHeads * key),
                             q_rotary = random_floats(tokens * kHeads * rotary);
    const HeadsMatrices keys(kHeads, width, key), values(kHeads, value, width);
    std::vector<float> cache(kPages * kPage * (width + rotary + 1)), out(tokens * kHeads * value), expected(out.size());
    const float scale = 0.2f;
    const bool rounds =
        kernels.expanded[static_cast<int>(type)] != umbra::kernels_generic().expanded[static_cast<int>(type)];
    const auto read = [&](double v) {  // as an operand of products
        return rounds ? umbra::widen(umbra::narrow<umbra::Bf16>(static_cast<float>(v))) : v;
    };
    int64_t first = 0;
    for (size_t s = 0; s < lens.size(); first += lens[s++])
        for (int h = 0; h < kHeads; h++) {
            std::vector<double> k(lens[s] * (key + rotary)), v(lens[s] * value);
            for (int64_t i = 0; i < lens[s]; i++) {
                std::vector<float> row(latents.begin() + (first + i) * width,
                                       latents.begin() + (first + i + 1) * width);
                row.insert(row.end(), turned.begin() + (first + i) * rotary, turned.begin() + (first + i + 1) * rotary);
                row = rounded(type, row);
                for (int l = 0; l < width; l++) {
                    for (int d = 0; d < key; d++)
                        k[i * (key + rotary) + d] += double{row[l]} * keys.plain[(h * width + l) * key + d];
                    for (int d = 0; d < value; d++)
                        v[i * value + d] += double{row[l]} * values.plain[(h * value + d) * width + l];
                }
                for (int d = 0; d < rotary; d++) k[i * (key + rotary) + key + d] = row[width + d];
            }
            std::transform(k.begin(), k.end(), k.begin(), read);
            std::transform(v.begin(), v.end(), v.begin(), read);
            for (int64_t t = starts[s]; t < starts[s + 1]; t++) {
                const int64_t seen = lens[s] - (starts[s + 1] - t) + 1, row = t * kHeads + h;
                std::vector<double> weights;
                double total = 0;
                for (int64_t i = 0; i < seen; i++) {
                    double score = 0;
                    const double* of = k.data() + i * (key + rotary);
                    for (int d = 0; d < key; d++) score += read(q[row * key + d] * scale) * of[d];
                    for (int d = 0; d < rotary; d++) score += read(q_rotary[row * rotary + d] * scale) * of[key + d];
                    weights.push_back(std::exp(score));
                    total += weights.back();
                }
                for (int d = 0; d < value; d++) {
                    double sum = 0;
                    for (int64_t i = 0; i < seen; i++) sum += weights[i] / total * v[i * value + d];
                    expected[row * value + d] = static_cast<float>(sum);
                }
            }
        }
    for (int threads : {1, 3}) {
        umbra::Pool pool(threads);
        umbra::Context context{pool, kernels};
        umbra::WriteLatents{latents.data(), turned.data(), cache.data(), slots.data(), cached, width,
                            rotary,         kPage,         width,        rotary,       type}
            .run(context);
        std::vector<float> peaks(tokens * kHeads * 2);
        umbra::ExpandedAttention op{keys.matrix,  values.matrix, q.data(),      q_rotary.data(),
                                    cache.data(), tables.data(), starts.data(), lens.data(),
                                    out.data(),   peaks.data(),  nullptr,       static_cast<int64_t>(lens.size()),
                                    kHeads,       width,         rotary,        key,
                                    value,        kPage,         most_pages,    tokens,
                                    kHeads * key, scale,         type};
        std::vector<uint8_t> memory(op.memory_bytes(kernels));
        op.memory = memory.data();
        op.run(context);
        close("expanded attention", out, expected, largest(expected) * (rounds ? 0.01f : 5e-5f));  // weights rounded
    }
}

}  // namespace
